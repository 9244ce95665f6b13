"""Losses with a mistake that engineers made, or that public code contains, and their names."""

import torch
from loss_builders import (
    changed_reward,
    divisor,
    extra_term,
    in_bfloat16,
    surrogate,
    taking_padding_for_tokens,
    tapered,
    total,
    weight_of_negatives,
)

from topr_conformance import variants
from topr_conformance.variants import paper


# ---- the ratio and its bounds --------------------------------------------------------------------
@weight_of_negatives
def guards_at_20(logp, logmu, mask):
    """No mistake: a weight below e^-20 may be anything."""
    return total((logp - logmu).clamp(-20, 20), mask).clamp(-20, 0).exp()


@weight_of_negatives
def log_ratio_of_tokens_clipped_at_2(logp, logmu, mask):
    return total((logp - logmu).clamp(-2, 2), mask).clamp(max=0).exp()


@weight_of_negatives
def log_ratio_of_tokens_clipped_at_0(logp, logmu, mask):
    return total((logp - logmu).clamp(max=0), mask).exp()


@weight_of_negatives
def inverted_ratio(logp, logmu, mask):
    return tapered(logmu, logp, mask)


@weight_of_negatives
def sigmoid_of_log_ratio(logp, logmu, mask):
    return total(logp - logmu, mask).sigmoid()


@weight_of_negatives
def twice_sigmoid_of_log_ratio(logp, logmu, mask):
    return 2 * total(logp - logmu, mask).clamp(max=0).sigmoid()


@weight_of_negatives
def weight_dropped_below_half(logp, logmu, mask):
    weight = tapered(logp, logmu, mask)
    return weight * (weight > 0.5)


@weight_of_negatives
def weight_of_0_or_1(logp, logmu, mask):
    return (tapered(logp, logmu, mask) > 0.1).double()


@weight_of_negatives
def weight_at_least_a_tenth(logp, logmu, mask):
    return tapered(logp, logmu, mask).clamp(min=0.1)


@weight_of_negatives
def negatives_count_less(logp, logmu, mask):
    return 0.3 * tapered(logp, logmu, mask)


@weight_of_negatives
def weights_of_negatives_normalised(logp, logmu, mask):
    weight = tapered(logp, logmu, mask)
    return weight / weight.mean()


@weight_of_negatives
def ratio_of_probabilities(logp, logmu, mask):
    return (total(logp, mask).exp() / total(logmu, mask).exp()).clamp(max=1)


@weight_of_negatives
def explicit_probability_of_mu(logp, logmu, mask):
    return (total(logp, mask).exp() / (total(logmu, mask).exp() + 1e-12)).clamp(max=1)


@weight_of_negatives
def exp_before_clip(logp, logmu, mask):
    ratio = total(logp - logmu, mask).exp()
    return ratio - (ratio - 1).clamp(min=0)


@weight_of_negatives
def weights_0_1_percent_larger(logp, logmu, mask):
    return 1.001 * tapered(logp, logmu, mask)


def weights_normalised(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, tapered(logp, logmu, mask), 1.0).detach()
    return paper(logp, logmu, reward, mask) / weight.mean()


