"""The family of losses: a choice of each property, and one function that builds the loss."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import NamedTuple

import torch
from torch import Tensor

from topr_conformance.losses import sum_over_tokens


class Bounds(NamedTuple):
    """Bounds of the ratio: a_pos and b_pos if reward >= 0, else a_neg and b_neg (Equation 7)."""

    a_pos: float
    b_pos: float
    a_neg: float
    b_neg: float

    def bounds_for(self, sign: Tensor) -> tuple[Tensor, Tensor]:
        """The lower and the upper bound for each sign, in its shape."""
        low = torch.where(sign >= 0, self.a_pos, self.a_neg)
        return low, torch.where(sign >= 0, self.b_pos, self.b_neg)


EVERYTHING = Bounds(0, math.inf, 0, math.inf)
TABLE_1 = {
    "": Bounds(1, 1, 0, 1),  # the paper's choice
    "tis": Bounds(0, 1, 0, 1),  # truncated importance sampling
    "plain is": EVERYTHING,
    "naive reinforce": Bounds(1, 1, 1, 1),
    "sft": Bounds(1, 1, 0, 0),
}

# ---- the choices: the name of a difference -> what the loss does; "" is the paper's --------------
POWERS = {"": 1.0, "tempered": 0.5, "inverted ratio": -1.0}
GRADIENTS = ("", "no stop-gradient")
# log-ratios of tokens and mask, (B, T) -> log-ratios (B, 1), or (B, T)
UNITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "": lambda log_ratio, mask: sum_over_tokens(log_ratio, mask)[:, None],
    "per-token": lambda log_ratio, mask: log_ratio,
    "geometric mean": lambda log_ratio, mask: (sum_over_tokens(log_ratio, mask) / mask.sum(1))[
        :, None
    ],
}
# reward (B,) -> what multiplies log pi, and what chooses the bounds by its sign
REWARDS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "": lambda r: (r, r),
    "batch-mean baseline": lambda r: (r - r.mean(), r - r.mean()),
    "branch by raw score": lambda r: (r - r.mean(), r),
    "normalised reward": lambda r: (r / r.std(), r),
    "batch-mean baseline + normalised reward": lambda r: ((r - r.mean()) / r.std(), r - r.mean()),
    "branch by raw score + normalised reward": lambda r: ((r - r.mean()) / r.std(), r),
}
# mask (B, T) -> what divides the sum over a completion's tokens
MEANS: dict[str, Callable[[Tensor], Tensor | float]] = {
    "": lambda mask: mask.sum(1),
    "token mean": lambda mask: mask.sum() / len(mask),
    "sequence sum": lambda mask: 1.0,
    "divided by the longest length": lambda mask: mask.sum(1).max(),
    "divided by the length and the batch's tokens": lambda mask: mask.sum(1) * mask.sum(),
    "length off by +1": lambda mask: mask.sum(1) + 1,
    "length off by -1": lambda mask: (mask.sum(1) - 1).clamp(min=1),
}
# mask -> which tokens count in the ratio, and which in the loss
MASKS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "": lambda mask: (mask, mask),
    "unmasked in the ratio": lambda mask: (torch.ones_like(mask), mask),
    "unmasked in the loss": lambda mask: (mask, torch.ones_like(mask)),
    "unmasked in the ratio + unmasked in the loss": lambda mask: (torch.ones_like(mask),) * 2,
}
CHOICES = {"unit": UNITS, "reward": REWARDS, "mean": MEANS, "mask": MASKS}


@dataclass(frozen=True)
class Combination:
    """A loss of the family; the defaults are the paper's choices."""

    limits: Bounds = TABLE_1[""]
    window: Bounds = EVERYTHING  # outside of it the weight is 0
    negatives: float = 1.0  # a factor on negatives
    guard: float = math.inf  # the largest log-ratio of a token; minus this is the smallest
    power: str = ""  # of the ratio: one of POWERS, and so on
    gradient: str = ""
    unit: str = ""
    reward: str = ""
    mean: str = ""
    mask: str = ""

    def loss(self, token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
        """The loss, with the shapes of topr.py's: a scalar to be minimised."""
        in_ratio, in_loss = MASKS[self.mask](mask)  # (B, T) each
        factor, sign = REWARDS[self.reward](reward)  # (B,) each
        log_ratio = POWERS[self.power] * (token_logp - token_logmu)  # (B, T)
        log_ratio = log_ratio.clamp(-self.guard, self.guard)
        ratio = UNITS[self.unit](log_ratio, in_ratio).exp()  # (B, 1) or (B, T)
        weight = ratio.clamp(*self.limits.bounds_for(sign[:, None]))
        low, high = self.window.bounds_for(sign[:, None])
        weight = torch.where((low <= ratio) & (ratio <= high), weight, 0.0)
        if self.gradient != "no stop-gradient":
            weight = weight.detach()
        factor = torch.where(sign < 0, self.negatives * factor, factor)
        logp = sum_over_tokens(weight * token_logp, in_loss)  # (B,)
        values = -factor * logp / MEANS[self.mean](mask)
        return values.sum() / len(reward)

    def differences(self) -> list[str]:
        """The names of what differs from the paper's loss."""
        negatives = f"negatives count {self.negatives:g} times" if self.negatives != 1 else ""
        guard = f"log-ratio of tokens clipped at -{self.guard:.4g}" if self.guard < math.inf else ""
        names = [self.unit, self._name_of_bounds(), guard, self.power, negatives, self.gradient]
        names += [self.reward, self.mean, self.mask]
        return [name for name in " + ".join(names).split(" + ") if name]

    def _name_of_bounds(self) -> str:
        a_pos, high, low, dual = self.window
        # PPO's min() has no gradient above `high` on positives, and none below `low` on negatives.
        if self.limits == EVERYTHING and a_pos == 0 and low < 1 <= high < math.inf:
            name = f"ppo clip {low:g}..{high:g}"
            return name if dual == math.inf else f"{name}, dual clip {dual:g}"
        names = [name for name, limits in TABLE_1.items() if limits == self.limits]
        if not names:
            positive, negative = _intervals(self.limits)
            both = f"clip {positive} on positives, {negative} on negatives"
            names = [f"clip {negative}" if positive == "1..1" else both]
            exponent = math.log(self.limits.a_neg or 2)
            is_whole = math.isclose(exponent, round(exponent), abs_tol=1e-4)
            if is_whole and self.limits == Bounds(1, 1, self.limits.a_neg, 1):
                names = [f"log-ratio clipped at {exponent:.0f}"]
        if self.window != EVERYTHING:
            positive, negative = _intervals(self.window)
            both = f"{positive} on positives, {negative} on negatives"
            text = positive if positive == negative else both
            names.append(f"weight 0 outside {text.removeprefix('0..infinity on positives, ')}")
        return " + ".join(names)


def _intervals(limits: Bounds) -> list[str]:
    pairs = (limits[:2], limits[2:])  # of positives, of negatives
    return [f"{low:g}..{high:g}".replace("inf", "infinity") for low, high in pairs]


def family(start: Combination) -> Iterator[Combination]:
    """The combinations that differ from `start` in up to three CHOICES, the fewest first."""
    for count in range(4):
        for properties in combinations(CHOICES, count):
            alternatives = [list(CHOICES[name])[1:] for name in properties]
            for names in product(*alternatives):
                yield replace(start, **dict(zip(properties, names, strict=True)))


paper = Combination().loss
_COMBINATIONS = [
    Combination(unit="per-token"),
    Combination(unit="per-token", mean="token mean"),
    Combination(unit="geometric mean"),
    Combination(limits=Bounds(1, 1, 0.8, 1.2)),
    *[Combination(limits=limits) for limits in list(TABLE_1.values())[1:]],
    Combination(power="tempered"),
    Combination(gradient="no stop-gradient"),
    Combination(reward="branch by raw score"),
    Combination(mean="token mean"),
    Combination(mean="sequence sum"),
]
# What `identify` says of a loss -> the loss: what public code computes under the name of TOPR
VARIANTS = {" + ".join(each.differences()): each.loss for each in _COMBINATIONS}

# ---- advice --------------------------------------------------------------------------------------
_OWN_LENGTH = "divide each completion's sum by its own length, mask.sum(1); then take the mean"
_WEIGHT = "positives (reward >= 0) have the weight 1, negatives min(pi/mu, 1), detached"
# How the name of a difference begins -> what to change; the first that fits counts
ADVICE = {
    "wrong sign": "put a minus before what is returned: a loss is minimised",
    "per-token": "sum logp - logmu over the completion's tokens; clip the sum, take its exp",
    "geometric mean": "do not divide the sum of log-ratios by the length; divide the loss by it",
    "tempered": "take the ratio to the power 1: no factor and no temperature on its logarithm",
    "inverted ratio": "take logp - logmu, not logmu - logp",
    "tis": f"clip the weight of negatives only: {_WEIGHT}",
    "naive reinforce": f"take log mu from the samples, not from the current model: {_WEIGHT}",
    "sft": "do not drop negatives: give them the weight min(pi/mu, 1)",
    "ppo clip": f"take weight times log pi, without PPO's min() of two terms: {_WEIGHT}",
    "weight 0 outside": f"drop no token or completion because of its ratio: {_WEIGHT}",
    "clip 0..1 on positives, 1..1 on negatives": f"exchange the signs: {_WEIGHT}",
    "log-ratio": "remove this guard: exp of a negative number does not overflow, its limit is 0",
    "clip": f"take other bounds (a clip of the log-ratio at x is a bound of e^x): {_WEIGHT}",
    "plain is": f"clip the ratio: {_WEIGHT}",
    "negatives count": "remove the factor on negatives; a baseline makes them count less",
    "no stop-gradient": "detach the weight",
    "batch-mean baseline": "subtract your baseline before the loss, or keep this one knowingly",
    "branch by raw score": "choose the bounds by the sign of the reward after the baseline",
    "normalised reward": "do not divide the reward by its standard deviation",
    "token mean": _OWN_LENGTH,
    "sequence sum": _OWN_LENGTH,
    "divided by the longest length": _OWN_LENGTH,
    "divided by the length and the batch's tokens": "divide by the length only",
    "length off by": f"{_OWN_LENGTH}; count exactly the tokens of the sum",
    "unmasked": "align the mask with logp; apply it before each sum, that of log-ratios included",
    "extra term": "remove what does not depend on the reward: a KL, entropy or constant baseline",
}
