"""A hypothesis about a loss: its independent properties, and a loss that has them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from topr_conformance.limits import (
    EVERYTHING,
    HIGHEST_GUARD,
    LOWEST_GUARD,
    TABLE_1,
    Limits,
)
from topr_conformance.losses import Loss, LossInputs, sum_over_tokens

Unit = Literal[
    "whole sequence",
    "per-token",
    "geometric mean",
    "geometric mean of clipped tokens",  # each token's log-ratio is clipped to the window
]
Baseline = Literal["none", "batch-mean baseline", "branch by raw score"]
Aggregation = Literal[
    "sequence mean",
    "token mean",
    "sequence sum",
    "divided by the longest length",
    "length off by +1",
]
# (log-ratios (B, T) or (B, 1), rewards (B, 1)) -> weights of the log-ratios' shape
WeightFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """A loss, described by its independent properties; the defaults are the paper's."""

    limits: Limits = TABLE_1["paper"]
    window: Limits = EVERYTHING  # outside of it the weight is 0
    function: WeightFunction | None = None  # in place of limits and window
    power: float = 1.0  # of the ratio; below 0 it is mu/pi
    unit: Unit = "whole sequence"  # of what the ratio is
    stops_gradient: bool = True
    frozen: tuple[str, ...] = ()  # the fields of LossInputs whose first values the weights keep
    baseline: Baseline = "none"
    aggregation: Aggregation = "sequence mean"
    negatives: float = 1.0  # a factor on negatives

    def differences(self) -> list[str]:
        """The names of what differs from the paper's loss, in the order of a verdict.

        >>> Hypothesis(unit="per-token", limits=Limits(1, 1, 0.8, 1.2)).differences()
        ['per-token', 'clip 0.8..1.2']
        """
        paper = Hypothesis()
        names = []
        if self.unit != paper.unit:
            names.append(self.unit)
        names += self.names_of_weight()
        if self.power < 0:
            names.append("inverted ratio")
        if abs(self.power) != 1:
            names.append("tempered")
        if self.negatives != 1:
            names.append(f"negatives count {self.negatives:.4g} times")
        if not self.stops_gradient:
            names.append("no stop-gradient")
        if self.frozen:
            names.append("frozen weight")
        if self.baseline != paper.baseline:
            names.append(self.baseline)
        if self.aggregation != paper.aggregation:
            names.append(self.aggregation)
        return names

    def names_of_weight(self) -> list[str]:
        """The names of what differs in the weight as a function of the ratio."""
        if self.function is not None:
            return ["another function of the ratio"]
        window = self._window_without_guards()
        of_ppo = _name_of_ppo(window) if self.limits == EVERYTHING else ""
        if of_ppo:
            return [of_ppo]
        names = []
        if self.limits != TABLE_1["paper"]:
            names.append(_name_of_limits(self.limits))
        if window != EVERYTHING:
            names.append(_name_of_window(window))
        return names

    def _window_without_guards(self) -> Limits:
        """The window without bounds that only keep exp of an unbounded ratio from overflow.

        Below e^-20 such a ratio is 0 in any case.
        """
        bounds = []
        for i, (bound, limit) in enumerate(zip(self.window, self.limits, strict=True)):
            is_low = i % 2 == 0
            is_guard = bound <= HIGHEST_GUARD if is_low else bound >= LOWEST_GUARD
            is_unbounded = limit == (0 if is_low else math.inf)
            free = 0.0 if is_low else math.inf
            bounds.append(free if is_guard and is_unbounded else bound)
        return Limits(*bounds)

    def loss(self) -> Loss:
        """A loss with these properties; its weights keep the `frozen` inputs of its first call."""
        kept: dict[str, Tensor] = {}

        def loss(token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
            inputs = LossInputs(token_logp, token_logmu, reward, mask)
            if not kept:
                for name in self.frozen:
                    kept[name] = getattr(inputs, name).detach().clone()
            weight = self._weight(inputs._replace(**kept), inputs)
            shifted = self.shifted(reward)
            scaled = torch.where(shifted < 0, self.negatives * shifted, shifted)[:, None]  # (B, 1)
            sums = sum_over_tokens(weight * scaled * token_logp, mask)
            return -(sums / self._divisor(mask)).mean()

        return loss

    def shifted(self, reward: Tensor) -> Tensor:
        """The reward after the loss's own baseline, if it has one: (B,)."""
        return reward if self.baseline == "none" else reward - reward.mean()

    def _weight(self, kept: LossInputs, inputs: LossInputs) -> Tensor:
        """The weights, (B, 1) or per token (B, T); kept: `inputs` with the frozen fields."""
        if "reward" in self.frozen or self.baseline == "branch by raw score":
            sign = kept.reward[:, None]
        else:
            sign = self.shifted(inputs.reward)[:, None]
        of_token = self.power * (kept.token_logp - inputs.token_logmu)  # (B, T)
        log_ratio = self._log_ratio(of_token, sign, kept.mask)
        if self.function is not None:
            weight = self.function(torch.where(inputs.mask > 0, log_ratio, 0.0), sign)
        else:
            weight = self.limits.weight(log_ratio, sign)
            is_clipped_by_token = self.unit == "geometric mean of clipped tokens"
            weight = weight * self.window.contain(
                of_token if is_clipped_by_token else log_ratio, sign
            )
        return weight.detach() if self.stops_gradient else weight

    def _log_ratio(self, of_token: Tensor, sign: Tensor, mask: Tensor) -> Tensor:
        """The log-ratio of the unit: (B, 1), or per token (B, T)."""
        if self.unit == "per-token":
            return of_token
        if self.unit == "geometric mean of clipped tokens":
            of_token = self.window.clamp_log(of_token, sign)
        log_ratio = sum_over_tokens(of_token, mask)[:, None]  # (B, 1)
        if self.unit == "whole sequence":
            return log_ratio
        return log_ratio / mask.sum(1, keepdim=True)

    def _divisor(self, mask: Tensor) -> Tensor | float:
        lengths = mask.sum(1)
        match self.aggregation:
            case "sequence mean":
                return lengths
            case "token mean":
                return lengths.mean()
            case "sequence sum":
                return 1.0
            case "divided by the longest length":
                return lengths.max()
            case "length off by +1":
                return lengths + 1


# ---- names of weights ----------------------------------------------------------------------------
def _name_of_limits(limits: Limits) -> str:
    for name, row in TABLE_1.items():
        if limits == row:
            return name
    negative = _name_of_interval(limits.a_neg, limits.b_neg)
    if limits.a_pos == limits.b_pos == 1:  # as in the paper
        return f"clip {negative}"
    positive = _name_of_interval(limits.a_pos, limits.b_pos)
    return f"clip {positive} on positives, {negative} on negatives"


def _name_of_ppo(window: Limits) -> str:
    """PPO's min() of two terms has no gradient above b on positives, and below a on negatives.

    Dual clip has none above another bound on negatives. "" for a window of another form.
    """
    high, low, dual = window.b_pos, window.a_neg, window.b_neg
    if window.a_pos > 0 or not low < 1 <= high < math.inf or (low == 0 and dual < math.inf):
        return ""
    name = f"ppo clip {_name_of_interval(low, high)}"
    return name if dual == math.inf else f"{name}, dual clip {dual:.6g}"


def _name_of_window(window: Limits) -> str:
    positive = _name_of_interval(window.a_pos, window.b_pos)
    negative = _name_of_interval(window.a_neg, window.b_neg)
    if positive == negative:
        return f"weight 0 outside {positive}"
    parts = []
    for interval, sign in ((positive, "positives"), (negative, "negatives")):
        if interval != "0..infinity":
            parts.append(f"{interval} on {sign}")
    return f"weight 0 outside {', '.join(parts)}"


def _name_of_interval(low: float, high: float) -> str:
    return f"{low:.6g}..{high:.6g}".replace("inf", "infinity")
