"""Training with TRL's GRPOTrainer and examples/topr_in_trl.py; prints the mean weight.

Arguments: steps, steps_per_generation, and a folder. It runs in TRL's environment.
"""

import sys
from fractions import Fraction

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import train_gsm8k as gsm8k
from examples.topr_in_trl import ToprLoss
from toprlib.language_model import load_model, load_tokenizer


class ToprTrainer(ToprLoss, GRPOTrainer):
    """TRL's trainer with the paper's loss."""


def reward(completions: list[str], gold: list[str], **_: object) -> list[float]:
    """+1 for a correct completion, -1 for others, as TRL calls it."""
    outcomes = [gsm8k.grade(*pair) for pair in zip(completions, map(Fraction, gold), strict=True)]
    return [1.0 if outcome == "correct" else -1.0 for outcome in outcomes]


steps, steps_per_generation, folder = sys.argv[1:]
settings = gsm8k.Settings()
task = gsm8k.gsm8k_task(settings)
rows = []
for problem in task.train:
    rows.append({"prompt": task.prompt(problem), "gold": str(problem.gold)})
config = GRPOConfig(
    output_dir=folder,
    max_steps=int(steps),
    per_device_train_batch_size=16,
    num_generations=16,
    steps_per_generation=int(steps_per_generation),
    max_completion_length=64,
    learning_rate=5e-5,
    lr_scheduler_type="constant",
    scale_rewards="none",
    gradient_checkpointing=False,
    bf16=False,
    save_strategy="no",
    report_to=[],
)
model = load_model(settings.model)
tokenizer = load_tokenizer(settings.model).tokenizer
data = Dataset.from_list(rows)
trainer = ToprTrainer(model, reward, config, data, processing_class=tokenizer)
trainer.train()
logged = [entry["topr/weight"] for entry in trainer.state.log_history if "topr/weight" in entry]
print(sum(logged) / len(logged))
