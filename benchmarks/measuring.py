"""What the benchmarks share: sides that are measured in turn, in one run, and how far they lie apart."""

import ctypes
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from pipeline.report import Table
from pipeline.runtime.processes import device


@dataclass(frozen=True)
class Settings:
    """What every benchmark can be told; every default is ours."""

    rounds: int = 5
    """times that each side is measured"""
    small: bool = False
    """at sizes that say nothing, to see that it works"""
    seed: int = 0
    """seed of everything that is drawn"""
    out: Path = Path("runs/bench")
    """folder to write NAME.json into"""


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

    def table(self) -> Table:
        """The sides, with median, lowest and highest.

        >>> Comparison("steps", "s", {"ours": [1.0, 2.0, 4000.0]}).table().rows
        [['ours', '2', '1', '4,000']]
        """
        of_sides = {name: (statistics.median(each), min(each), max(each)) for name, each in self.values.items()}
        rows = [[name, *(f"{value:,.4g}" for value in values)] for name, values in of_sides.items()]
        return Table([self.what, f"{self.unit}, median", "lowest", "highest"], rows)

    def ratio(self, side: str, against: str) -> tuple[float, str]:
        """The median of the rounds' ratios; in a line, with the lowest and the highest behind it.

        >>> Comparison("", "", {"a": [4.0, 9.0], "b": [2.0, 3.0]}).ratio("a", "b")
        (2.5, 'a / b: 2.50 (2.00 to 3.00)')
        """
        ratios = [a / b for a, b in zip(self.values[side], self.values[against], strict=True)]
        median = statistics.median(ratios)
        return median, f"{side} / {against}: {median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    def verdict(self, goal: Goal) -> str:
        """Whether a goal is met, in a line.

        >>> Comparison("", "", {"a": [4.0, 9.0], "b": [2.0, 3.0]}).verdict(Goal("a", "b", 5.0))
        'a / b: 2.50 (2.00 to 3.00); goal at least 5: missed'
        """
        median, told = self.ratio(goal.side, goal.against)
        is_met = median >= goal.bound if goal.is_least else median <= goal.bound
        hoped = f"goal at {'least' if goal.is_least else 'most'} {goal.bound:g}"
        return f"{told}; {hoped}: {'met' if is_met else 'missed'}"

    def findings(self) -> list[str]:
        """In lines: its goals, the first side's ratios to those that no goal names, its notes.

        >>> Comparison("", "s", {"ours": [2.0], "theirs": [4.0]}, notes=["a note"]).findings()
        ['ours / theirs: 0.50 (0.50 to 0.50)', 'a note']
        """
        named = {side for goal in self.goals for side in (goal.side, goal.against)}
        first, *others = self.values or [""]
        ratios = [self.ratio(first, other)[1] for other in others if self.has_ratios and other not in named]
        return [*map(self.verdict, self.goals), *ratios, *self.notes]


def record(comparisons: Sequence[Comparison], **versions: str) -> dict[str, Any]:
    """What a benchmark of comparisons writes."""
    return {"machine": machine() | versions, "comparisons": [asdict(comparison) for comparison in comparisons]}


def tables(found: Mapping[str, Any]) -> list[tuple[Table, list[str]]]:
    """The comparisons of a record, each as a table and the lines below it.

    >>> tables({"comparisons": [asdict(Comparison("a", "s", {"ours": [1.0]}, notes=["note"]))]})[0][1]
    ['note']
    """
    read = [Comparison(**c | {"goals": [Goal(**goal) for goal in c["goals"]]}) for c in found["comparisons"]]
    return [(comparison.table(), comparison.findings()) for comparison in read]


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
    start = now()
    work()
    return now() - start


def now() -> float:
    """The time, in seconds, once the device has done what it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


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


def matrix_speed(size: int, compute: str) -> float:
    """Operations per second of the best of ten products of square matrices."""
    a, b = (torch.randn(size, size, device=device(), dtype=getattr(torch, compute)) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: a @ b) for _ in range(10))


def memory_speed(megabytes: int = 256) -> float:
    """Bytes per second of a copy that no cache holds, those read and those written; the best of ten."""
    source = torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / min(seconds(lambda: target.copy_(source)) for _ in range(10))


def machine() -> dict[str, str | int | float]:
    """What the numbers were measured on and with, and what it can do."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "GFLOP/s, float32 matrices of 1024": round(matrix_speed(1024, "float32") / 1e9),
        "GB/s, copying": round(memory_speed() / 1e9, 1),
        "python": platform.python_version(),
        **made_with(),
    }


def made_with() -> dict[str, str]:
    """The versions that numbers depend on, and the date."""
    return {"torch": torch.__version__, "transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d")}
