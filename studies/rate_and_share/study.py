"""Learning rate and share of positives, tuned together: the runs of runs.jsonl.

    python -m studies.rate_and_share.study

Questions, arms, endpoints and predictions are in commit c17b340, predictions.md.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from figures.runs import Job, Run
from figures.scales import LAPTOP
from studies.study_runs import epoch_metrics, in_seed, majorities, make_groups, right_by_question
from tiny.problems import PLANS, QUESTIONS
from toprlib.command import command
from toprlib.records import Problem, Task
from toprlib.settings import TINY, Settings
from train_gsm8k import gsm8k_task

BASES = ("two_thirds", "worded")
RATES = (1e-5, 3e-5, 1e-4, 2e-4)
SEEDS = range(5)
NUM_TRAIN = 160
NUM_TEST = 300
# Every so many families, one is held out of training: each family in one of five seeds.
FOLDS = 5

SETTINGS = replace(
    LAPTOP.base,
    problems=1_000,
    test_problems=NUM_TEST,
    eval_samples=16,
    k=16,
    evals_per_epoch=1,
)
NATURAL = {
    "topr": {},
    "70 %": {"effective_proportion": 0.7},
    "80 %": {"effective_proportion": 0.8},
    "90 %": {"effective_proportion": 0.9},
    "sft": {"method": "sft"},
    "positives only": {"composition": "positives_only"},
}
TEN = {
    "10 %": {},
    "20 %": {"effective_proportion": 0.2},
    "50 %": {"effective_proportion": 0.5},
    "80 %": {"effective_proportion": 0.8},
    "100 %": {"effective_proportion": 1.0},
}
SETS: dict[str, dict[str, Any]] = {
    "natural": {},
    "10 % positive": {"composition": "proportion", "proportion": 0.1, **LAPTOP.sets},
}


def family_of(question: str) -> str:
    """The family of a problem, from its question."""
    for family, texts in QUESTIONS.items():
        if any(matches(text, question) for text in texts):
            return family
    raise ValueError(question)


def matches(template: str, question: str) -> bool:
    """Whether a question is that of a template, with any words in its places."""
    fields = re.escape(re.sub(r"\{\w+\}", "FIELD", template)).replace("FIELD", r"[\w ]+")
    return re.fullmatch(fields, question) is not None


def held_out_families(seed: int) -> set[str]:
    """The families that are not trained on with a seed."""
    return {family for index, family in enumerate(PLANS) if index % FOLDS == seed % FOLDS}


def task_without_families(settings: Settings) -> Task:
    """The first training problems of the families that are not held out; all test problems."""
    task = gsm8k_task(settings)
    held_out = held_out_families(settings.seed)
    train = [problem for problem in task.train if not is_of(problem, held_out)]
    return replace(task, train=train[:NUM_TRAIN])


def is_of(problem: Problem, families: set[str]) -> bool:
    """Whether a problem is of one of these families."""
    return family_of(problem.question) in families


def jobs_of(base: str, name: str) -> list[Job]:
    """All runs of a base and a training set with one seed, those with the same arm together."""
    settings = replace(SETTINGS, model=str(TINY / base), **SETS[name])
    jobs = []
    for arm, changes in (NATURAL if name == "natural" else TEN).items():
        for lr in RATES:
            columns = {"base": base, "set": name, "arm": arm, "lr": lr}
            label = f"{base}-{name}-{arm}-{lr:g}"
            arm_settings = replace(settings, lr=lr, **changes)
            jobs.append(Job(columns, label, arm_settings, task_without_families))
    return jobs


def describe(run: Run) -> dict[str, Any]:
    """Right samples and majorities of each test problem, before and after; means of the epoch."""
    before = run.answers(0)
    after = run.answers(run.last_step)
    return {
        "steps": run.last_step,
        "right before": right_by_question(before),
        "majority before": majorities(before),
        "right": right_by_question(after),
        "majority": majorities(after),
        **epoch_metrics(run),
    }


def main(
    workers: int = 2,
    runs: Path = Path("runs/rate_and_share"),
    out: Path = Path("studies/rate_and_share/runs.jsonl"),
    bases: tuple[str, ...] = BASES,
) -> None:
    """Make the runs that are missing, and append a line for each of them."""
    groups = []
    for base in bases:
        for name in SETS:
            groups += [in_seed(jobs_of(base, name), seed) for seed in SEEDS]
    make_groups(groups, runs, out, describe, workers)


if __name__ == "__main__":
    with command("rate_and_share"):
        tyro.cli(main, description=__doc__)
