"""What a run would draw, train and need in memory, before it starts: counts and formulas; nothing here is measured."""

import os
from math import ceil, prod
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from pipeline.models.chunked_head import SLICE
from pipeline.models.language_model import META, LanguageModel, decoder_layers, load_model
from pipeline.records import Sample, Task, read_rows
from pipeline.sampling import check_lengths
from pipeline.settings import Settings


class Item(NamedTuple):
    """A line of the plan; bytes and counts are plain numbers, `unit` says which."""

    name: str
    value: float
    unit: str
    formula: str
    digits: int = 0


def print_plan(settings: Settings, task: Task) -> None:
    """Print the plan of a run as a table; InputError where its model or prompts do not fit."""
    processes = int(os.environ.get("WORLD_SIZE", 8 if settings.preset == "paper" else 1))
    table = Table("", "", "how")
    for item in plan(settings, task, load_model(settings.model, META, settings.trust_remote_code), processes):
        value = f"{item.value / 1e9:,.3g} GB" if item.unit == "bytes" else f"{item.value:,.{item.digits}f} {item.unit}"
        table.add_row(item.name, value, item.formula)
    Console().print(table)


def plan(settings: Settings, task: Task, lm: LanguageModel, processes: int) -> list[Item]:
    """The counts of a run and the memory of each of its processes, with the formula of each."""
    longest = check_lengths(task, lm, settings.max_new_tokens)
    return [*_counts(settings, task, lm, processes), *_memory(settings, lm, processes, longest)]


def _counts(settings: Settings, task: Task, lm: LanguageModel, processes: int) -> list[Item]:
    prompts = lm.tokenizer([task.prompt(problem) for problem in task.train])["input_ids"] if task.train else []
    mean_prompt = sum(map(len, prompts)) / max(len(prompts), 1)
    given = read_rows(settings.samples, Sample) if settings.samples else None
    drawn = len(given) if given else len(task.train) * settings.drawn_per_problem
    trained = min(settings.examples or drawn, drawn)
    tested = len(task.test) * settings.test_samples * (1 + settings.iterations)
    along = len(task.test) * settings.curve_samples * (settings.curve_points - 1) * settings.iterations
    k = settings.iterations
    sampled = tested + along + (0 if given else k * drawn)
    parameters = sum(weight.numel() for weight in lm.model.parameters())
    tokens = k * trained * (mean_prompt + settings.max_new_tokens)
    passes = 8 + 2 if settings.gradient_checkpointing else 6 + 2
    return [
        Item("processes", processes, "", "one GPU each; torchrun --nproc-per-node"),
        Item("prompt", mean_prompt, "tokens", "mean over the training problems"),
        Item("training samples", k * drawn, "", f"{k} iterations x {drawn:,}"),
        Item("test samples", tested + along, "", "before, and after each iteration; fewer along its epoch"),
        Item("sampled tokens", sampled * settings.max_new_tokens, "", "at most: all to the limit"),
        Item("samples trained on", k * trained, "", f"{k} iterations x {trained:,}, at most"),
        Item("optimiser steps", k * ceil(trained / settings.batch), "", f"of {settings.batch} samples"),
        Item("parameters P", parameters, "", "counted"),
        Item(
            "at 100 TFLOP/s each",
            passes * parameters * tokens / processes / 1e14 / 3600,
            "h",
            f"an estimate, not measured: training and scoring, {passes} P a token, of prompt and longest completion",
            digits=2,
        ),
    ]


def _memory(settings: Settings, lm: LanguageModel, processes: int, longest: int) -> list[Item]:
    config, layers = lm.model.config, decoder_layers(lm.model)
    shapes = [weight.shape for weight in lm.model.parameters()]
    parameters, layer = sum(map(prod, shapes)), sum(weight.numel() for weight in layers[0].parameters())
    rest = parameters - layer * len(layers)  # embedding and head
    if settings.optimizer == "adamw":
        state, how = 8 * parameters / processes, "8 P / processes: two moments"
    else:
        means = sum(prod(s[:-1]) + prod(s[:-2]) * s[-1] if len(s) > 1 else s[0] for s in shapes)
        state, how = 4 * means / processes, "4 (rows + columns) / processes"
    c = {"float32": 4, "bfloat16": 2}[settings.compute]
    is_spread = processes > 1 or settings.compute != "float32"
    gathered = (c * (rest + 2 * layer) + (c + 4) * max(rest, layer)) * is_spread
    tokens = settings.micro_batch * longest
    wide = 16 * config.hidden_size + 6 * config.intermediate_size  # a layer's inner activations, a token
    kept = config.hidden_size * len(layers) + wide if settings.gradient_checkpointing else wide * len(layers)
    vocabulary = min(SLICE, config.vocab_size) if settings.sliced_head else config.vocab_size
    logits = settings.micro_batch * settings.max_new_tokens * vocabulary * (2 * c + 8)
    models = settings.iterations + settings.curve_points - 1
    copies = f"{c} (rest + 2 layers) + {c + 4} max(rest, layer): FSDP2's copies"
    of_training = [
        Item("weights", 4 * parameters / processes, "bytes", "4 P / processes: float32"),
        Item("gradients", 4 * parameters / processes, "bytes", "4 P / processes: float32"),
        Item("optimiser", state, "bytes", how),
        Item("gathered weights", gathered, "bytes", copies),
        Item("activations", c * tokens * kept, "bytes", f"{c} x {tokens:,} tokens x {kept:,}"),
        Item(
            "logits",
            logits,
            "bytes",
            f"{2 * c + 8} x {settings.micro_batch} x {settings.max_new_tokens} x "
            + (f"a slice of {vocabulary:,} of the vocabulary" if settings.sliced_head else "vocabulary"),
        ),
    ]
    return [
        *of_training,
        Item("training, per GPU", sum(item.value for item in of_training), "bytes", "sum; without fragmentation"),
        Item("sampling, per GPU", c * parameters, "bytes", f"{c} P; vLLM fills most of the rest with its cache"),
        Item(
            "host memory, in all", 4 * parameters * processes, "bytes", "4 P x processes, and what samples take in each"
        ),
        Item("checkpoint, on disk", 4 * parameters + state * processes, "bytes", "4 P + optimiser; two at times"),
        Item(
            "models, on disk", 4 * parameters * models, "bytes", "4 P an iteration, and a point of the curve at times"
        ),
    ]
