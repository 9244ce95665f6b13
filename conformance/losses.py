"""What the checker takes for a loss, the gradient by which it judges it, and adapters for other signatures."""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

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

    Arguments that the loss changes in place are restored. Raises InputError if it returns no scalar with a gradient.

    >>> one = torch.ones(1, 1)
    >>> push(lambda logp, logmu, reward, mask: -(reward * logp.sum(1)).mean(), LossInputs(-one, -one, -one[0], one))
    tensor([[-1.]])
    """
    leaf = inputs.logp.detach().clone().requires_grad_()
    before = [column.clone() for column in inputs]
    with torch.enable_grad():
        value = loss(leaf * 1, *inputs[1:])  # no trainer hands out a leaf, and a leaf cannot be changed in place
    if not isinstance(value, Tensor) or value.dim() > 0:
        kind = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the loss returned a {kind}, a scalar tensor was expected; see the adapters")
    if not value.requires_grad:
        raise InputError("the loss does not depend on logp: it has no gradient")
    pushed = -torch.autograd.grad(value, leaf)[0]
    for column, kept in zip(inputs, before, strict=True):
        column.copy_(kept)
    return pushed


def told(error: Exception) -> str:
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

    >>> load("conformance.variants:per_token").__name__
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
        found = importlib.import_module(module)
    except Exception as error:  # whatever a foreign module may raise
        raise InputError(f"{name}: cannot be imported: {type(error).__name__}: {error}") from error
    here = path or Path(*module.split(".")).with_suffix(".py")
    if here.exists() and here.read_bytes() != Path(found.__file__).read_bytes():  # imported before, from elsewhere
        raise InputError(f"{name}: {here} is hidden by {found.__file__}: give it another name")
    found = getattr(found, attribute, None)
    if not callable(found):
        raise InputError(f"{name}: {module} has no function {attribute!r}")
    return found


def adapted(loss: Callable[..., Tensor], adapter: str) -> Loss:
    """A loss with another signature, one of ADAPTERS, as one that can be checked.

    "advantages": loss(logp, logmu, advantages, mask), with an advantage for each token, (B, T). "sequences": loss(logp,
    logmu, reward, length), with one number per sequence, (B,), as `topr.topr_loss` takes them. "packed": the same with
    logp and logmu of all tokens, (N,), sequences laid end to end. "tokens": a loss that returns a value for each token,
    (B, T). Its mean is taken as in Section 4.2, over a sequence's tokens, then over sequences; if your trainer takes
    another, check a function that does. "none" leaves the loss as it is.

    >>> from conformance import identify
    >>> from topr import topr_loss
    >>> identify(adapted(topr_loss, "sequences")).variant
    'paper'
    """
    return loss if adapter == "none" else partial(ADAPTERS[adapter], loss)


ADAPTERS: dict[str, Callable[..., Tensor]] = {  # call a loss with logp, logmu (B, T), reward (B,) and mask (B, T)
    "advantages": lambda loss, p, m, reward, mask: loss(p, m, reward[:, None].expand_as(p), mask),
    "sequences": lambda loss, p, m, reward, mask: loss(total(p, mask), total(m, mask), reward, mask.sum(1)),
    "packed": lambda loss, p, m, reward, mask: loss(p[mask > 0], m[mask > 0], reward, mask.sum(1).long()),
    "tokens": lambda loss, *inputs: (total(loss(*inputs), inputs[-1]) / inputs[-1].sum(1)).mean(),
}
