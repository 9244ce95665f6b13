"""The paper's loss in TRL's GRPO trainer: a mixin that overrides the loss and nothing else.

make .venv-trl/ready                             # TRL 1.16.0 in an environment of its own
export PYTHONPATH=conformance                    # the checker, which is not installed there
.venv-trl/bin/python -m topr_conformance examples.topr_in_trl:loss  # prints "paper"
.venv-trl/bin/python examples/train_with_trl.py  # a run of it
"""

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from topr import PRESETS, importance_weight, topr_loss


class ToprLoss:
    """Put before GRPOTrainer: `class ToprTrainer(ToprLoss, GRPOTrainer)`. The reward is TRL's advantage.

    With scale_rewards="none" that is the reward less its mean over the prompt's completions. TRL keeps log mu unless
    steps_per_generation * num_iterations divides gradient_accumulation_steps, as it does by default.
    """

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        width = inputs["completion_ids"].shape[1]
        logp = self._get_per_token_logps_and_entropies(model, ids, seen, width)[0]
        logmu = inputs.get("old_per_token_logps")
        if logmu is None and model.training:
            mend = "set steps_per_generation=8, or num_iterations"
            warnings.warn(f"topr: every weight is 1, for TRL keeps no log mu: {mend}", stacklevel=2)
        logmu = logp.detach() if logmu is None else logmu
        mask, reward = (
            inputs["completion_mask"] * inputs.get("tool_mask", 1),
            inputs["advantages"].clone(),
        )
        is_empty = (
            mask.sum(1) == 0
        )  # mask_truncated_completions: counted in the mean, without a gradient
        mask[is_empty, 0], reward[is_empty] = 1, 0
        log_ratio = torch.where(mask > 0, logp.detach() - logmu, 0.0).sum(1)
        weight = importance_weight(log_ratio, *PRESETS["topr"].of_sign(reward))
        self._metrics["train" if model.training else "eval"]["topr/weight"].append(
            weight.mean().item()
        )
        value = topr_loss(logp, logmu, reward, mask)
        return value / (self.current_gradient_accumulation_steps if model.training else 1)


def loss(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """For topr-conformance: the mixin's loss, with the little that it needs of the trainer."""
    trainer = ToprLoss()
    trainer.current_gradient_accumulation_steps, trainer._metrics = (
        4,
        defaultdict(lambda: defaultdict(list)),
    )
    trainer._get_per_token_logps_and_entropies = lambda model, ids, seen, width: (logp, None)
    ids = torch.zeros(len(mask), 1, dtype=torch.long)
    inputs = dict.fromkeys(["prompt_ids", "prompt_mask", "completion_ids"], ids)
    inputs |= {"completion_mask": mask.long(), "old_per_token_logps": logmu, "advantages": reward}
    return trainer._compute_loss(SimpleNamespace(training=True), inputs)
