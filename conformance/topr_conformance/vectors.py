"""Inputs on which TOPR and its variants differ: test vectors by hand, probes of hypotheses, and random batches."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from topr_conformance.losses import Loss, LossInputs, in_a_line, push

TEXT = """\
V1   is the ratio that of the sequence?  R = -1; four tokens, log-ratio -0.5 each
     paper: weight e^(4 x -0.5) = e^-2 = 0.135335; geometric mean, per-token: 0.606531
V2   is the ratio clipped as a whole, not token by token?  R = -1; log-ratios +1, -1
     paper: weight e^(1 - 1) = 1; per-token: 1, 0.367879
V3   is the ratio neither per token nor a geometric mean?  R = -1; log-ratios +0.5, -1.5
     paper: weight e^(0.5 - 1.5) = e^-1 = 0.367879; geometric mean: 0.606531; per-token: 1, 0.223130
V4   are the four bounds 1, 1, 0, 1?  R = +1: log-ratio -3 and +2; R = -1: +2
     paper: weights [e^-3]_1^1 = 1, [e^2]_1^1 = 1, [e^2]_0^1 = 1
     TIS: 0.049787, 1, 1; plain IS: 0.049787, 7.389056, 7.389056
V5   is a long sequence computed without overflow?  R = -1; 512 tokens, log-ratio -0.2 each; +0.2 each; float32
     paper: weights e^-102.4 = 3e-45, and 1; e^102.4 exceeds float32, so clip before exp
     exp before clip, differentiated: 0 x inf = NaN; geometric mean: 0.818731
V6   does a negative's weight go to 0?  R = -1; one token, log-ratio -3
     paper: weight e^-3 = 0.049787, and a- = 0 does not stop it; clip 0.8..1.2: 0.8
V7   is the weight held fixed in the gradient?  R = -1; one token, log pi = -2, log-ratio -0.5
     paper: dL/dlogp = e^-0.5 = +0.606531, of L = -w R log pi with w constant
     differentiated too: w (1 + log pi) = -0.606531, the sign flips
V8   does the sign after the baseline choose the bounds?  scores 1, 1, 1, 0.2; the last has log-ratio -2
     paper: the last has weight [e^-2]_0^1 = 0.135335 if the loss itself subtracts the mean, for 0.2 - 0.8 < 0;
     [e^-2]_1^1 = 1 if it takes the scores as they are; branch by raw score: a negative update at weight 1
V9   does every sequence count alike, whatever its length?  R = +1, on-policy; one token and three tokens
     paper: each loss is divided by its length (Section 4.2): a token of the second has 1/3 of the gradient
     token mean, sequence sum: the same for every token
V10  is there no gradient at R = 0, and is a reward a little below 0 tapered?  R = 0, log-ratio -1; -0.2, -2
     paper: 0 times any weight; -0.2 [e^-2]_0^1 = -0.2 x 0.135335; weight 1 on small negatives: -0.2
V11  are prompt and padding left out?  logp (not logmu) of masked positions filled with -50; then padded on the left
     paper: the sums run over the completion's tokens: gradient unchanged to the bit, and 0 there
     unmasked: a factor of e^-49 in the weight for each such position, log mu being -1 there
V13  are probabilities never formed?  R = -1; 20 tokens of log mu = -3, log-ratio 0
     paper: weight e^(-60 + 60) = 1; mu made explicit as exp(-60): 8.757e-27
V16  does the weight follow the policy?  R = -1; log-ratio -1; then log pi of the same tokens 2 lower
     paper: weight e^-1 = 0.367879, then e^-3 = 0.049787; frozen weight: 0.367879 twice
     old log-probabilities recomputed at every step: 1 twice
V17  is the ratio taken to the power 1?  R = -1; log-ratio -2
     paper: weight e^-2 = 0.135335; tempered by 1/2: 0.367879
V20  does every example count once?  two positives, three negatives; then the positives alone, the negatives alone
     paper: one term for each sequence, over B or not: mean 5 g = 2 g+ + 3 g-; sum g = g+ + g-
     masked sums divided by their own counts: double counting
