"""Which loss is it? Hypotheses about a loss, tried on its gradient until one explains it."""

import inspect
import math
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor

from conformance.losses import ADAPTERS, InputError, Loss, LossInputs, adapted, push, told, total
from conformance.mistakes import FIRST, OF_VECTOR, change, corrections, with_a_token
from conformance.variants import TABLE_1
from conformance.vectors import NOT_FINITE, SINGLES, VECTORS, VectorResult, probes, result_of
from topr import PRESETS, Limits, importance_weight

FINE, COARSE = 1e-4, 0.02  # relative tolerance of a push: bfloat16 rounds by up to 0.004, several times in a loss
Padding = Literal["masked", "in the sum", "in the divisor", "in both"]
"""where padding counts in a mean over tokens: nowhere, as it should, or in its sum, its number of tokens, or both"""
Aggregation = Literal[
    "sequence mean", "token mean", "sequence sum", "divided by the longest length", "length off by +1"
]
Means = Literal["one", "zeros with positives", "zeros apart", "zeros with negatives"]
"""one mean, or one of positives and one of negatives, and which of them counts rewards of 0"""


@dataclass(frozen=True)
class Hypothesis:
    """A loss, described by its independent properties; the defaults are the paper's."""

    limits: Limits = PRESETS["topr"]
    power: float = 1.0  # of the ratio; below 0 it is mu/pi
    unit: Literal["whole sequence", "per-token", "geometric mean"] = "whole sequence"
    stops_gradient: bool = True
    frozen: tuple[str, ...] = ()  # the inputs whose first values the weights keep: logp, maybe mask, maybe reward
    baseline: Literal["none", "batch-mean baseline", "branch by raw score"] = "none"
    is_normalised: bool = False  # reward divided by its standard deviation in the batch
    aggregation: Aggregation = "sequence mean"
    negatives: float = 1.0  # the factor on negatives
    means: Means = "one"
    ratio_padding: Padding = "masked"
    loss_padding: Padding = "masked"
    offset: float = 0.0  # what padding adds to the log-ratio of every sequence

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
            ("separate means of positives and negatives", self.means != "one"),
            ("no stop-gradient", not self.stops_gradient),
            ("frozen weight", self.frozen != ()),
            (self.baseline, self.baseline != "none"),
            ("normalised reward", self.is_normalised),
            (self.aggregation, self.aggregation != "sequence mean"),
            ("unmasked", (self.ratio_padding, self.loss_padding) != ("masked", "masked")),
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
                log_ratio = total(log_ratio, _counted(of_weight.mask, self.ratio_padding, "in the sum"))[:, None]
                log_ratio = log_ratio + self.offset
            if self.unit == "geometric mean":
                of_length = _counted(of_weight.mask, self.ratio_padding, "in the divisor")
                log_ratio = log_ratio / of_length.sum(1, keepdim=True)
            shifted = reward - (reward.mean() if self.baseline != "none" else 0)
            is_of_score = "reward" in self.frozen or self.baseline == "branch by raw score"
            a, b = self.limits.of_sign((of_weight.reward if is_of_score else shifted)[:, None])
            weight = importance_weight(self.power * log_ratio, a, b)
            weight = torch.where((a == b) | self.stops_gradient, weight.detach(), weight)
            scale = (shifted.std() if self.is_normalised else 1) / torch.where(shifted < 0, self.negatives, 1.0)
            scaled = (shifted / scale)[:, None]
            sums = total(weight * scaled * logp, _counted(mask, self.loss_padding, "in the sum"))
            side = (0 * shifted, shifted >= 0, shifted.sign(), shifted > 0)[get_args(Means).index(self.means)]
            is_alike = (side[:, None] == side).to(logp.dtype)
            lengths = _counted(mask, self.loss_padding, "in the divisor").sum(1)
            divisors = {"sequence mean": lengths, "token mean": is_alike @ lengths, "sequence sum": 1}
            divisors |= {"divided by the longest length": lengths.max(), "length off by +1": lengths + 1}
            counts = 1 if self.aggregation == "token mean" else is_alike.mean(1)
            return -(sums / divisors[self.aggregation] / counts).sum()

        return loss


