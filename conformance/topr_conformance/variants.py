"""What circulates under the name of TOPR: the paper's loss, and the variants of it that public code contains.

Each is a `losses.Loss` that differs from `paper` in one or two lines; the rows of Table 1 are topr.py's own. They are
for comparison: to train, take `topr.topr_loss` or `topr.topr_loss_of_tokens`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from topr import PRESETS, topr_loss_of_tokens, topr_objective
from topr_conformance.losses import Loss, total


def paper(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Algorithm 1, Section 4.2: the sequence's ratio, [0, 1] for negatives; mean over tokens, then over sequences."""
    weight = total(logp - logmu, mask).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def objective(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Equation 11: another value than Algorithm 1, the same gradient."""
    return -(
        topr_objective(total(logp - logmu, mask), reward, PRESETS["topr"]) / mask.sum(1)
    ).mean()


def per_token(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Each token is weighted by its own ratio, which ignores how improbable the whole sequence has become."""
    weight = (logp - logmu).clamp(max=0).exp()
    weight = torch.where(reward[:, None] < 0, weight, 1.0).detach()
    return -(reward * total(weight * logp, mask) / mask.sum(1)).mean()


def per_token_and_token_mean(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Per-token ratios, and every token of the batch counts alike: the pair that most frameworks have."""
    weight = torch.where(reward[:, None] < 0, (logp - logmu).clamp(max=0).exp(), 1.0).detach()
    return -(reward * total(weight * logp, mask)).sum() / mask.sum()


def tapered(logp: Tensor, logmu: Tensor, mask: Tensor) -> Tensor:
    """The paper's weight of negatives, [pi/mu]_0^1 of the whole sequence, (B,)."""
    return total(logp - logmu, mask).clamp(max=0).exp()


def varied(
    weight: Callable[..., Tensor] = tapered,
    length: Callable[..., Tensor] = lambda mask: mask.sum(1),
) -> Loss:
    """The paper's loss but for the weight of negatives, a function like `tapered`, or the divisor, one of the mask."""

    def loss(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
        of_each = torch.where(reward < 0, weight(logp, logmu, mask), 1.0).detach()
        return -(of_each * reward * total(logp, mask) / length(mask)).mean()

    return loss


geometric_mean = varied(
    lambda logp, logmu, mask: (total(logp - logmu, mask) / mask.sum(1)).clamp(max=0).exp()
)
"""The log-ratio is divided by the length, so that weights stay near 1. The paper divides the loss."""

clipped = varied(lambda logp, logmu, mask: total(logp - logmu, mask).exp().clamp(0.8, 1.2))
"""Negatives clipped to PPO's [0.8, 1.2]: with a- = 0.8 the objective is unbounded (Proposition 3.2)."""

tempered = varied(lambda logp, logmu, mask: (0.5 * total(logp - logmu, mask)).clamp(max=0).exp())
"""The square root of the ratio: the weight of negatives falls half as fast."""


def frozen_weight() -> Loss:
    """A loss that keeps the weights of its first call, as code that computes them once, with the data, does."""
    kept: dict[str, Tensor] = {}
    return varied(lambda *inputs: kept.setdefault("first", tapered(*inputs).detach()))


def no_stop_gradient(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """The weight is differentiated too: below log pi = -1 it raises tapered negatives."""
    weight = torch.where(reward < 0, tapered(logp, logmu, mask), 1.0)
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def branch_by_raw_score(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """The batch's mean is subtracted, but the sign of the score before that chooses the bounds."""
    weight = torch.where(reward < 0, tapered(logp, logmu, mask), 1.0).detach()
    return -(weight * (reward - reward.mean()) * total(logp, mask) / mask.sum(1)).mean()


token_mean = varied(length=lambda mask: mask.sum() / len(mask))
"""Divided by the batch's number of tokens: a long sequence counts more than a short one."""

sequence_sum = varied(length=lambda mask: 1)
"""Not divided by the length at all."""


def unmasked(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Padding counts, in the ratio and in the loss."""
    return paper(logp, logmu, reward, torch.ones_like(mask))


TABLE_1 = {
    "tis": "tis",
    "plain is": "off_policy",
    "naive reinforce": "reinforce",
    "sft": "sft",
}  # rows, as named here
VARIANTS: dict[
    str, Callable[[], Loss]
] = {  # what `identify` says of it -> makes the loss, anew for each call
    "per-token": lambda: per_token,
    "per-token + token mean": lambda: per_token_and_token_mean,
    "geometric mean": lambda: geometric_mean,
    "clip 0.8..1.2": lambda: clipped,
    **{
        name: lambda row=row: partial(topr_loss_of_tokens, limits=PRESETS[row])
        for name, row in TABLE_1.items()
    },
    "tempered": lambda: tempered,
    "no stop-gradient": lambda: no_stop_gradient,
    "frozen weight": frozen_weight,
    "branch by raw score": lambda: branch_by_raw_score,
    "token mean": lambda: token_mean,
    "sequence sum": lambda: sequence_sum,
    "divided by the longest length + unmasked in the ratio + unmasked in the loss": lambda: (
        unmasked
    ),
}