V22  does each of a prompt's negatives count as one example?  one positive, three negatives of a prompt, on-policy
     paper: every weight is 1, and the mean is over all four: coefficients +1, -1, -1, -1
     negatives renormalised to share one positive's weight: -1/3 each"""
# A vector's name -> its question, its inputs, the paper's value and those of variants
VECTORS = {text.split()[0]: text for text in re.split(r"\n(?=V)", TEXT)}


class Case(NamedTuple):
    """A completion of a vector's batch."""

    reward: float
    log_ratio: tuple[float, ...]  # of each token
    logp: float = -3.0  # log pi of each token


CASES: dict[str, list[Case]] = {  # the inputs in figures, of the vectors that ask for R w
    "V1": [Case(-1, (-0.5,) * 4)],
    "V2": [Case(-1, (1.0, -1.0))],
    "V3": [Case(-1, (0.5, -1.5))],
    "V4": [Case(1, (-3.0,)), Case(1, (2.0,)), Case(-1, (2.0,))],
    "V5": [Case(-1, (-0.2,) * 512), Case(-1, (0.2,) * 512)],
    "V6": [Case(-1, (-3.0,))],
    "V7": [Case(-1, (-0.5,), logp=-2.0)],
    "V10": [Case(0, (-1.0,)), Case(-0.2, (-1.0, -1.0))],
    "V13": [Case(-1, (0.0,) * 20)],
    "V17": [Case(-1, (-2.0,))],
}


def batch_of(cases: Sequence[Case]) -> LossInputs:
    """The cases as a padded float32 batch, then an on-policy positive of each length, then one to balance the rewards.

    Padding has log pi = log mu = -1. The last makes the mean reward 0: to subtract the mean changes nothing then.

    >>> batch_of([Case(-1, (-0.5, -0.5))]).reward
    tensor([-1.,  1.])
    """
    lengths = sorted({len(case.log_ratio) for case in cases})
    cases = [*cases, *(Case(1, (0.0,) * length, logp=0.0) for length in lengths)]
    if balance := -sum(case.reward for case in cases):
        cases.append(Case(balance, (0.0,), logp=0.0))
    logp, logmu, mask = (torch.full((len(cases), lengths[-1]), fill) for fill in (-1.0, -1.0, 0.0))
    for i, case in enumerate(cases):
        length = len(case.log_ratio)
        logp[i, :length] = case.logp
        logmu[i, :length] = case.logp - torch.tensor(case.log_ratio)
        mask[i, :length] = 1
    return LossInputs(logp, logmu, torch.tensor([float(case.reward) for case in cases]), mask)


def oracle(inputs: LossInputs) -> list[list[float]]:
    """The paper's push for each token: R [pi/mu]_a^b / length, and 0 where the mask is 0.

    Not divided by the number of sequences. In plain Python, for it must not share code with what it checks.

    >>> oracle(LossInputs(*torch.tensor([[[-2.0, -2.0]], [[-1.5, -1.5]]]), torch.tensor([-1.0]), torch.ones(1, 2)))
    [[-0.18393972058572117, -0.18393972058572117]]
    """
    pushes = []
    for logp, logmu, reward, mask in zip(
        *(column.double().tolist() for column in inputs), strict=True
    ):
        log_ratio = sum(p - m for p, m, inside in zip(logp, logmu, mask, strict=True) if inside)
        weight = 1.0 if reward >= 0 or log_ratio > 0 else math.exp(log_ratio)
        pushes.append([reward * weight / sum(mask) if inside else 0.0 for inside in mask])
    return pushes


NOT_FINITE = "not a number"


def in_words(measured: str) -> str:
    """A text for people: neither nan nor inf stands in it."""
    return re.sub(r"\binf\b", "infinity", re.sub(r"\bnan\b", NOT_FINITE, measured))


@dataclass(frozen=True)
class VectorResult:
    """What a vector says of a loss."""

    name: str
    asks: str
    status: Literal["pass", "fail", "not applicable"]
    measured: str


