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

from topr import PRESETS, importance_weight


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
    """All tensors (B, T); a sequence's advantage is that of each of its tokens, as GRPO's and RLOO's are in verl."""
    mask = response_mask > 0
    reward = advantages.gather(
        1, mask.int().argmax(1, keepdim=True)
    )  # (B, 1) that of the first token
    if (mask & (advantages != reward)).any():
        raise ValueError(
            "topr: advantages differ within a sequence; set algorithm.adv_estimator=grpo"
        )
    if loss_agg_mode != "seq-mean-token-mean" or rollout_is_weights is not None:
        mend = "actor.loss_agg_mode=seq-mean-token-mean and algorithm.rollout_correction.rollout_is=null"
        raise ValueError(f"topr: set {mend}")
    log_ratio = (
        torch.where(mask, log_prob - old_log_prob, 0.0).sum(1, keepdim=True).detach()
    )  # of whole sequences
    weight = importance_weight(log_ratio, *PRESETS["topr"].of_sign(reward))  # (B, 1)
    token_loss = -weight * reward * torch.where(mask, log_prob, 0.0)
    value = agg_loss(token_loss, response_mask, loss_agg_mode, **config.global_batch_info)
    return value, {
        "actor/topr_weight": weight.mean().item(),
        "actor/log_ratio": log_ratio.mean().item(),
    }


def loss(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """For topr-conformance: the registered loss, with a configuration of verl's workers."""
    actor = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    return get_policy_loss_fn("topr")(
        logmu, logp, reward[:, None] * mask, mask.bool(), config=actor
    )[0]
