"""Checks of notebook 1's exercises: each known mistake has a name and a message of its own."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from topr import importance_weight, taper

INFINITY = math.inf


class NotebookError(Exception):
    """An error that a notebook shows as its text alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython's name for this
        return [str(self)]


class WrongSolution(NotebookError):
    """A solution with mistakes. mistakes: their names; none if the mistake is not a known one."""

    def __init__(self, text: str, mistakes: Collection[str] = ()) -> None:
        super().__init__(text)
        self.mistakes = tuple(mistakes)


def explain(messages: Mapping[str, str], mistakes: Collection[str]) -> WrongSolution:
    """The error for known mistakes: their names and messages, one a line.

    >>> explain({"wrong sign": "put a minus before the loss"}, ["wrong sign"])
    WrongSolution('wrong sign: put a minus before the loss')
    """
    text = "\n".join(f"{name}: {messages[name]}" for name in mistakes)
    return WrongSolution(text, mistakes)


# ---- Exercise 1: the weight ----------------------------------------------------------------------
WEIGHT_MISTAKES = {
    "overflow": "math.exp of a large log-ratio is an error; clip the log-ratio first",
    "logarithm of 0": "math.log(0) is an error; handle b = 0 separately",
    "missing exp": "the result is a log-ratio, not a ratio; take its exponential",
    "missing lower bound": "some weights are below a; raise them to a",
    "missing upper bound": "some weights exceed b; lower them to b",
}


def check_weight(my_weight: Callable[[float, float, float], Any]) -> None:
    """Print that Exercise 1 is right; WrongSolution if not."""
    if my_weight(0.0, 0.5, 1.0) is ...:
        print("my_weight is not written yet")
        return
    bounds = [(0, 1), (1, 1), (0.5, 2), (0, 0), (0, INFINITY)]
    for a, b in bounds:
        for log_ratio in (-1000.0, -1.0, 0.0, 0.3, 5.0, 1000.0):
            if b == INFINITY and log_ratio == 1000:
                continue  # the exact weight is larger than any float
            _check_weight_at(my_weight, log_ratio, a, b)
    print("my_weight is right")


def _check_weight_at(
    my_weight: Callable[[float, float, float], Any], log_ratio: float, a: float, b: float
) -> None:
    try:
        found = float(my_weight(log_ratio, a, b))
    except OverflowError:
        raise explain(WEIGHT_MISTAKES, ["overflow"]) from None
    except ValueError:
        raise explain(WEIGHT_MISTAKES, ["logarithm of 0"]) from None
    expected = importance_weight(log_ratio, a, b).item()
    if math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-6):
        return
    if math.isclose(found, min(max(log_ratio, a), b)):
        raise explain(WEIGHT_MISTAKES, ["missing exp"])
    if found < a:
        raise explain(WEIGHT_MISTAKES, ["missing lower bound"])
    if found > b:
        raise explain(WEIGHT_MISTAKES, ["missing upper bound"])
    problem = f"my_weight({log_ratio:g}, {a:g}, {b:g}) is {found:g}; it must be {expected:g}"
    raise WrongSolution(f"another mistake: {problem}")


# ---- Exercise 2: the taper -----------------------------------------------------------------------
TAPER_MISTAKES = {
    "division by 0": "the bound is 0 here; handle a = 0 and b = 0 separately",
    "the weight": "this is the clipped ratio; outside the bounds the taper is a logarithm",
    "missing factor": "outside the bounds, multiply 1 + log(r / bound) by the bound",
    "missing 1": "the taper jumps at a bound; outside, use bound * (1 + log(r / bound))",
}


def _wrong_tapers(r: float, a: float, b: float) -> dict[str, float]:
    """The values that some mistakes give, for a ratio outside positive bounds."""
    bound = min(max(r, a), b)
    return {
        "the weight": bound,
        "missing factor": 1 + math.log(r / bound),
        "missing 1": bound * math.log(r / bound),
    }


def check_taper(my_rho: Callable[[float, float, float], Any]) -> None:
    """Print that Exercise 2 is right; WrongSolution if not."""
    if my_rho(1.0, 0.5, 2.0) is ...:
        print("my_rho is not written yet")
        return
    for a, b in ((0.5, 2), (0.8, 1.2), (1, 1), (0, 1), (0, 0), (0, INFINITY)):
        for r in (0.1, 0.5, 1.0, 3.0):
            _check_taper_at(my_rho, r, a, b)
    print("my_rho is right")