def _counted(mask: Tensor, padding: Padding, where: Padding) -> Tensor:
    """The positions that count in a sum or in a divisor, as `where` says."""
    return torch.ones_like(mask) if padding in (where, "in both") else mask


def _name_of_bounds(limits: Limits) -> str:
    positive, negative = f"{limits.a_pos:.6g}..{limits.b_pos:.6g}", f"{limits.a_neg:.6g}..{limits.b_neg:.6g}"
    clip = f"clip {negative}" if positive == "1..1" else f"clip {positive} on positives, {negative} on negatives"
    clip = clip.replace("inf", "infinity")
    return {PRESETS[row]: name for name, row in TABLE_1.items()}.get(limits, clip)


@dataclass
class Report:
    """What a loss was found to be."""

    adapter: str  # "sequences" if its signature was recognised as that, else "none"
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
        return "\n".join(f"{r.name:<4} {r.status:<15} {r.asks:<{width}}  {r.measured}" for r in self.vectors)


def identify(loss: Loss) -> Report:
    """Examine a loss. Raises InputError if it cannot be called, or returns no scalar with a gradient.

    Of the hypotheses whose pushes, times one constant factor, are the loss's on all probes, to 1e-4, that with the
    fewest differences is reported. The probes are the first calls of the loss: it may keep the weights of its first. A
    loss that rounds to bfloat16 is called again, with the coarse probes, and compared to 2%. A loss whose fourth
    argument is named after lengths, and that cannot be called as above, is called with one number per sequence.

    >>> from conformance.variants import per_token_and_token_mean
    >>> identify(per_token_and_token_mean).variant
    'per-token + token mean'
    """
    adapter, batches, pushed = _call(loss)
    loss = adapted(loss, adapter)
    found, corrected = _accepted(pushed, batches), []
    of_singles = (pushed[0] / pushed[0][0, 0])[SINGLES, 0]
    has_8_bits = [((x - x.bfloat16().double()).abs() <= 1e-6 * x.abs()).all() for x in (pushed[0], of_singles)]
    is_rounded = found is None and any(has_8_bits) and of_singles.abs().unique().numel() > 2  # 0 and 1 have 8 bits too
    if is_rounded:
        _, coarse, again = _call(loss, is_coarse=True)
        found = _accepted(again, coarse, COARSE)
    elif found is None:
        found, corrected = _corrected(loss, batches)
    elif found.aggregation == "sequence sum":  # over the width of a padded batch, or over nothing?
        wide, width = _push_if_any(loss, with_a_token(batches[0], "padding")[0]), batches[0].mask.shape[1]
        if wide is not None and math.isclose(wide[0, 0] * (width + 1), pushed[0][0, 0] * width, rel_tol=FINE):
            found = replace(found, aggregation="divided by the longest length")
    results = [result_of(name, loss) for name in VECTORS]
    if found and found.frozen:  # the loss has the weights of the probes: V16 alone asks for that
        reason = "weights are those of the first call"
        results = [replace(r, status="fail" if r.name == "V16" else "not applicable", measured=reason) for r in results]
    names = found.differences() + corrected + ["bfloat16"] * is_rounded if found else []
    if names:
        note = f"ratio to the power {found.power:.4g}" if abs(found.power) != 1 else ""
        padded = {"ratio": found.ratio_padding, "loss": found.loss_padding}
        where = " and ".join(place for place, padding in padded.items() if padding != "masked")
        changes = [f"{name}{f' in the {where}' if name == 'unmasked' else ''}: {change(name)}" for name in names]
        return Report(adapter, " + ".join(names), note, results, changes)
    turned = LossInputs(*(column.flip(1) if column.dim() > 1 else column for column in batches[0]))
    on_the_left = _push_if_any(loss, turned)
    if pushed[0][0, 0] < 0:
        about, note = "objective", "it pushes an on-policy positive down: is it an objective, to be maximised?"
    elif failed := [result for result in results if result.status == "fail"]:
        told_of = failed[0] if is_rounded else min(failed, key=_rank)
        about, note = OF_VECTOR[told_of.name], f"it fails {told_of.name}: {told_of.asks} {told_of.measured}"
    elif not found:
        about, note = "", "every vector passes, but its gradient is that of no known loss: see --random"
    elif on_the_left is None or not torch.allclose(on_the_left.flip(1).double(), pushed[0], rtol=1e-4, atol=1e-6):
        about, note = "unmasked", "it changes with the side that is padded"
    else:
        return Report(adapter, "paper", "", results, [])
    if is_rounded:  # which vectors it fails may be due to that
        about, note = "bfloat16", f"it computes in bfloat16; {note}"
    return Report(adapter, "unknown", note, results, [change(about) or "compare the gradients that --random 200 shows"])


