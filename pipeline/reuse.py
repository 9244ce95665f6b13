"""--reuse: what the initial model has drawn in another run, and log mu of it, are copied where they are the same."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.dataset import Row
from pipeline.records import Example, Problem, Sample, Task
from pipeline.runtime.run_folder import read_checked, read_json
from pipeline.sampling import graded, is_of
from pipeline.settings import OF_SCORING


def take_samples(source: Path, task: Task, problems: Sequence[Problem], n: int) -> list[Sample]:
    """The samples of `source`, a stage's file of another run, if it holds n of each problem; else none.

    They are graded anew: the reward may have changed since.
    """
    of_each = [problem for problem in problems for _ in range(n)]
    samples = read_checked(source, Sample) if source.exists() else []
    return graded(task, samples, of_each) if is_of(task, samples, of_each) else []


def rows_with_logmu(folder: Path, source: Path, rows: list[Row], record: Mapping[str, Any]) -> list[Row]:
    """The rows with log mu of `source`, the train.jsonl of a run in `folder` that has computed the same batches.

    record: what this run is. Empty where the other computes otherwise, or has other completions or another order.
    """
    there = read_json(folder / "config.json")
    if not source.exists() or any(there[name] != record[name] for name in OF_SCORING):
        return []
    return with_logmu_of(rows, read_checked(source, Example))


def with_logmu_of(rows: Sequence[Row], others: Sequence[Example]) -> list[Row]:
    """The rows with the log mu of others, if those are the same completions in the same order; rewards may differ.

    Empty if they are not.

    >>> example = Example([1], [2], float("nan"), 1.0, sample=0, row=0)
    >>> [[found]] = with_logmu_of([[example]], [replace(example, logmu=-3.0, token_logmu=[-3.0], reward=0.5)])
    >>> found.logmu, found.reward
    (-3.0, 1.0)
    """

    def place(example: Example) -> tuple[list[int], list[int], int, int]:
        return example.prompt_ids, example.completion_ids, example.sample, example.row

    if [place(example) for row in rows for example in row] != [place(other) for other in others]:
        return []
    known = iter(others)
    found = [[(example, next(known)) for example in row] for row in rows]
    return [[replace(e, token_logmu=k.token_logmu, logmu=k.logmu) for e, k in row] for row in found]
