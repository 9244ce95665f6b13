"""The paper's loss in TRL 1.16.0: TRL's own loss, whose advantages a mixin weights in between.

TRL's "grpo" loss without log mu has the gradient of -advantage * log pi: a mean over tokens, then
over completions. With the advantage weight * reward this is TOPR. KL, entropy bonus, MoE loss,
images and TRL's metrics stay.

    topr_conformance.identify(loss_of(trainer)).variant  # "paper"
"""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from topr import TABLE_1, importance_weight, sequence_log_ratio

PAPER = {"title": "Tapered Off-Policy REINFORCE", "id": "2503.14286"}


class ToprLoss:
    """Put it before GRPOTrainer: `class ToprTrainer(ToprLoss, GRPOTrainer)`.

    The reward is TRL's advantage, the reward less its mean over the prompt's completions, which
    gives an effective proportion of 1/2. TRL keeps log mu unless steps_per_generation *
    num_iterations divides gradient_accumulation_steps, as by default. Raises ValueError if a
    setting contradicts TOPR.
    """

    effective_proportion = 0.5  # p~ of Equation 12; a subclass can set another
    _name = "TOPR"  # on TRL's model cards, as the next two
    _tag_names = ("trl", "topr")
    _paper = PAPER
    _inputs: dict[str, Any] | None = None  # of the loss that TRL computes now

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_settings(self.args)

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        self._inputs = dict(inputs)
        try:
            return super()._compute_loss(model, self._inputs)
        finally:
            self._inputs = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple:
        """TRL calls it in its loss, before it reads the advantages; and elsewhere, for log mu."""
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._inputs is not None:
            self._weight_advantages(self._inputs, outputs[0].detach())
        return outputs

    def _weight_advantages(self, inputs: dict[str, Any], token_logp: Tensor) -> None:
        token_logmu = inputs.pop("old_per_token_logps", None)  # (B, T)
        if token_logmu is None:
            token_logmu = token_logp
            if self.model.training:
                fix = "set steps_per_generation=8, or num_iterations"
                warnings.warn(f"topr: TRL keeps no log mu, so weights are 1: {fix}", stacklevel=2)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (B, T)
        p_tilde = self.effective_proportion
        advantage = inputs["advantages"]  # (B,)
        reward = 2 * advantage * torch.where(advantage < 0, 1 - p_tilde, p_tilde)  # (B,)
        log_ratio = sequence_log_ratio(token_logp, token_logmu, mask)  # (B,)
        weight = importance_weight(log_ratio, *TABLE_1["topr"].bounds_for(reward))  # (B,)
        inputs["advantages"] = weight * reward
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["topr/weight"].append(self.accelerator.gather(weight).mean().item())


def check_settings(config: Any) -> None:
    """Raises ValueError if a setting of the GRPOConfig contradicts TOPR."""
    needed = {
        "loss_type": "grpo",
        "scale_rewards": "none",
        "multi_objective_aggregation": "sum_then_normalize",  # the other one scales, too
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "delta": None,
    }
    if config.beta != 0:
        needed["use_bias_correction_kl"] = False  # TRL's loss sees no log mu, which this needs
    if config.use_vllm:
        needed["vllm_importance_sampling_correction"] = False  # TOPR has its own weights
    changes = []
    for name, value in needed.items():
        if getattr(config, name) != value:
            changes.append(f"{name}={value!r}")
    if changes:
        raise ValueError(f"topr: these settings contradict TOPR; set {', '.join(changes)}")


def loss_of(trainer: ToprLoss) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """For topr-conformance: the loss of a trainer that is not to train, in place of its model."""

    def loss(token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
        logp = torch.where(mask > 0, token_logp, 0.0)  # of padding, TRL computes none
        outputs = SimpleNamespace(log_probs=logp, entropy=0 * logp, aux_loss=0 * logp.sum())
        prompt = torch.zeros(len(mask), 1, dtype=torch.long)
        inputs = dict.fromkeys(["prompt_ids", "prompt_mask"], prompt)
        inputs |= dict.fromkeys(["completion_ids", "completion_mask"], mask.long())
        inputs["old_per_token_logps"] = token_logmu
        inputs["ref_per_token_logps"] = logp.detach()
        inputs["advantages"] = reward
        trainer.current_gradient_accumulation_steps = 1
        return trainer._compute_loss(lambda **_: outputs, inputs)

    return loss
