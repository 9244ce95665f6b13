"""The paper's loss, and what public code computes under the name of TOPR.

Each function differs from `paper` in one or two lines. All take what topr.py's loss takes:

    token_logp, token_logmu  (B, T) log pi and log mu of each token
    reward                   (B,) after the baseline
    mask                     (B, T) 1.0 on the completion's tokens, 0.0 elsewhere
    denominator              number of completions in the optimizer step (default B)

and return a scalar to be minimised. They are for comparison: to train, use topr.py's loss.
"""

import torch
from torch import Tensor

from topr_conformance.losses import Loss, sum_over_tokens

# ---- the paper's loss, in two forms --------------------------------------------------------------


def paper(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Algorithm 1, Section 4.2: the ratio of the whole completion, at most 1, on negatives.

    >>> token_logp = torch.tensor([[-2.0, -2.0]])
    >>> token_logmu = torch.tensor([[-1.5, -1.5]])
    >>> paper(token_logp, token_logmu, torch.tensor([-1.0]), torch.ones(1, 2))  # -2 e^-1
    tensor(-0.7358)
    """
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
    weight = weight_by_sign(log_ratio.clamp(max=0).exp(), reward)
    loss = -weight * reward * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


def weight_by_sign(weight_of_negatives: Tensor, reward: Tensor) -> Tensor:
    """1 where reward >= 0, the other weight elsewhere; without a gradient."""
    return torch.where(reward < 0, weight_of_negatives, 1.0).detach()


def mean(loss: Tensor, denominator: float | None) -> Tensor:
    """The sum of the losses of B completions, (B,), over B or over another denominator."""
    if denominator is None:
        denominator = len(loss)
    return loss.sum() / denominator


def objective(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Minus Equation 11: another value than Algorithm 1's, the same gradient."""
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
    clipped = log_ratio.clamp(max=0)
    # The taper rho of Section 3.1: the ratio within the bounds, linear in its logarithm outside.
    of_negatives = clipped.exp() * (1 + log_ratio - clipped)
    of_positives = 1 + log_ratio  # both bounds are 1
    taper = torch.where(reward < 0, of_negatives, of_positives)
    return mean(-taper * reward / mask.sum(1), denominator)


# ---- another unit of the ratio -------------------------------------------------------------------


def per_token(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Each token has its own ratio, which ignores how improbable the completion has become."""
    token_log_ratio = token_logp - token_logmu
    token_weight = weight_by_sign(token_log_ratio.clamp(max=0).exp(), reward[:, None])
    loss = -reward * sum_over_tokens(token_weight * token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


def per_token_and_token_mean(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Ratios of tokens, and all tokens of the batch count alike, as in most frameworks."""
    token_log_ratio = token_logp - token_logmu
    token_weight = weight_by_sign(token_log_ratio.clamp(max=0).exp(), reward[:, None])
    mean_length = mask.sum() / len(mask)
    loss = -reward * sum_over_tokens(token_weight * token_logp, mask) / mean_length
    return mean(loss, denominator)


def geometric_mean(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """The log-ratio, too, is divided by the length, so weights stay near 1."""
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask) / mask.sum(1)
    weight = weight_by_sign(log_ratio.clamp(max=0).exp(), reward)
    loss = -weight * reward * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


# ---- another function of the ratio ---------------------------------------------------------------


def clipped(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """PPO's [0.8, 1.2] on negatives: with a- = 0.8 nothing bounds the objective (Prop. 3.2)."""
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
    weight = weight_by_sign(log_ratio.exp().clamp(0.8, 1.2), reward)
    loss = -weight * reward * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


def tempered(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """The square root of the ratio: the logarithm of the weight falls half as fast."""
    log_ratio = 0.5 * sum_over_tokens(token_logp - token_logmu, mask)
    weight = weight_by_sign(log_ratio.clamp(max=0).exp(), reward)
    loss = -weight * reward * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


# ---- the other rows of Table 1 -------------------------------------------------------------------


def tis(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Truncated importance sampling: the ratio of positives, too, is at most 1."""
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
    weight = log_ratio.clamp(max=0).exp().detach()
    loss = -weight * reward * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


def plain_is(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Plain importance sampling: the ratio of both signs, without bounds."""
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
    weight = log_ratio.exp().detach()
    loss = -weight * reward * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


def naive_reinforce(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """No ratio, as if the model itself had sampled the completions."""
    loss = -reward * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


def sft(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Supervised training on the positives: negatives have weight 0, but count in the mean."""
    loss = -reward.clamp(min=0) * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


# ---- another gradient, another baseline ----------------------------------------------------------


def no_stop_gradient(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """The weight is differentiated too: below log pi = -1 this raises tapered negatives."""
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
    weight = torch.where(reward < 0, log_ratio.clamp(max=0).exp(), 1.0)
    loss = -weight * reward * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


def branch_by_raw_score(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """The loss subtracts the batch's mean, but the sign before that chooses the bounds."""
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
    weight = weight_by_sign(log_ratio.clamp(max=0).exp(), reward)
    shifted = reward - reward.mean()
    loss = -weight * shifted * sum_over_tokens(token_logp, mask) / mask.sum(1)
    return mean(loss, denominator)


class FrozenWeight:
    """All later calls use the weights of the first, as in code that stores them with the data.

    A class, and not in VARIANTS, because it has a state: each use needs a new one.
    """

    def __init__(self) -> None:
        self._weight_of_negatives: Tensor | None = None

    def __call__(
        self,
        token_logp: Tensor,
        token_logmu: Tensor,
        reward: Tensor,
        mask: Tensor,
        denominator: float | None = None,
    ) -> Tensor:
        """The loss; all calls must be of the same B completions."""
        if self._weight_of_negatives is None:
            log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
            self._weight_of_negatives = log_ratio.clamp(max=0).exp().detach()
        weight = weight_by_sign(self._weight_of_negatives, reward)
        loss = -weight * reward * sum_over_tokens(token_logp, mask) / mask.sum(1)
        return mean(loss, denominator)


# ---- another mean, another mask ------------------------------------------------------------------


def token_mean(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Divided by the mean length of the batch: a long completion counts more than a short one."""
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
    weight = weight_by_sign(log_ratio.clamp(max=0).exp(), reward)
    loss = -weight * reward * sum_over_tokens(token_logp, mask) / mask.sum(1).mean()
    return mean(loss, denominator)


def sequence_sum(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Not divided by the length at all."""
    log_ratio = sum_over_tokens(token_logp - token_logmu, mask)
    weight = weight_by_sign(log_ratio.clamp(max=0).exp(), reward)
    loss = -weight * reward * sum_over_tokens(token_logp, mask)
    return mean(loss, denominator)


def unmasked(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    denominator: float | None = None,
) -> Tensor:
    """Padding counts, in the ratio, in the loss and in the length."""
    return paper(token_logp, token_logmu, reward, torch.ones_like(mask), denominator)


# What `identify` says of a loss -> the loss
VARIANTS: dict[str, Loss] = {
    "per-token": per_token,
    "per-token + token mean": per_token_and_token_mean,
    "geometric mean": geometric_mean,
    "clip 0.8..1.2": clipped,
    "tis": tis,
    "plain is": plain_is,
    "naive reinforce": naive_reinforce,
    "sft": sft,
    "tempered": tempered,
    "no stop-gradient": no_stop_gradient,
    "branch by raw score": branch_by_raw_score,
    "token mean": token_mean,
    "sequence sum": sequence_sum,
    "divided by the longest length + unmasked in the ratio + unmasked in the loss": unmasked,
}
