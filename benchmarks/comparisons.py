"""Ways to do the same work, measured in turn: what TOPR costs above supervised training, and the memory of its head."""

import ctypes
import gc
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy

import topr
from benchmarks import Settings
from benchmarks.fake_8b_step import config_of
from pipeline.metrics import step_metrics
from pipeline.models.chunked_head import selected_logprobs
from pipeline.models.language_model import load_model, make_optimizer
from pipeline.report import Table
from pipeline.settings import TINY

PROMPT, COMPLETION = 40, 26  # tokens of a tiny problem, and of its longest solution


def compare(
    what: str, unit: str, sides: Mapping[str, Callable[[], float]], rounds: int, goals: Mapping[str, float]
) -> dict[str, Any]:
    """What each side returns, for the record: all sides once, then all again, so that they share the machine's moods.

    The notes are the first side's ratios to the others: median, lowest and highest of the rounds. goals: their limits.

    >>> ours, theirs = iter([1.0, 2.0, 9.0]), iter([1.0, 1.0, 1.0])
    >>> compare("steps", "s", {"ours": ours.__next__, "theirs": theirs.__next__}, 3, {"theirs": 2.0})["notes"]
    ['ours / theirs: 2.00 (1.00 to 9.00); goal at most 2: met']
    """
    turns = [{name: side() for name, side in sides.items()} for _ in range(rounds)]
    values = {name: [turn[name] for turn in turns] for name in sides}
    (first, *others), notes = sides, []
    for other in others:
        ratios = [a / b for a, b in zip(values[first], values[other], strict=True)]
        median, most = statistics.median(ratios), goals.get(other)
        hoped = f"; goal at most {most:g}: {'met' if median <= most else 'missed'}" if most else ""
        notes.append(f"{first} / {other}: {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f}){hoped}")
    return {"what": what, "unit": unit, "values": values, "notes": notes}


def tables(found: Mapping[str, Any]) -> list[tuple[Table, list[str]]]:
    """The comparisons of a record, each as a table of the sides, and the lines below it.

    >>> steps = {"what": "steps", "unit": "s", "values": {"ours": [1.0, 2.0, 4000.0]}, "notes": []}
    >>> tables({"comparisons": [steps]})[0][0].rows
    [['ours', '2', '1', '4,000']]
    """
    made = []
    for one in found["comparisons"]:
        sides = {name: (statistics.median(each), min(each), max(each)) for name, each in one["values"].items()}
        rows = [[name, *(f"{value:,.4g}" for value in values)] for name, values in sides.items()]
        made.append((Table([one["what"], f"{one['unit']}, median", "lowest", "highest"], rows), one["notes"]))
    return made


def peak_above(work: Callable[[], object]) -> int:
    """Bytes that `work` needs at most, above what there is before it; on Linux, with glibc."""

    def peak() -> int:
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before, and kept for later, would hide what is needed now
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = peak()
    work()
    return peak() - before


def loss_memory(settings: Settings) -> dict[str, Any]:
    """Memory of log pi and its gradient, from hidden states through a head of 128,256 tokens: by slices, and otherwise.

    Peak of the process's memory above what it has with weights and hidden states, forward and backward pass, the
    gradient of the weights included, and the time of the same calls. tests/test_head.py checks that all agree.
    """
    width, count, vocabulary = (64, 64, 32_768) if settings.small else (512, 512, 128_256)
    torch.manual_seed(settings.seed)
    hidden = torch.randn(count, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    tokens = torch.randint(vocabulary, (count,))
    ways = {
        "slices of the vocabulary": lambda: selected_logprobs(hidden, weight, tokens),
        "topr.select_logprobs": lambda: topr.select_logprobs(hidden @ weight.T, tokens),
        "log_softmax + gather": lambda: (hidden @ weight.T).log_softmax(-1).gather(-1, tokens[:, None]),
    }

    def step(logprobs: Callable[[], Tensor]) -> None:
        logprobs().sum().backward()
        weight.grad = hidden.grad = None

    for way in ways.values():
        step(way)  # the first time is slower
    what = f"{count} tokens, hidden {width}, {vocabulary:,} in the vocabulary, float32"
    memory = {name: lambda way=way: peak_above(lambda: step(way)) / 1e6 for name, way in ways.items()}
    time = {name: lambda way=way: timeit(lambda: step(way), number=1) for name, way in ways.items()}
    comparisons = [
        compare(f"peak memory: {what}", "MB", memory, settings.rounds, {"topr.select_logprobs": 0.5}),
        compare(f"time: {what}", "s", time, settings.rounds, {}),
    ]
    return {"comparisons": comparisons}


def batch_of(rows: int, vocabulary: int) -> topr.Batch:
    """Random tokens; a completion has two thirds of the longest or more."""
    length, column = torch.randint(18, COMPLETION + 1, (rows, 1)), torch.arange(PROMPT + COMPLETION)
    ids, mask = torch.randint(vocabulary, (rows, len(column))), (column < PROMPT + length).float()
    reward = 2.0 * torch.randint(2, (rows,)) - 1
    return topr.Batch(ids, mask, mask * (column >= PROMPT), torch.zeros(rows), reward, length[:, 0].float())


def train_ours(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[topr.Batch]) -> None:
    """TOPR, with the metrics of each step."""
    for stats in topr.train(model, optimizer, [topr.Step([batch], len(batch.reward)) for batch in batches]):
        step_metrics(stats.log_ratio, stats.reward, stats.weight)


def train_plainly(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[topr.Batch]) -> None:
    """Supervised training on every completion, by the shortest loop that trains."""
    for batch in batches:
        optimizer.zero_grad()
        logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        labels = batch.input_ids.masked_fill(batch.completion_mask == 0, -100)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()


def overhead(settings: Settings) -> dict[str, Any]:
    """What TOPR costs above supervised training: `topr.train` with metrics against plain cross-entropy.

    Milliseconds a step of the tiny model, and of a wider one, on the lengths of tiny problems. Both sides have the same
    padded rows, AdamW, and turns of two steps. Give --rounds 60, for the difference is small.
    """
    torch.manual_seed(settings.seed)
    wider = transformers.AutoModelForCausalLM.from_config(config_of("small"))
    models = {"tiny/base": load_model(str(TINY / "base")).model, "4 layers of 256": wider}
    rows, comparisons = 2 if settings.small else 16, []
    for name, model in models.items():
        batches, sides = [batch_of(rows, model.config.vocab_size) for _ in range(2)], {}
        for side, train in {"topr.train": train_ours, "cross-entropy": train_plainly}.items():
            own = deepcopy(model).eval()
            work = partial(train, own, make_optimizer("adamw", own, 1e-5), batches)
            work()  # the first passes are slower
            sides[side] = lambda work=work: 1e3 * timeit(work, number=1) / 2
        what = f"{name}, {rows} padded rows of {PROMPT} + {COMPLETION} tokens"
        comparisons.append(compare(what, "ms a step", sides, settings.rounds, {"cross-entropy": 1.03}))
    return {"comparisons": comparisons}
