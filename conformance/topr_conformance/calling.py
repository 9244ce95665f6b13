"""Call a loss on the probes, in the form that it takes."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from topr_conformance.adapters import adapted, call_with_batch, layouts, output_forms
from topr_conformance.arguments import (
    ARGUMENTS,
    AnyLoss,
    Order,
    Parameters,
    describe_batch,
    describe_order,
    parameters_of,
    possible_orders,
)
from topr_conformance.fitting import COARSE, FINE, Observation, find_hypothesis, observe
from topr_conformance.hypotheses import Hypothesis
from topr_conformance.losses import (
    InputError,
    Loss,
    LossInputs,
    NoGradientError,
    describe_error,
    neg_grad,
    value_of,
)
from topr_conformance.probes import probes


class Trial(NamedTuple):
    """A loss in one form, on the probes."""

    adapter: str
    arguments: str  # the parameter of each argument, and the reason
    loss: Loss  # with the adapter
    observed: Observation
    hypothesis: Hypothesis | None  # it explains the gradients
    is_negated: bool = False  # minus the user's loss


def call_in_its_form(loss: AnyLoss, is_coarse: bool = False) -> list[Trial]:
    """A trial in the order of arguments that names or gradients show; two if neither decides.

    The two take different parameters for logp; both have a gradient. Raises InputError
    if the loss cannot be called, or has no gradient in logp.
    """
    parameters = parameters_of(loss)
    if len(parameters.names) == 1:
        return [_call_with_batch(loss, is_coarse)]
    groups = possible_orders(parameters.names)
    is_guess = len(groups[0]) > 1
    errors: list[Exception] = []
    for group in groups:
        trials = []
        for order in group:
            try:
                trial = _call_in_order(loss, parameters, order, is_coarse)
            except Exception as error:  # a user's loss may raise anything
                errors.append(error)
                continue
            if group is groups[0] or trial.hypothesis is not None:
                trials.append(trial)
        if is_guess:  # a gradient of 0 everywhere is none
            trials = [trial for trial in trials if trial.observed.neg_grads[0].any()]
        if trials:
            return _with_reason(trials, _reason(groups, len(trials)))
    without_gradient = [error for error in errors if isinstance(error, NoGradientError)]
    raise _refusal([*without_gradient, *errors][0])


def _reason(groups: list[list[Order]], num_trials: int) -> str:
    """The reason for the choice of logp, and of reward and mask."""
    reason = "by their names"
    if len(groups[0]) > 1:
        reason = "a guess" if num_trials > 1 else "this logp is the only one with a gradient"
    return reason if len(groups) == 1 else f"{reason}; reward and mask by their order"


def _with_reason(trials: list[Trial], reason: str) -> list[Trial]:
    """The trials, with the reason for their order; the one with fewest differences comes first."""
    described = []
    for trial in sorted(trials, key=_num_differences):
        described.append(trial._replace(arguments=f"{trial.arguments} ({reason})"))
    return described


def _refusal(error: Exception) -> InputError:
    if isinstance(error, InputError):
        return error
    return InputError(
        "the loss cannot be called with logp, logmu (B, T), reward (B,), mask (B, T), or in "
        f"another known form: {describe_error(error)}; "
        "call it in a copy of topr_conformance/example.py"
    )


def _call_with_batch(loss: AnyLoss, is_coarse: bool) -> Trial:
    used: dict[str, str] = {}
    recorded = partial(call_with_batch, used, loss)
    try:
        trial = _call_in_some_layout(recorded, layouts([]), is_coarse)
    except NoGradientError as error:
        raise NoGradientError(f"{error} (of the batch: {describe_batch(used)})") from error
    except Exception as error:  # a user's loss may raise anything
        raise _refusal(error) from error
    used.clear()  # of forms that failed
    adapted(recorded, trial.adapter)(*trial.observed.batches[0])
    adapter = _join("one batch", trial.adapter)
    return trial._replace(adapter=adapter, arguments=f"{describe_batch(used)} (of the batch)")


def _call_in_order(loss: AnyLoss, parameters: Parameters, order: Order, is_coarse: bool) -> Trial:
    form = f"order {', '.join(order)}"
    if order == ARGUMENTS and not parameters.by_keyword:
        form = "none"
    arguments = describe_order(order, parameters.names)
    try:
        trial = _call_in_some_layout(adapted(loss, form), layouts(parameters.names), is_coarse)
    except NoGradientError as error:
        raise NoGradientError(
            f"the loss has no gradient in its logp ({arguments}): do not detach it, and check "
            "that the names are not exchanged"
        ) from error
    return trial._replace(adapter=_join(form, trial.adapter), arguments=arguments)


def _join(*forms: str) -> str:
    return " + ".join(form for form in forms if form not in ("", "none")) or "none"


def _call_in_some_layout(loss: AnyLoss, forms: list[str], is_coarse: bool) -> Trial:
    """Use the most likely layout; if it raises, the other one with the fewest differences.

    If all raise, raises the first exception about a missing gradient, or else the first.
    """
    first, *others = forms
    try:
        return _call_in_layout(loss, first, is_coarse)
    except InputError:
        raise
    except Exception as error:  # a user's loss may raise anything
        errors = [error]
    trials = []
    for form in others:
        try:
            trials.append(_call_in_layout(loss, form, is_coarse))
        except Exception as error:
            errors.append(error)
    if trials:
        return min(trials, key=_num_differences)
    without_gradient = [error for error in errors if isinstance(error, NoGradientError)]
    raise [*without_gradient, errors[0]][0]


def _num_differences(trial: Trial) -> float:
    return math.inf if trial.hypothesis is None else len(trial.hypothesis.differences())


def _call_in_layout(loss: AnyLoss, form: str, is_coarse: bool) -> Trial:
    """Use the first precision that the loss takes. If it takes none, raises its first exception."""
    errors = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        batches = probes(dtype, is_coarse)
        try:
            value = value_of(adapted(loss, form), batches[0])
            adapter = _join(form, *output_forms(value, len(batches[0].reward)))
            in_form = adapted(loss, adapter)
            rtol = COARSE if is_coarse else FINE
            observed = observe(gradient_of(in_form), batches, rtol)
        except Exception as error:  # a user's loss may raise anything
            errors.append(error)
        else:
            return Trial(adapter, "", in_form, observed, find_hypothesis(observed))
    raise errors[0]


def gradient_of(loss: Loss) -> Callable[[LossInputs], Tensor]:
    """A batch -> `neg_grad` of the loss on it, in float64."""
    return partial(_double_neg_grad, loss)


def _double_neg_grad(loss: Loss, batch: LossInputs) -> Tensor:
    return neg_grad(loss, batch).double()
