"""What a run would draw, train and need, before it starts: counts, bytes and hours, by arithmetic.

Activations are not counted: benchmarks/fake_8b_step.py counts those of Llama 3 8B and of a few other models.
"""

from math import ceil
from typing import NamedTuple

import torch
import transformers

from pipeline.dataset import Inputs, read_inputs
from pipeline.records import Task
from pipeline.report import Table
from pipeline.runtime.preflight import checkpoint_bytes, disk_needed, memory_needed
from pipeline.settings import Settings, intended_ranks

BYTES = {"float32": 4, "bfloat16": 2}  # of a number in each precision
# What an H100 SXM can do, as NVIDIA's data sheet says, and the share of it that is assumed here; no GPU was measured.
MATRICES = 989e12 * 0.4  # operations a second in bfloat16, dense
LINKS = 450e9 * 0.6  # bytes a second that a GPU sends over NVLink
MEMORY = 3.35e12 * 0.5  # bytes a second that a GPU reads
COMPLETION = 0.4  # of the longest: the tokens of a mean completion
SEQUENCES = 256  # that vLLM decodes at a time
WRITING = 0.5e9  # bytes a second that a model is gathered, written and hashed with
START = 180.0  # seconds that an engine takes to start, and the trainer to load the model


class Item(NamedTuple):
    """A line of the plan; bytes and counts are plain numbers, `unit` says which."""

    name: str
    value: float
    unit: str
    how: str


class Counts(NamedTuple):
    """How much a run does."""

    trained: int  # samples that an iteration trains on, at most
    tested: int  # test samples of all evaluations
    sampled: int  # completions that are drawn, in all
    steps: int  # of the optimiser in an iteration


def counts(settings: Settings, drawn: int, tests: int, is_given: bool = False) -> Counts:
    """The counts of a run that draws, or is given, so many samples in an iteration, on so many test problems.

    >>> counts(Settings(test_samples=4, batch=16, curve_points=1), drawn=40, tests=10)
    Counts(trained=40, tested=80, sampled=120, steps=3)
    """
    k, along = settings.iterations, settings.curve_samples * (settings.curve_points - 1)
    trained = settings.epochs * min(settings.examples or drawn, drawn)
    tested = tests * ((1 + k) * settings.test_samples + k * along)
    return Counts(trained, tested, tested + k * drawn * (not is_given), ceil(trained / settings.batch))


def print_plan(settings: Settings, task: Task) -> None:
    """Print the plan of a run as a table; InputError where its model or prompts do not fit."""
    rows = []
    for name, value, unit, how in plan(settings, read_inputs(settings, task), intended_ranks(settings.preset)):
        text = f"{value:,.2f} h" if unit == "h" else f"{value:,.0f} {unit}"
        rows.append([name, f"{value / 1e9:,.3g} GB" if unit == "bytes" else text, how])
    Table(["", "", "how"], rows).print()


