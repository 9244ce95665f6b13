"""What TOPR costs above supervised training: `topr.train` with metrics against plain cross-entropy, on the same tokens.

    python -m benchmarks overhead --rounds 60

The other side is the shortest loop that trains: forward pass, `cross_entropy` of the completions' tokens, backward
pass, clipping, AdamW. Both have the same padded rows, and turns of two steps, so that they share the machine's moods.
"""

import random
import statistics
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import topr
from benchmarks.measuring import Comparison, Goal, Settings, in_turn, record, seconds
from benchmarks.shapes import SHAPES, adamw, draw, make_model, plain, train_ours
from pipeline.metrics import step_metrics
from pipeline.models.language_model import load_model
from pipeline.settings import TINY

TOPR, PLAIN, STEPS = "topr.train", "cross-entropy", 2


def train_plainly(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[topr.Batch]) -> None:
    """Supervised training on every completion."""
    for batch in batches:
        optimizer.zero_grad()
        logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        labels = batch.input_ids.masked_fill(batch.completion_mask == 0, -100)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()


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
    logp, weight = torch.randn(len(batch.reward), requires_grad=True), torch.rand(len(batch.reward))
    parts = {
        "metrics": lambda: step_metrics(logp.detach(), batch.reward, weight),
        "loss and its gradient": lambda: topr.topr_loss(1 * logp, batch.logmu, batch.reward, batch.length).backward(),
    }
    times = {part: 1e3 * statistics.median(seconds(work) for _ in range(50)) for part, work in parts.items()}
    return "alone: " + ", ".join(f"{part} {time:.2f} ms" for part, time in times.items())


def measure(settings: Settings) -> dict[str, Any]:
    """The tiny model, and a wider one, on the lengths of tiny problems."""
    rng, shape, comparisons = random.Random(settings.seed), SHAPES[0], []
    models = {"tiny/base": load_model(str(TINY / "base")).model, "6 layers of 256": make_model(settings.seed)}
    for name, model in models.items():
        drawn = draw(rng, shape, STEPS, 2 if settings.small else 16, settings.small, model.config.vocab_size)
        what = f"{name}, {len(drawn[0])} padded rows of {shape.prompt} + {shape.completion} tokens"
        comparisons.append(compare(settings, what, model, [plain(examples) for examples in drawn]))
    return record(comparisons)
