"""A hypothesis about a loss: its independent properties, and a loss that has them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from topr_conformance.limits import TABLE_1, Limits
from topr_conformance.losses import Loss, LossInputs, sum_over_tokens

Unit = Literal["whole sequence", "per-token", "geometric mean"]
Baseline = Literal["none", "batch-mean baseline", "branch by raw score"]
Aggregation = Literal[
    "sequence mean",
    "token mean",
    "sequence sum",
    "divided by the longest length",
    "length off by +1",
]


@dataclass(frozen=True)
class Hypothesis:
    """A loss, described by its independent properties; the defaults are the paper's."""

    limits: Limits = TABLE_1["paper"]
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
        if self.limits != paper.limits:
            names.append(_name_of_limits(self.limits))
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
        """The weights, (B, 1) or per token (B, T); kept: the inputs, with those that are frozen."""
        log_ratio = kept.token_logp - inputs.token_logmu
        if self.unit != "per-token":
            log_ratio = sum_over_tokens(log_ratio, kept.mask)[:, None]  # (B, 1)
        if self.unit == "geometric mean":
            log_ratio = log_ratio / kept.mask.sum(1, keepdim=True)
        if "reward" in self.frozen or self.baseline == "branch by raw score":
            sign = kept.reward[:, None]
        else:
            sign = self.shifted(inputs.reward)[:, None]
        weight = self.limits.weight(self.power * log_ratio, sign)
        return weight.detach() if self.stops_gradient else weight

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


def _name_of_limits(limits: Limits) -> str:
    for name, row in TABLE_1.items():
        if limits == row:
            return name
    negative = f"{limits.a_neg:.6g}..{limits.b_neg:.6g}"
    if limits.a_pos == limits.b_pos == 1:  # as in the paper
        name = f"clip {negative}"
    else:
        positive = f"{limits.a_pos:.6g}..{limits.b_pos:.6g}"
        name = f"clip {positive} on positives, {negative} on negatives"
    return name.replace("inf", "infinity")
