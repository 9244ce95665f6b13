"""Losses of public trainers, each written from its formula, and their verdicts.

A loss takes logp, logmu (B, T), reward (B,) and mask (B, T).
"""

import torch
from loss_builders import total


# ---- means ---------------------------------------------------------------------------------------
def mean_of_tokens(values, mask):
    return (values * mask).sum() / mask.sum()


def mean_of_completions(values, mask):
    return (total(values, mask) / mask.sum(1)).mean()


def sum_of_completions(values, mask):
    return total(values, mask).mean()


# ---- PPO and its relatives -----------------------------------------------------------------------
def ppo_terms(log_ratio, advantage, low=0.2, high=0.2):
    """Minus the min() of PPO, in the shape of log_ratio."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def ppo_with(mean, low=0.2, high=0.2):
    def loss(logp, logmu, reward, mask):
        return mean(ppo_terms(logp - logmu, reward[:, None], low, high), mask)

    return loss


def dual_clip_ppo(logp, logmu, reward, mask):
    terms = ppo_terms(logp - logmu, reward[:, None])
    bounded = torch.minimum(terms, -3 * reward[:, None])
    return mean_of_tokens(torch.where(reward[:, None] < 0, bounded, terms), mask)


def dual_clip_ppo_with_guards(logp, logmu, reward, mask):
    """Where exp is kept from overflow there is no gradient, which makes no difference."""
    log_ratio = (logp - logmu).clamp(-20, 20)
    return dual_clip_ppo(log_ratio, torch.zeros_like(logp), reward, mask)


def grpo_with_delta(logp, logmu, reward, mask):
    """Two-sided clipping: the ratio of both terms is at most delta."""
    ratio = (logp - logmu).exp()
    advantage = reward[:, None]
    terms = torch.minimum(ratio.clamp(max=4) * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return mean_of_completions(-terms, mask)


def gspo(logp, logmu, reward, mask):
    log_ratio = total(logp - logmu, mask) / mask.sum(1)
    return ppo_terms(log_ratio, reward, 3e-4, 4e-4).mean()


def gspo_with_a_guard(logp, logmu, reward, mask):
    log_ratio = (total(logp - logmu, mask) / mask.sum(1)).clamp(max=10)
    return ppo_terms(log_ratio, reward).mean()


def gspo_of_tokens(logp, logmu, reward, mask):
    """The completion's ratio, with a gradient through each token, in a token mean."""
    of_completion = (total(logp - logmu, mask) / mask.sum(1)).detach()[:, None]
    return mean_of_tokens(ppo_terms(logp - logp.detach() + of_completion, reward[:, None]), mask)


def gmpo(logp, logmu, reward, mask):
    """Tokens are clipped, then the geometric mean is taken."""
    sign = reward.sign()[:, None]
    log_ratio = logp - logmu
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-0.2, 0.2))
    ratio = (total(clipped, mask) / mask.sum(1)).exp()
    return -(ratio * reward).mean()


def ppo_and_kl(logp, logmu, reward, mask):
    difference = logmu - logp
    kl = torch.expm1(difference) - difference
    terms = ppo_terms(logp - logmu, reward[:, None]) + 0.01 * kl
    return mean_of_tokens(terms, mask)


def whole_completion_ppo(logp, logmu, reward, mask):
    return (ppo_terms(total(logp - logmu, mask), reward) / mask.sum(1)).mean()


# ---- bounds of both signs, thresholds ------------------------------------------------------------
def cispo(logp, logmu, reward, mask):
    weight = (logp - logmu).exp().clamp(0.5, 1.28).detach()
    return mean_of_tokens(-weight * reward[:, None] * logp, mask)


def cispo_with_mask(logp, logmu, reward, mask):
    """Tokens at which PPO has no gradient have none."""
    ratio = (logp - logmu).exp()
    advantage = reward[:, None]
    is_outside = ((advantage > 0) & (ratio > 1.28)) | ((advantage < 0) & (ratio < 0.8))
    weight = torch.where(is_outside, 0.0, ratio).detach()
    return mean_of_tokens(-weight * advantage * logp, mask)


def icepop(logp, logmu, reward, mask):
    ratio = (logp - logmu).exp()
    weight = torch.where((ratio > 0.5) & (ratio < 5), ratio, 0.0).detach()
    return mean_of_tokens(-weight * reward[:, None] * logp, mask)


def completions_masked_by_kl(logp, logmu, reward, mask):
    """PPO, but negatives that the policy has left are dropped."""
    kl = total(logmu - logp, mask) / mask.sum(1)
    keeps = ((reward >= 0) | (kl < 0.6)).double()
    return mean_of_completions(ppo_terms(logp - logmu, reward[:, None]) * keeps[:, None], mask)


# ---- other functions of the ratio ----------------------------------------------------------------
def sapo_with(mean):
    def loss(logp, logmu, reward, mask):
        ratio = (logp - logmu).exp()
        temperature = torch.where(reward < 0, 1.05, 1.0)[:, None]
        gate = 4 / temperature * (temperature * (ratio - 1)).sigmoid()
        return mean(-gate * reward[:, None], mask)

    return loss


def vespo(logp, logmu, reward, mask):
    """The density of a gamma distribution at the ratio of the completion."""
    log_ratio = total(logp - logmu, mask)
    weight = (2 * log_ratio + 3 * (1 - log_ratio.exp())).exp().detach()
    return sum_of_completions(-(weight * reward)[:, None] * logp, mask)


