"""The test vectors: small inputs on which TOPR and its variants differ; the paper's values by hand.

A vector with cases asks for R w, the coefficient of a token's gradient, relative to that of an on-policy positive of
the same length in the same batch: length and constant factors cancel. The others have a check of their own below. The
numbers that are missing, such as V14, are not about a loss: the project's tests of topr.py have them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from conformance.losses import InputError, Loss, LossInputs, push

TEXT = """\
V1   is the ratio that of the sequence?
     inputs     R = -1; four tokens, log-ratio -0.5 each
     paper      weight e^(4 x -0.5) = e^-2 = 0.135335
     otherwise  geometric mean, per-token: 0.606531

V2   is the ratio clipped as a whole, not token by token?
     inputs     R = -1; log-ratios +1, -1
     paper      weight e^(1 - 1) = 1
     otherwise  per-token: 1, 0.367879

V3   is the ratio neither per token nor a geometric mean?
     inputs     R = -1; log-ratios +0.5, -1.5
     paper      weight e^(0.5 - 1.5) = e^-1 = 0.367879
     otherwise  geometric mean 0.606531; per-token 1, 0.223130

V4   are the four bounds 1, 1, 0, 1?
     inputs     R = +1: log-ratio -3 and +2; R = -1: +2
     paper      weights [e^-3]_1^1 = 1, [e^2]_1^1 = 1, [e^2]_0^1 = 1
     otherwise  TIS 0.049787, 1, 1; plain IS 0.049787, 7.389056, 7.389056

V5   is a long sequence computed without overflow?
     inputs     R = -1; 512 tokens, log-ratio -0.2 each; +0.2 each; float32
     paper      weights e^-102.4 = 3e-45, and 1; e^102.4 exceeds float32, so clip before exp
     otherwise  exp before clip, differentiated: 0 x inf = NaN; geometric mean 0.818731

V6   does a negative's weight go to 0?
     inputs     R = -1; one token, log-ratio -3
     paper      weight e^-3 = 0.049787, and a- = 0 does not stop it
     otherwise  clip 0.8..1.2: 0.8

V7   is the weight held fixed in the gradient?
     inputs     R = -1; one token, log pi = -2, log-ratio -0.5
     paper      dL/dlogp = e^-0.5 = +0.606531, of L = -w R log pi with w constant
     otherwise  differentiated too: w (1 + log pi) = -0.606531, the sign flips

V8   does the sign after the baseline choose the bounds?
     inputs     scores 1, 1, 1, 0.2; the last has log-ratio -2
     paper      the last: weight [e^-2]_0^1 = 0.135335 if the loss itself subtracts the mean, for 0.2 - 0.8 < 0;
                [e^-2]_1^1 = 1 if it takes the scores as they are
     otherwise  branch by raw score: a negative update at weight 1

V9   does every sequence count alike, whatever its length?
     inputs     R = +1, on-policy; one token and three tokens
     paper      each loss is divided by its length (Section 4.2): a token of the second has 1/3 of the gradient
     otherwise  token mean, sequence sum: the same for every token

V10  is there no gradient at R = 0, and is a reward a little below 0 tapered?
     inputs     R = 0, log-ratio -1; then R = 0 - 0.2, log-ratio -2
     paper      0 times any weight; -0.2 [e^-2]_0^1 = -0.2 x 0.135335
     otherwise  weight 1 on small negatives: -0.2

V11  are prompt and padding left out?
     inputs     logp (not logmu) of masked positions filled with -50
     paper      the sums run over the completion's tokens: gradient unchanged to the bit, and 0 there
     otherwise  unmasked: a factor of e^-49 in the weight for each such position, log mu being -1 there

V13  are probabilities never formed?
     inputs     R = -1; 20 tokens of log mu = -3, log-ratio 0
     paper      weight e^(-60 + 60) = 1
     otherwise  mu made explicit as exp(-60): 8.757e-27

V16  does the weight follow the policy?
     inputs     R = -1; log-ratio -1; then log pi of the same tokens 2 lower
     paper      weight e^-1 = 0.367879, then e^-3 = 0.049787
     otherwise  frozen weight: 0.367879 twice; old log-probabilities recomputed at every step: 1 twice

V17  is the ratio taken to the power 1?
     inputs     R = -1; log-ratio -2
     paper      weight e^-2 = 0.135335
     otherwise  tempered by 1/2: 0.367879

V20  does every example count once?
     inputs     two positives, three negatives; then the positives alone, the negatives alone
     paper      one term for each sequence, over B or not: mean 5 g = 2 g+ + 3 g-; sum g = g+ + g-
     otherwise  masked sums divided by their own counts: double counting

