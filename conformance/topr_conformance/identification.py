"""Identify a loss: call it in a form that it takes, explain its gradient, and report."""

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from topr_conformance.advice import change, most_informative
from topr_conformance.arguments import AnyLoss
from topr_conformance.calling import Trial, call_in_its_form, gradient_of
from topr_conformance.fitting import (
    COARSE,
    Observation,
    find_hypothesis,
    measure_single_tokens,
    observe,
)
from topr_conformance.hypotheses import Hypothesis
from topr_conformance.losses import Loss, LossInputs, neg_grad
from topr_conformance.mistakes import (
    Corrected,
    add_a_token,
    corrections,
    find_constant_baseline,
    find_coupling,
)
from topr_conformance.probes import SINGLES, probes
from topr_conformance.single_tokens import NegGrad
from topr_conformance.vectors import LONG, VECTORS, Case, VectorResult, batch_of, check_vector

Explanation = tuple[Hypothesis, list[str]]  # and the names of what no hypothesis has


@dataclass
class Report:
    """The verdict on a loss."""

    adapter: str  # how it was called: "none", or an adapter for `adapted`
    arguments: str  # the parameter of each argument, and the reason
    variant: str  # "paper", its differences joined by " + ", or "unknown"
    note: str  # details of the verdict; may be empty
    vectors: list[VectorResult]
    changes: list[str]  # what to change, a sentence each; empty for the paper's loss

    def table(self) -> str:
        """The vectors and what was measured, one line each.

        >>> result = VectorResult("V17", "is it 1?", "pass", "R w = -0.135335")
        >>> print(Report("none", "", "paper", "", [result], []).table())
        V17  pass            is it 1?  R w = -0.135335
        """
        width = max(len(result.asks) for result in self.vectors)
        lines = []
        for result in self.vectors:
            asks = result.asks.ljust(width)
            lines.append(f"{result.name:<4} {result.status:<15} {asks}  {result.measured}")
        return "\n".join(lines)


def identify(loss: AnyLoss) -> Report:
    """Name a loss. Raises InputError if it cannot be called, or returns nothing with a gradient.

    A hypothesis fits if its gradients equal the loss's on all probes to 1e-4, up to one constant
    factor. The report names the hypothesis with the fewest differences. The loss is first called
    with the probes, because it may keep the weights of its first call. A loss that rounds to
    bfloat16 or float16 is called again with coarse probes, within 2 %. A loss of another
    form than `losses.Loss` is called in its own form, which the report names.

    >>> from topr_conformance.variants import per_token_and_token_mean
    >>> identify(per_token_and_token_mean).variant
    'per-token + token mean'
    """
    trials = call_in_its_form(loss)
    if len(trials) > 1:
        return _report_of_guess(trials)
    trial = _with_right_sign(trials[0])
    precision = None
    if trial.hypothesis is None:
        precision = _precision_of(trial.loss, trial.observed.batches[0])
    if precision is not None:
        trial = _with_right_sign(call_in_its_form(loss, is_coarse=True)[0])
    explained = _explain(trial)
    if explained is None:
        return _report_of_unknown(trial, precision)
    hypothesis, names = explained
    results = _check_vectors(hypothesis, trial.loss)
    if precision is not None:
        names.append(precision)
    if names:
        note = ""
        if abs(hypothesis.power) != 1:
            note = f"ratio to the power {hypothesis.power:.4g}"
        changes = [f"{name}: {change(name)}" for name in names]
        return _report(trial, " + ".join(names), note, results, changes)
    if most_informative(results) is not None:  # it equals the paper's on the probes only
        return _report_of_unknown(trial, precision)
    return _report(trial, "paper", "", results, [])


def _report(
    trial: Trial, variant: str, note: str, results: list[VectorResult], changes: list[str]
) -> Report:
    return Report(trial.adapter, trial.arguments, variant, note, results, changes)


