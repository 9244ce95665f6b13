"""The rows of Table 1: to which bounds the importance ratio is clipped, by the reward's sign."""

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


def _clip(ratio: Tensor, low: float, high: float) -> Tensor:
    if low == high:  # a constant has no gradient; that of clamp is 1 where the ratio is the bound
        return torch.full_like(ratio, low)
    return ratio.clamp(low, high)


# By the names of the verdicts
TABLE_1: dict[str, Limits] = {
    "paper": Limits(1, 1, 0, 1),  # TOPR's canonical choice
    "tis": Limits(0, 1, 0, 1),  # truncated importance sampling
    "plain is": Limits(0, math.inf, 0, math.inf),  # plain importance sampling
    "naive reinforce": Limits(1, 1, 1, 1),
    "sft": Limits(1, 1, 0, 0),  # supervised training on the positives
}
