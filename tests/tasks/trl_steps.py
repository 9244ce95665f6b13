"""TRL's GRPOTrainer with examples/topr_in_trl.py, on a small mixture of experts; prints JSON.

Argument: a folder. It runs in TRL's environment.
"""

import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM
from trl import GRPOConfig, GRPOTrainer

from examples.topr_in_trl import ToprLoss, loss_of
from topr import topr_loss
from topr_conformance import identify

ACCUMULATION = 2  # micro-batches of an optimizer step
OTHER_TERMS = {
    "KL": {"beta": 0.5, "use_bias_correction_kl": False},
    "entropy": {"entropy_coef": 0.5},
    "experts": {"router_aux_loss_coef": 2.0},
}
CONTRADICTIONS = {
    "scale_rewards": "group",
    "loss_type": "dapo",
    "off_policy_mask_threshold": 0.5,
    "top_entropy_quantile": 0.2,
    "multi_objective_aggregation": "normalize_then_sum",
    "delta": 2.0,
    "beta": 0.5,  # with use_bias_correction_kl, TRL's default
    "learning_rate": 1e-3,  # no contradiction
}


class ToprTrainer(ToprLoss, GRPOTrainer):
    """TRL's trainer with the paper's loss."""


class ToprTrainer75(ToprTrainer):
    """Positives count 1.5 times, negatives 0.5 times."""

    effective_proportion = 0.75


def reward(completions: list[str], **_: object) -> list[float]:
    """Of an even number of characters +1, else -1."""
    return [(-1.0) ** len(text) for text in completions]


def make_trainer(trainer_class: type, **changes: object) -> GRPOTrainer:
    """A trainer of the model in the folder."""
    settings = {
        "output_dir": folder,
        "loss_type": "grpo",
        "scale_rewards": "none",
        "router_aux_loss_coef": 0.0,
        "max_completion_length": 8,
        "gradient_checkpointing": False,
        "bf16": False,
        "save_strategy": "no",
        "report_to": [],
    }
    data = Dataset.from_list([{"prompt": "Q: 2 + 2"}] * 8)
    return trainer_class(folder, reward, GRPOConfig(**settings | changes), data)


def train(**changes: object) -> tuple[list[dict], bool]:
    """The log of some steps, and whether the loss warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(ToprTrainer, learning_rate=1e-2, logging_steps=1, **changes)
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "topr/weight" in entry]
    return log, any("topr" in str(warning.message) for warning in caught)


def gradient(trainer: GRPOTrainer) -> Tensor:
    """The gradient of the trainer's loss, in one row."""
    trainer.model.train()  # in evaluation TRL divides by no number of micro-batches
    trainer.current_gradient_accumulation_steps = ACCUMULATION
    return flat_gradient(trainer._compute_loss(trainer.model, dict(inputs)), trainer.model)


def flat_gradient(loss: Tensor, model: torch.nn.Module) -> Tensor:
    """The gradient of all parameters, in one row."""
    gradients = torch.autograd.grad(loss, model.parameters(), materialize_grads=True)
    return torch.cat([part.flatten() for part in gradients])


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """NaN if both are 0."""
    return ((actual - expected).norm() / expected.norm()).item()


# ---- a model and a batch -------------------------------------------------------------------------
folder = sys.argv[1]
torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained("tiny/base")
config = MixtralConfig(
    vocab_size=len(tokenizer),
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=4,
)
MixtralForCausalLM(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
inputs = {
    "prompt_ids": torch.randint(5, len(tokenizer), (4, 3)),
    "prompt_mask": torch.ones(4, 3, dtype=torch.long),
    "completion_ids": torch.randint(5, len(tokenizer), (4, 6)),
    "completion_mask": (torch.arange(6) < torch.tensor([[6], [4], [2], [0]])).long(),
    "tool_mask": torch.tensor([[1, 0, 1, 1, 1, 1]] * 4),  # a tool wrote the second token
    "advantages": torch.tensor([-0.5, 0.75, -1.25, 1.0]),
}
topr_trainer = make_trainer(ToprTrainer75)
model = topr_trainer.model
ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
logp = model(ids, attention_mask=attention_mask).logits.log_softmax(-1)[:, 2:-1]
token_logp = logp.gather(-1, inputs["completion_ids"][..., None])[..., 0]
inputs["old_per_token_logps"] = (token_logp + 0.5 * torch.rand(4, 6)).detach()
inputs["ref_per_token_logps"] = (token_logp - 0.5 * torch.rand(4, 6)).detach()

# ---- the gradient: TOPR's, and what TRL adds to its own ------------------------------------------
weighted = torch.tensor([-0.25, 1.125, -0.625])  # the last completion is masked
mask = inputs["completion_mask"] * inputs["tool_mask"]
columns = (token_logp[:3], inputs["old_per_token_logps"][:3], weighted, mask[:3])
expected = flat_gradient(topr_loss(*columns, denominator=4 * ACCUMULATION), model)
topr_gradient = gradient(topr_trainer)
differences = {"TOPR": relative_difference(topr_gradient, expected)}
grpo_gradient = gradient(make_trainer(GRPOTrainer))
for name, settings in OTHER_TERMS.items():
    added = gradient(make_trainer(ToprTrainer75, **settings)) - topr_gradient
    expected = gradient(make_trainer(GRPOTrainer, **settings)) - grpo_gradient
    differences[name] = relative_difference(added, expected)

seen = []
images = torch.rand(4, 3)
topr_trainer._compute_loss(
    lambda pixel_values, **others: seen.append(pixel_values) or model(**others),
    inputs | {"pixel_values": images, "num_images": [1] * 4},
)

# ---- settings, steps, and the model card ---------------------------------------------------------
not_refused = []
for name, value in CONTRADICTIONS.items():
    with suppress(ValueError):
        make_trainer(ToprTrainer, **{name: value})
        not_refused.append(name)
kept, warned_if_kept = train(max_steps=4, steps_per_generation=4)
lost, warned_if_lost = train(max_steps=2, steps_per_generation=1)
make_trainer(ToprTrainer).create_model_card("a model")
results = {
    "verdict": identify(loss_of(make_trainer(ToprTrainer))).variant,
    "differences": differences,
    "has_images": torch.equal(seen[0], images),
    "not_refused": not_refused,
    "weights": [entry["topr/weight"] for entry in kept],
    "weights_without_logmu": [entry["topr/weight"] for entry in lost],
    "warnings": [warned_if_kept, warned_if_lost],
    "metrics": sorted(kept[0]),
    "card": Path(folder, "README.md").read_text(encoding="utf-8"),
}
print(json.dumps(results))
