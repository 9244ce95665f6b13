"""Is that TOPR? Checks any implementation of the loss against the paper, and names what departs from it.

    python conformance.py package.module:function     # exit status 0 only for the paper's loss
    python conformance.py package.module:function --random 200
    python conformance.py --list                      # the vectors V1 to V22

The function takes logp, logmu (B, T), reward (B,) and mask (B, T) and returns a scalar to be minimised; adapters for
other signatures are at the end of this file. The gradient decides: values only describe, since the objective of
Eq. 11 has another value than Algorithm 1 and the same gradient. A constant factor is no departure, nor is a sum over
sequences instead of their mean. What the loss is compared with is in vectors.py and departures.py.
"""

import importlib
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from conformance.variants import Loss, total
from conformance.vectors import VECTORS, Batch, Outcome, Vector, push, put
from pipeline.records import InputError, write_text
from topr import PRESETS, Limits, importance_weight

# ---- the oracle: Equation 7 in loops over numbers -----------------------------------------------------------------


def oracle(batch: Batch) -> list[list[float]]:
    """The paper's push, one token after the other in plain Python: R [pi/mu]_a^b / length, 0 on masked positions.

    Bounds 1, 1 for R >= 0 and 0, 1 for R < 0 (Eq. 7, Section 4.2); not divided by the number of sequences.

    >>> oracle(Batch(*torch.tensor([[[-2.0, -2.0]], [[-1.5, -1.5]]]), torch.tensor([-1.0]), torch.ones(1, 2)))
    [[-0.18393972058572117, -0.18393972058572117]]
    """
    pushes = []
    for logp, logmu, reward, mask in zip(*(column.double().tolist() for column in batch), strict=True):
        log_ratio = sum(p - m for p, m, inside in zip(logp, logmu, mask, strict=True) if inside)
        weight = 1.0 if reward >= 0 or log_ratio > 0 else math.exp(log_ratio)
        pushes.append([reward * weight / sum(mask) if inside else 0.0 for inside in mask])
    return pushes


# ---- the hypotheses: what a loss may be ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Hypothesis:
    """A loss by its properties, an axis each; the defaults are the paper's."""

    limits: Limits = PRESETS["topr"]
    power: float = 1.0  # of the ratio
    unit: Literal["whole sequence", "per-token", "geometric mean"] = "whole sequence"
    stops_gradient: bool = True
    frozen: tuple[bool, bool] | None = None  # weights of the first call: with its mask too? with its branch too?
    baseline: Literal["none", "batch-mean baseline", "branch by raw score"] = "none"
    is_normalised: bool = False  # the reward, by its standard deviation in the batch
    aggregation: Literal["sequence mean", "token mean", "sequence sum"] = "sequence mean"
    masks: tuple[bool, bool, bool, bool] = (True, True, True, True)  # in ratio, its length, the loss, its divisor
    offset: float = 0.0  # what padding adds to every log-ratio that is not masked

    def departures(self) -> list[str]:
        """Their names, none for the paper's loss.

        >>> Hypothesis(unit="per-token", limits=Limits(1, 1, 0.8, 1.2)).departures()
        ['per-token', 'clip 0.8..1.2']
        """
        named = [
            (self.unit, self.unit != "whole sequence"),
            (_name_of_bounds(self.limits), self.limits != PRESETS["topr"]),
            ("tempered", self.power != 1),
            ("no stop-gradient", not self.stops_gradient),
            ("frozen weight", self.frozen is not None),
            (self.baseline, self.baseline != "none"),
            ("normalised reward", self.is_normalised),
            (self.aggregation, self.aggregation != "sequence mean"),
            ("unmasked", not all(self.masks)),
        ]
        return [name for name, is_departure in named if is_departure]

    def loss(self, first: Batch) -> Loss:
        """The loss itself; `first` is the batch it was called with first."""
        keeps_mask, keeps_branch = self.frozen or (False, False)

        def loss(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
            everywhere, of_weight = torch.ones_like(mask), first.mask if keeps_mask else mask
            of_ratio, of_length = (of_weight if masked else everywhere for masked in self.masks[:2])
            of_loss, of_divisor = (mask if masked else everywhere for masked in self.masks[2:])
            log_ratio = (logp if self.frozen is None else first.logp) - logmu
            if self.unit != "per-token":
                log_ratio = total(log_ratio, of_ratio)[:, None] + self.offset
            if self.unit == "geometric mean":
                log_ratio = log_ratio / of_length.sum(1, keepdim=True)
            shifted = reward - (reward.mean() if self.baseline != "none" else 0)
            branch = first.reward if keeps_branch else reward if self.baseline == "branch by raw score" else shifted
            is_positive = branch[:, None] >= 0
            a_pos, b_pos, a_neg, b_neg = logp.new_tensor(self.limits)
            bounds = torch.where(is_positive, a_pos, a_neg), torch.where(is_positive, b_pos, b_neg)
            weight = importance_weight(self.power * log_ratio, *bounds)
            weight = torch.where((bounds[0] == bounds[1]) | self.stops_gradient, weight.detach(), weight)
            scale = shifted.std() if self.is_normalised else 1
            sums = total(weight * shifted[:, None] / scale * logp, of_loss)
            sizes = {"sequence mean": of_divisor.sum(1), "token mean": of_divisor.sum(), "sequence sum": 1}
            return -(sums / sizes[self.aggregation]).sum()

        return loss


def _name_of_bounds(limits: Limits) -> str:
    names = {"tis": "tis", "off_policy": "plain is", "reinforce": "naive reinforce", "sft": "sft"}
    for preset, name in names.items():
        if limits == PRESETS[preset]:
            return name
    positive, negative = (f"{a:.6g}..{b:.6g}" for a, b in (limits[:2], limits[2:]))
    return f"clip {negative}" if positive == "1..1" else f"clip {positive} on positives, {negative} on negatives"


STEPS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 40.0)
GRID = (*(-step for step in reversed(STEPS)), *STEPS)  # log-ratios of single tokens


