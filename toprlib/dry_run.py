"""What a run would sample, train and need, before it starts: calculated counts and bytes."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
import transformers

from toprlib.batches import MAX_PAIRS
from toprlib.external_samples import read_samples
from toprlib.language_model import load_without_weights
from toprlib.methods import METHODS
from toprlib.preflight import (
    RunSize,
    checkpoint_bytes,
    disk_needed,
    free_memory,
    measure_run,
    memory_needed,
    needs_gpu,
)
from toprlib.records import Task
from toprlib.report import Table
from toprlib.sampling import make_prompts
from toprlib.settings import Settings, check_task, intended_ranks

BYTES = {"float32": 4, "bfloat16": 2}  # of a number of each dtype
# Numbers that a layer keeps of a token for the backward pass: HIDDEN times the model's width, and
# MLP times that of its MLP; counted for Llama 3 8B, and within a fifth for three other models.
HIDDEN = 9.25
MLP = 4


class Counts(NamedTuple):
    """The numbers of samples and steps of a run."""

    trained: int  # samples that an iteration trains on, at most
    tested: int  # test samples of all evaluations
    sampled: int  # completions in all
    steps: int  # of the optimizer in an iteration


def count(settings: Settings, problems: int, tests: int, provided: int = 0) -> Counts:
    """The counts of a run that samples from these problems, or trains on `provided` samples.

    >>> count(Settings(n=4, eval_samples=4, k=4, evals_per_epoch=1), problems=10, tests=10)
    Counts(trained=40, tested=80, sampled=120, steps=3)
    """
    iterations = settings.iterations
    sampled = problems * settings.n
    available = provided or sampled
    if METHODS[settings.method].uses_pairs:
        most = 2 * problems * MAX_PAIRS or 2 * provided
    else:
        most = min(settings.examples or available, available)
    trained = settings.epochs * most
    at_ends = (1 + iterations) * settings.eval_samples_at(is_end=True)
    before_ends = iterations * (settings.evals_per_epoch - 1)
    tested = tests * (at_ends + before_ends * settings.eval_samples_at(is_end=False))
    steps = ceil(trained / settings.batch_size)
    return Counts(trained, tested, tested + iterations * sampled, steps)


def print_plan(settings: Settings, task: Task) -> None:
    """Print the plan of a run as a table. Raises InputError if model or prompts do not fit."""
    rows = []
    for name, (value, unit, explanation) in plan(settings, task).items():
        text = f"{value / 1e9:,.3g} GB" if unit == "bytes" else f"{value:,.0f} {unit}"
        rows.append([name, text, explanation])
    Table(["", "", "how"], rows).print()


def plan(settings: Settings, task: Task) -> dict[str, tuple[float, str, str]]:
    """Counts, memory and room on the disk: {name: (value, unit, explanation)}.

    Rows about GPUs are for runs that use them.
    """
    check_task(settings, task)
    lm = load_without_weights(settings.model, settings.chat, settings.system_prompt)
    task = lm.chat.apply_to(task) if lm.chat else task
    new_tokens = settings.max_new_tokens
    train_prompts = make_prompts(task, task.train, lm, new_tokens)
    test_prompts = make_prompts(task, task.test, lm, new_tokens)
    lengths = [len(prompt.ids) for prompt in train_prompts + test_prompts]
    provided = 0
    if settings.samples:
        ask = lm.chat.format if lm.chat else None
        samples = read_samples(settings.samples, settings.columns, ask, free_memory())
        provided = len(samples)
        lengths += [len(ids) for ids in lm.prompt_ids([sample.prompt for sample in samples])]
    processes = intended_ranks(settings.preset)
    counts = count(settings, len(task.train), len(task.test), provided)
    num_samples = provided or settings.n * len(task.train)
    max_tokens = max(lengths, default=0) + new_tokens
    size = measure_run(settings, lm, max_tokens, num_samples, len(task.test))
    table = {
        "processes": (processes, "", "torchrun --nproc-per-node"),
        "longest prompt": (max(lengths, default=0), "tokens", "of training and test problems"),
        "training samples": (settings.iterations * num_samples, "", "of all iterations"),
        "test samples": (counts.tested, "", "of all evaluations"),
        "sampled tokens": (counts.sampled * new_tokens, "", "if no completion ends early"),
        "samples trained on": (settings.iterations * counts.trained, "", "at most"),
        "optimizer steps": (settings.iterations * counts.steps, "", f"of {settings.batch_size}"),
        "parameters P": (size.parameters, "", "counted"),
    }
    if needs_gpu(settings) or torch.cuda.is_available():
        table |= gpu_memory(settings, lm.model.config, size, processes)
    checkpoint = checkpoint_bytes(settings, size)
    memory = memory_needed(settings, size)
    return table | {
        "memory of a machine": (memory, "bytes", "weights, samples and libraries, calculated"),
        "checkpoint, on disk": (checkpoint, "bytes", "weights and optimizer"),
        "disk": (disk_needed(settings, size), "bytes", "models, samples and two checkpoints"),
    }


def gpu_memory(
    settings: Settings, config: transformers.PreTrainedConfig, size: RunSize, processes: int
) -> dict[str, tuple[float, str, str]]:
    """The memory of each GPU in training, part by part, and in sampling."""
    shard = 4 * size.parameters / processes
    moments = checkpoint_bytes(settings, size) / processes - shard
    weights = BYTES[settings.dtype] * size.parameters
    gathered = weights
    if settings.reshard_after_forward:  # then the head is the largest part, with its gradient
        gathered = 2 * BYTES[settings.dtype] * config.vocab_size * config.hidden_size
    activations = activation_bytes(settings, config, size.max_tokens)
    parts = {
        "weights": (shard, "bytes", "float32, sharded over the processes"),
        "gradients": (shard, "bytes", "float32, sharded"),
        "optimizer": (moments, "bytes", "AdamW's moments, sharded; Adafactor's are small"),
        "gathered weights": (gathered, "bytes", "in --dtype"),
        "activations": (activations, "bytes", f"of {settings.micro_batch_size} full samples"),
    }
    total = _sum_of_values(parts.values())
    return parts | {
        "training, per GPU": (total, "bytes", "the sum, calculated; CUDA and NCCL need more"),
        "sampling, per GPU": (weights, "bytes", "vLLM fills most of the rest with its cache"),
    }


def _sum_of_values(rows: Sequence[tuple[float, str, str]]) -> float:
    return sum(value for value, _, _ in rows)


def activation_bytes(
    settings: Settings, config: transformers.PreTrainedConfig, max_tokens: int
) -> float:
    """What a micro-batch of the longest samples keeps for its backward pass, and its logits."""
    tokens = settings.micro_batch_size * max_tokens
    per_layer = HIDDEN * config.hidden_size + MLP * config.intermediate_size
    if settings.gradient_checkpointing:
        per_layer = config.hidden_size
    layers = config.num_hidden_layers * tokens * per_layer * BYTES[settings.dtype]
    new_tokens = settings.micro_batch_size * settings.max_new_tokens
    logits = 4 * new_tokens * config.vocab_size  # float32
    return layers + 2 * logits  # and their gradient