# ---- other terms ---------------------------------------------------------------------------------
def kl_cov(logp, logmu, reward, mask):
    """A KL for the tokens of the highest covariance of advantage and log pi."""
    is_token = mask > 0
    advantage = reward[:, None].expand_as(logp)
    terms = -advantage * (logp - logmu).exp()
    centred = (advantage - advantage[is_token].mean()) * (logp - logp[is_token].mean())
    covariance = centred.detach().masked_fill(~is_token, -torch.inf)
    count = max(1, int(0.2 * is_token.sum()))
    chosen = covariance >= covariance.flatten().topk(count).values[-1]
    return mean_of_tokens(terms + chosen * (logp - logmu).abs(), mask)


def asymmetric_reinforce(logp, logmu, reward, mask):
    return -((reward - (reward.mean() - 0.1)) * total(logp, mask)).mean()


def paper_above_a_constant(logp, logmu, reward, mask):
    above = reward - 0.25
    weight = torch.where(above < 0, total(logp - logmu, mask).clamp(max=0).exp(), 1.0).detach()
    return -(weight * above * total(logp, mask) / mask.sum(1)).mean()


def privileged_topr(logp, logmu, reward, mask):
    """If a batch has both signs, all its completions enter both terms."""
    loss = torch.zeros(())
    if (reward > 0).any():
        loss = loss - (reward * total(logp, mask)).sum()
    if (reward <= 0).any():
        weight = (logp - logmu).exp().clamp(0.8, 1.2)
        loss = loss - (reward * total(weight * logp, mask)).sum()
    return loss


# ---- lengths -------------------------------------------------------------------------------------
def weight_and_mean(logp, logmu, reward, mask, divisor):
    weight = torch.where(reward < 0, total(logp - logmu, mask).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * total(logp, mask) / divisor).mean()


def least_length_of_16(logp, logmu, reward, mask):
    return weight_and_mean(logp, logmu, reward, mask, mask.sum(1).clamp(min=16))


def without_completions_above_1024(logp, logmu, reward, mask):
    is_short = mask.sum(1) <= 1024
    return weight_and_mean(logp, logmu, reward * is_short, mask, mask.sum(1))


def last_64_tokens(logp, logmu, reward, mask):
    remaining = mask.flip(1).cumsum(1).flip(1)  # tokens from here to the end
    kept = mask * (remaining <= 64)
    weight = torch.where(reward < 0, total(logp - logmu, mask).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * total(logp, kept) / mask.sum(1)).mean()


# ---- precision, guards ---------------------------------------------------------------------------
def floor_of_1e7(logp, logmu, reward, mask):
    weight = total(logp - logmu, mask).clamp(max=0).exp().clamp(min=1e-7)
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def in_float16(logp, logmu, reward, mask):
    columns = [column.half() for column in (logp, logmu, reward)]
    return weight_and_mean(*columns, mask.half(), mask.sum(1).half()).float()


PUBLIC = [  # (the verdict, the loss)
    ("per-token + ppo clip 0.8..1.2 + token mean", ppo_with(mean_of_tokens)),
    ("per-token + ppo clip 0.8..1.2", ppo_with(mean_of_completions)),
    ("per-token + ppo clip 0.8..1.28 + sequence sum", ppo_with(sum_of_completions, high=0.28)),
    ("per-token + ppo clip 0.8..1.2, dual clip 3 + token mean", dual_clip_ppo),
    ("per-token + ppo clip 0.8..1.2, dual clip 3 + token mean", dual_clip_ppo_with_guards),
    ("per-token + ppo clip 0.8..1.2, dual clip 4", grpo_with_delta),
    ("geometric mean + ppo clip 0.9997..1.0004", gspo),
    ("geometric mean + ppo clip 0.8..1.2", gspo_with_a_guard),
    ("geometric mean + ppo clip 0.8..1.2 + token mean", gspo_of_tokens),
    ("geometric mean of clipped tokens + ppo clip 0.81873..1.2214", gmpo),
    ("per-token + ppo clip 0.8..1.2 + token mean + extra term", ppo_and_kl),
    ("ppo clip 0.8..1.2", whole_completion_ppo),
    ("per-token + clip 0.5..1.28 on positives, 0.5..1.28 on negatives + token mean", cispo),
    ("per-token + ppo clip 0.8..1.28 + token mean", cispo_with_mask),
    ("per-token + plain is + weight 0 outside 0.5..5 + token mean", icepop),
    ("per-token + another function of the ratio + token mean", sapo_with(mean_of_tokens)),
    ("per-token + another function of the ratio", sapo_with(mean_of_completions)),
    ("another function of the ratio + sequence sum", vespo),
    (
        "naive reinforce + batch-mean baseline + sequence sum + constant baseline -0.1",
        asymmetric_reinforce,
    ),
    ("constant baseline 0.25", paper_above_a_constant),
    ("length at least 16", least_length_of_16),
    ("float16", in_float16),
]
PUBLIC_UNNAMED = [  # (the most informative vector, the key of its advice, the loss)
    ("V6", "surrogate", completions_masked_by_kl),
    ("V7", "extra term", kl_cov),
    ("V20", "counted twice", privileged_topr),
    ("V23", "left out", without_completions_above_1024),
    ("V5", "left out", last_64_tokens),
]
