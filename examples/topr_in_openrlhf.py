"""The paper's loss in OpenRLHF, which has no registry: a subclass of its PolicyLoss.

In openrlhf/trainer/ray/ppo_actor.py import it in place of PolicyLoss. Written for OpenRLHF 0.11.2.
"""

from collections.abc import Callable

import torch
from openrlhf.models.loss import PolicyLoss, aggregate_loss
from torch import Tensor

from topr import TABLE_1, importance_weight, sequence_log_ratio


class ToprPolicyLoss(PolicyLoss):
    """All tensors are (B, T). The tokens of a sequence share an advantage.

    Rewards less the mean of a prompt's, as with rloo, have an effective proportion of 1/2.
    """

    effective_proportion = 0.5  # p~ of Equation 12; a subclass can set another

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
        """The loss, the share of weights below 1, and the mean of log mu - log pi of sequences.

        `topr.topr_loss` divides by the completions of its batch. OpenRLHF's `aggregate_loss`
        divides by those of all micro-batches and processes instead.
        """
        mask = action_mask > 0
        first = mask.int().argmax(1, keepdim=True)  # (B, 1) column of the first token
        reward = advantages.gather(1, first)  # (B, 1)
        if (mask & (advantages != reward)).any():
            fix = "set --algo.kl.init_coef 0 and another advantage estimator"
            raise ValueError(f"topr: advantages differ within a sequence; {fix}")
        log_ratio = sequence_log_ratio(log_probs.detach(), old_log_probs, mask)[:, None]  # (B, 1)
        weight = importance_weight(log_ratio, *TABLE_1["topr"].bounds_for(reward))  # (B, 1)
        p_tilde = self.effective_proportion
        reward = 2 * reward * torch.where(reward < 0, 1 - p_tilde, p_tilde)
        token_loss = -weight * reward * torch.where(mask, log_probs, 0.0)  # (B, T)
        sizes = (dp_size, batch_num_tokens, global_batch_size)
        value = aggregate_loss(token_loss, action_mask, False, *sizes)
        return value, (weight < 1).float().mean(), -log_ratio.mean(), None, None


def loss_of(policy_loss: ToprPolicyLoss) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """For topr-conformance: called as OpenRLHF's ActorPPOTrainer calls its PolicyLoss."""

    def loss(token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
        return policy_loss(token_logp, token_logmu, reward[:, None] * mask, action_mask=mask)[0]

    return loss


loss = loss_of(ToprPolicyLoss())