def _report_of_unknown(trial: Trial, precision: str | None) -> Report:
    """The report of a loss that no hypothesis explains; what a vector shows is in its note."""
    results = [check_vector(name, trial.loss) for name in VECTORS]
    notes = ["every vector passes, but no known loss has its gradient: see --random"]
    advice = "no known loss"
    informative = most_informative(results)
    if informative is not None:
        result, advice = informative
        notes = [f"it fails {result.name}: {result.asks} {result.measured}"]
        # These grow with the reward, as all of the gradient does; a KL does not.
        if advice in ("no stop-gradient", "counted twice") and not _is_proportional(trial):
            advice = "extra term"
    if precision is not None:  # the cause may be the precision alone
        notes.insert(0, f"it computes in {precision}")
        advice = precision
    changes = [change(advice)]
    single = measure_single_tokens(trial.observed)
    if single is not None and single.names_of_weight():
        notes.append(f"single tokens: {' + '.join(single.names_of_weight())}")
    if trial.is_negated:
        notes.insert(0, "it pushes positives down")
        changes.insert(0, change("wrong sign"))
    return _report(trial, "unknown", "; ".join(notes), results, changes)


def _report_of_guess(trials: list[Trial]) -> Report:
    """The report of a loss whose verdict depends on which of two parameters is logp."""
    readings = []
    for trial in trials:
        right = _with_right_sign(trial)
        reading = "something else"
        if right.hypothesis is not None:
            sign = ["wrong sign"] if right.is_negated else []
            reading = " + ".join([*sign, *right.hypothesis.differences()]) or "paper"
        order = trial.arguments.partition(", reward")[0]
        readings.append(f"{reading} if {order}")
    results = [check_vector(name, trials[0].loss) for name in VECTORS]
    return _report(trials[0], "unknown", "; ".join(readings), results, [change("a guess")])


def _is_proportional(trial: Trial) -> bool:
    """Whether gradients grow with rewards: those of the last probe are 100 times as large."""
    first, *_, last = trial.observed.neg_grads
    return torch.allclose(last, 100 * first, rtol=1e-3, atol=1e-6)


def _check_vectors(hypothesis: Hypothesis, loss: Loss) -> list[VectorResult]:
    results = [check_vector(name, loss) for name in VECTORS]
    if not hypothesis.frozen:
        return results
    # The loss has the weights of the probes, so the vectors say nothing; only V16 tests this.
    reason = "weights are those of the first call"
    frozen = []
    for result in results:
        status = "fail" if result.name == "V16" else "not applicable"
        frozen.append(replace(result, status=status, measured=reason))
    return frozen


# ---- its sign, its precision ---------------------------------------------------------------------
def _with_right_sign(trial: Trial) -> Trial:
    """The trial of minus the loss, if it pushes positives down: the first row is on-policy."""
    first = trial.observed.neg_grads[0]
    push = first[0, 0] or first[trial.observed.batches[0].reward > 0].sum()  # 0: it is left out
    if not push < 0:
        return trial
    loss = trial.loss

    def negated(*inputs: Tensor) -> Tensor:
        return -loss(*inputs)

    observed = observe(gradient_of(negated), trial.observed.batches, trial.observed.rtol)
    hypothesis = find_hypothesis(observed)
    return trial._replace(loss=negated, observed=observed, hypothesis=hypothesis, is_negated=True)


def _precision_of(loss: Loss, batch: LossInputs) -> str | None:
    """The precision to which a loss rounds its inputs: a small change does nothing then.

    It rounds if the gradients have more than two sizes, and most stay equal if log pi or log mu
    changes by a millionth. A change by 1/1200 is below half a step of bfloat16, but not of float16.
    None if it does not round.
    """
    before = neg_grad(loss, batch)[SINGLES, 0]
    for column in ("token_logp", "token_logmu"):
        values = getattr(batch, column)

        def times(factor: float, column: str = column, values: Tensor = values) -> Tensor:
            changed = batch._replace(**{column: factor * values})
            return neg_grad(loss, changed)[SINGLES, 0]

        depends = times(2.0) != before  # elsewhere a bound is reached
        has_sizes = before[depends].unique().numel() > 2
        if has_sizes and _share_equal(times(1 + 1e-6), before, depends) > 0.8:
            is_coarse = _share_equal(times(1 + 1 / 1200), before, depends) > 0.7
            return "bfloat16" if is_coarse else "float16"
    return None


def _share_equal(values: Tensor, before: Tensor, rows: Tensor) -> float:
    return (values == before)[rows].double().mean().item()