V22  does each of a prompt's negatives count as one example?
     inputs     one positive, three negatives of a prompt, on-policy
     paper      every weight is 1, and the mean is over all four: coefficients +1, -1, -1, -1
     otherwise  negatives renormalised to share one positive's weight: -1/3 each"""


class Case(NamedTuple):
    """A completion, and what the paper's gradient is there."""

    log_ratio: tuple[float, ...]  # of each token
    reward: float
    coefficient: float  # the paper's R w
    logp: float = -3.0  # log pi of each token


E = math.exp
CASES: dict[str, tuple[Case, ...]] = {  # the inputs in figures
    "V1": (Case((-0.5,) * 4, -1, -E(-2)),),
    "V2": (Case((1.0, -1.0), -1, -1),),
    "V3": (Case((0.5, -1.5), -1, -E(-1)),),
    "V4": (Case((-3.0,), 1, 1), Case((2.0,), 1, 1), Case((2.0,), -1, -1)),
    "V5": (Case((-0.2,) * 512, -1, 0.0), Case((0.2,) * 512, -1, -1)),
    "V6": (Case((-3.0,), -1, -E(-3)),),
    "V7": (Case((-0.5,), -1, -E(-0.5), logp=-2.0),),
    "V10": (Case((-1.0,), 0, 0), Case((-1.0, -1.0), -0.2, -0.2 * E(-2))),
    "V13": (Case((0.0,) * 20, -1, -1, logp=-3.0),),
    "V17": (Case((-2.0,), -1, -E(-2)),),
}


class Vector(NamedTuple):
    """A question to a loss."""

    name: str
    asks: str
    text: str  # with inputs, the paper's value and what variants give, as `--list` prints it


VECTORS = tuple(Vector(*text.partition("\n")[0].split(maxsplit=1), text) for text in TEXT.split("\n\n"))


@dataclass(frozen=True)
class VectorResult:
    """What a vector found out about a loss."""

    name: str
    asks: str
    status: Literal["pass", "fail", "not applicable"]
    measured: str


def batch_of(cases: tuple[Case, ...]) -> LossInputs:
    """The cases as a padded float32 batch, then an on-policy positive of each length, then one to balance the rewards.

    Padding has log pi = log mu = -1. The last makes the mean reward 0: to subtract the mean changes nothing then.

    >>> batch_of((Case((-0.5, -0.5), -1, -1),)).reward
    tensor([-1.,  1.])
    """
    lengths = sorted({len(case.log_ratio) for case in cases})
    cases = (*cases, *(Case((0.0,) * length, 1, 1, logp=0.0) for length in lengths))
    if balance := -sum(case.reward for case in cases):
        cases = (*cases, Case((0.0,), balance, balance, logp=0.0))
    logp, logmu, mask = (torch.full((len(cases), lengths[-1]), fill) for fill in (-1.0, -1.0, 0.0))
    for i, case in enumerate(cases):
        length = len(case.log_ratio)
        logp[i, :length] = case.logp
        logmu[i, :length] = case.logp - torch.tensor(case.log_ratio)
        mask[i, :length] = 1
    return LossInputs(logp, logmu, torch.tensor([float(case.reward) for case in cases]), mask)


def _check_cases(loss: Loss, cases: tuple[Case, ...]) -> tuple[bool, str]:
    """R w at each token: its push over that of an on-policy positive of the same length in the batch."""
    pushed = push(loss, batch_of(cases))
    lengths = sorted({len(case.log_ratio) for case in cases})
    reference = {length: pushed[len(cases) + i, 0] for i, length in enumerate(lengths)}
    found = [pushed[i, : len(case.log_ratio)] / reference[len(case.log_ratio)] for i, case in enumerate(cases)]
    passed = all(_near(x, case.coefficient) for x, case in zip(found, cases, strict=True))
    return passed, "R w = " + "; ".join(_shortly(x) for x in found)


def result_of(vector: Vector, loss: Loss) -> VectorResult:
    """Apply one vector to a loss. A loss that raises an exception fails; InputError where it is no loss.

    >>> from conformance.variants import per_token
    >>> result_of(VECTORS[0], per_token).measured
    'R w = -0.606531'
    """
    try:
        cases = CASES.get(vector.name)
        passed, measured = _check_cases(loss, cases) if cases else CHECKS[vector.name](loss)
    except InputError:
        raise
    except Exception as error:  # whatever a foreign loss may raise
        passed, measured = False, f"{type(error).__name__}: {error}".splitlines()[0]
    return VectorResult(vector.name, vector.asks, "pass" if passed else "fail", measured)


