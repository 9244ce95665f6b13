"""Call losses whose arguments or result have another form than those of `losses.Loss`."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from topr_conformance.arguments import (
    ARGUMENTS,
    LABELS_NAME,
    LENGTH_NAME,
    AnyLoss,
    Batch,
    Order,
    parameters_of,
)
from topr_conformance.losses import Loss, sum_over_tokens

IGNORED_LABEL = -100  # of tokens that do not count


# ---- forms of what a loss takes and returns ------------------------------------------------------
def _in_sequences(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return sum_over_tokens(logp, mask), sum_over_tokens(logmu, mask), reward, mask.sum(1)  # (B,)


def _packed(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    return logp[mask > 0], logmu[mask > 0], reward, mask.sum(1).long()  # (N,), (N,), (B,), (B,)


# A form -> its arguments, made of logp (B, T), logmu (B, T), reward (B,) and mask (B, T)
INPUT_FORMS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "advantages": lambda logp, logmu, reward, mask: (
        (logp, logmu, reward[:, None].expand_as(logp), mask)
    ),
    "time first": lambda logp, logmu, reward, mask: (logp.T, logmu.T, reward, mask.T),  # (T, B)
    "sequences": _in_sequences,
    "packed": _packed,
    "cumulative lengths": lambda logp, logmu, reward, length: (
        (logp, logmu, reward, pad(length.cumsum(0), (1, 0)).int())  # (B + 1,), from 0
    ),
    "boolean mask": lambda logp, logmu, reward, mask: (logp, logmu, reward, mask > 0),
    "integer mask": lambda logp, logmu, reward, mask: (logp, logmu, reward, mask.long()),
    "labels": lambda logp, logmu, reward, mask: (
        (logp, logmu, reward, torch.where(mask > 0, 1, IGNORED_LABEL))
    ),
}
# A form -> the scalar, made of what the loss returned and of the mask (B, T)
OUTPUT_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one value": lambda value, mask: value.squeeze(),  # of (1,)
    "mean over completions": lambda values, mask: values.mean(),  # of (B,)
    # Section 4.2: over the tokens of each completion, then over completions
    "tokens": lambda values, mask: (sum_over_tokens(values, mask) / mask.sum(1)).mean(),
}


def _call_with_inputs(form: str, loss: AnyLoss, *inputs: Tensor) -> object:
    return loss(*INPUT_FORMS[form](*inputs))


def _call_in_order(order: Order, loss: AnyLoss, *inputs: Tensor) -> object:
    value_of = dict(zip(ARGUMENTS, inputs, strict=True))
    values = [value_of[argument] for argument in order]
    parameters = parameters_of(loss)
    if parameters.by_keyword:
        return loss(**dict(zip(parameters.names, values, strict=True)))
    return loss(*values)


def call_with_batch(used: dict[str, str], loss: AnyLoss, *inputs: Tensor) -> object:
    """Give a loss one `Batch`; used: that of the batch."""
    return loss(Batch(dict(zip(ARGUMENTS, inputs, strict=True)), used))


def _get_output(key: int | str, loss: AnyLoss, *inputs: Tensor) -> object:
    return loss(*inputs)[key]


def _reduce_output(form: str, loss: AnyLoss, *inputs: Tensor) -> Tensor:
    return OUTPUT_FORMS[form](loss(*inputs), inputs[-1])


def adapted(loss: AnyLoss, adapter: str) -> Loss:
    """A loss with another signature, as one that can be checked.

    adapter: one of the following, or another name of INPUT_FORMS or OUTPUT_FORMS, or several
    joined by " + ". `identify` chooses one automatically.

    "none"          the loss as it is
    "order ..."     the order of its parameters, as in "order logmu, logp, reward, mask"
    "one batch"     loss(batch): a dictionary, or an object with attributes
    "advantages"    loss(logp, logmu, advantages, mask): an advantage for each token, (B, T)
    "sequences"     loss(logp, logmu, reward, length): one number per completion, (B,)
    "packed"        the same, but logp and logmu of all tokens, (N,), completions laid end to end
    "output 'KEY'"  a loss that returns a dictionary; "output 0" one that returns several values
    "tokens"        a loss that returns a value for each token, (B, T). The mean is that of Section
                    4.2, over tokens, then over completions. If your trainer takes another mean,
                    check a function that takes it.

    >>> from topr_conformance import identify
    >>> def naive(logp, logmu, reward, length):
    ...     return -(reward * logp / length).mean()
    >>> identify(adapted(naive, "sequences")).variant
    'naive reinforce'
    """
    for name in adapter.split(" + "):
        if name.startswith("order "):
            order = tuple(name.removeprefix("order ").split(", "))
            loss = partial(_call_in_order, order, loss)
        elif name == "one batch":
            loss = partial(call_with_batch, {}, loss)
        elif name.startswith("output "):
            key = name.removeprefix("output ")
            loss = partial(_get_output, key.strip("'") if "'" in key else int(key), loss)
        elif name in OUTPUT_FORMS:
            loss = partial(_reduce_output, name, loss)
        elif name != "none":
            loss = partial(_call_with_inputs, name, loss)
    return loss


# ---- which forms are worth a try -----------------------------------------------------------------
def layouts(names: Sequence[str]) -> list[str]:
    """The adapters of tensors that may fit parameters of these names, the likeliest first."""
    kinds = ["", "advantages", "time first", "sequences", "packed", "cumulative lengths + packed"]
    masks = ["", "boolean mask", "integer mask"]
    text = " ".join(names).lower()
    if re.search(LENGTH_NAME, text):
        kinds = ["", *kinds[3:], *kinds[1:3]]  # it takes lengths and no mask
    if re.search(LABELS_NAME, text):
        masks = ["labels"]
    forms = []
    for kind in kinds:
        for mask in masks:
            forms.append(" + ".join(part for part in (kind, mask) if part) or "none")
    return forms


def output_forms(value: object, num_completions: int) -> list[str]:
    """The adapters for what a loss returned; none for a scalar or an unknown form."""
    if isinstance(value, Mapping):
        key = _key_of_loss(value)
        return [f"output '{key}'", *output_forms(value[key], num_completions)] if key else []
    if isinstance(value, tuple | list):
        for i, output in enumerate(value):
            forms = output_forms(output, num_completions)
            if forms or (isinstance(output, Tensor) and output.requires_grad):
                return [f"output {i}", *forms]
    if isinstance(value, Tensor) and value.dim() == 1 and value.requires_grad:
        if len(value) == num_completions:
            return ["mean over completions"]
        return ["one value"] if len(value) == 1 else []
    if isinstance(value, Tensor) and value.dim() == 2 and value.requires_grad:
        return ["tokens"]
    return []


def _key_of_loss(outputs: Mapping[str, object]) -> str:
    """ "loss", or else the only key that has a gradient; "" if several have one."""
    if "loss" in outputs:
        return "loss"
    keys = []
    for key, value in outputs.items():
        if isinstance(value, Tensor) and value.requires_grad:
            keys.append(key)
    return keys[0] if len(keys) == 1 else ""
