"""Which loss is it? Hypotheses about a loss, tried on its gradient until one explains it."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor

from topr import PRESETS, Limits, importance_weight
from topr_conformance.losses import (
    InputError,
    Loss,
    LossInputs,
    adapted,
    in_a_line,
    input_forms,
    output_forms,
    push,
    total,
)
from topr_conformance.mistakes import change, corrections, factor_of_batch, telling, with_a_token
from topr_conformance.variants import TABLE_1
from topr_conformance.vectors import SINGLES, VECTORS, VectorResult, probes, result_of

FINE, COARSE = (
    1e-4,
    0.02,
)  # relative tolerance of a push: bfloat16 rounds by up to 0.004, several times in a loss
Unit = Literal["whole sequence", "per-token", "geometric mean"]
Aggregation = Literal[
    "sequence mean",
    "token mean",
    "sequence sum",
    "divided by the longest length",
    "length off by +1",
]
Pushes, Batches = list[Tensor], list[LossInputs]  # of a loss on the probes; the probes


@dataclass(frozen=True)
class Hypothesis:
    """A loss, described by its independent properties; the defaults are the paper's."""

    limits: Limits = PRESETS["topr"]
    power: float = 1.0  # of the ratio; below 0 it is mu/pi
    unit: Unit = "whole sequence"
    stops_gradient: bool = True
    frozen: tuple[
        str, ...
    ] = ()  # the inputs whose first values the weights keep: logp, maybe mask, maybe reward
    baseline: Literal["none", "batch-mean baseline", "branch by raw score"] = "none"
    aggregation: Aggregation = "sequence mean"
    negatives: float = 1.0  # the factor on negatives

    def differences(self) -> list[str]:
        """The names of what differs from the paper's loss.

        >>> Hypothesis(unit="per-token", limits=Limits(1, 1, 0.8, 1.2)).differences()
        ['per-token', 'clip 0.8..1.2']
        """
        named = [
            (self.unit, self.unit != "whole sequence"),
            (_name_of_bounds(self.limits), self.limits != PRESETS["topr"]),
            ("inverted ratio", self.power < 0),
            ("tempered", abs(self.power) != 1),
            (f"negatives count {self.negatives:.4g} times", self.negatives != 1),
            ("no stop-gradient", not self.stops_gradient),
            ("frozen weight", self.frozen != ()),
            (self.baseline, self.baseline != "none"),
            (self.aggregation, self.aggregation != "sequence mean"),
        ]
        return [name for name, differs in named if differs]

    def loss(self) -> Loss:
        """The loss itself. If its weights are frozen, they keep what it is called with first."""
        first: dict[str, Tensor] = {}

        def loss(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
            now = LossInputs(logp, logmu, reward, mask)
            if not first:
                first.update({name: getattr(now, name).detach().clone() for name in self.frozen})
            of_weight = now._replace(**first)
            log_ratio = of_weight.logp - logmu
            if self.unit != "per-token":
                log_ratio = total(log_ratio, of_weight.mask)[:, None]
            if self.unit == "geometric mean":
                log_ratio = log_ratio / of_weight.mask.sum(1, keepdim=True)
            shifted = reward - (reward.mean() if self.baseline != "none" else 0)
            is_of_score = "reward" in self.frozen or self.baseline == "branch by raw score"
            a, b = self.limits.of_sign((of_weight.reward if is_of_score else shifted)[:, None])
            weight = importance_weight(self.power * log_ratio, a, b)
            weight = torch.where((a == b) | self.stops_gradient, weight.detach(), weight)
            scaled = (shifted * torch.where(shifted < 0, self.negatives, 1.0))[:, None]
            sums, lengths = total(weight * scaled * logp, mask), mask.sum(1)
            divisors = {"sequence mean": lengths, "token mean": lengths.mean(), "sequence sum": 1}
            divisors |= {
                "divided by the longest length": lengths.max(),
                "length off by +1": lengths + 1,
            }
            return -(sums / divisors[self.aggregation]).mean()

        return loss


def _name_of_bounds(limits: Limits) -> str:
    positive, negative = (
        f"{limits.a_pos:.6g}..{limits.b_pos:.6g}",
        f"{limits.a_neg:.6g}..{limits.b_neg:.6g}",
    )
    clip = (
        f"clip {negative}"
        if positive == "1..1"
        else f"clip {positive} on positives, {negative} on negatives"
    )
    return {PRESETS[row]: name for name, row in TABLE_1.items()}.get(
        limits, clip.replace("inf", "infinity")
    )


@dataclass
class Report:
    """What a loss was found to be."""

    adapter: (
        str  # how it was called: "none" if as it is, else names of losses.ADAPTERS, joined by " + "
    )
    variant: str  # "paper", its differences joined by " + ", or "unknown"
    note: str
    vectors: list[VectorResult]
    changes: list[str]  # what to change, a sentence each; empty for the paper's loss

    def table(self) -> str:
        """The vectors and what they found, one line each.

        >>> print(Report("none", "paper", "", [VectorResult("V17", "is it 1?", "pass", "R w = -0.135335")], []).table())
        V17  pass            is it 1?  R w = -0.135335
        """
        width = max(len(result.asks) for result in self.vectors)
        return "\n".join(
            f"{r.name:<4} {r.status:<15} {r.asks:<{width}}  {r.measured}" for r in self.vectors
        )


def identify(loss: Callable[..., Tensor]) -> Report:
    """Examine a loss. Raises InputError if it cannot be called, or returns nothing with a gradient.

    Of the hypotheses whose pushes, times one constant factor, are the loss's on all probes, to 1e-4, that with the
    fewest differences is reported. The probes are the first calls of the loss: it may keep the weights of its first. A
    loss that rounds to bfloat16 is called again, with the coarse probes, and compared to 2%. A loss that takes or
    returns something else is called in another form, which the report names.

    >>> from topr_conformance.variants import per_token_and_token_mean
    >>> identify(per_token_and_token_mean).variant
    'per-token + token mean'
    """
    adapter, batches, pushed, hypothesis = _call(loss)
    is_rounded = hypothesis is None and _is_rounded(adapted(loss, adapter), batches[0])
    if is_rounded:
        adapter, batches, pushed, hypothesis = _call(loss, is_coarse=True)
    loss, corrected = adapted(loss, adapter), []
    if hypothesis is None:
        hypothesis, corrected = _corrected(loss, batches, COARSE if is_rounded else FINE)
    width = batches[0].mask.shape[1]
    if hypothesis and math.isclose(
        abs(hypothesis.power) * width, 1, rel_tol=COARSE
    ):  # a mean over the width
        hypothesis = replace(
            hypothesis, unit="geometric mean", power=round(hypothesis.power * width)
        )
    if (
        hypothesis and hypothesis.aggregation == "sequence sum"
    ):  # over the width of a padded batch, or over nothing?
        with suppress(Exception):  # whatever a foreign loss may raise on a batch of another width
            wide = push(loss, with_a_token(batches[0], "padding")[0])
            if math.isclose(wide[0, 0] * (width + 1), pushed[0][0, 0] * width, rel_tol=COARSE):
                hypothesis = replace(hypothesis, aggregation="divided by the longest length")
    results = [result_of(name, loss) for name in VECTORS]
    if (
        hypothesis and hypothesis.frozen
    ):  # the loss has the weights of the probes: V16 alone asks for that
        reason = "weights are those of the first call"
        results = [
            replace(r, status="fail" if r.name == "V16" else "not applicable", measured=reason)
            for r in results
        ]
    if hypothesis and (names := hypothesis.differences() + corrected + ["bfloat16"] * is_rounded):
        note = f"ratio to the power {hypothesis.power:.4g}" if abs(hypothesis.power) != 1 else ""
        return Report(
            adapter, " + ".join(names), note, results, [f"{name}: {change(name)}" for name in names]
        )
    if pushed[0][0, 0] < 0:
        note, advice = (
            "it pushes an on-policy positive down: is it an objective, to be maximised?",
            "objective",
        )
    elif failure := telling(results):
        result, advice = failure
        note = f"it fails {result.name}: {result.asks} {result.measured}"
    elif not hypothesis:
        note, advice = (
            "every vector passes, but its gradient is that of no known loss: see --random",
            "no known loss",
        )
    else:
        return Report(adapter, "paper", "", results, [])
    if is_rounded:  # which vectors it fails may be due to that
        note, advice = f"it computes in bfloat16; {note}", "bfloat16"
    return Report(adapter, "unknown", note, results, [change(advice)])


def _is_rounded(loss: Loss, batch: LossInputs) -> bool:
    """Whether pushes of more than two sizes stay if log pi or log mu changes by a millionth, and not if it doubles."""
    before = push(loss, batch)[SINGLES, 0]
    for name in ("logp", "logmu"):
        changed = [batch._replace(**{name: by * getattr(batch, name)}) for by in (1 + 1e-6, 2)]
        tiny, large = (push(loss, other)[SINGLES, 0] == before for other in changed)
        if before[~large].unique().numel() > 2 and tiny[~large].double().mean() > 0.8:
            return True
    return False


def _call(
    loss: Callable[..., Tensor], is_coarse: bool = False
) -> tuple[str, Batches, Pushes, Hypothesis | None]:
    """The loss in its most likely form; if that raises an exception, in the other form with the fewest differences."""
    first, *others = input_forms(loss)
    try:
        return _called(loss, first, is_coarse)
    except InputError:
        raise
    except Exception as error:  # whatever a foreign loss may raise
        reason = in_a_line(error)
    calls = []
    for form in others:
        with suppress(Exception):
            calls.append(_called(loss, form, is_coarse))
    if not calls:
        expected = "logp, logmu (B, T), reward (B,), mask (B, T), or in another known form"
        raise InputError(
            f"the loss cannot be called with {expected}: {reason}; call it in a copy of example.py"
        )
    return min(calls, key=lambda call: len(call[3].differences()) if call[3] else math.inf)


def _called(
    loss: Callable[..., Tensor], form: str, is_coarse: bool
) -> tuple[str, Batches, Pushes, Hypothesis | None]:
    """What the loss gives on the probes in the first precision that it takes; if it takes none, its first exception."""
    errors = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        batches = probes(dtype, is_coarse)
        try:
            value = adapted(loss, form)(*(column.clone() for column in batches[0]))
            adapter = " + ".join([form] * (form != "none") + output_forms(value)) or "none"
            pushed = [push(adapted(loss, adapter), batch).double() for batch in batches]
        except Exception as error:  # whatever a foreign loss may raise
            errors.append(error)
        else:
            return (
                adapter,
                batches,
                pushed,
                _accepted(pushed, batches, COARSE if is_coarse else FINE),
            )
    raise errors[0]


def _corrected(loss: Loss, batches: Batches, rtol: float) -> tuple[Hypothesis | None, list[str]]:
    """What the loss is without a mistake that no hypothesis has, and the names of the mistake; or None, []."""
    # In an extra term, ratios of e^40 would leave no digits of the others.
    near = probes(batches[0].logp.dtype, is_coarse=rtol == COARSE, by=0.1)
    with suppress(Exception):  # whatever a foreign loss may raise on a batch of another shape
        for names, corrected in corrections(
            lambda batch: push(loss, batch).double(), near[0], SINGLES
        ):
            chosen = near if "extra term" in names else batches
            pushed = [corrected(batch) for batch in chosen]
            for by_batch in (False, True):
                hypothesis = _accepted(pushed, chosen, rtol, by_batch)
                if hypothesis and (
                    "length off by -1" not in names or hypothesis.aggregation == "sequence mean"
                ):
                    factor = factor_of_batch(corrected, chosen[0]) if by_batch else []
                    if factor or not by_batch:
                        return hypothesis, names + factor
    return None, []


def _accepted(
    pushed: Pushes, batches: Batches, rtol: float, by_batch: bool = False
) -> Hypothesis | None:
    """The hypothesis with the fewest differences that explains all pushes, or None.

    Bounds, power and stop-gradient are measured on single tokens. How tokens make a ratio and a loss is tried on the
    first batch. What explains it is tried on all, with every baseline and frozen weights. by_batch: as `_explains`.
    """
    batches = [LossInputs(*(column.double() for column in batch)) for batch in batches]
    if not (pushed[0][0, 0] > 0 and torch.stack(pushed).isfinite().all()):
        return None
    if not (measured := _measured(pushed[0], batches[0], rtol)):
        return None
    variations = [
        replace(measured, unit=unit, aggregation=aggregation)
        for unit, aggregation in product(get_args(Unit), get_args(Aggregation))
    ]
    survivors = [
        hypothesis for hypothesis in variations if _explains(hypothesis, pushed[:1], batches, rtol)
    ]
    frozen = [(), ("logp", "mask", "reward"), ("logp", "mask"), ("logp", "reward"), ("logp",)]
    baselines = ("none", "batch-mean baseline", "branch by raw score")
    candidates = [
        replace(
            survivor,
            frozen=kept,
            baseline=baseline,
            negatives=1.0 if by_batch else survivor.negatives,
        )
        for survivor, kept, baseline in product(survivors, frozen, baselines)
        if survivor.stops_gradient or not kept  # frozen weights have no gradient
    ]
    accepted = [
        hypothesis
        for hypothesis in candidates
        if _explains(hypothesis, pushed, batches, rtol, by_batch)
    ]
    return min(accepted, key=lambda hypothesis: len(hypothesis.differences()), default=None)


def _explains(
    hypothesis: Hypothesis, pushed: Pushes, batches: Batches, rtol: float, by_batch: bool = False
) -> bool:
    """Whether its pushes, times one factor fitted on the first batch, are those observed; `pushed` may be shorter.

    by_batch: each batch has two factors of its own, those of its first two rows: for positives and for negatives.
    """
    loss, units = hypothesis.loss(), None
    for observed, batch in zip(pushed, batches, strict=False):
        expected = push(loss, batch)
        if units is None or by_batch:
            units = observed[:2, 0], expected[:2, 0]
        shifted = batch.reward - (batch.reward.mean() if hypothesis.baseline != "none" else 0)
        row = ((shifted < 0) & by_batch).long()  # which of the two has its unit
        scaled = observed / units[0][row, None], expected / units[1][row, None]
        if not (units[1][0] > 0 and torch.allclose(*scaled, rtol=rtol, atol=1e-2 * rtol)):
            return False
    return True


def _measured(pushed: Tensor, batch: LossInputs, rtol: float) -> Hypothesis | None:
    """What single tokens tell: limits, power, stop-gradient, a factor on negatives; None if no such weights fit.

    A push on a single token is R (w + w' logp). The derivative w' of the weight is there if the gradient does not stop
    at it. Two values of log pi separate w from w'. All w are relative to that of an on-policy positive.
    """
    # As `probes` orders them: (log-ratio, sign, two values of log pi).
    per_reward = pushed[:, 0] / pushed[0, 0] / batch.reward
    far, near = per_reward[SINGLES].view(-1, 2, 2).unbind(-1)
    logp_far, logp_near = batch.logp[SINGLES, 0].view(-1, 2, 2).unbind(-1)
    log_ratio = (batch.logp - batch.logmu)[SINGLES, 0].view(-1, 4)[:, 0]
    derivative = (far - near) / (logp_far - logp_near)  # w': (log-ratio, sign), as the weight
    weight = far - derivative * logp_far
    stops_gradient = bool((derivative.abs() < 0.1 * rtol * weight.abs().clamp_min(1)).all())
    weight = (far + near) / 2 if stops_gradient else weight
    is_inverted = bool((weight[0].abs() > weight[-1].abs() + rtol).any())
    if is_inverted:  # the weight rises with mu/pi
        log_ratio, weight = -log_ratio.flip(0), weight.flip(0)
    # A factor on negatives may also be a pair of limits. It is the weight of an on-policy negative, the second row.
    for factor in (1.0, per_reward[1].item()):
        if fitted := _weight(log_ratio, [weight[:, 0], weight[:, 1] / factor], rtol):
            limits, power = fitted
            # One weight of all positives is the unit of the others.
            unit = limits.a_pos if limits.a_pos == limits.b_pos else 1.0
            limits = replace(limits, a_pos=limits.a_pos / unit, b_pos=limits.b_pos / unit)
            power = -power if is_inverted else power
            return Hypothesis(limits, power, stops_gradient=stops_gradient, negatives=factor / unit)
    return None


def _weight(
    log_ratio: Tensor, weights: Sequence[Tensor], rtol: float
) -> tuple[Limits, float] | None:
    """Limits and power of [exp(power * log_ratio)]_a^b, times one factor for positives and negatives, if that fits.

    A bound is reached where two neighbours are equal; otherwise it is 0 or infinity. One log-ratio between the bounds
    does not tell the power, and none tells neither power nor factor: they are then the paper's.
    """
    bounds, lines = [], []
    for weight in weights:
        is_flat = ((weight[:-1] - weight[1:]).abs() <= 1e-2 * rtol * weight[:-1].abs()).tolist()
        a = (
            weight[0].item() if is_flat[0] and weight[0] > 1e-6 else 0.0
        )  # a guard such as exp(-20) is no bound
        b = weight[-1].item() if is_flat[-1] else math.inf
        between = (
            (weight > a * (1 + 0.1 * rtol)) & (weight < b * (1 - 0.1 * rtol)) & (weight > 1e-6)
        )
        x, y = log_ratio[between], weight[between].log()
        power = ((y[-1] - y[0]) / (x[-1] - x[0])).item() if len(x) > 1 and x[-1] > x[0] else 1.0
        bounds.append((a, max(a, b)))
        lines.append((len(x), power, (y - power * x).median().item() if len(x) else 0.0))
    _, power, shift = max(lines)  # a narrow clip may leave too few log-ratios between its bounds
    slack = 10 * FINE if rtol == FINE else COARSE
    power, shift = (
        target if abs(x - target) < slack else x for x, target in ((power, 1.0), (shift, 0.0))
    )
    for weight, (a, b) in zip(weights, bounds, strict=True):
        if not (0 <= a <= b and power > 0 and abs(shift) < 100):
            return None
        if not torch.allclose(
            weight, importance_weight(power * log_ratio + shift, a, b), rtol=slack, atol=1e-6
        ):
            return None
    digits = 6 if rtol == FINE else 2
    return Limits(
        *(float(f"{bound / math.exp(shift):.{digits}g}") for pair in bounds for bound in pair)
    ), power
