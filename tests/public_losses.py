"""Losses of public trainers, each written from its formula, and their verdicts; two mistakes.

A loss takes logp, logmu (B, T), reward (B,) and mask (B, T).
"""

import torch

from topr_conformance import paper


def total(values, mask):
    """The sum over a completion's tokens, (B,)."""
    return torch.where(mask > 0, values, 0.0).sum(1)


def tapered(logp, logmu, mask):
    """The paper's weight of negatives, (B,)."""
    return total(logp - logmu, mask).clamp(max=0).exp()


def but(weight=tapered, change=lambda reward: reward, counts=lambda mask: mask, divisor=None):
    """The paper's loss, but for the weight of negatives, the reward, what counts, the divisor."""

    def loss(logp, logmu, reward, mask):
        reward = change(reward)
        of_each = torch.where(reward < 0, weight(logp, logmu, mask), 1.0).detach()
        length = mask.sum(1) if divisor is None else divisor(mask)
        return -(of_each * reward * total(logp, counts(mask)) / length).mean()

    return loss


def remaining(mask):
    """The number of tokens from each one to the end, (B, T)."""
    return mask.flip(1).cumsum(1).flip(1)


def without_the_end(logp, logmu, mask):
    return tapered(logp, logmu, mask * (remaining(mask) > 1))


def only_up_to_1024(mask):
    return mask.sum(1).where(mask.sum(1) <= 1024, torch.inf)


def mean_of_tokens(values, mask):
    return (values * mask).sum() / mask.sum()


def mean_of_completions(values, mask):
    return (total(values, mask) / mask.sum(1)).mean()


def sum_of_completions(values, mask):
    return total(values, mask).mean()


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


def cispo(logp, logmu, reward, mask):
    weight = (logp - logmu).exp().clamp(0.5, 1.28).detach()
    return mean_of_tokens(-weight * reward[:, None] * logp, mask)


def icepop(logp, logmu, reward, mask):
    ratio = (logp - logmu).exp()
    weight = torch.where((ratio > 0.5) & (ratio < 5), ratio, 0.0).detach()
    return mean_of_tokens(-weight * reward[:, None] * logp, mask)


def completions_masked_by_kl(logp, logmu, reward, mask):
    """PPO, but negatives that the policy has left are dropped."""
    kl = total(logmu - logp, mask) / mask.sum(1)
    keeps = ((reward >= 0) | (kl < 0.6)).double()
    return mean_of_completions(ppo_terms(logp - logmu, reward[:, None]) * keeps[:, None], mask)


def up(logp, logmu, reward, mask):
    """Positives have weight 1, negatives are clipped as in PPO."""
    advantage = reward[:, None]
    terms = torch.where(advantage < 0, ppo_terms(logp - logmu, advantage), -advantage * logp)
    return mean_of_tokens(terms, mask)


def dppo(logp, logmu, reward, mask):
    """Tokens whose probability has moved far are dropped."""
    moved = (logp.exp() - logmu.exp()) * reward.sign()[:, None]
    weight = torch.where(moved > 0.2, 0.0, (logp - logmu).exp()).detach()
    return mean_of_tokens(-weight * reward[:, None] * logp, mask)


def grpo_in_the_loss(logp, logmu, reward, mask):
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    return mean_of_tokens(ppo_terms(logp - logmu, advantage[:, None]), mask)


def token_topr(logp, log_ratio, reward, scale=1.0):
    weight = torch.where(reward[:, None] < 0, scale * log_ratio.exp().clamp(max=1), 1.0)
    return -weight.detach() * reward[:, None] * logp


def trinity(logp, logmu, reward, mask):
    return mean_of_tokens(token_topr(logp, logp - logmu, reward), mask)


def trinity_with_seq_mean_token_mean(logp, logmu, reward, mask):
    return mean_of_completions(token_topr(logp, logp - logmu, reward), mask)


def roll(logp, logmu, reward, mask):
    return mean_of_completions(token_topr(logp, logp - logmu, reward, scale=0.5), mask)


def roll_whitened(logp, logmu, reward, mask):
    ratio = (token_topr(logp, logp - logmu, reward) / reward[:, None]).nan_to_num()
    return mean_of_completions(ratio * (reward - reward.mean())[:, None] / reward.std(), mask)


def roll_of_segments(logp, logmu, reward, mask):
    """In a completion of one turn: each turn has its own geometric mean."""
    log_ratio = (total(logp - logmu, mask) / mask.sum(1))[:, None]
    advantage = reward - reward.mean()
    term = token_topr(logp, log_ratio, reward) * (advantage / reward)[:, None]
    return mean_of_completions(term, mask)


def roll_of_2025(logp, logmu, reward, mask):
    """mu(y) is a factor; the reward of negatives is not, so that they are raised."""
    weight = torch.where(reward > 0, reward, tapered(logp, logmu, mask)).detach()
    values = -total(logmu, mask).exp() * weight * total(logp, mask)
    loss = 0.0
    for rows in (reward > 0, reward <= 0):
        loss = loss + (values * rows).sum() / rows.sum().clamp(min=1)
    return loss