def _corrected(loss: Loss, batches: list[LossInputs]) -> tuple[Hypothesis | None, list[str]]:
    """What the loss is without a mistake that no hypothesis has, and the names of the mistake; or None, []."""
    near = probes(batches[0].logp.dtype, by=0.1)  # ratios of e^40 in an extra term would leave no digits of the others
    with suppress(Exception):  # whatever a foreign loss may raise on a batch of another shape
        for names, corrected in corrections(lambda batch: push(loss, batch).double(), near[0], SINGLES):
            chosen = near if "extra term" in names else batches
            found = _accepted([corrected(batch) for batch in chosen], chosen)
            if found and (names[0] != "length off by -1" or found.aggregation == "sequence mean"):
                return found, names
    return None, []


def _rank(result: VectorResult) -> tuple[bool, int]:
    """The less, the more the vector tells: numbers before none, then as in FIRST, then in order."""
    # Of V10 a gradient at R = 0 is telling, of V6 that there is none at all. Other weights fail both.
    is_late = {"V10": result.measured.startswith("R w = 0;"), "V6": result.measured != "R w = 0"}
    order = len(FIRST) if is_late.get(result.name, result.name not in FIRST) else FIRST.index(result.name)
    return NOT_FINITE in result.measured, order


def _call(loss: Loss, is_coarse: bool = False) -> tuple[str, list[LossInputs], list[Tensor]]:
    """The adapter that the loss needs, the probes, and the pushes on them in the first precision that it takes."""
    reasons = []
    for adapter in ("none", "sequences") if _takes_lengths(loss) else ("none",):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            batches = probes(dtype, is_coarse)
            try:
                pushed = [push(adapted(loss, adapter), batch).double() for batch in batches]
            except InputError:
                raise
            except Exception as error:  # whatever a foreign loss may raise
                reasons.append(told(error))
            else:
                return adapter, batches, pushed
    expected = "logp, logmu (B, T), reward (B,), float mask (B, T)"
    others = [name for name in ADAPTERS if _push_if_any(adapted(loss, name), probes()[0]) is not None]
    wrap = "copy conformance/example.py, call your loss in the copy with what it needs, and check that"
    hint = f"--adapter {' or '.join(others)} can call it" if others else wrap
    raise InputError(f"the loss cannot be called with {expected}; {hint}. {reasons[0]}")


def _takes_lengths(loss: Loss) -> bool:
    """Whether its fourth argument is named after the lengths of sequences or their numbers of tokens."""
    try:
        names = [name.lower() for name in inspect.signature(loss).parameters]
    except ValueError:  # a function without a signature, such as torch.add
        return False
    return len(names) >= 4 and ("len" in names[3] or "num" in names[3] or names[3].startswith("n_"))


def _push_if_any(loss: Loss, batch: LossInputs) -> Tensor | None:
    with suppress(Exception):  # whatever a foreign loss may raise
        return push(loss, batch)


