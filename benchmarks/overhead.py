"""What TOPR costs above supervised training: `topr.train` with metrics against plain cross-entropy, on the same tokens.

    python benchmarks/overhead.py

The other side is the shortest loop that trains: forward pass, `cross_entropy` of the completions' tokens, backward
pass, clipping, AdamW. Both have the same padded rows, and turns of a few steps each.
"""

import random
import statistics
import sys
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measuring import Comparison, Goal, in_turn, report, seconds
from shapes import SHAPES, adamw, draw, make_model, plain, train_ours

import topr
from pipeline.metrics import step_metrics
from pipeline.models.language_model import load_model
from pipeline.settings import TINY

TOPR, PLAIN = "topr.train", "cross-entropy"


@dataclass(frozen=True)
class Settings:
    """What is measured; every default is ours."""

    completions: int = 16
    """in a step"""
    steps: int = 2
    """in a turn: few, so that both sides share the machine's moods"""
    rounds: int = 60
    """turns of each side"""
    scale: float = 1.0
    """prompts and completions of this share of their length, to try it out"""
    seed: int = 0
    """seed of weights, tokens and lengths"""
    out: Path = Path("runs/bench")
    """folder to write overhead.json into"""


def train_plainly(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[topr.Batch]) -> float:
    """Supervised training on every completion; the last loss."""
    for batch in batches:
        optimizer.zero_grad()
        logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        labels = batch.input_ids.masked_fill(batch.completion_mask == 0, -100)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def compare(settings: Settings, name: str, model: torch.nn.Module, batches: Sequence[topr.Batch]) -> Comparison:
    """Milliseconds a step."""
    of_topr, of_plain = deepcopy(model), deepcopy(model)
    steps = [topr.Step([batch], len(batch.reward)) for batch in batches]
    optimizers = adamw(of_topr), adamw(of_plain)
    sides = {
        TOPR: lambda: train_ours(of_topr, optimizers[0], steps, topr.sequence_logprobs),
        PLAIN: lambda: train_plainly(of_plain, optimizers[1], batches),
    }
    for side in sides.values():
        side()  # the first passes are slower
    values = in_turn({k: lambda k=k: 1e3 * seconds(sides[k]) / len(batches) for k in sides}, settings.rounds)
    return Comparison(name, "ms a step", values, [Goal(TOPR, PLAIN, 1.03, is_least=False)], [fixed_costs(batches[0])])


def fixed_costs(batch: topr.Batch) -> str:
    """What a step has besides the model, alone: the medians of some calls."""
    count = len(batch.reward)
    logp, weight = torch.randn(count, requires_grad=True), torch.rand(count)

    def loss() -> None:
        topr.topr_loss(1 * logp, batch.logmu, batch.reward, batch.length).backward()

    parts = {"metrics": lambda: step_metrics(logp.detach(), batch.reward, weight), "loss and its gradient": loss}
    times = {part: 1e3 * statistics.median(seconds(work) for _ in range(50)) for part, work in parts.items()}
    return "alone: " + ", ".join(f"{part} {time:.2f} ms" for part, time in times.items())


def main(settings: Settings) -> None:
    """The tiny model, and a wider one, on the lengths of tiny problems; print, write."""
    rng, comparisons = random.Random(settings.seed), []
    for name, model in (
        ("tiny/base", load_model(str(TINY / "base")).model),
        ("6 layers of 256", make_model(settings.seed)),
    ):
        shape = SHAPES[0]
        drawn = draw(rng, shape, settings.steps, settings.completions, settings.scale, model.config.vocab_size)
        what = f"{name}, {settings.completions} padded rows of {shape.prompt} + {shape.completion} tokens"
        comparisons.append(compare(settings, what, model, [plain(examples) for examples in drawn]))
    report(settings.out, "overhead", "python benchmarks/overhead.py", comparisons)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
