"""Call losses that take or return something else than `losses.Loss` does."""

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from torch import Tensor
from torch.nn.functional import pad

from topr_conformance.losses import Loss, sum_over_tokens

AnyLoss = Callable[..., object]  # a user's loss in any known form

# ---- which parameter is which argument, by its name ----------------------------------------------
ARGUMENTS = ("logp", "logmu", "reward", "mask")  # the order in which a loss takes them
LENGTH_NAME = "len|num|^n_"
# What the name of a parameter has in it -> which argument it is; the first that fits counts
NAME_PATTERNS = {
    "mask": "mask",
    LENGTH_NAME: "mask",  # the number of tokens is the mask in another form
    "reward|adv|return|score": "reward",
    "old|mu|behav|sampl|rollout": "logmu",
    "log|new|cur|policy|^pi$": "logp",
}


def argument_of(name: str) -> str:
    """Which of ARGUMENTS a parameter's name stands for; "" if it does not tell.

    >>> argument_of("old_log_probs"), argument_of("advantages"), argument_of("config")
    ('logmu', 'reward', '')
    """
    for pattern, argument in NAME_PATTERNS.items():
        if re.search(pattern, name.lower()):
            return argument
    return ""


class InputsByName(dict[str, Tensor]):
    """The arguments of a loss, under ARGUMENTS and under any other name that tells which it is.

    A dictionary, because losses that take one look their inputs up by names of their own.
    """

    def __missing__(self, name: str) -> Tensor | None:
        return self.get(argument_of(name))


def _parameters(loss: AnyLoss) -> list[str]:
    """The names of the first four parameters; none if it has no signature, as torch.add."""
    with suppress(ValueError):
        function = getattr(loss, "forward", loss)  # of a torch.nn.Module
        return list(inspect.signature(function).parameters)[:4]
    return []


# ---- the adapters: each calls a loss with (B, T), (B, T), (B,), (B, T) in another form -----------
def _call_with_token_advantages(
    loss: AnyLoss, logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor
) -> object:
    return loss(logp, logmu, reward[:, None].expand_as(logp), mask)


def _call_with_sequences(
    loss: AnyLoss, logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor
) -> object:
    return loss(sum_over_tokens(logp, mask), sum_over_tokens(logmu, mask), reward, mask.sum(1))


def _call_packed(
    loss: AnyLoss, logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor
) -> object:
    return loss(logp[mask > 0], logmu[mask > 0], reward, mask.sum(1).long())  # (N,), (N,), (B,)


def _call_with_cumulative_lengths(
    loss: AnyLoss, logp: Tensor, logmu: Tensor, reward: Tensor, length: Tensor
) -> object:
    starts = pad(length.cumsum(0), (1, 0)).int()  # (B + 1,), from 0
    return loss(logp, logmu, reward, starts)


def _call_time_first(
    loss: AnyLoss, logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor
) -> object:
    return loss(logp.T, logmu.T, reward, mask.T)  # (T, B)


def _call_with_boolean_mask(
    loss: AnyLoss, logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor
) -> object:
    return loss(logp, logmu, reward, mask > 0)


def _call_with_integer_mask(
    loss: AnyLoss, logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor
) -> object:
    return loss(logp, logmu, reward, mask.long())


def _call_by_name(loss: AnyLoss, *inputs: Tensor) -> object:
    by_name = InputsByName(zip(ARGUMENTS, inputs, strict=True))
    return loss(*[by_name[name] for name in _parameters(loss)])


def _call_with_dictionary(loss: AnyLoss, *inputs: Tensor) -> object:
    return loss(InputsByName(zip(ARGUMENTS, inputs, strict=True)))


def _first_output(loss: AnyLoss, *inputs: Tensor) -> object:
    return loss(*inputs)[0]


def _output_named_loss(loss: AnyLoss, *inputs: Tensor) -> object:
    return loss(*inputs)["loss"]


def _mean_over_completions(loss: AnyLoss, *inputs: Tensor) -> Tensor:
    return loss(*inputs).mean()  # of (B,)


def _mean_over_tokens(loss: AnyLoss, *inputs: Tensor) -> Tensor:
    """Section 4.2: over the tokens of each completion, then over completions."""
    mask = inputs[-1]
    sums = sum_over_tokens(loss(*inputs), mask)
    return (sums / mask.sum(1)).mean()


ADAPTERS: dict[str, Callable[..., object]] = {
    "advantages": _call_with_token_advantages,
    "sequences": _call_with_sequences,
    "packed": _call_packed,
    "cumulative lengths": _call_with_cumulative_lengths,
    "one dictionary": _call_with_dictionary,
    "arguments by name": _call_by_name,
    "time first": _call_time_first,
    "boolean mask": _call_with_boolean_mask,
    "integer mask": _call_with_integer_mask,
    "first output": _first_output,
    "output 'loss'": _output_named_loss,
    "mean over completions": _mean_over_completions,
    "tokens": _mean_over_tokens,
}


def adapted(loss: AnyLoss, adapter: str) -> Loss:
    """A loss with another signature, as one that can be checked.

    adapter: a name of ADAPTERS, or several joined by " + ". `identify` finds it by itself.

    "none"        the loss as it is
    "advantages"  loss(logp, logmu, advantages, mask): an advantage for each token, (B, T)
    "sequences"   loss(logp, logmu, reward, length): one number per completion, (B,)
    "packed"      the same, but logp and logmu of all tokens, (N,), completions laid end to end
    "tokens"      a loss that returns a value for each token, (B, T). The mean is that of Section
                  4.2, over tokens, then over completions. If your trainer takes another mean,
                  check a function that takes it.

    >>> from topr_conformance import identify
    >>> def naive(logp, logmu, reward, length):
    ...     return -(reward * logp / length).mean()
    >>> identify(adapted(naive, "sequences")).variant
    'naive reinforce'
    """
    for name in adapter.split(" + "):
        if name != "none":
            loss = partial(ADAPTERS[name], loss)
    return loss


# ---- which forms are worth a try -----------------------------------------------------------------
def input_forms(loss: AnyLoss) -> list[str]:
    """The adapters of arguments that may fit a loss, as `adapted` takes them, most likely first."""
    names = _parameters(loss)
    layouts = ["advantages", "time first", "sequences", "packed"]
    layouts += ["cumulative lengths + packed", "one dictionary"]
    if any(re.search(LENGTH_NAME, name.lower()) for name in names):
        layouts = layouts[2:] + layouts[:2]  # it takes lengths and no mask
    arguments = tuple(argument_of(name) for name in names)
    is_permuted = arguments != ARGUMENTS and set(arguments) == set(ARGUMENTS)
    orders = ["arguments by name", ""] if is_permuted else [""]
    forms = []
    for order in orders:
        for layout in ["", *layouts]:
            for mask in ("", "boolean mask", "integer mask"):
                parts = [part for part in (order, layout, mask) if part]
                forms.append(" + ".join(parts) or "none")
    return forms


def output_forms(value: object) -> list[str]:
    """The adapters for what a loss returned; none if it is a scalar, or nothing known."""
    if isinstance(value, Mapping) and "loss" in value:
        return ["output 'loss'", *output_forms(value["loss"])]
    if isinstance(value, tuple | list) and value:
        return ["first output", *output_forms(value[0])]
    if isinstance(value, Tensor) and value.dim() == 1:
        return ["mean over completions"]
    if isinstance(value, Tensor) and value.dim() == 2:
        return ["tokens"]
    return []