def result_of(name: str, loss: Loss) -> VectorResult:
    """Apply one vector to a loss. A loss that raises an exception fails.

    >>> from topr_conformance.variants import per_token
    >>> result_of("V1", per_token).measured
    'R w = -0.606531'
    """
    try:
        passed, measured = _check_cases(CASES[name], loss) if name in CASES else _check(name, loss)
    except Exception as error:  # whatever a foreign loss may raise
        passed, measured = False, in_a_line(error)
    asks = VECTORS[name].partition("?")[0].removeprefix(name).strip() + "?"
    return VectorResult(name, asks, "pass" if passed else "fail", in_words(measured))


def _check_cases(cases: Sequence[Case], loss: Loss) -> tuple[bool, str]:
    """R w at each token: its push over that of an on-policy positive of the same length, so that the length cancels."""
    batch, lengths = batch_of(cases), [len(case.log_ratio) for case in cases]
    positive = {length: i for i, length in enumerate(sorted(set(lengths)), start=len(cases))}
    observed, expected = (
        [pushed[i, :length] / pushed[positive[length], 0] for i, length in enumerate(lengths)]
        for pushed in (push(loss, batch), torch.tensor(oracle(batch)))
    )
    return all(map(_near, observed, expected)), "R w = " + "; ".join(map(_shortly, observed))


def _check(name: str, loss: Loss) -> tuple[bool, str]:
    """What a vector finds that asks for something else: whether the loss passes it, and what was measured."""
    single, ones = torch.full((4, 1), -1.0), torch.ones(4, 1)
    match name:
        case "V8":
            lower = single - torch.tensor([[0.0], [0.0], [0.0], [2.0]])
            pushed = push(
                loss, LossInputs(lower, single, torch.tensor([1.0, 1.0, 1.0, 0.2]), ones)
            )[:, 0]
            ratio = (
                pushed[3] / pushed[0]
            )  # the mean is 0.8: a loss that subtracts it has -0.6 w over 0.2
            about = f"push of the last / the first: {ratio:.6g} (scores as given: 0.2; less their mean: -0.406)"
            return _near(ratio, 0.2) or _near(ratio, -3 * math.exp(-2)), about
        case "V9":
            one, three = push(
                loss, batch_of([Case(1, (0.0,) * length, logp=0.0) for length in (1, 3)])
            )[:2]
            share = three / one[0]
            return _near(
                share, 1 / 3
            ), f"a token of three has {_shortly(share)} of the gradient of one alone"
        case "V11":
            batch = batch_of([Case(-1, (-0.5, 0.2)), Case(1, (0.1,) * 4), Case(-1, (-1.0,))])
            filled = batch._replace(logp=torch.where(batch.mask > 0, batch.logp, -50.0))
            turned = LossInputs(
                *(column.flip(1) if column.dim() > 1 else column for column in filled)
            )
            before, after, on_the_left = (
                push(loss, batch),
                push(loss, filled),
                push(loss, turned).flip(1),
            )
            outside = after[batch.mask == 0].abs().max()
            inside, side = (
                (pushed - before)[batch.mask > 0].abs().max() for pushed in (after, on_the_left)
            )
            measured = (
                f"gradient changes by {inside:.3g}; on masked positions it reaches {outside:.3g}"
            )
            passed = bool(inside == 0 and outside == 0) and _near(on_the_left, before)
            return passed, f"{measured}; padded on the left it changes by {side:.3g}"
        case "V16":
            batch = batch_of([Case(-1, (-1.0,), logp=-2.0)])
            lower = batch._replace(logp=batch.logp - torch.tensor([[2.0], [0.0]]))
            before, after = (
                -pushed[0, 0] / pushed[1, 0] for pushed in (push(loss, batch), push(loss, lower))
            )
            weights = f"weights {before:.6g}, {after:.6g}"
            return _near(before, math.exp(-1)) and _near(after, math.exp(-3)), weights
        case "V20":
            batch = batch_of(
                [Case(reward, (-0.3, 0.1)) for reward in (1.5, 1.5, -1.0, -1.0, -1.0)]
            )  # the mean is 0
            parts = (slice(1), slice(2), slice(2, 5), slice(5))
            pushed = [push(loss, LossInputs(*(x[rows] for x in batch)))[:, 0] for rows in parts]
            one, positives, negatives, whole = pushed
            is_mean = _near(positives[0] / one[0], 0.5)
            shares = torch.stack([whole[0] / positives[0], whole[4] / negatives[0]])
            passed = _near(shares, torch.tensor([2 / 5, 3 / 5] if is_mean else [1.0, 1.0]))
            return (
                passed,
                f"of the positives' own gradient {shares[0]:.6g}, of the negatives' {shares[1]:.6g}",
            )
        case "V22":
            pushed = push(
                loss, LossInputs(single, single, torch.tensor([1.0, -1.0, -1.0, -1.0]), ones)
            )[:, 0]
            shares = pushed[1:] / pushed[0]
            return _near(shares, -1.0), f"negatives' pushes over the positive's: {_shortly(shares)}"