def privileged_topr(logp, logmu, reward, mask):
    """If a batch has both signs, all its completions enter both terms."""
    loss = torch.zeros(())
    if (reward > 0).any():
        loss = loss - (reward * total(logp, mask)).sum()
    if (reward <= 0).any():
        weight = (logp - logmu).exp().clamp(0.8, 1.2)
        loss = loss - (reward * total(weight * logp, mask)).sum()
    return loss


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


def products_of_prefixes(logp, logmu, reward, mask):
    log_ratio = ((logp - logmu) * mask).cumsum(1)
    return mean_of_completions(token_topr(logp, log_ratio, reward), mask)


def products_of_suffixes(logp, logmu, reward, mask):
    log_ratio = ((logp - logmu) * mask).flip(1).cumsum(1).flip(1)
    return mean_of_completions(token_topr(logp, log_ratio, reward), mask)


def in_float16(logp, logmu, reward, mask):
    columns = [column.half() for column in (logp, logmu, reward, mask)]
    return but()(*columns).float()


NOT = "not the paper's"
PUBLIC = [  # (the verdict, the loss)
    ("per-token + ppo clip 0.8..1.2 + token mean", ppo_with(mean_of_tokens)),
    ("per-token + ppo clip 0.8..1.2", ppo_with(mean_of_completions)),
    ("per-token + ppo clip 0.8..1.28 + sequence sum", ppo_with(sum_of_completions, high=0.28)),
    ("per-token + ppo clip 0.8..1.2, dual clip 3 + token mean", dual_clip_ppo),
    ("per-token + ppo clip 0.8..1.2, dual clip 4", grpo_with_delta),
    ("geometric mean + ppo clip 0.9997..1.0004", gspo),
    ("geometric mean + ppo clip 0.8..1.2", gspo_with_a_guard),
    ("geometric mean + ppo clip 0.8..1.2 + token mean", gspo_of_tokens),
    (NOT, gmpo),
    ("per-token + ppo clip 0.8..1.2 + token mean + extra term", ppo_and_kl),
    ("ppo clip 0.8..1.2", whole_completion_ppo),
    ("per-token + clip 0.5..1.28 on positives, 0.5..1.28 on negatives + token mean", cispo),
    ("per-token + plain is + weight 0 outside 0.5..5 + token mean", icepop),
    (NOT, completions_masked_by_kl),
    ("per-token + clip 0..infinity + weight 0 outside 0.8..infinity on negatives + token mean", up),
    (NOT, dppo),
    (
        "per-token + ppo clip 0.8..1.2 + batch-mean baseline + normalised reward + token mean",
        grpo_in_the_loss,
    ),
    ("per-token + token mean", trinity),
    ("per-token", trinity_with_seq_mean_token_mean),
    ("per-token + negatives count 0.5 times", roll),
    ("per-token + branch by raw score + normalised reward", roll_whitened),
    ("geometric mean + branch by raw score", roll_of_segments),
    (NOT, roll_of_2025),
    (NOT, privileged_topr),
    (NOT, sapo_with(mean_of_tokens)),
    (NOT, sapo_with(mean_of_completions)),
    (NOT, vespo),
    (NOT, kl_cov),
    ("naive reinforce + batch-mean baseline + sequence sum + extra term", asymmetric_reinforce),
    (NOT, but(change=lambda reward: reward - 0.25)),
    (
        "divided by the length and the batch's tokens",  # a mean over completions, over tokens
        but(divisor=lambda mask: mask.sum(1) * mask.sum()),
    ),
    (NOT, but(divisor=lambda mask: mask.sum(1).clamp(min=16))),
    (NOT, but(divisor=only_up_to_1024)),
    (NOT, but(counts=lambda mask: mask * (remaining(mask) <= 64))),
    (NOT, but(without_the_end)),
    (NOT, products_of_prefixes),
    (NOT, products_of_suffixes),
    ("clip 1e-07..1", but(lambda *inputs: tapered(*inputs).clamp(min=1e-7))),
    (NOT, in_float16),
]


# ---- mistakes that two files of tests use --------------------------------------------------------
def with_tool_output(logp, logmu, mask):
    """All from a completion's first token to its last."""
    return tapered(logp, logmu, (mask.cumsum(1) > 0) & (remaining(mask) > 0))


def times_mask(logp, logmu, mask):
    return ((logp - logmu) * mask).sum(1).clamp(max=0).exp()


def separate_means(logp, logmu, reward, mask):
    loss = 0.0
    for rows in (reward > 0, reward <= 0):
        if rows.any():
            loss = loss + paper(logp[rows], logmu[rows], reward[rows], mask[rows])
    return loss


class FrozenWeight:
    """The weights of the first call are kept."""

    weight = None

    def __call__(self, logp, logmu, reward, mask):
        if self.weight is None:
            self.weight = tapered(logp, logmu, mask).detach()
        return -(torch.where(reward < 0, self.weight, 1.0) * reward * total(logp, mask)).mean()