# ---- what explains it ----------------------------------------------------------------------------
def _explain(trial: Trial) -> Explanation | None:
    """The hypothesis that explains a loss, and the names of all its differences; None if none."""
    hypothesis = trial.hypothesis
    mistakes: list[str] = []
    if hypothesis is None:
        found = _explain_by_mistakes(trial)
        if found is None:
            return None
        hypothesis, mistakes = found
    hypothesis = _with_padded_width(hypothesis, trial)
    least_length = None
    if hypothesis.aggregation == "sequence sum":
        least_length = _least_length(trial.loss)
    if least_length is not None:
        hypothesis = replace(hypothesis, aggregation="sequence mean")
        mistakes = [f"length at least {least_length:.4g}", *mistakes]
    names = hypothesis.differences() + mistakes
    if trial.is_negated:
        names.insert(0, "wrong sign")
    return hypothesis, names


def _explain_by_mistakes(trial: Trial) -> Explanation | None:
    """Explain the loss without its mistakes that no hypothesis describes; names all differences."""
    batches, rtol = trial.observed.batches, trial.observed.rtol
    # Next to an extra term, ratios of e^40 would leave no digits of the others.
    near = probes(batches[0].token_logp.dtype, is_coarse=rtol == COARSE, scale=0.1)
    gradient = gradient_of(trial.loss)
    for has_any_weight in (False, True):
        with suppress(Exception):  # a user's loss may raise anything on a batch of another shape
            for correction in corrections(gradient, near[0]):
                is_near = "extra term" in correction.mistakes
                observed = observe(correction.neg_grad, near if is_near else batches, rtol)
                found = _explain_corrected(correction, observed, has_any_weight)
                if found is None:
                    continue
                if is_near:
                    found = _name_extra_term(found, correction, gradient, near[0])
                return found
    return None


def _name_extra_term(
    found: Explanation, correction: Corrected, gradient: NegGrad, batch: LossInputs
) -> Explanation:
    """The same explanation, with a constant baseline instead, if the extra term is one."""
    hypothesis, mistakes = found
    baseline = find_constant_baseline(gradient, correction, hypothesis, batch)
    if baseline is None:
        return found
    return hypothesis, [baseline if name == "extra term" else name for name in mistakes]


def _explain_corrected(
    correction: Corrected, observed: Observation, has_any_weight: bool
) -> Explanation | None:
    mistakes = correction.mistakes
    for is_scaled_by_batch in (False,) if has_any_weight else (False, True):
        hypothesis = find_hypothesis(observed, is_scaled_by_batch, has_any_weight)
        if hypothesis is None:
            continue
        # Only with the paper's mean can a length that is off by -1 be distinguished.
        if "length off by -1" in mistakes and hypothesis.aggregation != "sequence mean":
            continue
        if not is_scaled_by_batch:
            return hypothesis, mistakes
        coupling = find_coupling(correction.neg_grad, observed.batches[0])
        if coupling is not None:
            return hypothesis, [*mistakes, coupling]
    return None


def _least_length(loss: Loss) -> float | None:
    """The least length by which a loss divides, longer than those of the probes; None if none."""
    with suppress(Exception):  # a user's loss may raise anything on a batch of another width
        of_one, of_long = neg_grad(loss, batch_of([Case.on_policy(1), Case.on_policy(LONG)]))[:2, 0]
        if 0 < of_long < 0.999 * of_one:
            return LONG * (of_long / of_one).item()
    return None


def _with_padded_width(hypothesis: Hypothesis, trial: Trial) -> Hypothesis:
    """Recognise means over the width of the padded batch, which is the same in all probes."""
    width = trial.observed.batches[0].mask.shape[1]
    power = hypothesis.power * width
    if math.isclose(abs(power), 1, rel_tol=COARSE):
        hypothesis = replace(hypothesis, unit="geometric mean", power=round(power))
    if hypothesis.aggregation == "sequence sum":
        with suppress(Exception):  # a user's loss may raise anything on a batch of another width
            wider, _ = add_a_token(trial.observed.batches[0], "padding")
            of_wider = neg_grad(trial.loss, wider)[0, 0] * (width + 1)
            if math.isclose(of_wider, trial.observed.neg_grads[0][0, 0] * width, rel_tol=COARSE):
                hypothesis = replace(hypothesis, aggregation="divided by the longest length")
    return hypothesis
