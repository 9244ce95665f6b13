"""Make results/page.json, what docs/index.html shows of single completions: two default laptop runs, looked at closely.

    python -m docs.make_page_data    # ten minutes on two cores; then python docs/make_page.py

TOPR and naive REINFORCE train on the same samples in the same order, with train_gsm8k.py's default settings. Both are
looked at after every sixteenth of the epoch. What is shown is chosen by rule, before anything is trained:

- the first five test questions, each with the first completion that each model draws;
- of the training samples: the first problem that has a correct and an incorrect completion, and the first of either.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paper.runs import commit
from pipeline.dataset import Row
from pipeline.models.language_model import collate, load_model, token_logprobs
from pipeline.records import Example, Sample, Task, read_rows, write_file
from pipeline.results import versions
from pipeline.runtime.processes import command
from pipeline.runtime.run_folder import Point
from pipeline.settings import MethodName, Settings
from pipeline.stages import open_run
from train_gsm8k import gsm8k_task

ROOT = Path(__file__).resolve().parent.parent
METHODS: tuple[MethodName, ...] = ("topr", "reinforce")
POINTS = 16  # looks at a run along its epoch
QUESTIONS = 5  # the first test questions


class Looked(NamedTuple):
    """A run, and what was seen along its epoch."""

    samples: list[Sample]
    rows: list[Row]
    chosen: list[Example]
    points: list[Point]
    log_ratio: list[list[list[float]]]  # point, chosen example, token
    tested: list[list[Sample]]  # point, first completion of each of the first test questions
    curve: list[dict[str, Any]]


def look(settings: Settings, task: Task) -> Looked:
    """The experiment of train_gsm8k.py; each model is used to score the chosen examples before it is removed."""
    with open_run(settings, task) as run:
        run.evaluate(1, run.start)
        samples = run.sample(1, settings.model)
        rows = run.compose(1, samples, settings.model)
        chosen = choose(samples, rows)
        points = [run.start, *run.train(1, rows, settings.model)]
        log_ratio = score(chosen, [point.model for point in points])
        for point in points[1:]:
            run.evaluate(1, point)
        [iteration] = run.results()["iterations"]
    files = [settings.out / "iteration-1" / f"test-{point.step}.jsonl" for point in points]
    first = [problem.id for problem in task.test[:QUESTIONS]]
    drawn = [{sample.problem_id: sample for sample in reversed(read_rows(file, Sample))} for file in files]
    tested = [[of_problem[name] for name in first] for of_problem in drawn]
    return Looked(samples, rows, chosen, points, log_ratio, tested, iteration["curve"])


def choose(samples: Sequence[Sample], rows: Sequence[Row]) -> list[Example]:
    """The first correct and the first incorrect completion of the first problem that has both."""
    first: dict[str, dict[str, int]] = {}
    for number, sample in enumerate(samples):
        first.setdefault(sample.prompt, {}).setdefault(sample.outcome, number)
    of_problem = next(found for found in first.values() if {"correct", "incorrect"} <= set(found))
    examples = {example.sample: example for row in rows for example in row}
    return [examples[of_problem[outcome]] for outcome in ("correct", "incorrect")]


def score(examples: Sequence[Example], models: Sequence[str]) -> list[list[list[float]]]:
    """log pi - log mu of each token of each example under each model; mu is the first of the models."""
    batch, found = collate([[example] for example in examples]), []
    for model in models:
        with torch.no_grad():
            found.append(token_logprobs(load_model(model).model, batch))  # (B, C)
    sizes = [len(example.completion_ids) for example in examples]
    return [
        [[round(x, 4) for x in row[:size].tolist()] for row, size in zip(token_logp - found[0], sizes, strict=True)]
        for token_logp in found
    ]


def record(task: Task, settings: Settings, looked: dict[str, Looked]) -> dict[str, Any]:
    """The content of page.json."""
    one = looked[METHODS[0]]
    tokenizer = load_model(settings.model).tokenizer
    outcomes = ("correct", "incorrect", "invalid")
    return {
        "command": "python -m docs.make_page_data",
        "settings": {"seed": settings.seed, "lr": settings.lr, "batch": settings.batch, "problems": settings.problems},
        "commit": commit(),
        "versions": versions(),
        "steps": [point.step for point in one.points],
        "seen": [point.seen for point in one.points],
        "curves": {
            method: {name: [round(point[name], 6) for point in run.curve] for name in outcomes}
            | {"se": [round(point["pass@1"]["se"], 6) for point in run.curve]}
            for method, run in looked.items()
        },
        "questions": [
            {
                "question": problem.question,
                "gold": str(problem.gold),
                "completions": {
                    method: [[tested[i].completion, tested[i].outcome] for tested in run.tested]
                    for method, run in looked.items()
                },
            }
            for i, problem in enumerate(task.test[:QUESTIONS])
        ],
        "completions": [
            {
                "question": next(p.question for p in task.train if p.id == one.samples[example.sample].problem_id),
                "outcome": one.samples[example.sample].outcome,
                "reward": example.reward,
                "step": 1 + example.row // settings.batch,  # that trains on it
                "tokens": [tokenizer.decode([token]) for token in example.completion_ids],
                "log_ratio": {method: [found[i] for found in run.log_ratio] for method, run in looked.items()},
            }
            for i, example in enumerate(one.chosen)
        ],
    }


def main() -> None:
    """The command: two runs in a temporary folder, then results/page.json."""
    with command("make_page_data"), tempfile.TemporaryDirectory() as folder:
        out, looked = Path(folder), {}
        for method in METHODS:
            reuse = out / METHODS[0] if looked else None
            settings = Settings(method=method, curve_points=POINTS, out=out / method, reuse=reuse)
            task = gsm8k_task(settings)
            looked[method] = look(settings, task)
        content = json.dumps(record(task, settings, looked), indent=1, ensure_ascii=False)
        write_file(ROOT / "results" / "page.json", content + "\n")


if __name__ == "__main__":
    main()
