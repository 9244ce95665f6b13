"""What the checker takes for a loss, and the gradient by which it judges the loss."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logp, logmu (B, T), reward (B,), mask (B, T)) -> a scalar to be minimised"""


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
        raise InputError(f"the loss returned {_kind(value)}, a scalar tensor was expected; see the adapters")
    if not value.requires_grad:
        raise InputError("the loss does not depend on logp: it has no gradient")
    pushed = -torch.autograd.grad(value, leaf)[0]
    for column, kept in zip(inputs, before, strict=True):
        column.copy_(kept)
    return pushed


def _kind(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def total(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over a sequence's own tokens: (B, T) -> (B,).

    >>> total(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([3.])
    """
    return torch.where(mask > 0, values, 0.0).sum(1)
