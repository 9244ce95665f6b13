"""How fast a training step is, and what it needs, on GPUs: random weights, the paper's shapes, `topr.train`.

    torchrun --nproc-per-node 8 benchmarks/gpu_step.py --gradient-checkpointing False --reshard False
    python benchmarks/gpu_step.py                       # 8B on one GPU
    python benchmarks/gpu_step.py --model small --compute float32 --batches 1 2  # on a CPU, to see that it works

A prompt has about 1,100 tokens (eight shots), a completion 150 to 512. For each number of completions in a forward
pass it prints tokens per second, peak memory beside what pipeline/rehearsal.py foretells for the longest sequences,
and the share of the matrix speed that it has just measured on the same chip. It counts the operations that the
mathematics needs (6 a weight and token, and attention), not those of recomputing activations.
"""

import dataclasses
import json
import platform
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fake_8b_step import EIGHT_B, MODELS, rehearsed

import topr
from pipeline.dataset import epoch_steps, lay_out
from pipeline.models.language_model import decoder_layers, make_optimizer, shard, token_logprobs
from pipeline.records import Example, write_file
from pipeline.runtime.processes import device, on_rank_zero, process_group, rank, ranks
from pipeline.settings import Compute


@dataclass(frozen=True)
class Settings:
    """What is measured; every default is ours."""

    model: Literal[tuple(MODELS)] = EIGHT_B
    """the model's shapes; "small" is for the CPU"""
    gradient_checkpointing: bool = True
    """recompute activations in the backward pass"""
    reshard: bool = True
    """gather weights again for the backward pass"""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """completions in a forward pass; it stops at the first that does not fit"""
    steps: int = 5
    """steps that are timed, after one that is not"""
    prompt: int = 1_100
    """tokens of a prompt"""
    completion: tuple[int, int] = (150, 512)
    """tokens of the shortest and the longest completion"""
    compute: Compute = "bfloat16"
    """precision of the passes, and of the matrices that they are compared with"""
    seed: int = 0
    """seed of weights, tokens and lengths"""
    out: Path = Path("runs/gpu_step")
    """folder to write gpu_step.json into"""


def matrix_speed(size: int, compute: Compute) -> float:
    """Operations per second of the best of ten products of square matrices."""
    a, b = (torch.randn(size, size, device=device(), dtype=getattr(torch, compute)) for _ in range(2))
    times = []
    for _ in range(10):
        start = now()
        a @ b
        times.append(now() - start)
    return 2 * size**3 / min(times)


def now() -> float:
    """The time, in seconds, once the device has done what it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def examples(settings: Settings, count: int, vocabulary: int) -> list[Example]:
    """Random tokens in the paper's shapes."""
    rng = random.Random(settings.seed)

    def tokens(size: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(size)]

    sizes = [rng.randint(*settings.completion) for _ in range(count)]
    return [Example(tokens(settings.prompt), tokens(size), -1.0, rng.choice([-1.0, 1.0])) for size in sizes]


def operations(config: transformers.PreTrainedConfig, weights: int, examples: list[Example]) -> float:
    """Of a forward and backward pass: 6 a weight and token, and causal attention; the head for completions only.

    weights: those of the layers.
    """
    total, attention = 0.0, 6 * config.num_hidden_layers * config.hidden_size
    for example in examples:
        length = len(example.prompt_ids) + len(example.completion_ids)
        head = config.hidden_size * config.vocab_size * len(example.completion_ids)
        total += 6 * (weights * length + head) + attention * length**2
    return total


def measure(settings: Settings, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> dict:
    """`settings.steps` steps at `batch` completions in each process's forward pass."""
    per_step = batch * ranks()
    drawn = examples(settings, per_step * (1 + settings.steps), model.config.vocab_size)
    steps = epoch_steps([[example] for example in drawn], per_step, batch, rank(), ranks())
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trained = topr.train(model, optimizer, lay_out(steps), logprobs=lambda *args: token_logprobs(*args).sum(-1))
    ends = [now() for _ in trained]
    seconds = (ends[-1] - ends[0]) / settings.steps
    timed = drawn[per_step:]
    tokens = sum(len(example.prompt_ids) + len(example.completion_ids) for example in timed)
    weights = sum(weight.numel() for weight in decoder_layers(model).parameters())
    done = operations(model.config, weights, timed) / settings.steps / ranks()
    return {
        "batch": batch,
        "seconds_per_step": seconds,
        "tokens_per_second": tokens / settings.steps / seconds,
        "operations_per_second": done / seconds,
        "peak_memory": torch.cuda.max_memory_allocated() if device().type == "cuda" else None,
        "rehearsed": on_rank_zero(lambda: foretold(settings, per_step, batch)) if device().type == "cuda" else None,
    }


def foretold(settings: Settings, per_step: int, batch: int) -> int:
    """Bytes of the peak by pipeline/rehearsal.py, for the longest sequences."""
    switches = {"gradient_checkpointing": settings.gradient_checkpointing, "reshard": settings.reshard}
    sizes = {"processes": ranks(), "prompt": settings.prompt, "completion": settings.completion[1]}
    own = {"batch": per_step, "micro_batch": batch, "compute": settings.compute}
    return rehearsed(settings.model, switches | sizes | own)["peak"]


def main(settings: Settings) -> None:
    """Build, measure, print, write."""
    with process_group(alone=True):
        torch.manual_seed(settings.seed)
        peak = matrix_speed(8192 if device().type == "cuda" else 1024, settings.compute)
        with device():
            model = transformers.AutoModelForCausalLM.from_config(MODELS[settings.model]()).eval()
        parameters = sum(weight.numel() for weight in model.parameters())
        shard(model, settings.compute, settings.gradient_checkpointing, settings.reshard)
        optimizer = make_optimizer("adafactor", model, 5e-7)
        name = torch.cuda.get_device_name() if device().type == "cuda" else platform.processor() or platform.machine()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        record = {"settings": dataclasses.asdict(settings), "device": name, "processes": ranks(), "peak": peak}
        record |= {"parameters": parameters, "versions": versions, "date": time.strftime("%Y-%m-%d"), "measured": []}
        for batch in settings.batches:
            try:
                record["measured"].append(measure(settings, model, optimizer, batch))
            except torch.cuda.OutOfMemoryError:
                print(f"{batch} completions in a forward pass do not fit")
                if ranks() > 1:
                    raise  # the others may have had room, and would wait
                break
            if rank() == 0:
                write_file(settings.out / "gpu_step.json", json.dumps(record, indent=2, default=str) + "\n")
        if rank() == 0:
            print_table(record)


def print_table(record: dict) -> None:
    """What was measured, a row for each batch."""
    print(f"{record['device']}, {record['processes']} processes; {record['parameters']:,} parameters")
    print(f"peak of {record['settings']['compute']} matrices: {record['peak'] / 1e12:.3g} TFLOP/s")
    table = Table("completions", "s a step", "tokens/s", "TFLOP/s", "of the peak", "peak memory", "rehearsed")
    for row in record["measured"]:
        memory = [f"{row[what] / 1e9:.1f} GB" if row[what] else "-" for what in ("peak_memory", "rehearsed")]
        speed = row["operations_per_second"]
        cells = f"{row['seconds_per_step']:.2f}", f"{row['tokens_per_second']:,.0f}", f"{speed / 1e12:.3g}"
        table.add_row(str(row["batch"]), *cells, f"{100 * speed / record['peak']:.1f} %", *memory)
    Console(width=120).print(table)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
