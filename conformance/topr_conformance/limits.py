"""The rows of Table 1: the bounds of the importance ratio, by the reward's sign."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Limits(NamedTuple):
    """Clip the ratio to [a_pos, b_pos] if reward >= 0, and to [a_neg, b_neg] otherwise (Eq. 7)."""

    a_pos: float
    b_pos: float
    a_neg: float
    b_neg: float

    def weight(self, log_ratio: Tensor, reward: Tensor) -> Tensor:
        """[exp(log_ratio)]_a^b, with the bounds of each reward's sign, differentiable.

        log_ratio: (B, T) of tokens, or (B, 1) of completions; reward: (B, 1). Returns log_ratio's
        shape. Not topr.py's own lines: the checker shares no code with what it checks.

        >>> TABLE_1["paper"].weight(torch.tensor([[-2.0], [-2.0]]), torch.tensor([[1.0], [-1.0]]))
        tensor([[1.0000],
                [0.1353]])
        """
        ratio = log_ratio.exp()
        of_positives = _clip(ratio, self.a_pos, self.b_pos)
        of_negatives = _clip(ratio, self.a_neg, self.b_neg)
        return torch.where(reward >= 0, of_positives, of_negatives)

    def contain(self, log_ratio: Tensor, reward: Tensor) -> Tensor:
        """Whether exp(log_ratio) is within the bounds of each reward's sign; shapes as above."""
        ratio = log_ratio.exp()
        of_positives = (self.a_pos <= ratio) & (ratio <= self.b_pos)
        of_negatives = (self.a_neg <= ratio) & (ratio <= self.b_neg)
        return torch.where(reward >= 0, of_positives, of_negatives)

    def clamp_log(self, log_ratio: Tensor, reward: Tensor) -> Tensor:
        """log_ratio, clipped to the logarithms of the bounds of each reward's sign."""
        logs = [math.log(bound) if bound else -math.inf for bound in self]
        of_positives = log_ratio.clamp(logs[0], logs[1])
        of_negatives = log_ratio.clamp(logs[2], logs[3])
        return torch.where(reward >= 0, of_positives, of_negatives)


def _clip(ratio: Tensor, low: float, high: float) -> Tensor:
    if low == high:  # a constant has no gradient; that of clamp is 1 where the ratio is the bound
        return torch.full_like(ratio, low)
    return ratio.clamp(low, high)


HIGHEST_GUARD = 3e-9  # a weight of at most e^-20 comes from a guard of exp, and is no bound
LOWEST_GUARD = 2.2e4  # so does a ratio of at least e^10
EVERYTHING = Limits(0, math.inf, 0, math.inf)
# By the names of the verdicts
TABLE_1: dict[str, Limits] = {
    "paper": Limits(1, 1, 0, 1),  # TOPR's canonical choice
    "tis": Limits(0, 1, 0, 1),  # truncated importance sampling
    "plain is": EVERYTHING,  # plain importance sampling
    "naive reinforce": Limits(1, 1, 1, 1),
    "sft": Limits(1, 1, 0, 0),  # supervised training on the positives
}