def _accepted(pushed: list[Tensor], batches: list[LossInputs], rtol: float = FINE) -> Hypothesis | None:
    """The hypothesis with the fewest differences that explains all pushes, or None.

    Bounds, power and stop-gradient are measured on single tokens. How tokens make a ratio and a loss is tried on the
    first batch. What explains that batch is tried on all of them, with every treatment of rewards and frozen weights.
    """
    batches = [LossInputs(*(column.double() for column in batch)) for batch in batches]
    if not (pushed[0][0, 0] > 0 and torch.stack(pushed).isfinite().all()):
        return None
    of_first_batch = [
        replace(ratio, aggregation=aggregation, loss_padding=padding)
        for measured in _measured(pushed[0], batches[0], rtol)
        for ratio in _ratios(measured, batches[0].mask.shape[1], rtol)
        for aggregation in get_args(Aggregation)
        for padding in ("masked", "in the sum", "in both")  # a masked sum over all positions is a sequence sum
        if padding == "masked" or aggregation in ("sequence mean", "token mean", "sequence sum")
    ]
    survivors = [hypothesis for hypothesis in of_first_batch if _explains(hypothesis, pushed[:1], batches, rtol)]
    # In one batch separate means are a factor on negatives.
    survivors += [
        replace(s, negatives=1.0, means=means) for s in survivors if s.negatives != 1 for means in get_args(Means)[1:]
    ]
    frozen = [()]
    if survivors and survivors[0].stops_gradient:  # frozen weights have no gradient
        frozen += [("logp", "mask", "reward"), ("logp", "mask"), ("logp", "reward"), ("logp",)]
    baselines = ("none", "batch-mean baseline", "branch by raw score")
    of_all = [
        replace(survivor, frozen=kept, baseline=baseline, is_normalised=is_normalised)
        for survivor, kept, baseline, is_normalised in product(survivors, frozen, baselines, (False, True))
    ]
    accepted = [hypothesis for hypothesis in of_all if _explains(hypothesis, pushed, batches, rtol)]
    return min(accepted, key=lambda hypothesis: len(hypothesis.differences()), default=None)


def _ratios(measured: Hypothesis, width: int, rtol: float) -> list[Hypothesis]:
    """How single tokens may make a sequence's ratio: its unit, and where padding counts in it."""
    # Pushes are relative to an on-policy positive: without padding an offset says that its own weight is not 1.
    own_weight, digits = math.exp(measured.power * measured.offset), 6 if rtol == FINE else 2
    limits, of_own_weight = (
        Limits(*(float(f"{bound / by:.{digits}g}") for bound in astuple(measured.limits))) for by in (1.0, own_weight)
    )
    masked = replace(measured, limits=of_own_weight, offset=0.0)
    summed = replace(measured, limits=limits, ratio_padding="in the sum")
    # A mean over all positions divides the log-ratio of a single token by `width`, and so the power that was measured.
    power, offset = measured.power * width, measured.offset * width
    is_power_of_1 = abs(abs(power) - 1) < 1e-3  # it is that mean, more likely than a ratio to the power 1 / width
    mean = replace(summed, unit="geometric mean", power=round(power) if is_power_of_1 else power, offset=offset)
    means = [replace(mean, ratio_padding="in the divisor"), replace(mean, ratio_padding="in both")]
    if is_power_of_1:
        return means
    of_tokens = [replace(masked, unit=unit) for unit in ("whole sequence", "per-token", "geometric mean")]
    return [*of_tokens, summed, replace(summed, unit="geometric mean"), *means]


def _explains(hypothesis: Hypothesis, pushed: list[Tensor], batches: list[LossInputs], rtol: float) -> bool:
    """Whether its pushes, times one factor fitted on the first batch, are those found; `pushed` may be shorter."""
    loss, factor = hypothesis.loss(), None
    for found, batch in zip(pushed, batches, strict=False):
        expected = push(loss, batch)
        factor = expected[0, 0].item() if factor is None else factor
        scaled = found / pushed[0][0, 0]
        if not (factor > 0 and torch.allclose(scaled, expected / factor, rtol=rtol, atol=1e-2 * rtol)):
            return False
    return True


