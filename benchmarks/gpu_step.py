"""How fast a training step is, and what it needs, on GPUs: random weights, the paper's shapes, `topr.train`.

    torchrun --nproc-per-node 8 -m benchmarks gpu_step       # Llama 3 8B on eight GPUs
    python -m benchmarks gpu_step --gradient-checkpointing --reshard
    python -m benchmarks gpu_step --small                    # a small model in float32 on a CPU, to see that it works

A prompt has about 1,100 tokens (eight shots), a completion 150 to 512. For each number of completions in a forward
pass it prints tokens per second, peak memory beside what benchmarks/fake_8b_step.py counts for the longest sequences,
and the share of the matrix speed that it has just measured on the same chip. Operations are those that the mathematics
needs (6 a weight and token, and attention), not those of recomputing activations.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import transformers

import topr
from benchmarks import measuring
from benchmarks.fake_8b_step import EIGHT_B, MODELS, Setup, config_of, counted
from benchmarks.measuring import made_with, matrix_speed, now
from benchmarks.shapes import shared_logprobs
from pipeline.dataset import epoch_steps, lay_out
from pipeline.models.language_model import decoder_layers, make_optimizer, shard
from pipeline.records import Example
from pipeline.report import Table
from pipeline.runtime.processes import device, on_rank_zero, process_group, rank, ranks


@dataclass(frozen=True)
class Settings(measuring.Settings):
    """What is measured; every default is ours. A round is a step that is timed, after one that is not."""

    model: Literal[tuple(MODELS)] = EIGHT_B
    """the model's shapes"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    reshard: bool = False
    """gather weights again for the backward pass"""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """completions in a forward pass; it stops at the first that does not fit"""


def operations(config: transformers.PreTrainedConfig, weights: int, examples: Sequence[Example]) -> float:
    """Of a forward and backward pass: 6 a weight and token, and causal attention; the head for completions only.

    weights: those of the layers.
    """
    total, attention = 0.0, 6 * config.num_hidden_layers * config.hidden_size
    for example in examples:
        length = len(example.prompt_ids) + len(example.completion_ids)
        head = config.hidden_size * config.vocab_size * len(example.completion_ids)
        total += 6 * (weights * length + head) + attention * length**2
    return total


def measure(settings: Settings) -> dict[str, Any]:
    """What each number of completions in a forward pass reaches."""
    is_cuda = device().type == "cuda"
    switches = {"gradient_checkpointing": settings.gradient_checkpointing, "reshard": settings.reshard}
    setup, shortest = Setup(settings.model, ranks(), **switches), 150
    if settings.small:
        setup, shortest = setup._replace(model="small", compute="float32", prompt=64, completion=30), 20
    with process_group(alone=True):
        torch.manual_seed(settings.seed)
        peak = matrix_speed(8192 if is_cuda else 1024, setup.compute)
        with device():
            model = transformers.AutoModelForCausalLM.from_config(config_of(setup.model)).eval()
        parameters = sum(weight.numel() for weight in model.parameters())
        shard(model, setup.compute, setup.gradient_checkpointing, setup.reshard)
        optimizer = make_optimizer("adafactor", model, 5e-7)
        weights = sum(weight.numel() for weight in decoder_layers(model).parameters())
        measured = []
        for batch in settings.batches:
            drawn = examples(setup, shortest, batch * ranks() * (1 + settings.rounds), settings.seed)
            steps = epoch_steps([[example] for example in drawn], batch * ranks(), batch, rank(), ranks())
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()
            try:
                trained = topr.train(model, optimizer, lay_out(steps), logprobs=shared_logprobs)
                ends = [now() for _ in trained]
            except torch.cuda.OutOfMemoryError:
                print(f"{batch} completions in a forward pass do not fit", flush=True)
                if ranks() > 1:
                    raise  # the others may have had room, and would wait
                break
            took, timed = ends[-1] - ends[0], drawn[batch * ranks() :]
            tokens = sum(len(example.prompt_ids) + len(example.completion_ids) for example in timed)
            longest = setup._replace(batch=batch * ranks(), micro_batch=batch)
            measured.append(
                {
                    "batch": batch,
                    "seconds_per_step": took / settings.rounds,
                    "tokens_per_second": tokens / took,
                    "operations_per_second": operations(model.config, weights, timed) / ranks() / took,
                    "peak_memory": torch.cuda.max_memory_allocated() if is_cuda else None,
                    "counted": on_rank_zero(lambda longest=longest: counted(longest)["peak"]) if is_cuda else None,
                }
            )
    name = torch.cuda.get_device_name() if is_cuda else "cpu"
    found = {"settings": asdict(settings), "device": name, "processes": ranks(), "peak": peak}
    return found | {"parameters": parameters, "machine": made_with(), "measured": measured}


def examples(setup: Setup, shortest: int, count: int, seed: int) -> list[Example]:
    """Random tokens in the paper's shapes."""
    rng, vocabulary = random.Random(seed), config_of(setup.model).vocab_size

    def tokens(size: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(size)]

    sizes = [rng.randint(shortest, setup.completion) for _ in range(count)]
    return [Example(tokens(setup.prompt), tokens(size), -1.0, rng.choice([-1.0, 1.0])) for size in sizes]


def tables(found: Mapping[str, Any]) -> list[tuple[Table, Sequence[str]]]:
    """A row for each number of completions in a forward pass."""
    rows = []
    for row in found["measured"]:
        memory = [f"{row[what] / 1e9:.1f} GB" if row[what] else "-" for what in ("peak_memory", "counted")]
        speed = row["operations_per_second"]
        cells = f"{row['seconds_per_step']:.2f}", f"{row['tokens_per_second']:,.0f}", f"{speed / 1e12:.3g}"
        rows.append([str(row["batch"]), *cells, f"{100 * speed / found['peak']:.1f} %", *memory])
    head = ["completions", "s a step", "tokens/s", "TFLOP/s", "of the peak", "peak memory", "counted"]
    told = f"{found['device']}, {found['processes']} processes, {found['parameters']:,} parameters"
    return [(Table(head, rows), [f"{told}; peak of matrices: {found['peak'] / 1e12:.3g} TFLOP/s"])]