def probes(dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Five batches of one shape and one logmu, on whose pushes hypotheses are tried.

    First a single-token on-policy positive with log pi = 0, whose weight is 1 by any account; then single tokens with
    each log-ratio of GRID, both rewards and two values of log pi; then longer sequences. After it: other log pi (is the
    weight frozen?), shorter sequences (what divides the sum, and does what is masked count?), rewards whose mean is not
    0, and rewards twice as large. Since shape and logmu stay, weights that were kept from the first call still fit.
    """
    draw = torch.Generator().manual_seed(0)
    # Small differences of small numbers, large ones of large numbers: float32 resolves them, and log mu stays below 0.
    values = {step: (-0.25, -0.75) if step < 0.05 else (-5.0, -9.0) if step < 5 else (-45.0, -50.0) for step in STEPS}
    singles = [(d, sign, value) for d, sign in product(GRID, (1.0, -1.0)) for value in values[abs(d)]]
    many, width = 31, 6

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(many, width, generator=draw, dtype=dtype)

    zeros = torch.zeros(1 + len(singles), width, dtype=dtype)
    logp, logmu = torch.cat([zeros, uniform(-3, -0.5)]), torch.cat([zeros, uniform(-3, -0.5)])
    for i, (log_ratio, _, value) in enumerate(singles, start=1):
        logp[i, 0], logmu[i, 0] = value, value - log_ratio
    lengths = torch.tensor([1] * len(zeros) + [2 + i % 5 for i in range(many)])
    mask = (torch.arange(width) < lengths[:, None]).to(dtype)
    logp = torch.where(mask > 0, logp, logmu)  # padding adds nothing to a ratio, at first
    sizes = [(0.5, 1.0, 2.0, 0.0)[i // 2 % 4] * (-1) ** i for i in range(many)]
    reward = torch.tensor([1.0, *(sign for _, sign, _ in singles), *sizes], dtype=dtype)
    reward[-1] -= reward.sum()  # the mean is 0 now
    first = Batch(logp, logmu, reward, mask)
    step = torch.cat([zeros, uniform(-1, 0.6)])
    return [
        first,
        first._replace(logp=logp + step * mask),
        first._replace(mask=mask * (torch.arange(width) < 3)),
        first._replace(reward=reward + 1.5),
        first._replace(reward=2 * reward),
    ]


# ---- identification -----------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What a loss was found to be. variant: "paper", its departures joined by " + ", or "unknown"."""

    variant: str
    note: str = ""
    vectors: list[Outcome] = field(default_factory=list)

    def table(self) -> Table:
        """The vectors, a row each."""
        table = Table("vector", "asks", "outcome", "measured")
        for row in self.vectors:
            table.add_row(*map(escape, (row.name, row.asks, row.status, row.measured)))
        return table


def identify(loss: Loss) -> Report:
    """Examine a loss; InputError where it cannot be called or returns no scalar with a gradient.

    A hypothesis is accepted if one constant factor makes its pushes those of the loss, on all probes, to 1e-4. Of those
    that are accepted, the one with the fewest departures is reported. The probes come first, in their order, so that a
    loss that keeps the weights of its first call is found out.

    >>> from conformance.variants import per_token_and_token_mean
    >>> identify(per_token_and_token_mean).variant
    'per-token + token mean'
    """
    batches, pushed = _call(loss)
    found = _accepted(pushed, batches)
    outcomes = [_put_or_skip(vector, loss, found is not None and found.frozen is not None) for vector in VECTORS]
    departures = [] if found is None else found.departures()
    if departures:
        note = f"ratio to the power {found.power:.4g}" if found.power != 1 else ""
        return Report(" + ".join(departures), note, outcomes)
    failed = next((row for row in outcomes if row.status == "fail"), None)
    if found and not failed and _is_same_with_left_padding(loss, batches[0], pushed[0]):
        return Report("paper", "", outcomes)
    if pushed[0][0, 0] < 0:
        note = "it pushes an on-policy positive down: is it an objective, to be maximised?"
    elif failed:
        note = f"first told by {failed.name}: {failed.asks} {failed.measured}"
    elif found:
        note = "it changes with the side that is padded"
    else:
        note = "every vector passes, but its gradient is none that is known: see --random"
    return Report("unknown", note, outcomes)


def _call(loss: Loss) -> tuple[list[Batch], list[Tensor]]:
    """The probes and the pushes on them: in float64, or in float32 where a loss can take no other."""
    for dtype in (torch.float64, torch.float32):
        batches = probes(dtype)
        try:
            return batches, [push(loss, batch) for batch in batches]
        except InputError:
            raise
        except Exception as error:  # whatever a foreign loss may raise
            told = f"{type(error).__name__}: {error}".splitlines()[0]
    raise InputError(f"the loss cannot be called with logp, logmu (B, T), reward (B,), float mask (B, T): {told}")


def _is_same_with_left_padding(loss: Loss, batch: Batch, pushed: Tensor) -> bool:
    turned = Batch(*(column.flip(1) if column.dim() > 1 else column for column in batch))
    try:
        return torch.allclose(push(loss, turned).flip(1), pushed, rtol=1e-4, atol=1e-6)
    except Exception:  # whatever a foreign loss may raise
        return False


def _put_or_skip(vector: Vector, loss: Loss, is_frozen: bool) -> Outcome:
    if is_frozen and vector.applies_to == "loss":
        if vector.name == "V16":
            return Outcome(vector.name, vector.asks, "fail", "weights of the first call, at every later one")
        return Outcome(vector.name, vector.asks, "not applicable", "weights are those of the first call")
    return put(vector, loss)


def _accepted(pushed: list[Tensor], batches: list[Batch]) -> Hypothesis | None:
    """The hypothesis with the fewest departures that explains all pushes.

    Bounds, power and stop-gradient are measured on single tokens; how tokens make a ratio and a loss is tried on the
    first batch; and what survives that, with every treatment of rewards and kept weights, on all of them.
    """
    if not (pushed[0][0, 0] > 0 and torch.stack(pushed).isfinite().all()):
        return None
    measured = _measure_bounds(pushed[0], batches[0])
    if measured is None:
        return None
    limits, power, offset, stops_gradient = measured
    width = batches[0].mask.shape[1]
    ratios = [(unit, (True, True), power, 0.0) for unit in ("whole sequence", "per-token", "geometric mean")]
    ratios += [(unit, (False, True), power, offset) for unit in ("whole sequence", "geometric mean")]
    ratios += [("geometric mean", (masked, False), power * width, offset * width) for masked in (True, False)]
    if abs(power * width - 1) < 1e-3:  # a mean over all positions, rather than a ratio to the power 1 / T
        ratios = [(*ratio[:2], 1.0, ratio[3]) for ratio in ratios if ratio[0] == "geometric mean" and not ratio[1][1]]
    simple = [
        Hypothesis(limits, p, unit, stops_gradient, None, "none", False, aggregation, (*masked, *of_loss), shift)
        for (unit, masked, p, shift), aggregation, of_loss in product(
            ratios,
            ("sequence mean", "token mean", "sequence sum"),
            ((True, True), (False, True), (False, False)),  # a masked sum over all positions is a sequence sum
        )
    ]
    kept = [None, *product((True, False), repeat=2)] if stops_gradient else [None]  # kept weights have no gradient
    baselines = ["none", "batch-mean baseline", *["branch by raw score"] * (limits[:2] != limits[2:])]
    accepted = [
        hypothesis
        for survivor in simple
        if _explains(survivor, pushed[:1], batches)
        for frozen, baseline, is_normalised in product(kept, baselines, (False, True))
        if _explains(
            hypothesis := replace(survivor, frozen=frozen, baseline=baseline, is_normalised=is_normalised),
            pushed,
            batches,
        )
    ]
    return min(accepted, key=lambda hypothesis: len(hypothesis.departures()), default=None)


def _explains(hypothesis: Hypothesis, pushed: list[Tensor], batches: list[Batch]) -> bool:
    """Whether one factor, fitted on the first batch, makes its pushes those found, on as many batches as are given."""
    loss, factor = hypothesis.loss(batches[0]), None
    for found, batch in zip(pushed, batches, strict=False):
        expected = push(loss, batch)
        factor = expected[0, 0].item() if factor is None else factor
        if not factor > 0:
            return False
        if not torch.allclose(found / pushed[0][0, 0], expected / factor, rtol=1e-4, atol=1e-6):
            return False
    return True


def _measure_bounds(pushed: Tensor, batch: Batch) -> tuple[Limits, float, float, bool] | None:
    """Limits, power and offset of the log-ratio, and whether the gradient stops at the weight; None if nothing fits.

    A push on a single token is R (w + w' logp), w' being the derivative that a weight which is not held fixed adds: two
    values of log pi tell w from w'.
    """
    singles = slice(1, 1 + 4 * len(GRID))
    scaled = pushed[singles, 0] / pushed[0, 0] / batch.reward[singles]
    (far, near), (logp_far, logp_near) = (x.view(len(GRID), 2, 2).unbind(-1) for x in (scaled, batch.logp[singles, 0]))
    derivative = (far - near) / (logp_far - logp_near)  # (grid, sign)
    weight = far - derivative * logp_far
    stops_gradient = bool((derivative.abs() < 1e-5 * weight.abs().clamp_min(1)).all())
    weight = (far + near) / 2 if stops_gradient else weight
    fits = [_fit_clip(weight.new_tensor(GRID), weight[:, sign]) for sign in (0, 1)]
    if None in fits:
        return None
    lines = [line for _, line in fits if line is not None] or [(1.0, 0.0)]
    if any(abs(x - y) > 1e-3 for x, y in zip(lines[0], lines[-1], strict=True)):
        return None
    power, offset = (target if abs(x - target) < 1e-3 else x for x, target in zip(lines[0], (1.0, 0.0), strict=True))
    return Limits(*fits[0][0], *fits[1][0]), power, offset / power, stops_gradient


def _fit_clip(log_ratio: Tensor, weight: Tensor) -> tuple[tuple[float, float], tuple[float, float] | None] | None:
    """(a, b), (power, shift) with weight = [exp(power * log_ratio + shift)]_a^b; None where there is none.

    The second pair is None where no log-ratio lies between the bounds: then nothing speaks against 1 and 0.
    """

    def is_flat(i: int, j: int) -> bool:
        return bool((weight[i] - weight[j]).abs() <= 1e-6 * weight[i].abs())

    a = weight[0].item() if is_flat(0, 1) and weight[0] > 1e-6 else 0.0  # a guard such as exp(-20) is no bound
    b = weight[-1].item() if is_flat(-1, -2) else math.inf
    if not 0 <= a <= b:
        return None
    between = (weight > a * (1 + 1e-5)) & (weight < b * (1 - 1e-5)) & (weight > 1e-6)
    line = None
    if between.sum() > 1:
        x, y = log_ratio[between], weight[between].log()
        power = ((y[-1] - y[0]) / (x[-1] - x[0])).item()
        line = power, (y - power * x).median().item()
    expected = importance_weight(log_ratio * line[0] + line[1] if line else log_ratio, a, b)
    if (line and not line[0] > 0) or not torch.allclose(weight, expected, rtol=1e-3, atol=1e-6):
        return None
    rounded = [float(f"{bound:.6g}") for bound in (a, b)]
    return (rounded[0], rounded[1]), line


# ---- random batches against the oracle ----------------------------------------------------------------------------


def compare(loss: Loss, count: int, seed: int = 0) -> str | None:
    """Draw `count` ragged batches and compare the pushes with the oracle's; None, or the smallest batch that differs.

    The constant factor is found on one sequence and on two: it is either the same (a sum) or halved (a mean).

    >>> from conformance.variants import paper, token_mean
    >>> compare(paper, 20)
    >>> compare(token_mean, 20).splitlines()[0]
    'differs from Eq. 7 on this batch:'
    """
    import hypothesis
    import hypothesis.configuration
    from hypothesis import strategies as st

    factor = [_factor(loss, size) for size in (1, 2)]
    if not factor[0] > 0:
        return f"differs from Eq. 7: an on-policy positive has a push of {factor[0]:g}"
    is_sum = math.isclose(factor[0], factor[1], rel_tol=1e-4)
    if not is_sum and not math.isclose(factor[0], 2 * factor[1], rel_tol=1e-4):
        return (
            f"differs from Eq. 7: an on-policy positive has a push of {factor[0]:g} alone, {factor[1]:g} as one of two"
        )

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count, database=None, deadline=None, print_blob=False, report_multiple_bugs=False)
    @hypothesis.given(st.composite(_ragged)())
    def check(batch: Batch) -> None:
        found = push(loss, batch)
        expected = torch.tensor(oracle(batch), dtype=found.dtype) * factor[0] / (1 if is_sum else len(batch.reward))
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-6 * factor[0]):
            columns = [f"{name} {column.tolist()}" for name, column in batch._asdict().items()]
            raise _Differs("\n".join([*columns, f"push {found.tolist()}", f"paper {expected.tolist()}"]))

    try:
        with tempfile.TemporaryDirectory() as folder:  # hypothesis would write into the current one
            hypothesis.configuration.set_hypothesis_home_dir(folder)
            check()
    except InputError:
        raise
    except Exception as error:  # what hypothesis makes of a difference, or a foreign loss raises
        return f"differs from Eq. 7 on this batch:\n{error}"
    return None


