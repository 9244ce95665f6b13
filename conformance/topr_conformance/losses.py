"""The form of a loss that the checker calls, and the gradient that it compares."""

import inspect
import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# (token_logp, token_logmu (B, T), reward (B,), mask (B, T)) -> a scalar to be minimised
Loss = Callable[..., Tensor]


class InputError(ValueError):
    """The loss cannot be checked; the message is one line that says why."""


class LossInputs(NamedTuple):
    """The arguments of a loss, in their order: B completions, padded to T tokens."""

    token_logp: Tensor  # (B, T) log pi of each token: from the model in training
    token_logmu: Tensor  # (B, T) log mu of each token: from the model that sampled
    reward: Tensor  # (B,) after the baseline
    mask: Tensor  # (B, T) 1.0 on the completion's tokens, 0.0 elsewhere


# An argument -> the names of a parameter for it. The first pattern that fits a whole name counts.
NAMES = {
    "mask": r"(\w+_)?mask",
    "reward": r"rewards?|advantages?|adv|returns?|scores?",
    "token_logp": r"((per|token|next|new|cur|curr|current|pi|policy)_)*log_?(pi|ps?|probs?)|pi",
    "token_logmu": (
        r"((per|token|old|prev|mu|behaviou?r|sampl(e|er|ing)|rollout|generation|inference)_)*"
        r"(log_?(ps?|probs?|mu)|mu)"
    ),
}
ANOTHER_FORM = "or call it in a copy of topr_conformance/example.py"


def by_names(loss: Loss) -> tuple[Loss, str]:
    """The loss, called with arguments by the names of its parameters, and how they were read.

    Of a tuple, such as (loss, metrics), the first item counts.
    Raises InputError unless the names say which parameter is which argument.

    >>> by_names(lambda old_logp, logp, adv, mask: ...)[1]
    'token_logp = logp, token_logmu = old_logp, reward = adv, mask = mask'
    """
    fix = f"name its parameters token_logp, token_logmu, reward and mask, {ANOTHER_FORM}"
    try:
        parameters = inspect.signature(getattr(loss, "forward", loss)).parameters
    except (TypeError, ValueError) as error:  # no function, or one that is written in C
        raise InputError(f"{describe_error(error)}; {fix}") from error
    name_of: dict[str, str] = {}
    for name in parameters:
        fitting = [argument for argument, names in NAMES.items() if re.fullmatch(names, name)]
        if fitting:
            name_of.setdefault(fitting[0], name)
    if name_of.keys() != NAMES.keys():
        raise InputError(f"the loss has the parameters {', '.join(parameters)}: {fix}")

    def called(*inputs: Tensor) -> Tensor:
        names = [name_of[argument] for argument in LossInputs._fields]
        value = loss(**dict(zip(names, inputs, strict=True)))
        return value[0] if isinstance(value, tuple) else value

    return called, ", ".join(f"{argument} = {name_of[argument]}" for argument in LossInputs._fields)


def neg_grad(loss: Loss, inputs: LossInputs) -> Tensor:
    """Minus the gradient in token_logp, (B, T): how much a step of descent raises each log pi.

    Raises InputError if the loss returns no scalar, or one that has no gradient.

    >>> one = torch.ones(1, 1)
    >>> inputs = LossInputs(-one, -one, reward=-one[0], mask=one)
    >>> neg_grad(lambda logp, logmu, reward, mask: -(reward * logp.sum(1)).mean(), inputs)
    tensor([[-1.]])
    """
    leaf = inputs.token_logp.detach().clone().requires_grad_()
    others = [column.clone() for column in inputs[1:]]
    with torch.enable_grad():
        value = loss(leaf * 1, *others)  # autograd forbids changing a leaf itself in place
    if not (isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        fix = "return a scalar with a gradient in token_logp"
        raise InputError(f"the loss returned a {type(value).__name__}{shape}: {fix}")
    [gradient] = torch.autograd.grad(value, leaf, materialize_grads=True)
    return -gradient


def check_gradient(loss: Loss, inputs: LossInputs) -> None:
    """Raises InputError if the loss raises an exception, or if its gradient is not finite."""
    try:
        gradient = neg_grad(loss, inputs)
    except InputError:
        raise
    except Exception as error:  # a user's loss may raise anything
        fix = f"take token_logp, token_logmu, mask (B, T) and reward (B,), {ANOTHER_FORM}"
        raise InputError(f"the loss raised {describe_error(error)}: {fix}") from error
    if not gradient.isfinite().all():
        raise InputError("the gradient is not finite on ordinary numbers: look at exp, log and /")


def sum_over_tokens(values: Tensor, mask: Tensor) -> Tensor:
    """The sum over each completion's own tokens: (B, T) -> (B,)."""
    # Not values * mask: padding may hold infinity, and 0 times infinity is NaN.
    return torch.where(mask > 0, values, 0.0).sum(1)


def describe_error(error: Exception) -> str:
    """The type and the first line of the message of an exception."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
