"""A sweep: many runs, each in a folder of its own, and what several seeds say together.

A run that is there is not made again and one that was cut short goes on, so a sweep grows run by run.
"""

import contextlib
import io
import json
import re
import shutil
import subprocess
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tqdm import tqdm

import pipeline.stages
from pipeline.records import Sample, Task, read_rows, write_text
from pipeline.runtime.processes import is_first_process
from pipeline.settings import Settings, check


def run_task(settings: Settings, task: Callable[[Settings], Task]) -> None:
    """Make the run of a task; InputError as `check` and `pipeline.stages.run` raise it."""
    check(settings)
    pipeline.stages.run(settings, task(settings))


class Job(NamedTuple):
    """A run to be made. label: what its folder is called by; task, run: modules' functions, which processes find."""

    label: str
    settings: Settings
    task: Callable[[Settings], Task]
    run: Callable[[Settings, Callable[[Settings], Task]], object] = run_task


@dataclass(frozen=True)
class Finished:
    """A run that was made, and its files."""

    settings: Settings
    results: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.settings.out

    @property
    def curve(self) -> list[dict]:
        """The evaluations along its first iteration, the one before it included."""
        return self.results["iterations"][0]["curve"]

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """The optimiser's steps in its first iteration: metrics.jsonl."""
        lines = (self.folder / "iteration-1" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def tested(self, step: int) -> list[Sample]:
        """The test problems' completions after this step of the first iteration."""
        return read_rows(self.folder / "iteration-1" / f"test-{step}.jsonl", Sample)

    @property
    def made(self) -> dict[str, Any]:
        """How it was made: seconds and commit; nothing of a run that was ended before it could say."""
        file = self.folder / "made.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"seconds": 0.0, "commit": "unknown"}


class OverSeeds(NamedTuple):
    """What several seeds measured: the mean, its standard error (None for one seed), and each seed's value."""

    mean: float
    se: float | None
    each: list[float]


def over_seeds(values: Iterable[float]) -> OverSeeds:
    """Mean and standard error of the mean, s / sqrt(n), over n seeds.

    >>> over_seeds([1.0, 2.0, 3.0])
    OverSeeds(mean=2.0, se=0.5773502691896258, each=[1.0, 2.0, 3.0])
    """
    each = [float(value) for value in values]
    se = float(np.std(each, ddof=1) / np.sqrt(len(each))) if len(each) > 1 else None
    return OverSeeds(float(np.mean(each)), se, each)


class Sweep(AbstractContextManager):
    """Runs in `folder`, `workers` of them side by side with one thread each; with one worker, here, one by one."""

    def __init__(self, folder: Path, workers: int):
        self._folder, self._workers, self._pool = folder, workers, None

    def make(self, jobs: Sequence[Job]) -> list[Finished]:
        """The jobs' runs, those made that are not there. InputError as `pipeline.stages.run` raises it."""
        jobs = [job._replace(settings=replace(job.settings, out=self._folder / folder_name(job))) for job in jobs]
        missing = [job for job in jobs if not (job.settings.out / "results.json").exists()]
        with tqdm(
            total=len(missing), desc="runs", unit="run", disable=not (missing and is_first_process())
        ) as progress:
            for _ in self._made(missing):
                progress.update()
        return [Finished(s, json.loads((s.out / "results.json").read_text())) for s in (job.settings for job in jobs)]

    def _made(self, jobs: Sequence[Job]) -> Iterable[None]:
        if self._workers == 1:
            yield from map(_make, jobs)
        elif jobs:
            self._pool = self._pool or ProcessPoolExecutor(self._workers, get_context("spawn"), _start_worker)
            for future in as_completed([self._pool.submit(_make_silently, job) for job in jobs]):
                yield future.result()

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def folder_name(job: Job) -> str:
    """Label and seed to be read, and a checksum of what the run is made with to tell it from others.

    >>> folder_name(Job("plain IS", Settings(seed=3), folder_name)).split("_")[:2]
    ['plain-IS', '3']
    """
    made_with = zlib.crc32(f"{job.settings.record()} {job.task.__name__}".encode())
    return f"{re.sub('[^A-Za-z0-9.=~]+', '-', job.label)}_{job.settings.seed}_{made_with:08x}"


def _make(job: Job) -> None:
    started = time.monotonic()
    job.run(job.settings, job.task)
    if is_first_process():
        for model in job.settings.out.rglob("iteration-*/model"):
            shutil.rmtree(model)  # what has been measured is not needed any more, and it is large
        made = {"seconds": round(time.monotonic() - started, 1), "commit": commit()}
        write_text(job.settings.out / "made.json", json.dumps(made) + "\n")


def _make_silently(job: Job) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _make(job)


def _start_worker() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


def commit() -> str:
    """The commit of this code, with "-dirty" where Python files were changed; "unknown" outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--short", "--", "*.py") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