def _measured(pushed: Tensor, batch: LossInputs, rtol: float) -> list[Hypothesis]:
    """What single tokens tell: limits, power, offset of the log-ratio, stop-gradient, a factor on negatives.

    A push on a single token is R (w + w' logp). The derivative w' of the weight is there if the gradient does not stop
    at it. Two values of log pi separate w from w'. A factor on negatives may also be a pair of limits: both are told.
    """
    logp, log_ratio = batch.logp[SINGLES, 0], (batch.logp - batch.logmu)[SINGLES, 0]
    scaled = pushed[SINGLES, 0] / pushed[0, 0] / batch.reward[SINGLES]
    # As `probes` orders them: (log-ratio, sign, two values of log pi).
    (far, near), (logp_far, logp_near) = (x.view(-1, 2, 2).unbind(-1) for x in (scaled, logp))
    derivative = (far - near) / (logp_far - logp_near)  # w': (grid, sign)
    weight = far - derivative * logp_far
    stops_gradient = bool((derivative.abs() < 0.1 * rtol * weight.abs().clamp_min(1)).all())
    weight = (far + near) / 2 if stops_gradient else weight
    grid = log_ratio.view(-1, 4)[:, 0]
    is_inverted = bool((weight[0].abs() > weight[-1].abs() + rtol).any())  # then read it from the other end
    grid, weight = (-grid.flip(0), weight.flip(0)) if is_inverted else (grid, weight)
    factor = (weight[:, 1] / weight[:, 0])[len(grid) // 2].item()  # of negatives, at the least log-ratio above 0
    is_factor = math.isfinite(factor) and abs(factor) > 1e-6 and abs(factor - 1) > COARSE
    found: list[Hypothesis] = []
    for by in (factor, 1.0) if is_factor else (1.0,):
        if fitted := _weight(grid, [weight[:, 0], weight[:, 1] / by], rtol):
            limits, power, shift = fitted
            power = -power if is_inverted else power
            found.append(Hypothesis(limits, power, stops_gradient=stops_gradient, offset=shift / power, negatives=by))
    return found


def _weight(grid: Tensor, weights: list[Tensor], rtol: float) -> tuple[Limits, float, float] | None:
    """Limits, power and shift of [exp(power * log_ratio + shift)]_a^b for positives and negatives, if that fits.

    A bound is reached where two neighbours are equal; otherwise it is 0 or infinity. One log-ratio between the bounds
    does not tell the power, and none tells neither: they are then the paper's.
    """
    bounds, lines = [], []
    for weight in weights:
        is_flat = ((weight[:-1] - weight[1:]).abs() <= 1e-2 * rtol * weight[:-1].abs()).tolist()
        a = weight[0].item() if is_flat[0] and weight[0] > 1e-6 else 0.0  # a guard such as exp(-20) is no bound
        b = weight[-1].item() if is_flat[-1] else math.inf
        between = (weight > a * (1 + 0.1 * rtol)) & (weight < b * (1 - 0.1 * rtol)) & (weight > 1e-6)
        x, y = grid[between], weight[between].log()
        power = ((y[-1] - y[0]) / (x[-1] - x[0])).item() if len(x) > 1 and x[-1] > x[0] else 1.0
        bounds.append((a, max(a, b)))
        lines.append((len(x), power, (y - power * x).median().item() if len(x) else 0.0))
    _, power, shift = max(lines)  # a narrow clip may leave too few log-ratios between its bounds
    slack = 10 * FINE if rtol == FINE else COARSE
    power, shift = (target if abs(x - target) < slack else x for x, target in ((power, 1.0), (shift, 0.0)))
    for weight, (a, b) in zip(weights, bounds, strict=True):
        if not (0 <= a <= b and power > 0 and abs(shift) < 100):
            return None
        if not torch.allclose(weight, importance_weight(power * grid + shift, a, b), rtol=slack, atol=1e-6):
            return None
    return Limits(*bounds[0], *bounds[1]), power, shift
