"""The runs of the figures: jobs, their folders, and what was measured, as one table.

All calls of the experiment are in this file. A finished run is not made again, and an
interrupted one resumes, so that a figure can be given more seeds later.
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import train_gsm8k
from tasks import verifier
from tasks.verifier import VerifierSettings
from topr_conformance import VARIANTS
from toprlib.distributed import progress_bar, rank, ranks
from toprlib.dry_run import count
from toprlib.evaluation import Answers, estimate, majority_is_correct, to_answers
from toprlib.files import read_records, read_text, write_file
from toprlib.records import InputError, Sample, Task
from toprlib.report import Table
from toprlib.settings import Settings, check


@dataclass(frozen=True)
class Job:
    """A run to make.

    columns: what distinguishes it from the other runs of its figure, by the names of columns of
    `measurements`. label: begins the name of its folder. task: a function of a module, since
    worker processes import it by name. variant: the loss to train with, one of
    topr_conformance.VARIANTS; None for the loss of the method. samples_from: the job whose
    samples it trains on; None for a run that samples by itself.
    """

    columns: Mapping[str, Any]
    label: str
    settings: Settings
    task: Callable[[Settings], Task]
    variant: str | None = None
    samples_from: "Job | None" = None


def with_shared_samples(jobs: Sequence[Job]) -> list[Job]:
    """The jobs, all of which train on the samples of the first one.

    A run of several iterations samples by itself, and has the same samples in the first of them:
    --samples is for one iteration only.
    """
    first = jobs[0]
    shared = []
    for job in jobs:
        # TOPR at its own learning rate is also TOPR at the rate of all: the same run, twice here.
        is_first = folder_name(job) == folder_name(first)
        samples_itself = is_first or job.settings.iterations != 1
        shared.append(job if samples_itself else replace(job, samples_from=first))
    return shared


def in_seeds(jobs: Sequence[Job], seeds: Sequence[int]) -> list[Job]:
    """Each job once for each seed. A job shares samples with the job of the same seed."""
    seeded = []
    for job in jobs:
        seeded += [_with_seed(job, seed) for seed in seeds]
    return seeded


def _with_seed(job: Job, seed: int) -> Job:
    first = job.samples_from and _with_seed(job.samples_from, seed)
    return replace(job, settings=replace(job.settings, seed=seed), samples_from=first)


def folder_name(job: Job) -> str:
    """Label and seed, for readers, and a checksum of everything that the run depends on.

    Samples are not part of it: a run has the same ones if it samples by itself.
    """
    made_with = f"{job.settings.to_config()} {job.task.__name__} {job.variant}"
    label = re.sub("[^A-Za-z0-9.=~]+", "-", job.label)
    return f"{label}_{job.settings.seed}_{zlib.crc32(made_with.encode()):08x}"


def share_samples(settings: Settings, first_run: Path) -> Settings:
    """The settings of a run that trains on the samples of `first_run`, a run's folder."""
    samples = first_run / "iteration-1" / "samples.jsonl"
    return replace(settings, samples=str(samples))


def settings_in(folder: Path, job: Job) -> Settings:
    """The settings of a job whose run lies in a folder with the other runs."""
    settings = replace(job.settings, out=folder / folder_name(job))
    if job.samples_from is None:
        return settings
    return share_samples(settings, folder / folder_name(job.samples_from))


def check_job(job: Job, processes: int, name: str) -> None:
    """InputError, which begins with `name`, for settings that so many processes cannot run."""
    is_verifier = isinstance(job.settings, VerifierSettings)
    check_settings = verifier.check_verifier if is_verifier else check
    try:
        check_settings(job.settings, processes)
    except InputError as error:
        raise InputError(f"{name}: {error}", option=error.option) from None


def job_table(name: str, jobs: Sequence[Job], usual: Sequence[Settings]) -> Table:
    """The jobs by label: seeds, settings that differ from the usual ones, and what a run does.

    usual: settings of each type, of solvers and of verifiers. Samples and steps are those of one
    run, at most.
    """
    # Label -> folder -> job: a label's jobs differ in their seeds only.
    by_label = {}
    for job in jobs:
        by_label.setdefault(job.label, {})[folder_name(job)] = job
    defaults = {type(settings): asdict(settings) for settings in usual}
    rows = []
    for label, distinct in by_label.items():
        job = next(iter(distinct.values()))
        seeds = " ".join(str(each.settings.seed) for each in distinct.values())
        differing = changed_settings(job, defaults[type(job.settings)])
        samples, steps = work_of(job.settings)
        rows.append([label, seeds, differing, f"{samples:,}", f"{steps:,}"])
    return Table([name, "seeds", "differs in", "samples", "steps"], rows)


