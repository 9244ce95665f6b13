"""What a run would draw, train and need, before it starts: counts, and a rehearsal of its longest training step."""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table

from pipeline import dataset
from pipeline.held_out import rows_held_out
from pipeline.models.language_model import META, LanguageModel, asked_by, load_model
from pipeline.records import Task
from pipeline.rehearsal import Choice, choose, needed, setup_of
from pipeline.runtime.preflight import Size, checkpoint_bytes, disk_needed, memory_needed
from pipeline.sampling import check_lengths
from pipeline.settings import Settings, intended_ranks

CARDS = {"paper": 80e9, "single-gpu": 24e9}  # bytes of the GPU that a preset is for

# What an H100 SXM can do, as NVIDIA's data sheet says, and the share of it that is assumed here; no GPU was measured.
MATRICES = 989e12 * 0.4  # operations a second in bfloat16, dense
LINKS = 450e9 * 0.6  # bytes a second that a GPU sends over NVLink
MEMORY = 3.35e12 * 0.5  # bytes a second that a GPU reads
COMPLETION = 0.4  # of the longest: the tokens of a mean completion
SEQUENCES = 256  # that vLLM decodes at a time


class Item(NamedTuple):
    """A line of the plan; bytes and counts are plain numbers, `unit` says which."""

    name: str
    value: float
    unit: str
    how: str
    digits: int = 0


def print_plan(settings: Settings, task: Task) -> None:
    """Print the plan of a run as a table; InputError where its model or prompts do not fit."""
    processes = intended_ranks(settings.preset)
    table = Table("", "", "how")
    lm = load_model(settings.model, META, settings)
    for item in plan(settings, asked_by(lm, task), lm, processes):
        value = f"{item.value / 1e9:,.3g} GB" if item.unit == "bytes" else f"{item.value:,.{item.digits}f} {item.unit}"
        table.add_row(item.name, value, item.how)
    Console().print(table)


def plan(settings: Settings, task: Task, lm: LanguageModel, processes: int) -> list[Item]:
    """The counts of a run, the memory of each of its processes, its room on the disk, and an estimate of its time."""
    task = task if settings.test_source else replace(task, test=())
    longest = check_lengths(task, lm, settings.max_new_tokens)
    prompts = lm.prompt_ids([task.prompt(problem) for problem in task.train]) if task.train else []
    given = dataset.given_samples(settings, settings.samples, lm)[0] if settings.samples else None
    drawn = len(given) if given else len(task.train) * settings.drawn_per_problem
    trained = min(settings.examples or drawn, drawn)
    k = settings.iterations
    tested = len(task.test) * settings.test_samples
    along = len(task.test) * settings.curve_samples * (settings.curve_points - 1) * k
    sampled = tested * (1 + k) + along + (0 if given else k * drawn)
    steps = k * ceil(settings.epochs * trained / settings.batch)
    parameters = sum(weight.numel() for weight in lm.model.parameters())
    lengths = longest - settings.max_new_tokens, settings.max_new_tokens
    if given:
        lengths = dataset.longest(dataset.compose(settings, given, lm, task.stop)[0])
        longest = longest or sum(lengths)
    held_out = dataset.given_samples(settings, settings.held_out, lm)[0] if settings.held_out else []
    if held_out:
        rows_held_out(settings, held_out, lm, task.stop)  # InputError where they do not fit
    chosen = _chosen(settings, processes, *lengths)
    size = Size(parameters, drawn, tested, longest)
    c = {"float32": 4, "bfloat16": 2}[settings.compute]
    mean_prompt = sum(map(len, prompts)) / len(prompts) if prompts else lengths[0]
    of_gpus = []
    if torch.cuda.is_available() or settings.preset in CARDS:
        hours = _hours(chosen, lm.model.config, parameters, processes, steps, sampled, mean_prompt, lengths)
        of_gpus = [Item(f"{name}, on H100s", value, "h", how, 2) for name, (value, how) in hours.items()]
    return [
        Item("processes", processes, "", "one GPU each; torchrun --nproc-per-node"),
        Item("prompt", mean_prompt, "tokens", f"the {'mean' if prompts else 'longest'} of training"),
        Item("training samples", k * drawn, "", f"{k} iterations x {drawn:,}"),
        Item("test samples", tested * (1 + k) + along, "", "before, and after each iteration; fewer along its epoch"),
        *([Item("held-out samples", len(held_out), "", "scored before, along and after training")] if held_out else []),
        Item("sampled tokens", sampled * settings.max_new_tokens, "", "at most: all to the limit"),
        Item("samples trained on", k * settings.epochs * trained, "", f"{k} iterations x {trained:,}, at most"),
        Item("optimiser steps", steps, "", f"of {settings.batch} samples"),
        Item("parameters P", parameters, "", "counted"),
        *(Item(name, value, "bytes", "at the peak of the passes") for name, value in chosen.found.passes.items()),
        Item("training, per GPU", chosen.found.peak, "bytes", _how(chosen)),
        Item("sampling, per GPU", c * parameters, "bytes", f"{c} P; vLLM fills most of the rest with its cache"),
        Item("host memory of a node", memory_needed(settings, size), "bytes", "weights once; samples in each process"),
        Item("checkpoint, on disk", checkpoint_bytes(settings, parameters), "bytes", "weights and optimiser"),
        Item("disk", disk_needed(settings, size), "bytes", "models, samples and two checkpoints"),
        *of_gpus,
    ]


