"""What the checker takes for a loss, the gradient by which it judges it, and adapters for other signatures."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# (logp, logmu (B, T), reward (B,), mask (B, T)) -> a scalar to be minimised
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class InputError(ValueError):
    """What the user gave cannot be checked; the message is one line."""


class LossInputs(NamedTuple):
    """The arguments of a loss, in their order: B completions, padded to T tokens."""

    logp: Tensor  # (B, T) log pi of each token
    logmu: Tensor  # (B, T)
    reward: Tensor  # (B,) after the baseline
    mask: Tensor  # (B, T) 1.0 on the completion's tokens, 0.0 elsewhere


def push(loss: Loss, inputs: LossInputs) -> Tensor:
    """By how much a step of descent raises each token's log pi: minus the gradient in logp, (B, T).

    The loss may change its arguments in place. Raises InputError if it returns no scalar with a gradient.

    >>> one = torch.ones(1, 1)
    >>> push(lambda logp, logmu, reward, mask: -(reward * logp.sum(1)).mean(), LossInputs(-one, -one, -one[0], one))
    tensor([[-1.]])
    """
    leaf = inputs.logp.detach().clone().requires_grad_()
    with torch.enable_grad():  # no trainer hands out a leaf, and a leaf cannot be changed in place
        value = loss(leaf * 1, *(column.clone() for column in inputs[1:]))
    if not isinstance(value, Tensor) or value.dim() > 0:
        kind = (
            f"tensor of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise InputError(f"the loss returned a {kind}, a scalar tensor was expected")
    if not value.requires_grad:
        raise InputError(
            "the loss does not depend on logp: is it detached, or are the arguments in another order?"
        )
    return -torch.autograd.grad(value, leaf)[0]


def in_a_line(error: Exception) -> str:
    """What an exception says, in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def total(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over a sequence's own tokens: (B, T) -> (B,).

    >>> total(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([3.])
    """
    return torch.where(mask > 0, values, 0.0).sum(1)


def load(name: str) -> Callable[..., Tensor]:
    """The function that package.module:function names, the current folder included; InputError where there is none.

    A path to a file will do for the module: folder/mine.py:loss. Its folder is then where it imports from.

    >>> load("topr_conformance.variants:per_token").__name__
    'per_token'
    """
    module, colon, attribute = name.rpartition(":")
    if not colon:
        raise InputError(f"{name}: write it as package.module:function or path/file.py:function")
    path = Path(module).with_suffix(".py") if module.endswith(".py") or "/" in module else None
    if path and not path.is_file():
        raise InputError(f"{name}: there is no file {path}")
    sys.path.insert(0, str(path.parent) if path else "")
    module = path.stem if path else module
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # whatever a foreign module may raise
        raise InputError(f"{name}: cannot be imported: {type(error).__name__}: {error}") from error
    here = path or Path(*module.split(".")).with_suffix(".py")
    if (
        here.exists() and here.read_bytes() != Path(imported.__file__).read_bytes()
    ):  # imported before, from elsewhere
        raise InputError(f"{name}: {here} is hidden by {imported.__file__}: give it another name")
    function = getattr(imported, attribute, None)
    if not callable(function):
        raise InputError(f"{name}: {module} has no function {attribute!r}")
    return function


def adapted(loss: Callable[..., Tensor], adapter: str) -> Loss:
    """A loss with another signature as one that can be checked. adapter: one of ADAPTERS, or several joined by " + ".

    "advantages": loss(logp, logmu, advantages, mask), with an advantage for each token, (B, T). "sequences": loss(logp,
    logmu, reward, length), with one number per sequence, (B,), as `topr.topr_loss` takes them. "packed": the same with
    logp and logmu of all tokens, (N,), sequences laid end to end. "tokens": a loss that returns a value for each token,
    (B, T). Its mean is taken as in Section 4.2, over a sequence's tokens, then over sequences; if your trainer takes
    another, check a function that does. "none" leaves the loss as it is. `identify` finds the others by itself.

    >>> from topr_conformance import identify
    >>> from topr import topr_loss
    >>> identify(adapted(topr_loss, "sequences")).variant
    'paper'
    """
    for name in adapter.split(" + "):
        loss = loss if name == "none" else partial(ADAPTERS[name], loss)
    return loss


LENGTH = "len|num|^n_"
ROLES = {  # what a parameter's name has in it -> which argument it is; the first that fits counts
    "mask": "mask",
    LENGTH: "mask",
    "reward|adv|return|score": "reward",
    "old|mu|behav|sampl|rollout": "logmu",
    "log|new|cur|policy|^pi$": "logp",
}


def _role(name: str) -> str:
    return next((role for pattern, role in ROLES.items() if re.search(pattern, name.lower())), "")


class Named(dict[str, Tensor]):
    """The arguments of a loss, under any name that says which of them it is."""

    def __init__(self, inputs: tuple[Tensor, ...]) -> None:
        super().__init__(zip(LossInputs._fields, inputs, strict=True))

    def __missing__(self, name: str) -> Tensor | None:
        return self.get(_role(name))


ADAPTERS: dict[
    str, Callable[..., Tensor]
] = {  # call a loss with logp, logmu (B, T), reward (B,) and mask (B, T)
    "advantages": lambda loss, p, m, reward, mask: loss(p, m, reward[:, None].expand_as(p), mask),
    "sequences": lambda loss, p, m, reward, mask: loss(
        total(p, mask), total(m, mask), reward, mask.sum(1)
    ),
    "packed": lambda loss, p, m, reward, mask: loss(
        p[mask > 0], m[mask > 0], reward, mask.sum(1).long()
    ),
    "tokens": lambda loss, *inputs: (total(loss(*inputs), inputs[-1]) / inputs[-1].sum(1)).mean(),
    "arguments by name": lambda loss, *inputs: loss(
        *map(Named(inputs).__getitem__, _parameters(loss))
    ),
    "one dictionary": lambda loss, *inputs: loss(Named(inputs)),
    "cumulative lengths": lambda loss, p, m, reward, length: loss(
        p, m, reward, pad(length.cumsum(0), (1, 0)).int()
    ),
    "time first": lambda loss, p, m, reward, mask: loss(p.T, m.T, reward, mask.T),
    "boolean mask": lambda loss, p, m, reward, mask: loss(p, m, reward, mask > 0),
    "integer mask": lambda loss, p, m, reward, mask: loss(p, m, reward, mask.long()),
    "first output": lambda loss, *inputs: loss(*inputs)[0],
    "output 'loss'": lambda loss, *inputs: loss(*inputs)["loss"],
    "mean over completions": lambda loss, *inputs: loss(*inputs).mean(),
}


def _parameters(loss: Callable[..., Tensor]) -> list[str]:
    """The names of the first four parameters; none where there is no signature, as of torch.add."""
    with suppress(ValueError):
        return list(inspect.signature(getattr(loss, "forward", loss)).parameters)[:4]
    return []


def input_forms(loss: Callable[..., Tensor]) -> list[str]:
    """What `adapted` can do with the arguments of a loss, the most likely first."""
    names = _parameters(loss)
    order = tuple(map(_role, names))
    is_permuted = order != LossInputs._fields and set(order) == set(LossInputs._fields)
    layouts = [
        "advantages",
        "time first",
        "sequences",
        "packed",
        "cumulative lengths + packed",
        "one dictionary",
    ]
    if any(re.search(LENGTH, name.lower()) for name in names):
        layouts = layouts[2:] + layouts[:2]
    orders, masks = ["arguments by name"] * is_permuted + [""], ["", "boolean mask", "integer mask"]
    return [
        " + ".join(filter(None, form)) or "none" for form in product(orders, ["", *layouts], masks)
    ]


def output_forms(value: object) -> list[str]:
    """What `adapted` can do with what a loss returns, if anything."""
    if isinstance(value, Mapping) and "loss" in value:
        return ["output 'loss'", *output_forms(value["loss"])]
    if isinstance(value, tuple | list) and value:
        return ["first output", *output_forms(value[0])]
    return (
        {1: ["mean over completions"], 2: ["tokens"]}.get(value.dim(), [])
        if isinstance(value, Tensor)
        else []
    )
