"""The form of a loss that the checker calls, and the gradient that it compares."""

import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

# (token_logp, token_logmu (B, T), reward (B,), mask (B, T)) -> a scalar to be minimised
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class InputError(ValueError):
    """The loss cannot be checked; the message is one line that says why."""


class NoGradientError(InputError):
    """The loss has no gradient in logp."""


class LossInputs(NamedTuple):
    """The arguments of a loss, in their order: B completions, padded to T tokens."""

    token_logp: Tensor  # (B, T) log pi of each token: from the model in training
    token_logmu: Tensor  # (B, T) log mu of each token: from the model that sampled
    reward: Tensor  # (B,) after the baseline
    mask: Tensor  # (B, T) 1.0 on the completion's tokens, 0.0 elsewhere


def neg_grad(loss: Loss, inputs: LossInputs) -> Tensor:
    """Minus the gradient in token_logp, (B, T): how much a step of descent raises each log pi.

    The loss may change its arguments in place. Raises InputError if it returns no scalar, and
    NoGradientError if what it returns does not depend on token_logp.

    >>> one = torch.ones(1, 1)
    >>> inputs = LossInputs(-one, -one, reward=-one[0], mask=one)
    >>> neg_grad(lambda logp, logmu, reward, mask: -(reward * logp.sum(1)).mean(), inputs)
    tensor([[-1.]])
    """
    leaf = inputs.token_logp.detach().clone().requires_grad_()
    value = value_of(loss, inputs._replace(token_logp=leaf))
    _check_scalar(value)
    [gradient] = torch.autograd.grad(value, leaf, allow_unused=True)
    if gradient is None:  # the loss has parameters of its own, as a torch.nn.Module
        raise NoGradientError("the loss does not depend on logp: is it detached?")
    return -gradient


def value_of(loss: Callable[..., object], inputs: LossInputs) -> object:
    """What a loss returns, with a gradient in token_logp. It may change its arguments in place."""
    # The loss gets no leaf tensor: a trainer's log-probabilities are not leaves, and autograd
    # forbids changing a leaf in place.
    leaf = inputs.token_logp
    if not leaf.requires_grad:
        leaf = leaf.clone().requires_grad_()
    others = [column.clone() for column in inputs[1:]]
    with torch.enable_grad():
        return loss(leaf * 1, *others)


def _check_scalar(value: object) -> None:
    if isinstance(value, Tensor) and not value.requires_grad:
        raise NoGradientError("the loss does not depend on logp: is it detached?")
    if not isinstance(value, Tensor) or value.dim() > 0:
        kind = type(value).__name__
        if isinstance(value, Tensor):
            kind = f"tensor of shape {tuple(value.shape)}"
        elif isinstance(value, Mapping):
            kind = f"{kind} with {', '.join(map(str, value)) or 'nothing'}"
        raise InputError(f"the loss returned a {kind}: return a scalar tensor")


def sum_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over each completion's own tokens: (B, T) -> (B,).

    >>> sum_over_tokens(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([3.])
    """
    # Not values * mask: padding may hold infinity, and 0 times infinity is NaN.
    return torch.where(mask > 0, values, 0.0).sum(1)


def describe_error(error: Exception) -> str:
    """The type and the message of an exception, in one line; without a message, where it arose.

    >>> describe_error(KeyError("logp"))
    "KeyError: 'logp'"
    """
    reason = str(error).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if not reason and frames:
        reason = f"{frames[-1].line} (line {frames[-1].lineno} of {frames[-1].filename})"
    return f"{type(error).__name__}: {reason}".splitlines()[0]
