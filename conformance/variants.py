"""What circulates under the name of TOPR: the paper's loss, and the variants of it that public code contains.

Every loss takes logp, logmu (B, T), which here are per token as in the code they stand for, reward (B,) after the
baseline, and mask (B, T), 1.0 on the completion's tokens and 0.0 elsewhere. It returns a scalar. Each loss is written
out, so that it differs from `paper` in one or two lines. They are for comparison: to train, take `topr.topr_loss` or
`topr.topr_loss_of_tokens`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from conformance.gradient import Loss, total


def paper(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Algorithm 1, Section 4.2: the sequence's ratio, [0, 1] for negatives; mean over tokens, then over sequences."""
    weight = total(logp - logmu, mask).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def objective(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Equation 11: another value than Algorithm 1, the same gradient."""
    log_ratio = total(logp - logmu, mask)
    taper = torch.where(log_ratio > 0, 1 + log_ratio, log_ratio.clamp(max=0).exp())
    taper = torch.where(reward < 0, taper, 1 + log_ratio)
    return -(taper * reward / mask.sum(1)).mean()


def per_token(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Each token is weighted by its own ratio, which ignores how improbable the whole sequence has become."""
    weight = (logp - logmu).clamp(max=0).exp()
    weight = torch.where(reward[:, None] < 0, weight, 1.0).detach()
    return -(reward * total(weight * logp, mask) / mask.sum(1)).mean()


def per_token_and_token_mean(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Per-token ratios, and every token of the batch counts alike: the pair that most frameworks have."""
    weight = (logp - logmu).clamp(max=0).exp()
    weight = torch.where(reward[:, None] < 0, weight, 1.0).detach()
    return -(reward * total(weight * logp, mask)).sum() / mask.sum()


def geometric_mean(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """The log-ratio is divided by the length, so that weights stay near 1. The paper divides the loss."""
    weight = (total(logp - logmu, mask) / mask.sum(1)).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def clipped(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Negatives clipped to PPO's [0.8, 1.2]: with a- = 0.8 the objective is unbounded (Proposition 3.2)."""
    weight = total(logp - logmu, mask).exp().clamp(0.8, 1.2)
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def tis(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Truncated importance sampling (Table 1): improbable positives lose their weight too, and are not learnt again."""
    weight = total(logp - logmu, mask).clamp(max=0).exp().detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def plain_is(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Off-policy REINFORCE (Table 1): unbounded weights."""
    weight = total(logp - logmu, mask).exp().detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def naive_reinforce(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE on off-policy data as if it were on-policy (Table 1): it keeps lowering improbable negatives."""
    return -(reward * total(logp, mask) / mask.sum(1)).mean()


def sft(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Supervised training on the positives (Table 1): negatives are not used."""
    return -(reward.clamp(min=0) * total(logp, mask) / mask.sum(1)).mean()


def tempered(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """The square root of the ratio: the weight of negatives falls half as fast."""
    weight = (0.5 * total(logp - logmu, mask)).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def no_stop_gradient(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """The weight is differentiated too: below log pi = -1 it raises tapered negatives."""
    weight = total(logp - logmu, mask).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0)
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def branch_by_raw_score(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """The batch's mean is subtracted, but the sign of the score before that chooses the bounds."""
    weight = total(logp - logmu, mask).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * (reward - reward.mean()) * total(logp, mask) / mask.sum(1)).mean()


def token_mean(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Divided by the batch's number of tokens: a long sequence counts more than a short one."""
    weight = total(logp - logmu, mask).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * total(logp, mask)).sum() / mask.sum()


def sequence_sum(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Not divided by the length at all."""
    weight = total(logp - logmu, mask).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * total(logp, mask)).mean()


def unmasked(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """Padding counts, in the ratio and in the loss."""
    weight = (logp - logmu).sum(1).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * logp.mean(1)).mean()


def frozen_weight() -> Loss:
    """A loss that keeps the weights of its first call, as code that computes them once, with the data, does."""
    kept: list[Tensor] = []

    def loss(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
        if not kept:
            kept.append(torch.where(reward < 0, total(logp - logmu, mask).clamp(max=0).exp(), 1.0).detach())
        return -(kept[0] * reward * total(logp, mask) / mask.sum(1)).mean()

    return loss


VARIANTS: dict[str, Callable[[], Loss]] = {  # what `identify` says of it -> makes the loss, anew for each call
    "per-token": lambda: per_token,
    "per-token + token mean": lambda: per_token_and_token_mean,
    "geometric mean": lambda: geometric_mean,
    "clip 0.8..1.2": lambda: clipped,
    "tis": lambda: tis,
    "plain is": lambda: plain_is,
    "naive reinforce": lambda: naive_reinforce,
    "sft": lambda: sft,
    "tempered": lambda: tempered,
    "no stop-gradient": lambda: no_stop_gradient,
    "frozen weight": frozen_weight,
    "branch by raw score": lambda: branch_by_raw_score,
    "token mean": lambda: token_mean,
    "sequence sum": lambda: sequence_sum,
    "unmasked": lambda: unmasked,
}
