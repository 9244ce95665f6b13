"""Find the hypothesis that explains a loss's gradients on the probes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from topr_conformance.hypotheses import Aggregation, Baseline, Hypothesis, Unit
from topr_conformance.limits import EVERYTHING, HIGHEST_GUARD, Limits
from topr_conformance.losses import LossInputs, neg_grad
from topr_conformance.single_tokens import Curve, NegGrad, SingleTokens, WeightOfSingleTokens

# Relative tolerances of a gradient. bfloat16 rounds by up to 0.004, several times in a loss.
FINE = 1e-4
COARSE = 0.02
UNDERFLOW = 1e-3  # smaller weights of a loss that rounds to 16 bits are ignored
# Which inputs' first values frozen weights may keep; the first that explains the loss counts.
FROZEN = [(), ("token_logp", "mask", "reward"), ("token_logp", "mask")]
FROZEN += [("token_logp", "reward"), ("token_logp",)]


class Observation(NamedTuple):
    """The gradients of a loss on the probes."""

    neg_grad: NegGrad  # a batch -> `neg_grad` of the loss
    batches: Sequence[LossInputs]  # `probes`
    neg_grads: Sequence[Tensor]  # (B, T) of each batch, float64
    rtol: float  # FINE or COARSE


def observe(neg_grad: NegGrad, batches: Sequence[LossInputs], rtol: float) -> Observation:
    """Call a loss with the probes."""
    return Observation(neg_grad, batches, [neg_grad(batch) for batch in batches], rtol)


def find_hypothesis(
    observed: Observation, is_scaled_by_batch: bool = False, has_any_weight: bool = False
) -> Hypothesis | None:
    """The hypothesis with the fewest differences that explains all gradients, or None.

    Limits, window, power and stop-gradient are measured on single tokens. Ways to form
    ratio and loss from tokens are tried on the first batch. Those that explain it are tried on all,
    with every baseline and frozen weights. is_scaled_by_batch: see `explains`. has_any_weight: the
    weight may be any function of the ratio; it is measured where it is needed.

    >>> from topr_conformance import variants
    >>> from topr_conformance.probes import probes
    >>> observed = observe(lambda batch: neg_grad(variants.token_mean, batch), probes(), FINE)
    >>> find_hypothesis(observed).differences()
    ['token mean']
    """
    is_finite = torch.stack(list(observed.neg_grads)).isfinite().all()
    if not (is_finite and observed.neg_grads[0][0, 0] > 0):
        return None
    if has_any_weight:
        function = WeightOfSingleTokens(observed.neg_grad, observed.batches[0])
        measured = Hypothesis(function=function)
    else:
        measured = measure_single_tokens(observed)
    if measured is None:
        return None
    best = None
    for unit, aggregation in product(get_args(Unit), get_args(Aggregation)):
        survivor = replace(measured, unit=unit, aggregation=aggregation)
        if not explains(survivor, observed, is_first_only=True):
            continue
        if is_scaled_by_batch:  # the factor on negatives is then that of each batch
            survivor = replace(survivor, negatives=1.0)
        for candidate in _with_states(survivor):
            is_simpler = best is None or len(candidate.differences()) < len(best.differences())
            if is_simpler and explains(candidate, observed, is_scaled_by_batch):
                best = candidate
    return best


def _in_float64(batch: LossInputs) -> LossInputs:
    return LossInputs(*[column.double() for column in batch])


def _with_states(hypothesis: Hypothesis) -> list[Hypothesis]:
    """The hypothesis with each baseline, and with weights that are frozen in each way."""
    candidates = []
    ways = FROZEN if hypothesis.function is None else [()]
    for frozen, baseline in product(ways, get_args(Baseline)):
        if hypothesis.stops_gradient or not frozen:  # frozen weights have no gradient
            candidates.append(replace(hypothesis, frozen=frozen, baseline=baseline))
    return candidates


def explains(
    hypothesis: Hypothesis,
    observed: Observation,
    is_scaled_by_batch: bool = False,
    is_first_only: bool = False,
) -> bool:
    """Whether its gradients, times one factor fitted on the first batch, are those observed.

    is_scaled_by_batch: each batch has two factors of its own, fitted on its first two rows: one
    for positives, one for negatives. is_first_only: on the first batch.
    """
    loss = hypothesis.loss()
    units = None
    count = 1 if is_first_only else len(observed.batches)
    for actual, original in zip(observed.neg_grads[:count], observed.batches, strict=False):
        batch = _in_float64(original)
        expected = neg_grad(loss, batch)
        if units is None or is_scaled_by_batch:
            units = actual[:2, 0], expected[:2, 0]  # of the on-policy positive and negative
        actual_unit, expected_unit = units
        if not expected_unit[0] > 0:
            return False
        row = torch.zeros(len(batch.reward), dtype=torch.long)  # by which unit each is divided
        if is_scaled_by_batch:
            row = (hypothesis.shifted(batch.reward) < 0).long()
        actual = actual / actual_unit[row, None]
        expected = expected / expected_unit[row, None]
        if not torch.allclose(actual, expected, rtol=observed.rtol, atol=1e-2 * observed.rtol):
            return False
    return True


# ---- measurements on single tokens ---------------------------------------------------------------
class Line(NamedTuple):
    """log weight = power * log-ratio + shift, between the bounds."""

    num_points: int
    power: float
    shift: float


def measure_single_tokens(observed: Observation) -> Hypothesis | None:
    """Limits, window, power, stop-gradient, factor on negatives; None if no such weights fit."""
    rtol = observed.rtol
    tokens = SingleTokens.measure(observed.neg_grads[0], _in_float64(observed.batches[0]), rtol)
    # A factor on negatives may also be a pair of limits, which is tried first. The factor is the
    # weight of an on-policy negative.
    for factor in (1.0, tokens.negative):
        inside = tokens.inside_window(factor)
        if inside is None:
            continue
        fitted = _fit_limits(inside, rtol)
        if fitted is None:
            continue
        limits, power = fitted
        # If all positives have one weight, it is the unit of the others.
        unit = limits.a_pos if limits.a_pos == limits.b_pos else 1.0
        if unit == 0:  # positives off-policy have no gradient, those on-policy have one
            continue
        limits = limits._replace(a_pos=limits.a_pos / unit, b_pos=limits.b_pos / unit)
        window = EVERYTHING
        if any(curve.has_zeros for curve in inside):
            function = WeightOfSingleTokens(observed.neg_grad, observed.batches[0])
            window = tokens.find_window(function, power, digits=5 if rtol == FINE else 2)
        return Hypothesis(
            limits=limits,
            window=window,
            power=-power if tokens.is_inverted else power,
            stops_gradient=tokens.stops_gradient,
            negatives=factor / unit,
        )
    return None


def _fit_limits(curves: Sequence[Curve], rtol: float) -> tuple[Limits, float] | None:
    """Limits and power of [exp(power * log_ratio)]_a^b, times one common factor, if that fits.

    curves: of positives, of negatives.
    """
    bounds = [_bounds(curve.weight, rtol) for curve in curves]
    lines = []
    for curve, (low, high) in zip(curves, bounds, strict=True):
        lines.append(_line_between(low, high, curve, rtol))
    # The line of more points: a narrow clip may leave too few log-ratios between its bounds.
    _, power, shift = max(lines)
    slack = 10 * FINE if rtol == FINE else COARSE
    power = 1.0 if abs(power - 1) < slack else power
    shift = 0.0 if abs(shift) < slack else shift
    if not (power > 0 and abs(shift) < 100):
        return None
    for curve, (low, high) in zip(curves, bounds, strict=True):
        if not 0 <= low <= high:
            return None
        expected = (power * curve.log_ratio + shift).exp().clamp(low, high)
        atol = 1e-6 if rtol == FINE else UNDERFLOW
        if not torch.allclose(curve.weight, expected, rtol=slack, atol=atol):
            return None
    digits = 6 if rtol == FINE else 2
    rounded = []
    for bound in (*bounds[0], *bounds[1]):
        rounded.append(float(f"{bound / math.exp(shift):.{digits}g}"))
    return Limits(*rounded), power


def _bounds(weight: Tensor, rtol: float) -> tuple[float, float]:
    """The bounds that a weight reaches: where two neighbours are equal. Otherwise 0 or infinity."""
    if len(weight) < 2:
        return 0.0, math.inf
    slack = 1e-2 * rtol * weight[:-1].abs()
    is_flat = (weight[:-1] - weight[1:]).abs() <= slack
    low = 0.0
    if is_flat[0] and weight[0] > HIGHEST_GUARD:
        low = weight[0].item()
    high = weight[-1].item() if is_flat[-1] else math.inf
    return low, max(low, high)


def _line_between(low: float, high: float, curve: Curve, rtol: float) -> Line:
    """The line of the weights between two bounds.

    One log-ratio between the bounds does not determine the power; without any, neither power nor
    shift is known. An unknown power is 1, an unknown shift 0, as in the paper.
    """
    least = max(low * (1 + 0.1 * rtol), 1e-6 if rtol == FINE else UNDERFLOW)
    is_above = curve.weight > least
    is_between = is_above & (curve.weight < high * (1 - 0.1 * rtol))
    x = curve.log_ratio[is_between]
    y = curve.weight[is_between].log()
    power = 1.0
    if len(x) > 1 and x[-1] > x[0]:
        power = ((y[-1] - y[0]) / (x[-1] - x[0])).item()
    shift = (y - power * x).median().item() if len(x) else 0.0
    return Line(len(x), power, shift)
