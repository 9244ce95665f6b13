"""A training step on GPUs, measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import transformers

import benchmarks
import topr
from benchmarks import now, seconds
from benchmarks.fake_8b_step import EIGHT_B, MODELS, Setup, config_of, counted
from pipeline.dataset import epoch_steps, lay_out
from pipeline.models.language_model import decoder_layers, make_optimizer, shard, token_logprobs
from pipeline.records import Example
from pipeline.report import Table
from pipeline.runtime.processes import device, on_rank_zero, process_group, rank, ranks


@dataclass(frozen=True)
class Settings(benchmarks.Settings):
    """What is measured; every default is ours. A round is a step that is timed, after one that is not."""

    model: Literal[tuple(MODELS)] = EIGHT_B
    """the model's shapes"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass"""
    reshard: bool = False
    """gather weights again for the backward pass"""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    """completions in a forward pass; it stops at the first that does not fit"""


def operations(config: transformers.PreTrainedConfig, weights: int, prompt: int, completions: Sequence[int]) -> float:
    """Of a forward and backward pass: 6 a weight and token, and causal attention; the head for completions only.

    weights: those of the layers. prompt, completions: tokens of each prompt, and of each completion.
    """
    total, attention = 0.0, 6 * config.num_hidden_layers * config.hidden_size
    for size in completions:
        head = config.hidden_size * config.vocab_size * size
        total += 6 * (weights * (prompt + size) + head) + attention * (prompt + size) ** 2
    return total


def gpu_step(settings: Settings) -> dict[str, Any]:
    """How fast a training step is, and what it needs, on GPUs: random weights, the paper's shapes, `topr.train`.

        torchrun --nproc-per-node 8 -m benchmarks gpu_step       # Llama 3 8B on eight GPUs
        python -m benchmarks gpu_step --small                    # a small model in float32 on a CPU, to try it

    A prompt has about 1,100 tokens (eight shots), a completion 150 to 512. For each number of completions in a forward
    pass it prints tokens per second, peak memory beside what fake_8b_step counts for the longest sequences, and the
    share of the matrix speed that it has just measured on the same chip. Operations are those that the mathematics
    needs (6 a weight and token, and attention), not those of recomputing activations.
    """
    is_cuda = device().type == "cuda"
    setup, shortest = Setup(settings.model, ranks()), 150
    setup = setup._replace(gradient_checkpointing=settings.gradient_checkpointing, reshard=settings.reshard)
    if settings.small:
        setup, shortest = setup._replace(model="small", compute="float32", prompt=64, completion=30), 20
    with process_group(alone=True):
        torch.manual_seed(settings.seed)
        size = 8192 if is_cuda else 1024
        a, b = (torch.randn(size, size, device=device(), dtype=getattr(torch, setup.compute)) for _ in range(2))
        peak = 2 * size**3 / min(seconds(lambda: a @ b) for _ in range(10))
        with device():
            model = transformers.AutoModelForCausalLM.from_config(config_of(setup.model)).eval()
        shard(model, setup.compute, setup.gradient_checkpointing, setup.reshard)
        optimizer = make_optimizer("adafactor", model, 5e-7)
        weights = sum(weight.numel() for weight in decoder_layers(model).parameters())
        measured = []

        def tokens(size: int) -> list[int]:
            return torch.randint(model.config.vocab_size, (size,)).tolist()

        for batch in settings.batches:
            count = batch * ranks()  # completions in a step
            sizes = torch.randint(shortest, setup.completion + 1, (count * (1 + settings.rounds),)).tolist()
            drawn = [[Example(tokens(setup.prompt), tokens(size), -1.0, 1.0)] for size in sizes]
            steps = epoch_steps(drawn, count, batch, rank(), ranks())
            if is_cuda:
                torch.cuda.reset_peak_memory_stats()
            try:
                logprobs = lambda model, batch: token_logprobs(model, batch).sum(-1)  # noqa: E731
                trained = topr.train(model, optimizer, lay_out(steps), logprobs=logprobs)
                ends = [now() for _ in trained]
            except torch.cuda.OutOfMemoryError:
                print(f"{batch} completions in a forward pass do not fit", flush=True)
                if ranks() > 1:
                    raise  # the others may have had room, and would wait
                break
            took, timed = ends[-1] - ends[0], sizes[count:]
            work = operations(model.config, weights, setup.prompt, timed) / ranks() / took
            speed = sum(setup.prompt + size for size in timed) / took
            row = {"completions": batch, "s a step": took / settings.rounds, "tokens/s": speed}
            row |= {"TFLOP/s": work / 1e12, "% of the peak": 100 * work / peak}
            if is_cuda:
                longest = setup._replace(batch=count, micro_batch=batch)
                row["GB at the peak"] = torch.cuda.max_memory_allocated() / 1e9
                row["GB counted"] = on_rank_zero(lambda step=longest: counted([step])[0]["peak"]) / 1e9
            measured.append(row)
    name = torch.cuda.get_device_name() if is_cuda else "cpu"
    made = f"{name}, {ranks()} processes, {model.num_parameters():,} parameters; matrices at {peak / 1e12:.3g} TFLOP/s"
    return {"settings": asdict(settings), "made": made, "measured": measured}


def tables(found: Mapping[str, Any]) -> list[tuple[Table, Sequence[str]]]:
    """A row for each number of completions in a forward pass."""
    head = list(*found["measured"][:1])
    return [(Table(head, [[f"{row[what]:,.4g}" for what in head] for row in found["measured"]]), [found["made"]])]
