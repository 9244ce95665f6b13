"""SmolLM2-135M-Instruct on questions that it gets right half of the time: the runs of runs.jsonl.

    make real-llm                                        # makes the model's folder
    python -m studies.room_to_learn.study MODEL

Commit c17b340 has questions, arms, endpoints and predictions, predictions.md. questions.txt has
the right ones of 32 samples, kind, question and answers. These samples are used for nothing else.
"""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

import train_gsm8k
from examples.questions import FRAME, find_words, grade, parse_answer
from figures.runs import Job, Run
from studies.study_runs import epoch_metrics, in_seed, majorities, make_groups, right_by_question
from toprlib.command import command
from toprlib.files import read_text
from toprlib.records import OUTCOMES, Problem, Task
from toprlib.settings import Settings

SEEDS = range(5)
SETTINGS = Settings(
    chat=True,
    max_new_tokens=12,
    problems=1_000,
    n=8,
    test_problems=1_000,
    eval_samples=16,
    k=16,
    evals_per_epoch=3,
)
ARMS = {
    "topr": ({"method": "topr"}, (1e-5, 2e-5)),
    "70 %": ({"effective_proportion": 0.7}, (1e-5, 2e-5)),
    "sft": ({"method": "sft"}, (1e-5, 2e-5, 4e-5)),
    "reinforce": ({"method": "reinforce"}, (1e-5, 2e-5)),
}


def questions_task(settings: Settings) -> Task:
    """The questions in the random order of a seed: two thirds for training, the others for tests.

    A problem's id is the number of its line.
    """
    text = read_text(Path(__file__).with_name("questions.txt"))
    problems = []
    for number, line in enumerate(text.splitlines()):
        _, _, question, answers = line.split(" | ")
        FRAME.update(find_words(question))
        gold = frozenset(" ".join(find_words(answer)) for answer in answers.split("/"))
        problems.append(Problem(str(number), question, gold))
    random.Random(settings.seed).shuffle(problems)
    count = len(problems) // 3
    return Task(
        name="room_to_learn",
        train=problems[count:],
        test=problems[:count],
        parse=parse_answer,
        grade=grade,
        outcomes=OUTCOMES,
    )


def describe(run: Run) -> dict[str, Any]:
    """Right samples of each test question along the epoch, majorities, and answers at T = 0."""
    files = run.folder.glob("iteration-1/test-*.jsonl")
    curve = sorted(int(file.stem.removeprefix("test-")) for file in files)
    counts = [right_by_question(run.answers(step)) for step in curve]
    samples = run.test_samples(0)
    per_question = run.settings.eval_samples
    greedy_before = greedy(run, run.settings.model, "greedy-before")
    [model] = run.folder.glob("iteration-*/model")
    return {
        "questions": [int(sample.problem_id) for sample in samples[::per_question]],
        "steps": curve,
        "right": counts,
        "majority before": majorities(run.answers(0)),
        "majority": majorities(run.answers(run.last_step)),
        "greedy before": greedy_before,
        "greedy": greedy(run, str(model), "greedy"),
        **epoch_metrics(run),
    }


def greedy(run: Run, model: str, folder: str) -> list[int]:
    """1 for each test question that a model answers rightly at T = 0, else 0."""
    changes = {"top_k": 1, "iterations": 0, "eval_samples": 2, "k": 2, "samples": None}
    settings = replace(run.settings, model=model, out=run.folder / folder, **changes)
    train_gsm8k.experiment(settings, questions_task(settings))
    lines = read_text(settings.out / "iteration-1" / "test-0.jsonl").splitlines()
    # Both samples of a question are the same.
    return [int(json.loads(line)["reward"] > 0) for line in lines[::2]]


def jobs_of(model: Path) -> list[Job]:
    """All runs with one seed, those with the same arm together."""
    jobs = []
    for arm, (changes, rates) in ARMS.items():
        for lr in rates:
            settings = replace(SETTINGS, model=str(model), lr=lr, **changes)
            jobs.append(Job({"arm": arm, "lr": lr}, f"{arm}-{lr:g}", settings, questions_task))
    return jobs


def main(
    model: tyro.conf.Positional[Path],
    workers: int = 2,
    runs: Path = Path("runs/room_to_learn"),
    out: Path = Path("studies/room_to_learn/runs.jsonl"),
) -> None:
    """Make the runs that are missing, and append a line for each of them."""
    groups = [in_seed(jobs_of(model), seed) for seed in SEEDS]
    make_groups(groups, runs, out, describe, workers)


if __name__ == "__main__":
    with command("room_to_learn"):
        tyro.cli(main, description=__doc__)
