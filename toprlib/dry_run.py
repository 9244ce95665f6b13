"""What a run would draw, train and need, before it starts: counts, bytes and hours, by arithmetic."""

from math import ceil
from typing import NamedTuple

import torch
import transformers

from toprlib.compositions import COMPOSITIONS
from toprlib.batches import Inputs, read_inputs
from toprlib.methods import METHODS
from toprlib.records import Task
from toprlib.report import Table
from toprlib.preflight import checkpoint_bytes, disk_needed, memory_needed
from toprlib.settings import Settings, intended_ranks

BYTES = {"float32": 4, "bfloat16": 2}  # of a number in each precision
# What an H100 SXM can do, as NVIDIA's data sheet says, and the share of it that is assumed here; no GPU was measured.
MATRICES = (
    989e12 * 0.35
)  # operations a second in bfloat16, dense; kernels that wait for their launch are in the share
LINKS = 450e9 * 0.6  # bytes a second that a GPU sends over NVLink
MEMORY = 3.35e12 * 0.5  # bytes a second that a GPU reads
COMPLETION = 0.4  # of the longest: the tokens of a mean completion
SEQUENCES = 1024  # that vLLM decodes at a time, at most
WRITING = 0.5e9  # bytes a second that a process writes and hashes
DISK = 2e9  # bytes a second that a disk takes from all of them
START = 180.0  # seconds that an engine takes to start, and the trainer to load the model
UPDATE = 100  # bytes that optimiser, clipping and FSDP2's copies read and write for each weight of a GPU, in a step
HIDDEN, MLP = (
    9.25,
    4,
)  # numbers that a layer keeps of a token for the backward pass, in widths of its parts; ours
SAMPLE = 1e-3  # seconds to write, read, hash and evaluate a sample


class Counts(NamedTuple):
    """How much a run does."""

    trained: int  # samples that an iteration trains on, at most
    tested: int  # test samples of all evaluations
    sampled: int  # completions that are drawn, in all
    steps: int  # of the optimiser in an iteration


def counts(settings: Settings, problems: int, tests: int, trained: int | None = None) -> Counts:
    """The counts of a run that draws samples of so many problems in an iteration; `trained`, if they are given to it.

    >>> counts(Settings(n=4, test_samples=4, batch=16, curve_points=1), problems=10, tests=10)
    Counts(trained=40, tested=80, sampled=120, steps=3)
    """
    k, along = settings.iterations, settings.curve_samples * (settings.curve_points - 1)
    drawn = problems * getattr(settings, COMPOSITIONS[settings.composition].draws)
    if trained is None:
        at_most = min(settings.examples or drawn, drawn)
        trained = settings.epochs * (
            2 * problems * settings.pairs if METHODS[settings.method].of_pairs else at_most
        )
    between = max(k - 1, 0) * (settings.between_samples or settings.test_samples)
    tested = tests * (min(1 + k, 2) * settings.test_samples + between + k * along)
    return Counts(trained, tested, tested + k * drawn, ceil(trained / settings.batch))


def print_plan(settings: Settings, task: Task) -> None:
    """Print the plan of a run as a table; InputError where its model or prompts do not fit."""
    items = plan(settings, read_inputs(settings, task), intended_ranks(settings.preset))
    texts = {"bytes": lambda x: f"{x / 1e9:,.3g} GB", "h": lambda x: f"{x:,.2f} h"}
    rows = [
        [name, texts[unit](value) if unit in texts else f"{value:,.0f} {unit}", how]
        for name, (value, unit, how) in items.items()
    ]
    Table(["", "", "how"], rows).print()


def plan(settings: Settings, inputs: Inputs, processes: int) -> dict[str, tuple[float, str, str]]:
    """A run's counts, memory of each process, room on the disk and estimated time: {name: (value, unit, how)}."""
    task, k = inputs.task, settings.iterations
    size, parameters, sampling = (
        inputs.size,
        inputs.size.parameters,
        BYTES[settings.compute] * inputs.size.parameters,
    )
    given = inputs.composed and sum(map(len, inputs.composed.rows))
    count = counts(settings, 0 if inputs.composed else len(task.train), len(task.test), given)
    lengths = [len(prompt.ids) for prompt in inputs.train]
    prompt = sum(lengths) / len(lengths) if lengths else inputs.lengths[0]
    checkpoint, shard = checkpoint_bytes(settings, parameters), 4 * parameters / processes
    config, at_once = (
        inputs.lm.model.config,
        f"of {settings.micro_batch} of the longest samples, and logits",
    )
    head = (
        2 * BYTES[settings.compute] * config.vocab_size * config.hidden_size
    )  # its weights and their gradient
    held = {
        "weights": (shard, "bytes", "in float32, sharded over the processes"),
        "gradients": (shard, "bytes", "in float32, sharded"),
        "optimiser": (
            checkpoint / processes - shard,
            "bytes",
            "AdamW's moments, sharded; Adafactor's means are small",
        ),
        "gathered weights": (
            head if settings.reshard else sampling,
            "bytes",
            "with resharding the head at the most",
        ),
        "activations": (activation_bytes(settings, config, size.longest), "bytes", at_once),
    }
    items = {
        "processes": (processes, "", "one GPU each; torchrun --nproc-per-node"),
        "prompt": (prompt, "tokens", f"the {'mean' if lengths else 'longest'} of training"),
        "training samples": (k * size.drawn, "", f"{k} iterations x {size.drawn:,}"),
        "test samples": (
            count.tested,
            "",
            "before and after all; fewer between iterations and along an epoch",
        ),
        "held-out samples": (
            sum(map(len, inputs.held_out or ())),
            "",
            "scored before, along and after training",
        ),
        "sampled tokens": (
            count.sampled * settings.max_new_tokens,
            "",
            "at most: all to the limit",
        ),
        "samples trained on": (
            k * count.trained,
            "",
            f"{k} iterations x {count.trained:,}, at most",
        ),
        "optimiser steps": (k * count.steps, "", f"of {settings.batch} samples"),
        "parameters P": (parameters, "", "counted"),
        **held,
        "training, per GPU": (
            sum(size for size, *_ in held.values()),
            "bytes",
            "the sum, good to a fifth; CUDA and NCCL come on top",
        ),
        "sampling, per GPU": (sampling, "bytes", "vLLM fills most of the rest: a cache"),
        "host memory of a node": (
            memory_needed(settings, size),
            "bytes",
            "weights once; samples in each process",
        ),
        "checkpoint, on disk": (checkpoint, "bytes", "weights and optimiser"),
        "disk": (disk_needed(settings, size), "bytes", "models, samples and two checkpoints"),
    }
    if settings.preset != "laptop" or torch.cuda.is_available():
        mean = prompt, COMPLETION * inputs.lengths[1]
        estimated = hours(settings, count, config, parameters, processes, *mean)
        items |= {
            f"{stage}, on H100s": (value, "h", how) for stage, (value, how) in estimated.items()
        }
    return items