def plan(settings: Settings, inputs: Inputs, processes: int) -> list[Item]:
    """The counts of a run, the memory of each of its processes, its room on the disk, and an estimate of its time."""
    task, k = inputs.task, settings.iterations
    size, parameters = inputs.size, inputs.size.parameters
    found = counts(settings, size.drawn, len(task.test), inputs.given is not None)
    prompts = inputs.meta.prompt_ids([task.prompt(problem) for problem in task.train]) if task.train else []
    prompt = sum(map(len, prompts)) / len(prompts) if prompts else inputs.lengths[0]
    scored = sum(map(len, inputs.held_out or ()))
    checkpoint, own = checkpoint_bytes(settings, parameters), 4 * parameters / processes
    held = {
        "weights": (own, "in float32, sharded over the processes"),
        "gradients": (own, "in float32, sharded"),
        "optimiser": (checkpoint / processes - own, "AdamW's moments in float32, sharded; Adafactor's means are small"),
        "gathered weights": ((not settings.reshard) * BYTES[settings.compute] * parameters, "without resharding"),
    }
    items = [
        Item("processes", processes, "", "one GPU each; torchrun --nproc-per-node"),
        Item("prompt", prompt, "tokens", f"the {'mean' if prompts else 'longest'} of training"),
        Item("training samples", k * size.drawn, "", f"{k} iterations x {size.drawn:,}"),
        Item("test samples", found.tested, "", "before, and after each iteration; fewer along its epoch"),
        *([Item("held-out samples", scored, "", "scored before, along and after training")] if scored else []),
        Item("sampled tokens", found.sampled * settings.max_new_tokens, "", "at most: all to the limit"),
        Item("samples trained on", k * found.trained, "", f"{k} iterations x {found.trained:,}, at most"),
        Item("optimiser steps", k * found.steps, "", f"of {settings.batch} samples"),
        Item("parameters P", parameters, "", "counted"),
        *(Item(name, value, "bytes", how) for name, (value, how) in held.items()),
        Item("training, per GPU", sum(size for size, _ in held.values()), "bytes", "the sum; activations come on top"),
        Item(
            "sampling, per GPU", BYTES[settings.compute] * parameters, "bytes", "vLLM fills most of the rest: a cache"
        ),
        Item("host memory of a node", memory_needed(settings, size), "bytes", "weights once; samples in each process"),
        Item("checkpoint, on disk", checkpoint, "bytes", "weights and optimiser"),
        Item("disk", disk_needed(settings, size), "bytes", "models, samples and two checkpoints"),
    ]
    if settings.preset != "laptop" or torch.cuda.is_available():
        mean = prompt, COMPLETION * inputs.lengths[1]
        estimated = hours(settings, found, inputs.meta.model.config, parameters, processes, *mean)
        items += [Item(f"{stage}, on H100s", value, "h", ASSUMED[stage]) for stage, value in estimated.items()]
    return items


# ---- time: what is counted, over what a GPU is assumed to do -----------------------------------------------------

ASSUMED = {
    "starting": "3 minutes for each model: an engine and the trainer",
    "sampling": f"{SEQUENCES} sequences at a time; weights and cache are read at {MEMORY / 1e12:.2f} TB/s",
    "scoring": f"a forward pass at {MATRICES / 1e12:.0f} TFLOP/s",
    "training": f"{MATRICES / 1e12:.0f} TFLOP/s, then {LINKS / 1e9:.0f} GB/s of NVLink",
    "saving": f"weights after every --save-every steps and at the end, {WRITING / 1e9} GB/s",
}


def hours(
    settings: Settings,
    found: Counts,
    config: transformers.PreTrainedConfig,
    parameters: int,
    processes: int,
    prompt: float,
    completion: float,
) -> dict[str, float]:
    """Hours of each stage of a run on H100s, one after the other; a sample has so many tokens in the mean.

    A forward pass takes 2 operations for each weight and token, a backward pass twice that. For each of its passes a
    GPU of n sends (n - 1) / n of the weights that are gathered, and of the gradients that are summed.
    """
    k, each = settings.iterations, settings.batch / processes  # samples of a GPU in a step
    forward = 2 * parameters * each * (prompt + completion) / MATRICES
    sending = ceil(each / settings.micro_batch) * parameters * (processes - 1) / processes / LINKS
    gathering = BYTES[settings.compute] * sending
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * 2 * config.num_hidden_layers * heads * width * (prompt + completion)  # keys and values in bfloat16
    tokens_per_second = processes * SEQUENCES * MEMORY / (2 * parameters + SEQUENCES * cache)
    score = forward + settings.reshard * gathering  # without resharding the weights stay gathered from step to step
    train = (3 + settings.gradient_checkpointing) * forward + (1 + settings.reshard) * gathering + 4 * sending
    seconds = {
        "starting": (1 + k) * START,
        "sampling": found.sampled * completion / tokens_per_second,
        "scoring": k * found.steps * score,
        "training": k * found.steps * train,
        "saving": k * (found.steps // settings.save_every + 1) * 4 * parameters / WRITING,
    }
    return {stage: value / 3600 for stage, value in seconds.items()}