def _near(value: Tensor, expected: Tensor | float) -> bool:
    return torch.allclose(
        value, torch.as_tensor(expected, dtype=value.dtype), rtol=1e-4, atol=1e-6
    )  # NaN is not near


def _shortly(values: Tensor) -> str:
    """At most four of the numbers, and only one where they are all equal."""
    values = (values.flatten() + 0.0).tolist()  # no -0
    values = values[:1] if max(values) - min(values) <= 1e-5 * abs(values[0]) else values
    return ", ".join(f"{x:.6g}" for x in values[:4]) + ", ..." * (len(values) > 4)


STEPS = (
    1e-4,
    1e-3,
    0.01,
    0.03,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    3.0,
    4.0,
    6.0,
    8.0,
    12.0,
    16.0,
    24.0,
    32.0,
    40.0,
)
SINGLES = slice(
    2, 2 + 8 * len(STEPS)
)  # the rows of single tokens in a probe; those before are on-policy


def probes(
    dtype: torch.dtype = torch.float64, is_coarse: bool = False, by: float = 1.0
) -> list[LossInputs]:
    """Five batches on which hypotheses are tried, all of one shape and one logmu: frozen weights fit all of them.

    The first batch holds one on-policy positive of a single token with log pi = 0, by which all pushes are divided, and
    such a negative. Next come single tokens, with log-ratios of - and + STEPS times `by`, then longer sequences. The
    other batches change it in one way each. is_coarse: in quarters, which bfloat16 sums without rounding.
    """
    draw = torch.Generator().manual_seed(0)
    steps = (
        [max(round(4 * step) / 4, 0.25) for step in STEPS]
        if is_coarse
        else [by * step for step in STEPS]
    )
    grid = [*(-step for step in reversed(steps)), *steps]
    # The larger the log-ratio, the larger |log pi|: float32 resolves the difference, and log mu stays below 0.
    values = {
        step: (-0.25, -0.75) if step < 0.05 else (-5.0, -9.0) if step < 5 else (-45.0, -50.0)
        for step in steps
    }
    singles = [
        (d, sign, value) for d, sign in product(grid, (1.0, -1.0)) for value in values[abs(d)]
    ]
    many, width = 31, 6

    def uniform(low: float, high: float) -> Tensor:
        drawn = low + (high - low) * torch.rand(many, width, generator=draw, dtype=torch.float64)
        return (4 * drawn).round() / 4 if is_coarse else drawn

    zeros = torch.zeros(SINGLES.stop, width, dtype=torch.float64)
    logp, logmu = torch.cat([zeros, uniform(-3, -0.5)]), torch.cat([zeros, uniform(-3, -0.5)])
    for i, (log_ratio, _, value) in enumerate(singles, start=SINGLES.start):
        logp[i, 0], logmu[i, 0] = value, value - log_ratio
    lengths = torch.tensor([1] * len(zeros) + [2 + i % 5 for i in range(many)])
    mask = (torch.arange(width) < lengths[:, None]).double()
    sizes = [(0.5, 1.0, 2.0, 0.0)[i // 2 % 4] * (-1) ** i for i in range(many)]
    reward = torch.tensor(
        [1.0, -2.0, *(sign for _, sign, _ in singles), *sizes], dtype=torch.float64
    )
    reward[-1] -= reward.sum()  # the mean is 0 now
    changes = [
        {},
        {"logp": logp + torch.cat([zeros, uniform(-1, 0.6)]) * mask},  # is the weight frozen?
        {"mask": mask * (torch.arange(width) < 3)},  # what divides the sum, and does padding count?
        {"reward": reward + 1.5},
        {"reward": 100 * reward},  # is it clipped?
    ]
    first = LossInputs(logp, logmu, reward, mask)
    return [
        LossInputs(*(column.to(dtype) for column in first._replace(**change))) for change in changes
    ]


def compare(loss: Loss, count: int, seed: int = 0) -> str | None:
    """Compare the pushes on `count` random batches with the oracle's: None, or the smallest batch that differs.

    A factor is fitted on one sequence and on two: it may stay (a sum) or be halved (a mean).

    >>> from topr_conformance.variants import paper, token_mean
    >>> compare(paper, 20)
    >>> compare(token_mean, 20).splitlines()[0]
    'differs from Eq. 7 on this batch:'
    """
    positives = (torch.ones(number, 1) for number in (1, 2))
    try:
        alone, of_two = (push(loss, LossInputs(-x, -x, x[:, 0], x))[0, 0].item() for x in positives)
    except Exception as error:  # whatever a foreign loss may raise
        return f"differs from Eq. 7: on an on-policy positive it raised {in_a_line(error)}"
    is_sum = math.isclose(alone, of_two, rel_tol=1e-4)
    if not (alone > 0 and (is_sum or math.isclose(alone, 2 * of_two, rel_tol=1e-4))):
        return in_words(
            f"differs from Eq. 7: an on-policy positive has a push of {alone:g}, as one of two {of_two:g}"
        )
    draw = torch.Generator().manual_seed(seed)
    for batch in sorted(
        (_ragged(draw) for _ in range(count)), key=lambda batch: batch.mask.numel()
    ):
        expected = torch.tensor(oracle(batch)) * alone / (1 if is_sum else len(batch.reward))
        try:
            pushed = push(loss, batch)
        except Exception as error:  # whatever a foreign loss may raise
            difference = f"raised {in_a_line(error)}"
        else:
            if torch.allclose(pushed, expected, rtol=1e-4, atol=1e-6 * alone):
                continue
            numbers = (x.double().round(decimals=6).tolist() for x in (pushed, expected))
            difference = "push {}\npaper {}".format(*numbers)
        columns = [
            f"{name} {column.double().round(decimals=6).tolist()}"
            for name, column in batch._asdict().items()
        ]
        return in_words("\n".join(["differs from Eq. 7 on this batch:", *columns, difference]))
    return None


def _ragged(draw: torch.Generator) -> LossInputs:
    """A batch of 1 to 5 sequences of 1 to 8 tokens; padding, on either side, holds numbers from -50 to 50."""

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=draw)

    many, width = int(integers(1, 5)), int(integers(1, 8))
    lengths = integers(1, width, many, 1)
    logp, logmu = (integers(-500, 0, many, width) / 100 for _ in range(2))  # not exact in bfloat16
    padding = integers(-50, 50, many, width)
    mask = (torch.arange(width) < lengths).float()
    mask = mask.flip(1) if integers(0, 1) else mask
    reward = torch.tensor([-50.0, -1.0, -0.3, 0.0, 0.3, 1.0, 50.0])[integers(0, 6, many)]
    return LossInputs(
        torch.where(mask > 0, logp, padding), torch.where(mask > 0, logmu, -padding), reward, mask
    )
