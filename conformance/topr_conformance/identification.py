"""Which loss is it? Call it in the form that it takes, explain its gradient, and report."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from topr_conformance.adapters import AnyLoss, adapted, input_forms, output_forms
from topr_conformance.advice import change, most_informative
from topr_conformance.fitting import COARSE, FINE, find_hypothesis
from topr_conformance.hypotheses import Hypothesis
from topr_conformance.losses import InputError, Loss, LossInputs, describe_error, neg_grad
from topr_conformance.mistakes import NegGrad, add_a_token, corrections, find_coupling
from topr_conformance.probes import SINGLES, probes
from topr_conformance.vectors import VECTORS, VectorResult, check_vector


@dataclass
class Report:
    """What a loss was found to be."""

    adapter: str  # how it was called: "none" if as it is, else as `adapted` takes it
    variant: str  # "paper", its differences joined by " + ", or "unknown"
    note: str  # what the verdict leaves open; may be empty
    vectors: list[VectorResult]
    changes: list[str]  # what to change, a sentence each; empty for the paper's loss

    def table(self) -> str:
        """The vectors and what was measured, one line each.

        >>> result = VectorResult("V17", "is it 1?", "pass", "R w = -0.135335")
        >>> print(Report("none", "paper", "", [result], []).table())
        V17  pass            is it 1?  R w = -0.135335
        """
        width = max(len(result.asks) for result in self.vectors)
        lines = []
        for result in self.vectors:
            asks = result.asks.ljust(width)
            lines.append(f"{result.name:<4} {result.status:<15} {asks}  {result.measured}")
        return "\n".join(lines)


class Trial(NamedTuple):
    """A loss in one form, on the probes."""

    adapter: str
    loss: Loss  # with the adapter
    batches: list[LossInputs]
    neg_grads: list[Tensor]  # for each batch
    hypothesis: Hypothesis | None  # what explains them


def identify(loss: AnyLoss) -> Report:
    """Name a loss. Raises InputError if it cannot be called, or returns nothing with a gradient.

    Of the hypotheses whose gradients, times one constant factor, are the loss's on all probes, to
    1e-4, the report names the one with the fewest differences. The first calls of the loss are
    those with the probes: it may keep the weights of its first call. If a loss rounds to bfloat16,
    it is called again with coarse probes, and compared to 2 %. If it takes or returns something
    else than a `losses.Loss`, it is called in another form, which the report names.

    >>> from topr_conformance.variants import per_token_and_token_mean
    >>> identify(per_token_and_token_mean).variant
    'per-token + token mean'
    """
    trial = _call_in_some_form(loss)
    is_rounded = trial.hypothesis is None and _is_rounded(trial.loss, trial.batches[0])
    if is_rounded:
        trial = _call_in_some_form(loss, is_coarse=True)
    hypothesis = trial.hypothesis
    mistakes = []
    if hypothesis is None:
        hypothesis, mistakes = _explain_by_mistakes(trial, COARSE if is_rounded else FINE)
    if hypothesis is None:
        results = [check_vector(name, trial.loss) for name in VECTORS]
        return _report_of_unknown(trial, results, is_rounded)
    hypothesis = _with_padded_width(hypothesis, trial)
    results = _check_vectors(hypothesis, trial.loss)
    names = hypothesis.differences() + mistakes
    if is_rounded:
        names.append("bfloat16")
    if names:
        note = ""
        if abs(hypothesis.power) != 1:
            note = f"ratio to the power {hypothesis.power:.4g}"
        changes = [f"{name}: {change(name)}" for name in names]
        return Report(trial.adapter, " + ".join(names), note, results, changes)
    if most_informative(results) is not None:  # the paper's on the probes, and not elsewhere
        return _report_of_unknown(trial, results, is_rounded)
    return Report(trial.adapter, "paper", "", results, [])


def _report_of_unknown(trial: Trial, results: list[VectorResult], is_rounded: bool) -> Report:
    """The report of a loss that no hypothesis explains; what a vector shows is in its note."""
    informative = most_informative(results)
    if trial.neg_grads[0][0, 0] < 0:
        note = "it pushes an on-policy positive down: is it an objective, to be maximised?"
        advice = "objective"
    elif informative is not None:
        result, advice = informative
        note = f"it fails {result.name}: {result.asks} {result.measured}"
    else:
        note = "every vector passes, but its gradient is that of no known loss: see --random"
        advice = "no known loss"
    if is_rounded:  # which vectors it fails may be due to that
        note = f"it computes in bfloat16; {note}"
        advice = "bfloat16"
    return Report(trial.adapter, "unknown", note, results, [change(advice)])


def _check_vectors(hypothesis: Hypothesis, loss: Loss) -> list[VectorResult]:
    results = [check_vector(name, loss) for name in VECTORS]
    if not hypothesis.frozen:
        return results
    # The loss has the weights of the probes, so the vectors say nothing; V16 asks for just that.
    reason = "weights are those of the first call"
    frozen = []
    for result in results:
        status = "fail" if result.name == "V16" else "not applicable"
        frozen.append(replace(result, status=status, measured=reason))
    return frozen


# ---- the form in which a loss is called ----------------------------------------------------------
def _call_in_some_form(loss: AnyLoss, is_coarse: bool = False) -> Trial:
    """Use the most likely form; if it raises, that of all others with the fewest differences."""
    first, *others = input_forms(loss)
    try:
        return _call_in_form(loss, first, is_coarse)
    except InputError:
        raise
    except Exception as error:  # a user's loss may raise anything
        reason = describe_error(error)
    trials = []
    for form in others:
        with suppress(Exception):
            trials.append(_call_in_form(loss, form, is_coarse))
    if not trials:
        raise InputError(
            "the loss cannot be called with logp, logmu (B, T), reward (B,), mask (B, T), or in "
            f"another known form: {reason}; call it in a copy of example.py"
        )
    return min(trials, key=_num_differences)


def _num_differences(trial: Trial) -> float:
    return math.inf if trial.hypothesis is None else len(trial.hypothesis.differences())


def _call_in_form(loss: AnyLoss, form: str, is_coarse: bool) -> Trial:
    """Use the first precision that the loss takes. If it takes none, raises its first exception."""
    errors = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        batches = probes(dtype, is_coarse)
        try:
            columns = [column.clone() for column in batches[0]]
            value = adapted(loss, form)(*columns)
            adapters = [] if form == "none" else [form]
            adapter = " + ".join(adapters + output_forms(value)) or "none"
            in_form = adapted(loss, adapter)
            neg_grads = [neg_grad(in_form, batch).double() for batch in batches]
        except Exception as error:  # a user's loss may raise anything
            errors.append(error)
        else:
            hypothesis = find_hypothesis(neg_grads, batches, COARSE if is_coarse else FINE)
            return Trial(adapter, in_form, batches, neg_grads, hypothesis)
    raise errors[0]


def _is_rounded(loss: Loss, batch: LossInputs) -> bool:
    """Whether a loss rounds its inputs, so that a small change does nothing, and a large one does.

    It does if the gradients have more than two sizes, and stay if log pi or log mu changes by a
    millionth.
    """
    before = neg_grad(loss, batch)[SINGLES, 0]
    for column in ("token_logp", "token_logmu"):
        values = getattr(batch, column)
        slightly = neg_grad(loss, batch._replace(**{column: (1 + 1e-6) * values}))[SINGLES, 0]
        doubled = neg_grad(loss, batch._replace(**{column: 2 * values}))[SINGLES, 0]
        depends = doubled != before  # elsewhere a bound is reached
        has_sizes = before[depends].unique().numel() > 2
        share_unchanged = (slightly == before)[depends].double().mean()
        if has_sizes and share_unchanged > 0.8:
            return True
    return False


# ---- what the probes leave open ------------------------------------------------------------------
def _explain_by_mistakes(trial: Trial, rtol: float) -> tuple[Hypothesis | None, list[str]]:
    """What the loss is without a mistake that no hypothesis has, and the names of that mistake."""
    # Next to an extra term, ratios of e^40 would leave no digits of the others.
    near = probes(trial.batches[0].token_logp.dtype, is_coarse=rtol == COARSE, scale=0.1)
    gradient = partial(_double_neg_grad, trial.loss)
    with suppress(Exception):  # a user's loss may raise anything on a batch of another shape
        for mistakes, corrected in corrections(gradient, near[0]):
            batches = near if "extra term" in mistakes else trial.batches
            found = _explain_corrected(mistakes, corrected, batches, rtol)
            if found is not None:
                return found
    return None, []


def _double_neg_grad(loss: Loss, batch: LossInputs) -> Tensor:
    return neg_grad(loss, batch).double()


def _explain_corrected(
    mistakes: list[str], corrected: NegGrad, batches: Sequence[LossInputs], rtol: float
) -> tuple[Hypothesis, list[str]] | None:
    neg_grads = [corrected(batch) for batch in batches]
    for is_scaled_by_batch in (False, True):
        hypothesis = find_hypothesis(neg_grads, batches, rtol, is_scaled_by_batch)
        if hypothesis is None:
            continue
        # A length that is off by -1 is told from other divisors by the paper's mean only.
        if "length off by -1" in mistakes and hypothesis.aggregation != "sequence mean":
            continue
        if not is_scaled_by_batch:
            return hypothesis, mistakes
        coupling = find_coupling(corrected, batches[0])
        if coupling is not None:
            return hypothesis, [*mistakes, coupling]
    return None


def _with_padded_width(hypothesis: Hypothesis, trial: Trial) -> Hypothesis:
    """Recognise means over the width of the padded batch, which is the same in all probes."""
    width = trial.batches[0].mask.shape[1]
    power = hypothesis.power * width
    if math.isclose(abs(power), 1, rel_tol=COARSE):
        hypothesis = replace(hypothesis, unit="geometric mean", power=round(power))
    if hypothesis.aggregation == "sequence sum":
        with suppress(Exception):  # a user's loss may raise anything on a batch of another width
            wider, _ = add_a_token(trial.batches[0], "padding")
            of_wider = neg_grad(trial.loss, wider)[0, 0] * (width + 1)
            if math.isclose(of_wider, trial.neg_grads[0][0, 0] * width, rel_tol=COARSE):
                hypothesis = replace(hypothesis, aggregation="divided by the longest length")
    return hypothesis
