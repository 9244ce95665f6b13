"""The paper's loss in verl: a policy loss in verl's own registry.

make .venv-verl/ready          # verl 0.9.1 in an environment of its own
export PYTHONPATH=conformance  # the checker, which is not installed there
.venv-verl/bin/python -m topr_conformance examples.topr_in_verl:loss  # prints "paper"
"""

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, register_policy_loss
from verl.workers.config import ActorConfig

from topr import TABLE_1, importance_weight, sequence_log_ratio

# p~ of Equation 12. Rewards less the mean of a prompt's, as in GRPO, make it 1/2.
EFFECTIVE_PROPORTION = 0.5


@register_policy_loss("topr")
def topr_policy_loss(  # noqa: PLR0913 - the arguments of verl
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ActorConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """All tensors are (B, T). The tokens of a sequence share an advantage, as in GRPO and RLOO.

    The loss is a mean over tokens, then over sequences, whatever `loss_agg_mode` is, as in verl's
    own sapo. `topr.topr_loss` divides by the completions of its batch. verl's `agg_loss` divides by
    those of all micro-batches and processes instead.
    """
    mask = response_mask > 0
    first = mask.int().argmax(1, keepdim=True)  # (B, 1) column of the first token
    reward = advantages.gather(1, first)  # (B, 1)
    if (mask & (advantages != reward)).any():
        fix = "set algorithm.adv_estimator=grpo"
        raise ValueError(f"topr: advantages differ within a sequence; {fix}")
    if rollout_is_weights is not None:
        message = "topr: the loss has its own weights"
        raise ValueError(f"{message}; set algorithm.rollout_correction.rollout_is=null")
    log_ratio = sequence_log_ratio(log_prob.detach(), old_log_prob, mask)[:, None]  # (B, 1)
    weight = importance_weight(log_ratio, *TABLE_1["topr"].bounds_for(reward))  # (B, 1)
    reward = 2 * reward * torch.where(reward < 0, 1 - EFFECTIVE_PROPORTION, EFFECTIVE_PROPORTION)
    token_loss = -weight * reward * torch.where(mask, log_prob, 0.0)  # (B, T)
    mean = "seq-mean-token-mean"
    value = agg_loss(token_loss, response_mask, mean, **config.global_batch_info)
    means = {"actor/topr_weight": weight.mean().item(), "actor/log_ratio": log_ratio.mean().item()}
    return value, means


def loss(token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """For topr-conformance: the registered loss, with a configuration of verl's workers."""
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    registered_loss = get_policy_loss_fn("topr")
    advantages = reward[:, None] * mask
    value, _ = registered_loss(token_logmu, token_logp, advantages, mask.bool(), config=actor)
    return value
