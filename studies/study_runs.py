"""Runs of a study: groups of runs that share samples, and one line of a file for each run."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from figures.runs import (
    Job,
    Run,
    commit,
    folder_name,
    now,
    parallel_map,
    read_run,
    settings_in,
    train,
)
from toprlib import files
from toprlib.distributed import progress_bar
from toprlib.evaluation import Answers, majority_is_correct
from toprlib.external_samples import read_samples
from toprlib.preflight import free_memory

EPOCH = ("realised_share", "log_ratio_pos_mean", "log_ratio_neg_mean")

# Describes a finished run, whose model still exists.
Describe = Callable[[Run], dict[str, Any]]


def make_groups(
    groups: Sequence[Sequence[Job]], runs: Path, lines: Path, describe: Describe, workers: int
) -> None:
    """Make the missing runs of all groups, two groups at a time; append a line for each run."""
    with parallel_map(workers) as map_groups:
        done = map_groups(make_group, groups, repeat(runs), repeat(lines), repeat(describe))
        for _ in progress_bar(done, "groups", "group", total=len(groups)):
            pass


def make_group(jobs: Sequence[Job], runs: Path, lines: Path, describe: Describe) -> None:
    """Make the runs of a group in their order. The first one samples for all."""
    for number, job in enumerate(jobs):
        if not (runs / folder_name(job) / "made.json").exists():
            make_run(job, jobs[:number], runs, lines, describe)


def make_run(job: Job, earlier: Sequence[Job], runs: Path, lines: Path, describe: Describe) -> None:
    """Make one run, and append its line."""
    settings = settings_in(runs, job)
    if earlier and not (settings.out / "config.json").exists():
        copy_files(job, earlier, runs)
    begun = {"commit": commit(), "start": now()}
    seconds = sum(os.times()[:4])
    train(job, settings)
    run = read_run(job, runs)
    line = {**job.columns, "seed": settings.seed, **describe(run), **begun, "end": now()}
    line["seconds"] = round(sum(os.times()[:4]) - seconds, 1)
    for model in settings.out.rglob("iteration-*/model"):
        shutil.rmtree(model)
    files.append_to_file(lines, json.dumps(line) + "\n")
    files.write_file(settings.out / "made.json", json.dumps(begun) + "\n")


def copy_files(job: Job, earlier: Sequence[Job], runs: Path) -> None:
    """Copy what an earlier run of the group computed, and this one would compute again.

    That is the evaluation of the base model, and log mu if only the learning rate differs.
    """
    settings = settings_in(runs, job)
    samples = read_samples(settings.samples, (), None, free_memory())
    # All runs of a group have the same problems, and so the same checksum of them.
    config = files.read_json(runs / folder_name(earlier[0]) / "config.json")
    config |= settings.to_config(samples)
    donors = {"test-0.jsonl": earlier[0]}
    for other in earlier:
        if differing(job, other) <= {"lr"}:
            donors["train.jsonl"] = other
    with files.locked_run_folder(settings.out, config):
        for name, donor in donors.items():
            content = (runs / folder_name(donor) / "iteration-1" / name).read_bytes()
            files.write_file(settings.iteration_folder(1) / name, content)


def differing(job: Job, other: Job) -> set[str]:
    """The names of the settings in which two jobs differ."""
    ones = asdict(job.settings)
    others = asdict(other.settings)
    return {name for name, value in ones.items() if others[name] != value}


def right_by_question(answers: Answers) -> list[int]:
    """How many samples of each question are right."""
    return answers.correct.sum(1).tolist()


def majorities(answers: Answers) -> list[int]:
    """1 for each question on which the majority of all its samples is right, else 0."""
    questions, n = answers.correct.shape
    return [int(majority_is_correct(answers, q, range(n))) for q in range(questions)]


def epoch_metrics(run: Run) -> dict[str, float]:
    """The mean realised share of the epoch, and the mean log-ratios of its last tenth."""
    training = run.results["iterations"][0]["training"]
    return {name: training[name] for name in EPOCH}


def in_seed(jobs: Sequence[Job], seed: int) -> list[Job]:
    """The jobs with a seed; all but the first train on the samples of the first one."""
    seeded = [replace(job, settings=replace(job.settings, seed=seed)) for job in jobs]
    return [seeded[0], *(replace(job, samples_from=seeded[0]) for job in seeded[1:])]
