"""Make results/page.json, what docs/index.html shows of single completions: two default laptop runs, looked at closely.

    python -m docs.make_page_data    # ten minutes on two cores; then python docs/make_page.py

TOPR and naive REINFORCE train on the same samples in the same order, with train_gsm8k.py's default settings. Both are
looked at after every sixteenth of the epoch. What is shown is chosen by rule, before training: the first five
test questions, each with a model's first completion, and the training samples that `choose` takes.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paper.runs import commit
from pipeline.models.language_model import collate, load_model, token_logprobs
from pipeline.records import Example, Sample, read_rows, write_file
from pipeline.results import versions
from pipeline.runtime.processes import command
from pipeline.settings import Settings
from pipeline.stages import open_run
from train_gsm8k import gsm8k_task

RESULTS = Path(__file__).resolve().parent.parent / "results"
POINTS = 16  # looks at a run along its epoch
QUESTIONS = 5  # the first test questions


def choose(samples: Sequence[Sample], examples: Sequence[Example]) -> list[Example]:
    """The first correct and the first incorrect completion of the first problem that has both."""
    trained = {example.sample: example for example in examples}
    first: dict[str, dict[str, Example]] = {}
    for number, sample in enumerate(samples):
        first.setdefault(sample.prompt, {}).setdefault(sample.outcome, trained[number])
    return next([of["correct"], of["incorrect"]] for of in first.values() if {"correct", "incorrect"} <= set(of))


@torch.no_grad()
def score(examples: Sequence[Example], models: Sequence[str]) -> list[list[list[float]]]:
    """log pi - log mu: example, model, token. mu is the first of the models."""
    batch = collate([[example] for example in examples])
    logp = torch.stack([token_logprobs(load_model(model).model, batch) for model in models])  # (models, B, C)
    each = (logp - logp[0]).unbind(1)
    sizes = [len(example.completion_ids) for example in examples]
    return [[[round(x, 4) for x in row[:size].tolist()] for row in of] for of, size in zip(each, sizes, strict=True)]


def main() -> None:
    """The command: two runs in a temporary folder, then results/page.json."""
    curves, log_ratio = {}, {}
    with command("make_page_data"), tempfile.TemporaryDirectory() as folder:
        topr = Settings(method="topr", curve_points=POINTS, out=Path(folder) / "topr")
        naive = replace(topr, method="reinforce", out=Path(folder) / "reinforce", reuse=topr.out)
        task = gsm8k_task(topr)
        shown = task.test[:QUESTIONS]
        questions = [{"question": p.question, "gold": str(p.gold), "completions": {}} for p in shown]
        for settings in (topr, naive):
            with open_run(settings, task) as run:
                run.evaluate(1, run.start)
                samples = run.sample(1, settings.model)
                rows = run.compose(1, samples, settings.model)
                points = [run.start, *run.train(1, rows, settings.model)]
                chosen = choose(samples, [example for row in rows for example in row])
                log_ratio[settings.method] = score(chosen, [point.model for point in points])
                for point in points[1:]:  # removes its model
                    run.evaluate(1, point)
                [curve] = [iteration["curve"] for iteration in run.results()["iterations"]]
            shares = {name: [round(p[name], 6) for p in curve] for name in ("correct", "incorrect", "invalid")}
            curves[settings.method] = shares | {"se": [round(p["pass@1"]["se"], 6) for p in curve]}
            files = [settings.out / "iteration-1" / f"test-{point.step}.jsonl" for point in points]
            first = [{sample.problem_id: sample for sample in reversed(read_rows(file, Sample))} for file in files]
            for question, p in zip(questions, shown, strict=True):
                question["completions"][settings.method] = [[of[p.id].completion, of[p.id].outcome] for of in first]
    asked = {problem.id: problem.question for problem in task.train}
    tokenizer = load_model(topr.model).tokenizer
    content = {
        "command": "python -m docs.make_page_data",
        "settings": {name: getattr(topr, name) for name in ("seed", "lr", "batch", "problems")},
        "commit": commit(),
        "versions": versions(),
        "steps": [point.step for point in points],
        "seen": [point.seen for point in points],
        "curves": curves,
        "questions": questions,
        "completions": [
            {
                "question": asked[samples[example.sample].problem_id],
                "outcome": samples[example.sample].outcome,
                "reward": example.reward,
                "step": 1 + example.row // topr.batch,  # that trains on it
                "tokens": [tokenizer.decode([token]) for token in example.completion_ids],
                "log_ratio": {method: values[i] for method, values in log_ratio.items()},
            }
            for i, example in enumerate(chosen)
        ],
    }
    write_file(RESULTS / "page.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