def changed_settings(job: Job, defaults: Mapping[str, Any]) -> str:
    """The settings of a job that differ from the defaults, seed aside, as NAME=VALUE."""
    values = asdict(job.settings) | {"seed": defaults["seed"], "variant": job.variant}
    changed = []
    for name, value in values.items():
        if value != defaults.get(name):
            changed.append(f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}")
    return " ".join(changed)


def work_of(settings: Settings) -> tuple[int, int]:
    """How many completions a run samples, and how many optimizer steps it takes, at most."""
    problems = settings.problems
    tests = settings.test_problems
    solutions = 0
    if isinstance(settings, VerifierSettings):
        # A verifier's problems are solutions, which a generator samples first.
        problems *= settings.train_solutions
        tests *= settings.test_solutions
        solutions = problems + tests
    counted = count(settings, problems, tests)
    return counted.sampled + solutions, settings.iterations * counted.steps


# ---- making runs ----


@contextmanager
def parallel_map(workers: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """`map` for one worker, else a map over so many processes of one thread each."""
    if workers == 1:
        yield map
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """One thread, and nothing printed."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = io.StringIO()


def make_runs(jobs: Sequence[Job], folder: Path, map_jobs: Callable[..., Any]) -> "list[Run]":
    """The finished runs of the jobs; those that are missing are made, by `map_jobs`.

    map_jobs: that of `parallel_map`. Raises InputError if a job's settings, model or samples do
    not fit.
    """
    # Runs that train on the samples of others come after these.
    sampling = [job for job in jobs if job.samples_from is None]
    sharing = [job for job in jobs if job.samples_from is not None]
    for group in (sampling, sharing):
        # By name, since two arms of a figure may need the same run.
        unfinished = {}
        for job in group:
            name = folder_name(job)
            if not (folder / name / "results.json").exists():
                unfinished[name] = job
        if not unfinished:
            continue
        made = map_jobs(make_run, unfinished.values(), repeat(folder))
        try:
            for _ in progress_bar(made, "runs", "run", total=len(unfinished)):
                pass
        except BrokenProcessPool:
            # A signal ended a worker: Ctrl-C reaches workers too.
            raise KeyboardInterrupt from None
    return [read_run(job, folder) for job in jobs]


def make_run(job: Job, folder: Path) -> None:
    """Train and evaluate one job; leaves results.json, and its cost and times in made.json.

    Those of a resumed run are of the call that finished it.
    """
    settings = settings_in(folder, job)
    check_job(replace(job, settings=settings), ranks(), job.label)
    # Processor time of this process and its children: other work on the machine lengthens
    # only wall time.
    seconds = sum(os.times()[:4])
    # Before the run, since the code may change while it lasts.
    made = {"commit": commit(), "start": now()}
    train(job, settings)
    if rank() == 0:
        # Models are large, and only their evaluations are needed now.
        for model in settings.out.rglob("iteration-*/model"):
            shutil.rmtree(model)
        made["end"] = now()
        made["seconds"] = round(sum(os.times()[:4]) - seconds, 1)
        write_file(settings.out / "made.json", json.dumps(made) + "\n")


def train(job: Job, settings: Settings) -> None:
    """The run of a job: the one place that starts training."""
    if isinstance(settings, VerifierSettings):
        verifier.run(settings)
        return
    loss = None if job.variant is None else VARIANTS[job.variant]
    train_gsm8k.experiment(settings, job.task(settings), loss)


def now() -> str:
    """The time in UTC, to the second.

    >>> now()[10], now()[-6:]
    ('T', '+00:00')
    """
    return datetime.now(UTC).isoformat(timespec="seconds")


def commit() -> str:
    """The commit of this code, with "-dirty" if Python files differ from it.

    "unknown" outside of a repository.
    """
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.check_output(
            command, cwd=folder, text=True, stderr=subprocess.DEVNULL
        ).strip()

    try:
        changed = git("status", "--short", "--", ":/*.py")
        head = git("rev-parse", "--short", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


# ---- reading runs ----


@dataclass(frozen=True)
class Run:
    """A finished run: its job, its folder, and the content of its results.json."""

    job: Job
    folder: Path
    results: Mapping[str, Any]

    @property
    def settings(self) -> Settings:
        """The settings that the run was made with."""
        return self.job.settings

    @property
    def last_step(self) -> int:
        """The number of optimizer steps in the first iteration; 0 if the run does not train."""
        iterations = self.results["iterations"]
        return iterations[0]["dataset"]["steps"] if iterations else 0

    def steps(self) -> pd.DataFrame:
        """metrics.jsonl of the first iteration: a row for each optimizer step."""
        lines = read_text(self.folder / "iteration-1" / "metrics.jsonl").splitlines()
        # pandas' own reader of JSON rounds floats.
        return pd.DataFrame([json.loads(line) for line in lines])

    def tenths(self, metric: str) -> list[float]:
        """The mean of a metric of `steps` in each tenth of training, or at each of fewer steps."""
        values = self.steps()[metric].to_numpy()
        parts = np.array_split(values, min(10, len(values)))
        # A step without, say, a negative has no number for negatives.
        return [float(np.nanmean(part)) for part in parts]

    def test_samples(self, step: int) -> list[Sample]:
        """The completions of the test problems after a step of the first iteration."""
        return read_records(self.folder / "iteration-1" / f"test-{step}.jsonl", Sample)

    def answers(self, step: int) -> Answers:
        """The graded answers of these completions, (problems, samples)."""
        return to_answers(self.test_samples(step), self.job.task(self.settings))

    def majority_accuracy(self, answers: Answers, k: int) -> float:
        """maj@k: the share of problems whose most frequent answer among k is correct."""
        return estimate(majority_is_correct, answers, k, self.settings.seed).mean

    def cost(self) -> dict[str, Any]:
        """Core seconds, commit, times of start and end, and versions.

        All but the versions are unknown if the run was ended before it wrote them. A run of an
        earlier version has no times.
        """
        file = self.folder / "made.json"
        made = {"seconds": 0.0, "commit": "unknown", "start": None, "end": None}
        if file.exists():
            made |= json.loads(read_text(file))
        return made | {"versions": self.results["versions"]}


def read_run(job: Job, folder: Path) -> Run:
    """The finished run of a job."""
    run_folder = folder / folder_name(job)
    return Run(job, run_folder, json.loads(read_text(run_folder / "results.json")))


# Metric -> its values along a run; one value if it was measured once.
Measured = Mapping[str, Sequence[float]]


def outcomes_and_estimates(run: Run) -> dict[str, Sequence[float]]:
    """What results.json says of every run.

    Shares of outcomes are those along the first iteration's epoch. Estimates, such as pass@1 and
    maj@16, are those before training and after each iteration.
    """
    before = run.results["before"]
    iterations = run.results["iterations"]
    entries = [before, *(iteration["after"] for iteration in iterations)]
    curve = iterations[0]["curve"] if iterations else entries
    measured = {}
    for name, value in before.items():
        if isinstance(value, float):
            measured[name] = [point[name] for point in curve]
        elif isinstance(value, dict):
            measured[name] = [entry[name]["mean"] for entry in entries]
    return measured


def measurements(
    runs: Sequence[Run], measure_more: Callable[[Run], Measured] = lambda run: {}
) -> pd.DataFrame:
    """What was measured in some runs: one row for each run, metric and point of the run.

    measure_more: what a figure measures besides `outcomes_and_estimates`. Columns: those of the
    jobs, seed, metric, point (0, 1, ...) and value.
    """
    # One row for each number, so that a figure can group by any of its columns.
    rows = []
    for run in runs:
        measured = outcomes_and_estimates(run) | measure_more(run)
        for metric, values in measured.items():
            row = {**run.job.columns, "seed": run.settings.seed, "metric": metric}
            rows += [{**row, "point": point, "value": value} for point, value in enumerate(values)]
    return pd.DataFrame(rows)