def _check_taper_at(
    my_rho: Callable[[float, float, float], Any], r: float, a: float, b: float
) -> None:
    try:
        found = float(my_rho(r, a, b))
    except (ValueError, ZeroDivisionError):
        raise explain(TAPER_MISTAKES, ["division by 0"]) from None
    expected = taper(r, a, b).item()
    if math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-6):
        return
    if a > 0 and not a <= r <= b:
        for name, value in _wrong_tapers(r, a, b).items():
            if math.isclose(found, value, rel_tol=1e-5):
                raise explain(TAPER_MISTAKES, [name])
    problem = f"my_rho({r:g}, {a:g}, {b:g}) is {found:g}; it must be {expected:g}"
    raise WrongSolution(f"another mistake: {problem}")


# ---- Exercise 3: the loss ------------------------------------------------------------------------
LOSS_MISTAKES = {
    "missing detach": "the gradient also goes through the weight; detach the log-ratio",
    "missing clamp": "the weight of a wrong answer exceeds 1; clamp its log-ratio at 0 before exp",
    "missing length": "the loss is not divided by the length of the completion; divide by it",
    "wrong sign": "a step makes right answers less probable; change the sign of the loss",
    "same bounds": "a right answer is weighted by its ratio, too; its weight must be 1",
    "mean ratio": "the log-ratio is divided by the length; divide only the loss",
    "missing weight": "the weight of a wrong answer is always 1; weight it by its ratio, at most 1",
}
# log pi, log mu, reward and length of one completion
LOSS_CASES = (
    (-2.0, -1.5, -1.0, 1.0),
    (-2.3, -1.5, -1.0, 7.0),
    (-2.3, -4.0, -1.0, 2.0),
    (-2.3, -1.5, 1.0, 3.0),
    (-2.0, -4.0, 0.5, 2.0),
)


def loss_with(
    mistakes: Collection[str], logp: Tensor, logmu: Tensor, reward: Tensor, length: Tensor
) -> Tensor:
    """The loss of one completion, with some of LOSS_MISTAKES; without any it is the paper's.

    >>> tensors = [torch.tensor(x) for x in (-2.0, -2.0, -1.0, 4.0)]
    >>> loss_with([], *tensors), loss_with(["missing length"], *tensors)
    (tensor(-0.5000), tensor(-2.))
    """
    log_ratio = logp - logmu
    if "mean ratio" in mistakes:
        log_ratio = log_ratio / length
    if "missing detach" not in mistakes:
        log_ratio = log_ratio.detach()
    if "missing clamp" not in mistakes:
        log_ratio = log_ratio.clamp(max=0)
    weight = log_ratio.exp()
    if "same bounds" not in mistakes:
        weight = torch.where(reward < 0, weight, 1.0)
    if "missing weight" in mistakes:
        weight = torch.ones_like(weight)
    loss = -weight * reward * logp
    if "missing length" not in mistakes:
        loss = loss / length
    return -loss if "wrong sign" in mistakes else loss


def check_loss(my_loss: Callable[..., Any]) -> None:
    """Print that Exercise 3 is right; WrongSolution if not.

    my_loss(logp, logmu, reward, length) gets tensors of one number each.
    """
    tensors = [torch.tensor(value) for value in LOSS_CASES[0]]
    if my_loss(*tensors) is ...:
        print("my_loss is not written yet")
        return
    found = _gradients(my_loss)
    for mistakes in _sets_of_mistakes():
        if torch.allclose(found, _gradients(loss_with, mistakes), rtol=1e-4):
            if mistakes:
                raise explain(LOSS_MISTAKES, mistakes)
            print("my_loss is right")
            return
    expected = _gradients(loss_with, ())
    index = (found - expected).abs().argmax().item()
    logp, logmu, reward, length = LOSS_CASES[index]
    case = f"log pi = {logp:g}, log mu = {logmu:g}, reward {reward:g} and length {length:g}"
    problem = f"at {case} the gradient is {found[index]:g}; it must be {expected[index]:g}"
    raise WrongSolution(f"another mistake: {problem}")


def _sets_of_mistakes() -> Iterator[tuple[str, ...]]:
    """All sets of LOSS_MISTAKES, small ones first."""
    for size in range(len(LOSS_MISTAKES) + 1):
        yield from combinations(LOSS_MISTAKES, size)


def _gradients(loss: Callable[..., Tensor], *first: Any) -> Tensor:
    """The gradient of a loss in log pi, for each of LOSS_CASES."""
    gradients = []
    for case in LOSS_CASES:
        tensors = [torch.tensor(value) for value in case]
        logp = tensors[0].requires_grad_()
        value = loss(*first, *tensors)
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise WrongSolution("no gradient: compute the loss from logp, with PyTorch")
        [gradient] = torch.autograd.grad(value.sum(), logp)
        gradients.append(gradient)
    return torch.stack(gradients)
