"""Naive REINFORCE, SFT and TOPR on the same answers, few of which are right: two minutes.

`python -m examples.compare`. SFT trains on the right answers: once, in batches with wrong answers
of weight 0, or repeated to full batches. All methods make equally many optimizer steps.
"""

import random
import sys
from dataclasses import replace
from typing import Any

import rich
import rich.table

from toprlib.evaluation import format_value
from toprlib.records import Problem, Task
from toprlib.settings import Settings, command, read_settings
from train_gsm8k import experiment, grade_all, parse_answer

QUESTION = "Q: Kim owns {} books and sells {} of them. How many books are left?\nA:"
METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "naive REINFORCE": {"method": "reinforce"},
    "TOPR": {},
    "TOPR, effective proportion 50 %": {"effective_proportion": 0.5},
    "SFT, once": {"method": "sft"},
    "SFT, repeated": {"method": "sft", "composition": "positives_only"},
}
PRESETS = {
    "compare": Settings(
        problems=96, n=8, lr=1e-4, test_problems=96, eval_samples=8, k=4, evaluate_after=()
    )
}


def books_task(settings: Settings) -> Task:
    """Differences of two numbers; the first half of them to train on, the second half to test."""
    problems = []
    for a in range(5, 80):
        for b in range(3, a):
            problems.append(Problem(f"{a}-{b}", QUESTION.format(a, b), gold=a - b))
    random.Random(0).shuffle(problems)
    half = len(problems) // 2
    train = problems[:half][: settings.problems]
    test = problems[half:][: settings.test_problems]
    return Task("books", train, test, grade_all, parse=parse_answer)


def compare(settings: Settings, task: Task) -> rich.table.Table:
    """Train with each of METHOD_SETTINGS on the samples of the first one; a row for each."""
    table = rich.table.Table("", "pass@1", "greedy", f"maj@{settings.k}")
    samples = None
    for name, changes in METHOD_SETTINGS.items():
        out = settings.out / name.replace(" ", "_")
        results = experiment(replace(settings, out=out, samples=samples, **changes), task)
        if samples is None:
            add_row(table, "before training", results["before"])
            samples = str(out / "iteration-1" / "samples.jsonl")
        add_row(table, name, results["iterations"][0]["after"])
    return table


def add_row(table: rich.table.Table, name: str, evaluation: dict[str, Any]) -> None:
    """Add the metrics of the table's columns."""
    metrics = [column.header for column in table.columns[1:]]
    table.add_row(name, *[format_value(evaluation[metric]) for metric in metrics])


def main() -> None:
    """The command line."""
    with command("examples.compare"):
        settings = read_settings(sys.argv[1:], PRESETS, __doc__)
        rich.print(compare(settings, books_task(settings)))


if __name__ == "__main__":
    main()