class _Differs(Exception):
    pass


def _factor(loss: Loss, size: int) -> float:
    ones = torch.ones(size, 1, dtype=torch.float64)
    return push(loss, Batch(-ones, -ones, ones[:, 0], ones))[0, 0].item()


def _ragged(draw: Callable) -> Batch:
    """A batch of 1 to 5 sequences of 1 to 8 tokens, padded on either side with anything finite."""
    from hypothesis import strategies as st

    lengths = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    width = max(lengths)

    def column(low: float, high: float) -> Tensor:
        row = st.lists(st.floats(low, high), min_size=width, max_size=width)
        return torch.tensor(draw(st.lists(row, min_size=len(lengths), max_size=len(lengths))), dtype=torch.float64)

    logp, logmu, padding = column(-5, 0), column(-5, 0), column(-50, 50)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).double()
    mask = mask.flip(1) if draw(st.booleans()) else mask
    inside = mask > 0
    reward = draw(
        st.lists(st.sampled_from([-2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 2.0]), min_size=len(mask), max_size=len(mask))
    )
    padded = (torch.where(inside, logp, padding), torch.where(inside, logmu, -padding))
    return Batch(*padded, torch.tensor(reward, dtype=torch.float64), mask)


# ---- adapters: losses with other signatures -----------------------------------------------------------------------


