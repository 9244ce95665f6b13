"""The paper's loss in TRL's GRPO trainer: a mixin that overrides the loss and nothing else.

make .venv-trl/ready           # TRL 1.16.0 in an environment of its own
export PYTHONPATH=conformance  # the checker, which is not installed there
.venv-trl/bin/python -m topr_conformance examples.topr_in_trl:loss  # prints "paper"
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from topr import TABLE_1, importance_weight, sequence_log_ratio, topr_loss


class ToprLoss:
    """Put it before GRPOTrainer: `class ToprTrainer(ToprLoss, GRPOTrainer)`.

    The reward is TRL's advantage: with scale_rewards="none" that is the reward less its mean over
    the prompt's completions, which gives an effective proportion of 1/2. TRL keeps log mu unless
    steps_per_generation * num_iterations divides gradient_accumulation_steps, as by default.
    """

    effective_proportion = 0.5  # p~ of Equation 12; a subclass can set another

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (B, T), a copy
        p_tilde = self.effective_proportion
        advantage = inputs["advantages"]  # (B,)
        reward = 2 * advantage * torch.where(advantage < 0, 1 - p_tilde, p_tilde)  # (B,)
        # With mask_truncated_completions a whole completion can be masked. It counts in the mean
        # and has no gradient, but `topr_loss` needs a token of each.
        is_masked = mask.sum(1) == 0
        mask[is_masked, 0] = 1
        reward[is_masked] = 0

        token_logp = self._completion_logprobs(model, inputs)  # (B, T)
        token_logmu = inputs.get("old_per_token_logps")
        if token_logmu is None:
            token_logmu = token_logp.detach()
            if model.training:
                fix = "set steps_per_generation=8, or num_iterations"
                warnings.warn(f"topr: TRL keeps no log mu, so weights are 1: {fix}", stacklevel=2)

        log_ratio = sequence_log_ratio(token_logp.detach(), token_logmu, mask)  # (B,)
        weight = importance_weight(log_ratio, *TABLE_1["topr"].bounds_for(reward))  # (B,)
        mode = "train" if model.training else "eval"
        self._metrics[mode]["topr/weight"].append(weight.mean().item())
        value = topr_loss(token_logp, token_logmu, reward, mask)
        return value / self.current_gradient_accumulation_steps if model.training else value

    def _completion_logprobs(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]  # T
        return self._get_per_token_logps_and_entropies(model, ids, attention_mask, width)[0]


def loss(token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """For topr-conformance: the mixin's loss, with stand-ins for the trainer's parts."""
    trainer = ToprLoss()
    trainer.current_gradient_accumulation_steps = 4
    trainer._metrics = defaultdict(lambda: defaultdict(list))
    trainer._get_per_token_logps_and_entropies = lambda *_: (token_logp, None)
    ids = torch.zeros(len(mask), 1, dtype=torch.long)
    inputs = dict.fromkeys(["prompt_ids", "prompt_mask", "completion_ids"], ids)
    inputs["completion_mask"] = mask.long()
    inputs["old_per_token_logps"] = token_logmu
    inputs["advantages"] = reward
    return trainer._compute_loss(SimpleNamespace(training=True), inputs)