def activation_bytes(
    settings: Settings, config: transformers.PreTrainedConfig, longest: int
) -> float:
    """What a micro-batch of the longest samples keeps for its backward pass, and the logits of its completions.

    HIDDEN and MLP are those of a counted step of Llama 3 8B; for it and three smaller models the sum of a GPU's memory
    is within a fifth of what was counted (docs/gpu.md).
    """
    width, tokens = config.hidden_size, settings.micro_batch * longest
    of_layer = (
        width
        if settings.gradient_checkpointing
        else HIDDEN * width + MLP * config.intermediate_size
    )
    logits = (
        settings.micro_batch * settings.max_new_tokens * config.vocab_size * 4
    )  # float32, and their gradient
    return config.num_hidden_layers * tokens * of_layer * BYTES[settings.compute] + 2 * logits


def hours(
    settings: Settings,
    count: Counts,
    config: transformers.PreTrainedConfig,
    parameters: int,
    processes: int,
    prompt: float,
    completion: float,
) -> dict[str, tuple[float, str]]:
    """Each stage's hours on H100s, and what is assumed for it; a sample has so many tokens in the mean.

    A forward pass takes 2 operations for each weight and token, a backward pass twice that. For each of its passes a
    GPU of n sends (n - 1) / n of the weights that are gathered, and of the gradients that are summed.
    """
    k, each = settings.iterations, settings.batch / processes  # samples of a GPU in a step
    forward = 2 * parameters * each * (prompt + completion) / MATRICES
    sending = ceil(each / settings.micro_batch) * parameters * (processes - 1) / processes / LINKS
    gathering = BYTES[settings.compute] * sending
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = (
        2 * 2 * config.num_hidden_layers * heads * width * (prompt + completion)
    )  # keys and values in bfloat16
    # Ended sequences of a chunk are replaced while there are others; of the last ones half run in the mean.
    requests = settings.chunk * settings.n
    sequences = requests / (requests / min(requests, SEQUENCES) + 1)
    tokens_per_second = processes * sequences * MEMORY / (2 * parameters + sequences * cache)
    score = (
        forward + settings.reshard * gathering
    )  # without resharding the weights stay gathered from step to step
    train = (
        (3 + settings.gradient_checkpointing) * forward
        + (1 + settings.reshard) * gathering
        + 4 * sending
    )
    train += UPDATE * parameters / processes / MEMORY
    checkpoints = (
        k * (count.steps // settings.save_every) * 4 * parameters / min(processes * WRITING, DISK)
    )
    save = checkpoints + k * 4 * parameters / WRITING
    reading, speed = (
        f"weights and cache are read at {MEMORY / 1e12:.2f} TB/s",
        f"{MATRICES / 1e12:.0f} TFLOP/s",
    )
    seconds = {
        "starting": ((1 + k) * START, "3 minutes for each model: an engine and the trainer"),
        "sampling": (
            count.sampled * completion / tokens_per_second,
            f"{sequences:.0f} sequences at a time; {reading}",
        ),
        "scoring": (k * count.steps * score, f"a forward pass at {speed}"),
        "training": (
            k * count.steps * train,
            f"{speed}, {LINKS / 1e9:.0f} GB/s of NVLink, {UPDATE} bytes a weight",
        ),
        "saving": (
            save,
            f"models at {WRITING / 1e9} GB/s, checkpoints by all processes at {DISK / 1e9:.0f} GB/s",
        ),
        "files": (
            count.sampled * SAMPLE,
            f"{1e3 * SAMPLE:.0f} ms a sample to write, read, hash and evaluate it",
        ),
    }
    return {stage: (value / 3600, how) for stage, (value, how) in seconds.items()}