def _near(found: Tensor, expected: Tensor | float) -> bool:
    return torch.allclose(found, torch.as_tensor(expected, dtype=found.dtype), rtol=1e-4, atol=1e-6)  # NaN is not near


def _shortly(values: Tensor) -> str:
    """At most four of the numbers, and only one where they are all equal."""
    values = (values.flatten() + 0.0).tolist()  # no -0
    values = values[:1] if max(values) - min(values) <= 1e-5 * abs(values[0]) else values
    return ", ".join(f"{x:.6g}" for x in values[:4]) + ", ..." * (len(values) > 4)


def _check_branch(loss: Loss) -> tuple[bool, str]:  # V8
    scores = torch.tensor([1.0, 1.0, 1.0, 0.2])
    log_ratio = torch.tensor([[0.0], [0.0], [0.0], [-2.0]])
    logmu = torch.full((4, 1), -1.0)
    pushed = push(loss, LossInputs(logmu + log_ratio, logmu, scores, torch.ones(4, 1)))[:, 0]
    ratio = pushed[3] / pushed[0]  # the mean is 0.8: a loss that subtracts it has -0.6 w over 0.2
    is_right = _near(ratio, 0.2) or _near(ratio, -3 * E(-2))
    return is_right, f"push of the last / the first: {ratio:.6g} (scores as given: 0.2; less their mean: -0.406)"


def _check_length(loss: Loss) -> tuple[bool, str]:  # V9
    cases = (Case((0.0,), 1, 1, logp=0.0), Case((0.0,) * 3, 1, 1, logp=0.0))
    one, three = push(loss, batch_of(cases))[:2]
    return _near(three / one[0], 1 / 3), f"{_shortly(three / one[0])} of the first's"


def _check_mask(loss: Loss) -> tuple[bool, str]:  # V11
    batch = batch_of((Case((-0.5, 0.2), -1, 0), Case((0.1,) * 4, 1, 0), Case((-1.0,), -1, 0)))
    filled = batch._replace(logp=torch.where(batch.mask > 0, batch.logp, -50.0))
    before, after = push(loss, batch), push(loss, filled)
    outside = after[batch.mask == 0].abs().max()
    inside = (after - before)[batch.mask > 0].abs().max()
    measured = f"gradient changes by {inside:.3g}; on masked positions it reaches {outside:.3g}"
    return inside == 0 and outside == 0, measured


def _check_frozen(loss: Loss) -> tuple[bool, str]:  # V16
    batch = batch_of((Case((-1.0,), -1, 0, logp=-2.0),))
    lower = batch._replace(logp=batch.logp - torch.tensor([[2.0], [0.0]]))
    before, after = (-pushed[0, 0] / pushed[1, 0] for pushed in (push(loss, batch), push(loss, lower)))
    return _near(before, E(-1)) and _near(after, E(-3)), f"weights {before:.6g}, {after:.6g}"


def _check_counts(loss: Loss) -> tuple[bool, str]:  # V20
    columns = batch_of(tuple(Case((-0.3, 0.1), reward, 0) for reward in (1.5, 1.5, -1.0, -1.0, -1.0)))  # the mean is 0

    def first_push(rows: slice) -> Tensor:
        return push(loss, LossInputs(*(column[rows] for column in columns)))[0, 0]

    one, positives, negatives = (first_push(rows) for rows in (slice(1), slice(2), slice(2, 5)))
    whole = push(loss, LossInputs(*(column[:5] for column in columns)))[:, 0]
    is_mean = _near(positives / one, 0.5)
    shares = whole[0] / positives, whole[4] / negatives
    passed = all(_near(x, y) for x, y in zip(shares, (2 / 5, 3 / 5) if is_mean else (1, 1), strict=True))
    return passed, f"of the positives' own gradient {shares[0]:.6g}, of the negatives' {shares[1]:.6g}"


def _check_shares(loss: Loss) -> tuple[bool, str]:  # V22
    logp = torch.full((4, 1), -1.0)
    pushed = push(loss, LossInputs(logp, logp, torch.tensor([1.0, -1.0, -1.0, -1.0]), torch.ones(4, 1)))[:, 0]
    shares = pushed[1:] / pushed[0]
    return _near(shares, -1.0), f"negatives' pushes over the positive's: {_shortly(shares)}"


CHECKS: dict[str, Callable[[Loss], tuple[bool, str]]] = {
    "V8": _check_branch,
    "V9": _check_length,
    "V11": _check_mask,
    "V16": _check_frozen,
    "V20": _check_counts,
    "V22": _check_shares,
}