def _chosen(settings: Settings, processes: int, prompt: int, completion: int) -> Choice:
    """The run's own choice: for the GPU that is here, or that the preset is for; what a processor does without one."""
    setup = setup_of(settings, processes, prompt, completion)
    if torch.cuda.is_available() or settings.preset in CARDS:
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else CARDS[settings.preset]
        return choose(setup, free)
    return choose(setup._replace(gradient_checkpointing=bool(setup.gradient_checkpointing), reshard=True), float("inf"))


def _how(chosen: Choice) -> str:
    switches = {"gradient checkpointing": chosen.gradient_checkpointing, "resharding": chosen.reshard}
    told = ", ".join(f"{name} {'on' if value else 'off'}" for name, value in switches.items())
    room = f"{needed(chosen.found.peak) / 1e9:.1f} GB with what is not seen (1.1 times that and 4 GB: ours)"
    return f"rehearsed with {told}; {room}" + ("" if chosen.fits else ": too much for the GPU")


# ---- time: what is counted, over what a GPU can do ---------------------------------------------------------------


def step_seconds(flops: float, sent: dict[str, float], processes: int, host: float = 0.0) -> float:
    """Seconds of a step that computes, sends and lets the processor work one after the other, without any overlap.

    sent: bytes of whole tensors by collective; of these a GPU of n sends (n - 1) / n, twice that for an all-reduce.

    >>> step_seconds(MATRICES, {"all-gather": 2 * LINKS}, processes=2)
    2.0
    """
    share = (processes - 1) / processes
    own = sum(share * size * (2 if name == "all-reduce" else 1) for name, size in sent.items())
    return flops / MATRICES + own / LINKS + host


def scoring_seconds(flops: float, parameters: int, reshard: bool, processes: int) -> float:
    """Seconds of a forward pass without gradients; without resharding the weights are there from the first one on."""
    return step_seconds(flops, {"all-gather": 2 * parameters * reshard}, processes)


def tokens_per_second(config: transformers.PreTrainedConfig, parameters: int, context: float) -> float:
    """Tokens that a GPU decodes: a token of each sequence, once it has read weights, keys and values in bfloat16."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * 2 * config.num_hidden_layers * heads * size * context
    return SEQUENCES * MEMORY / (2 * parameters + SEQUENCES * cache)


def _hours(
    chosen: Choice,
    config: transformers.PreTrainedConfig,
    parameters: int,
    processes: int,
    steps: int,
    sampled: int,
    prompt: float,
    lengths: tuple[int, int],
) -> dict[str, tuple[float, str]]:
    """Hours of training, scoring and sampling, with what is assumed."""
    found, completion = chosen.found, COMPLETION * lengths[1]
    share = (prompt + completion) / sum(lengths)
    training = step_seconds(share * found.flops, found.sent, processes, found.host_seconds)
    scoring = scoring_seconds(share * found.forward_flops, parameters, chosen.reshard, processes)
    speed = processes * tokens_per_second(config, parameters, prompt + completion)
    return {
        "training": (steps * training / 3600, "40 % of 989 TFLOP/s, then 60 % of 450 GB/s of NVLink; mean lengths"),
        "scoring": (steps * scoring / 3600, "log mu: a forward pass"),
        "sampling": (
            sampled * completion / speed / 3600,
            f"vLLM at {speed:,.0f} tokens/s, 50 % of 3.35 TB/s; {completion:.0f} tokens each",
        ),
    }
