"""What the benchmarks share: sides that are measured in turn, in one run, and how far they lie apart."""

import ctypes
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import transformers
from gpu_step import matrix_speed
from rich.console import Console
from rich.table import Table

from pipeline.records import write_file


@dataclass(frozen=True)
class Goal:
    """That `side` has at least, or at most, `bound` times what `against` has."""

    side: str
    against: str
    bound: float
    is_least: bool = True


@dataclass(frozen=True)
class Comparison:
    """Sides that do the same work: what each had in every round, and what was hoped for."""

    what: str
    unit: str
    values: dict[str, list[float]]  # a number for each round
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what limits it, as measured
    has_ratios: bool = True

    def ratios(self, side: str, against: str) -> list[float]:
        """Round by round.

        >>> Comparison("", "", {"a": [4.0, 9.0], "b": [2.0, 3.0]}).ratios("a", "b")
        [2.0, 3.0]
        """
        return [a / b for a, b in zip(self.values[side], self.values[against], strict=True)]


def in_turn(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each side returns, `rounds` times: all sides once, then all again, so that they share the machine's moods.

    >>> in_turn({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    values: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            values[name].append(side())
    return values


def seconds(work: Callable[[], object]) -> float:
    """The time it takes.

    >>> seconds(lambda: time.sleep(0.01)) > 0.009
    True
    """
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _resident(field: str) -> int:
    """Bytes of this process: VmRSS, now; VmHWM, at most since it was last reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


def peak_above(work: Callable[[], object]) -> int:
    """Bytes that `work` needs at most, above what there is before it; on Linux, with glibc."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed before, and kept for later, would hide what is needed now
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def memory_speed(megabytes: int = 256, repeats: int = 10) -> float:
    """Bytes per second of a copy that no cache holds, those read and those written; the best of some."""
    source = torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / min(seconds(lambda: target.copy_(source)) for _ in range(repeats))


def machine() -> dict[str, str | int | float]:
    """What the numbers were measured on and with, and what it can do."""
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "GFLOP/s, float32 matrices of 1024": round(matrix_speed(1024, "float32") / 1e9),
        "GB/s, copying": round(memory_speed() / 1e9, 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _lines(file: str) -> list[str]:
    path = Path(file)
    return path.read_text().splitlines() if path.exists() else []


def report(out: Path, name: str, command: str, comparisons: list[Comparison], **versions: str) -> None:
    """Print the comparisons, and write them to out/NAME.json."""
    for comparison in comparisons:
        print_comparison(comparison)
    record = {"command": command, "machine": machine() | versions, "comparisons": [asdict(c) for c in comparisons]}
    write_file(out / f"{name}.json", json.dumps(record, indent=1) + "\n")


def print_comparison(comparison: Comparison) -> None:
    """A table of the sides, and a line for each goal and note."""
    table = Table("", f"{comparison.unit}, median", "lowest", "highest", title=comparison.what)
    for name, values in comparison.values.items():
        table.add_row(name, *summary(values))
    Console().print(table)
    for line in findings(comparison):
        print(line)


def summary(values: Sequence[float]) -> list[str]:
    """Median, lowest and highest, as text.

    >>> summary([1.0, 2.0, 4000.0])
    ['2', '1', '4,000']
    """
    return [f"{value:,.4g}" for value in (statistics.median(values), min(values), max(values))]


def findings(comparison: Comparison) -> list[str]:
    """In lines: its goals, the first side's ratios to those that no goal names, its notes.

    >>> findings(Comparison("", "s", {"ours": [2.0], "theirs": [4.0]}, notes=["a note"]))
    ['ours / theirs: 0.50 (0.50 to 0.50)', 'a note']
    """
    first, *others = comparison.values or [""]
    known = {goal.against for goal in comparison.goals} | {goal.side for goal in comparison.goals}
    others = [other for other in others if comparison.has_ratios and other not in known]
    ratios = [ratio_of(comparison, first, other) for other in others]
    return [*(verdict(comparison, goal) for goal in comparison.goals), *ratios, *comparison.notes]


def ratio_of(comparison: Comparison, side: str, against: str) -> str:
    """The ratio of two sides: the rounds' median, and the lowest and the highest behind it."""
    ratios = comparison.ratios(side, against)
    return f"{side} / {against}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def verdict(comparison: Comparison, goal: Goal) -> str:
    """Whether a goal is met, in a line.

    >>> found = Comparison("", "samples/s", {"ours": [10.0, 12.0, 12.0], "theirs": [4.0, 4.0, 5.0]})
    >>> verdict(found, Goal("ours", "theirs", 5.0))
    'ours / theirs: 2.50 (2.40 to 3.00); goal at least 5: missed'
    """
    ratios = comparison.ratios(goal.side, goal.against)
    middle = statistics.median(ratios)
    is_met = middle >= goal.bound if goal.is_least else middle <= goal.bound
    hoped = f"goal at {'least' if goal.is_least else 'most'} {goal.bound:g}"
    return f"{ratio_of(comparison, goal.side, goal.against)}; {hoped}: {'met' if is_met else 'missed'}"