def takes_advantages(loss: Callable[..., Tensor]) -> Loss:
    """For loss(logp, logmu, advantages, mask) with an advantage for each token, (B, T).

    >>> def theirs(logp, logmu, advantages, mask):
    ...     return -(advantages * logp * mask).sum(1).div(mask.sum(1)).mean()
    >>> identify(takes_advantages(theirs)).variant
    'naive reinforce'
    """
    return lambda logp, logmu, reward, mask: loss(logp, logmu, reward[:, None].expand_as(logp), mask)


def returns_tokens(loss: Callable[..., Tensor]) -> Loss:
    """For a loss that returns a value for each token, (B, T), and leaves the mean to its caller.

    It is taken as Section 4.2 does: over a sequence's tokens, then over sequences. If the caller takes another mean,
    write that around the loss instead, since it belongs to what is asked about.

    >>> def theirs(logp, logmu, reward, mask):
    ...     return -reward[:, None] * logp
    >>> identify(returns_tokens(theirs)).variant
    'naive reinforce'
    """

    def scalar(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
        return (total(loss(logp, logmu, reward, mask), mask) / mask.sum(1)).mean()

    return scalar


def takes_packed(loss: Callable[..., Tensor]) -> Loss:
    """For loss(logp, logmu, reward, lengths) on sequences laid end to end: logp, logmu (N,), reward, lengths (B,).

    >>> def theirs(logp, logmu, reward, lengths):
    ...     rows = zip(logp.split(lengths.tolist()), reward)
    ...     return -torch.stack([r * row.mean() for row, r in rows]).mean()
    >>> identify(takes_packed(theirs)).variant
    'naive reinforce'
    """

    def padded(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
        return loss(logp[mask > 0], logmu[mask > 0], reward, mask.sum(1).long())

    return padded


ADAPTERS = {"none": lambda loss: loss, "advantages": takes_advantages, "tokens": returns_tokens, "packed": takes_packed}

# ---- the command --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Every setting of the command; all are ours."""

    loss: tyro.conf.Positional[str | None] = None
    """what to check, as package.module:function"""
    list: bool = False
    """show the vectors and do nothing else"""
    adapter: Literal[*ADAPTERS] = "none"
    """for a loss that takes advantages (B, T), returns a value for each token, or takes packed sequences"""
    random: int = 0
    """compare this many ragged batches with the paper's gradient, too"""
    seed: int = 0
    """seed of the random batches"""
    out: Path | None = None
    """folder for report.json; none: nothing is written"""


def load(name: str) -> Callable[..., Tensor]:
    """The function that package.module:function names, the current folder included; InputError where there is none.

    >>> load("departures:tis").__name__
    'tis'
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(f"{name}: write it as package.module:function")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a foreign module may raise
        raise InputError(f"{name}: cannot be imported: {type(error).__name__}: {error}") from error
    here = Path(*module.split(".")).with_suffix(".py")
    if here.exists() and not here.samefile(found.__file__):
        raise InputError(f"{name}: {here} is hidden by {found.__file__}: give it another name")
    found = getattr(found, attribute, None)
    if not callable(found):
        raise InputError(f"{name}: {module} has no function {attribute!r}")
    return found


def list_vectors() -> Table:
    """What is put to a loss, and what else there is to check, a row each.

    >>> list_vectors().row_count
    22
    """
    table = Table("vector", "asks", "of", "inputs", "the paper's value", "because", "otherwise")
    for row in VECTORS:
        table.add_row(*map(escape, row[:7]))
    return table


def main() -> None:
    """The command line: what the loss is, vector by vector; exit status 0 for the paper's loss and nothing else."""
    settings = tyro.cli(Settings, description=__doc__)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if settings.list:
        console.print(list_vectors())
        return
    try:
        if settings.loss is None:
            raise InputError("say which loss to check, as package.module:function, or --list")
        loss = ADAPTERS[settings.adapter](load(settings.loss))
        report = identify(loss)
        difference = compare(loss, settings.random, settings.seed) if settings.random else None
        if settings.out is not None:
            settings.out.mkdir(parents=True, exist_ok=True)
            content = {"loss": settings.loss} | asdict(report) | {"random": settings.random, "difference": difference}
            write_text(settings.out / "report.json", json.dumps(content, indent=2) + "\n")
    except (InputError, OSError) as error:
        sys.exit(f"conformance: {error}")
    console.print(report.table())
    print(f"{settings.loss}: {report.variant}{f' ({report.note})' if report.note else ''}")
    if settings.random:
        print(difference or f"{settings.random} random batches agree with Eq. 7")
    sys.exit(report.variant != "paper" or difference is not None)


if __name__ == "__main__":
    main()
