"""Find the hypothesis that explains a loss's gradients on the probes."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from topr_conformance.hypotheses import Aggregation, Baseline, Hypothesis, Unit
from topr_conformance.limits import Limits
from topr_conformance.losses import LossInputs, neg_grad
from topr_conformance.probes import SINGLES

# Relative tolerances of a gradient. bfloat16 rounds by up to 0.004, several times in a loss.
FINE = 1e-4
COARSE = 0.02
# Which inputs' first values frozen weights may keep; the first that explains the loss counts.
FROZEN = [(), ("token_logp", "mask", "reward"), ("token_logp", "mask")]
FROZEN += [("token_logp", "reward"), ("token_logp",)]


def find_hypothesis(
    neg_grads: Sequence[Tensor],
    batches: Sequence[LossInputs],
    rtol: float,
    is_scaled_by_batch: bool = False,
) -> Hypothesis | None:
    """The hypothesis with the fewest differences that explains all gradients, or None.

    neg_grads, batches: one for each probe, as `neg_grad` and `probes` return them. Limits, power
    and stop-gradient are measured on single tokens. How tokens make a ratio and a loss is tried on
    the first batch. What explains the first batch is tried on all, with every baseline and frozen
    weights. is_scaled_by_batch: see `explains`.

    >>> from topr_conformance import variants
    >>> from topr_conformance.probes import probes
    >>> neg_grads = [neg_grad(variants.token_mean, batch) for batch in probes()]
    >>> find_hypothesis(neg_grads, probes(), FINE).differences()
    ['token mean']
    """
    batches = [_in_float64(batch) for batch in batches]
    is_finite = torch.stack(list(neg_grads)).isfinite().all()
    if not (is_finite and neg_grads[0][0, 0] > 0):
        return None
    measured = _measure_single_tokens(neg_grads[0], batches[0], rtol)
    if measured is None:
        return None
    best = None
    for unit, aggregation in product(get_args(Unit), get_args(Aggregation)):
        survivor = replace(measured, unit=unit, aggregation=aggregation)
        if not explains(survivor, neg_grads[:1], batches, rtol):
            continue
        if is_scaled_by_batch:  # the factor on negatives is then that of each batch
            survivor = replace(survivor, negatives=1.0)
        for candidate in _with_states(survivor):
            is_simpler = best is None or len(candidate.differences()) < len(best.differences())
            if is_simpler and explains(candidate, neg_grads, batches, rtol, is_scaled_by_batch):
                best = candidate
    return best


def _in_float64(batch: LossInputs) -> LossInputs:
    return LossInputs(*[column.double() for column in batch])


def _with_states(hypothesis: Hypothesis) -> list[Hypothesis]:
    """The hypothesis with each baseline, and with weights that are frozen in each way."""
    candidates = []
    for frozen, baseline in product(FROZEN, get_args(Baseline)):
        if hypothesis.stops_gradient or not frozen:  # frozen weights have no gradient
            candidates.append(replace(hypothesis, frozen=frozen, baseline=baseline))
    return candidates


def explains(
    hypothesis: Hypothesis,
    neg_grads: Sequence[Tensor],
    batches: Sequence[LossInputs],
    rtol: float,
    is_scaled_by_batch: bool = False,
) -> bool:
    """Whether its gradients, times one factor fitted on the first batch, are those observed.

    neg_grads may be of the first batches only. is_scaled_by_batch: each batch has two factors of
    its own, fitted on its first two rows: one for positives, one for negatives.
    """
    loss = hypothesis.loss()
    units = None
    for actual, batch in zip(neg_grads, batches, strict=False):
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
        if not torch.allclose(actual, expected, rtol=rtol, atol=1e-2 * rtol):
            return False
    return True


# ---- what single tokens tell ---------------------------------------------------------------------
class Line(NamedTuple):
    """log weight = power * log-ratio + shift, between the bounds."""

    num_points: int
    power: float
    shift: float


def _measure_single_tokens(neg_grads: Tensor, batch: LossInputs, rtol: float) -> Hypothesis | None:
    """Limits, power, stop-gradient and a factor on negatives; None if no such weights fit.

    The gradient of a single token is R (w + w' logp). The weight's derivative w' is there if the
    gradient is not stopped at the weight. Two values of log pi separate w from w'. All w are
    relative to that of an on-policy positive.
    """
    per_reward = neg_grads[:, 0] / neg_grads[0, 0] / batch.reward  # (B,)
    # As `probes` orders them: (log-ratios, two signs, two log pi)
    far, near = per_reward[SINGLES].view(-1, 2, 2).unbind(-1)  # (log-ratios, signs) each
    logp_far, logp_near = batch.token_logp[SINGLES, 0].view(-1, 2, 2).unbind(-1)
    all_log_ratios = (batch.token_logp - batch.token_logmu)[SINGLES, 0]
    log_ratio = all_log_ratios.view(-1, 4)[:, 0]  # (log-ratios,): four rows have the same
    derivative = (far - near) / (logp_far - logp_near)  # w'
    weight = far - derivative * logp_far
    is_flat = derivative.abs() < 0.1 * rtol * weight.abs().clamp_min(1)
    stops_gradient = bool(is_flat.all())
    if stops_gradient:
        weight = (far + near) / 2
    is_inverted = bool((weight[0].abs() > weight[-1].abs() + rtol).any())
    if is_inverted:  # the weight rises with mu/pi
        log_ratio = -log_ratio.flip(0)
        weight = weight.flip(0)
    # A factor on negatives may also be a pair of limits, which is tried first. The factor is the
    # weight of an on-policy negative, the second row.
    for factor in (1.0, per_reward[1].item()):
        fitted = _fit_limits(log_ratio, [weight[:, 0], weight[:, 1] / factor], rtol)
        if fitted is not None:
            limits, power = fitted
            # If all positives have one weight, it is the unit of the others.
            unit = limits.a_pos if limits.a_pos == limits.b_pos else 1.0
            if unit == 0:  # positives off-policy have no gradient, those on-policy have one
                continue
            limits = limits._replace(a_pos=limits.a_pos / unit, b_pos=limits.b_pos / unit)
            return Hypothesis(
                limits=limits,
                power=-power if is_inverted else power,
                stops_gradient=stops_gradient,
                negatives=factor / unit,
            )
    return None


def _fit_limits(
    log_ratio: Tensor, weights: Sequence[Tensor], rtol: float
) -> tuple[Limits, float] | None:
    """Limits and power of [exp(power * log_ratio)]_a^b, times one common factor, if that fits.

    weights: of positives, of negatives, each in the order of log_ratio, which rises.
    """
    bounds = [_bounds(weight, rtol) for weight in weights]
    lines = []
    for weight, (low, high) in zip(weights, bounds, strict=True):
        lines.append(_line_between(low, high, log_ratio, weight, rtol))
    # The line of more points: a narrow clip may leave too few log-ratios between its bounds.
    _, power, shift = max(lines)
    slack = 10 * FINE if rtol == FINE else COARSE
    power = 1.0 if abs(power - 1) < slack else power
    shift = 0.0 if abs(shift) < slack else shift
    if not (power > 0 and abs(shift) < 100):
        return None
    for weight, (low, high) in zip(weights, bounds, strict=True):
        if not 0 <= low <= high:
            return None
        expected = (power * log_ratio + shift).exp().clamp(low, high)
        if not torch.allclose(weight, expected, rtol=slack, atol=1e-6):
            return None
    digits = 6 if rtol == FINE else 2
    rounded = []
    for bound in (*bounds[0], *bounds[1]):
        rounded.append(float(f"{bound / math.exp(shift):.{digits}g}"))
    return Limits(*rounded), power


def _bounds(weight: Tensor, rtol: float) -> tuple[float, float]:
    """The bounds that a weight reaches: where two neighbours are equal. Otherwise 0 or infinity."""
    slack = 1e-2 * rtol * weight[:-1].abs()
    is_flat = (weight[:-1] - weight[1:]).abs() <= slack
    low = 0.0
    if is_flat[0] and weight[0] > 1e-6:  # a guard such as exp(-20) is no bound
        low = weight[0].item()
    high = weight[-1].item() if is_flat[-1] else math.inf
    return low, max(low, high)


def _line_between(low: float, high: float, log_ratio: Tensor, weight: Tensor, rtol: float) -> Line:
    """The line of the weights between two bounds.

    One log-ratio between the bounds does not tell the power, and none tells neither power nor
    shift: they are then the paper's, 1 and 0.
    """
    is_above = (weight > low * (1 + 0.1 * rtol)) & (weight > 1e-6)
    is_between = is_above & (weight < high * (1 - 0.1 * rtol))
    x = log_ratio[is_between]
    y = weight[is_between].log()
    power = 1.0
    if len(x) > 1 and x[-1] > x[0]:
        power = ((y[-1] - y[0]) / (x[-1] - x[0])).item()
    shift = (y - power * x).median().item() if len(x) else 0.0
    return Line(len(x), power, shift)