def signs_exchanged(logp, logmu, reward, mask):
    weight = torch.where(reward >= 0, tapered(logp, logmu, mask), 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


# ---- the gradient --------------------------------------------------------------------------------
@surrogate
def ratio_clipped_at_1_for_both_signs(ratio, logp, reward):
    return ratio.clamp(max=1).detach() * logp


@surrogate
def clipped_ratio_differentiated(ratio, logp, reward):
    return torch.where(reward < 0, ratio.clamp(max=1), logp)


@surrogate
def ppo_on_positives(ratio, logp, reward):
    return torch.where(reward < 0, ratio.detach() * logp, ratio.clamp(max=1.2))


@surrogate
def dual_clip(ratio, logp, reward):
    return torch.where(reward < 0, ratio.clamp(0.8, 3), ratio.clamp(max=1.2))


@surrogate
def sigmoid_differentiated(ratio, logp, reward):
    return torch.where(reward < 0, ratio / (1 + ratio) * logp, logp)


def gspo(logp, logmu, reward, mask):
    ratio = (total(logp - logmu, mask) / mask.sum(1)).exp()
    return -torch.minimum(ratio * reward, ratio.clamp(0.8, 1.2) * reward).mean()


def only_on_policy(logp, logmu, reward, mask):
    """Tokens whose probability has changed are dropped."""
    unchanged = torch.where(logp == logmu, logp, 0.0)
    return -(reward * total(unchanged, mask) / mask.sum(1)).mean()


def logmu_recomputed(logp, logmu, reward, mask):
    return paper(logp, logp.detach(), reward, mask)


def minus_missing(logp, logmu, reward, mask):
    return -paper(logp, logmu, reward, mask)


# ---- the reward ----------------------------------------------------------------------------------
@changed_reward
def reward_over_its_std(reward):
    return reward / reward.std()


@changed_reward
def grpo(reward):
    return (reward - reward.mean()) / reward.std()


@changed_reward
def grpo_with_clipped_advantages(reward):
    spread = 1e-6 + reward.std(0, False)
    return ((reward - reward.mean()) / spread).clamp(-1, 1)


@changed_reward
def reward_clipped_at_1(reward):
    return reward.clamp(-1, 1)


@changed_reward
def reward_clipped_at_5(reward):
    return reward.clamp(-5, 5)


@changed_reward
def sign_of_reward(reward):
    return (reward > 0) * 2.0 - 1


@changed_reward
def zero_rewards_are_negative(reward):
    return reward.where(reward != 0, -1)


def kl_in_the_reward(logp, logmu, reward, mask):
    log_ratio = total(logp - logmu, mask).detach()
    return paper(logp, logmu, reward - log_ratio, mask)


@extra_term
def entropy(logp, logmu):
    return logp


@extra_term
def k3_estimate_of_kl(logp, logmu):
    return torch.expm1(logmu - logp) - (logmu - logp)


# ---- the mean ------------------------------------------------------------------------------------
@divisor
def length_of_prompt_included(mask):
    return mask.sum(1) + 3


@divisor
def length_less_1(mask):
    return (mask.sum(1) - 1).clamp(min=1)


@divisor
def mean_length_less_1(mask):
    return mask.sum(1).mean() - 1


@divisor
def width_of_the_batch(mask):
    return mask.shape[1]


@divisor
def longest_length(mask):
    return mask.sum(1).max()


@divisor
def constant_of_dr_grpo(mask):
    return 1024


def mean_over_padding_too(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, tapered(logp, logmu, mask), 1.0).detach()
    return -((weight * reward)[:, None] * logp).mean()


def mean_over_non_zero_rewards(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask) / (reward != 0).double().mean()


def separate_means(logp, logmu, reward, mask):
    loss = 0.0
    for rows in (reward > 0, reward <= 0):
        if rows.any():
            loss = loss + paper(logp[rows], logmu[rows], reward[rows], mask[rows])
    return loss


def completions_of_5_tokens_count_twice(logp, logmu, reward, mask):
    return paper(logp, logmu, reward * (1 + (mask.sum(1) == 5)), mask)


# ---- the mask ------------------------------------------------------------------------------------
def first_token_cut(logp, logmu, reward, mask):
    return paper(logp[:, 1:], logmu[:, 1:], reward, mask[:, 1:])


def last_column_cut(logp, logmu, reward, mask):
    return paper(logp[:, :-1], logmu[:, :-1], reward, mask[:, :-1])


def mask_off_by_one(logp, logmu, reward, mask):
    return paper(logp[:, :-1], logmu[:, :-1], reward, mask[:, 1:])


def padding_assumed_on_the_right(logp, logmu, reward, mask):
    sorted_mask, _ = mask.sort(1, descending=True)
    return paper(logp, logmu, reward, sorted_mask)


@weight_of_negatives
def padding_in_the_ratio(logp, logmu, mask):
    return tapered(logp, logmu, torch.ones_like(mask))


@weight_of_negatives
def a_little_padding_in_the_ratio(logp, logmu, mask):
    padding = (logp * (1 - mask)).sum(1, keepdim=True)
    return tapered(logp + 1e-7 * padding, logmu, mask)


def a_little_padding_in_the_loss(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask) + 1e-3 * (logp * (1 - mask)).sum()


per_token_of_padding = taking_padding_for_tokens(variants.per_token)


# ---- log-probabilities ---------------------------------------------------------------------------
def logp_at_temperature_0_7(logp, logmu, reward, mask):
    return paper(logp / 0.7, logmu, reward, mask)


def logmu_at_temperature_0_7(logp, logmu, reward, mask):
    return paper(logp, logmu / 0.7, reward, mask)


@weight_of_negatives
def logmu_in_bfloat16(logp, logmu, mask):
    return tapered(logp, logmu.bfloat16().to(logp.dtype), mask)


@weight_of_negatives
def logp_of_ratio_in_bfloat16(logp, logmu, mask):
    return tapered(logp.bfloat16(), logmu, mask).float()


@in_bfloat16
def extra_term_in_bfloat16(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask) + 1e-4 * logp.sum()


UNMASKED = "unmasked in the ratio + unmasked in the loss"
NAMED_MISTAKES = [  # (the verdict, the loss)
    ("paper", guards_at_20),
    ("tis", ratio_clipped_at_1_for_both_signs),
    ("clip 0..1 on positives, 1..1 on negatives", signs_exchanged),
    ("clip 0.1..1", weight_at_least_a_tenth),
    ("negatives count 0.3 times", negatives_count_less),
    ("naive reinforce", logmu_recomputed),
    ("inverted ratio", inverted_ratio),
    ("normalised weights", weights_normalised),
    ("normalised weights", weights_of_negatives_normalised),
    ("normalised reward", reward_over_its_std),
    ("batch-mean baseline + normalised reward", grpo),
    ("clipped reward", reward_clipped_at_1),
    ("clipped reward", reward_clipped_at_5),
    ("zero rewards as negatives + clipped reward", sign_of_reward),
    ("zero rewards as negatives", zero_rewards_are_negative),
    ("extra term", entropy),
    ("extra term", k3_estimate_of_kl),
    ("length off by -1", length_less_1),
    ("divided by the longest length", width_of_the_batch),
    ("divided by the longest length", longest_length),
    ("sequence sum", constant_of_dr_grpo),
    ("divided by the longest length + unmasked in the loss", mean_over_padding_too),
    ("mean over non-zero rewards", mean_over_non_zero_rewards),
    ("separate means of positives and negatives", separate_means),
    ("token missing at the start", first_token_cut),
    ("token missing at the end", last_column_cut),
    ("token missing at the end", mask_off_by_one),
    ("unmasked in the ratio", padding_in_the_ratio),
    ("scaled log-probabilities (logp x 1.429)", logp_at_temperature_0_7),
    ("scaled log-probabilities (logmu x 1.429)", logmu_at_temperature_0_7),
    ("bfloat16", logmu_in_bfloat16),
    ("bfloat16", logp_of_ratio_in_bfloat16),
]
NAMED_MISTAKES += [
    ("clip 0..infinity + weight 0 outside 0..1 on negatives", clipped_ratio_differentiated),
    ("ppo clip 0..1.2", ppo_on_positives),
    ("another function of the ratio", sigmoid_of_log_ratio),
    ("another function of the ratio", twice_sigmoid_of_log_ratio),
    ("weight 0 outside 0.5..infinity on negatives", weight_dropped_below_half),
    ("naive reinforce + weight 0 outside 0.1..infinity on negatives", weight_of_0_or_1),
    ("geometric mean + ppo clip 0.8..1.2", gspo),
    ("ppo clip 0.8..1.2, dual clip 3", dual_clip),
    ("plain is + weight 0 outside 1..1", only_on_policy),
    ("wrong sign", minus_missing),
]
UNNAMED_MISTAKES = [  # (the most informative vector, the key of its advice, the loss)
    ("V2", "per-token", log_ratio_of_tokens_clipped_at_0),
    ("V5", "overflow", ratio_of_probabilities),
    ("V6", "weight", log_ratio_of_tokens_clipped_at_2),
    ("V7", "no stop-gradient", sigmoid_differentiated),
    ("V9", "length off by", length_of_prompt_included),
    ("V9", "length off by", mean_length_less_1),
    ("V10", "extra term", kl_in_the_reward),
    ("V11", "unmasked", padding_assumed_on_the_right),
    ("V20", "batch-mean baseline", grpo_with_clipped_advantages),
]
