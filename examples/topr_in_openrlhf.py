"""The paper's loss in OpenRLHF, which has no registry: a subclass of its PolicyLoss, to be put in the place of that.

In openrlhf/trainer/ray/ppo_actor.py import it instead of PolicyLoss. Written for OpenRLHF 0.11.2.
"""

import torch
from openrlhf.models.loss import PolicyLoss, aggregate_loss
from torch import Tensor

from topr import PRESETS, importance_weight


class ToprPolicyLoss(PolicyLoss):
    """All tensors (B, T); a sequence's advantage is that of each of its tokens: set --algo.kl.init_coef 0."""

    def forward(  # noqa: PLR0913 - the arguments of OpenRLHF
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: Tensor | None = None,
        global_batch_size: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """The loss, the share of sequences with a weight below 1, and the mean of log mu - log pi per sequence."""
        mask = action_mask > 0
        reward = advantages.gather(
            1, mask.int().argmax(1, keepdim=True)
        )  # (B, 1) that of the first token
        if (mask & (advantages != reward)).any():
            mend = "set --algo.kl.init_coef 0 and another estimator"
            raise ValueError(f"topr: advantages differ within a sequence; {mend}")
        log_ratio = torch.where(mask, log_probs - old_log_probs, 0.0).sum(1, keepdim=True).detach()
        weight = importance_weight(log_ratio, *PRESETS["topr"].of_sign(reward))  # (B, 1)
        token_loss = -weight * reward * torch.where(mask, log_probs, 0.0)
        value = aggregate_loss(
            token_loss, action_mask, False, dp_size, batch_num_tokens, global_batch_size
        )
        return value, (weight < 1).float().mean(), -log_ratio.mean(), None, None


def loss(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """For topr-conformance: called as OpenRLHF's ActorPPOTrainer calls its PolicyLoss."""
    return ToprPolicyLoss()(
        logp, logmu, reward[:, None] * mask, action_mask=mask, rollout_log_probs=None
    )[0]
