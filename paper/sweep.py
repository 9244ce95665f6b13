"""A sweep: many runs, each in its own folder, and means over seeds.

A finished run is not made again and an interrupted one goes on, so a sweep can be extended later.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import topr
import train_gsm8k
from conformance.variants import VARIANTS
from paper.token_loss import logprobs_with_gradient_of
from pipeline.models.language_model import token_logprobs
from pipeline.records import Sample, Task, read_rows, write_file
from pipeline.runtime.processes import progress_bar, rank
from pipeline.settings import Settings, check

if TYPE_CHECKING:
    from pipeline.stages import Learn


def run_job(job: "Job") -> None:
    """Make the run of a job; InputError as `train_gsm8k.experiment` raises it."""
    train_gsm8k.experiment(job.settings, job.task(job.settings), job.token_loss and learn_with(job.token_loss))


def learn_with(variant: str) -> "Learn":
    """The loss and the log-probabilities with which `topr.train` learns by one of conformance.variants.VARIANTS.

    >>> loss, logprobs = learn_with("per-token")
    >>> loss.keywords["limits"] == topr.PRESETS["reinforce"]  # weights are 1: `logprobs` has the variant's own
    True
    """
    loss = partial(topr.topr_loss, limits=topr.PRESETS["reinforce"])
    return loss, logprobs_with_gradient_of(VARIANTS[variant](), token_logprobs)


class Job(NamedTuple):
    """A run to be made. Worker processes import `task` and `run` by name: they are functions of modules.

    label: begins the name of its folder. token_loss: the name of one of conformance.variants.VARIANTS, to train with it
    in place of the method's own loss. check: raises InputError, before any run is made, where settings do not fit as
    many processes; as pipeline.settings.check does.
    """

    label: str
    settings: Settings
    task: Callable[[Settings], Task]
    run: Callable[["Job"], object] = run_job
    token_loss: str | None = None
    check: Callable[[Settings, int], None] = check


@dataclass(frozen=True)
class Finished:
    """A finished run and its files."""

    settings: Settings
    results: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.settings.out

    @property
    def curve(self) -> list[dict]:
        """The evaluations along its first iteration, beginning with the one before it."""
        return self.results["iterations"][0]["curve"]

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """The optimiser's steps of its first iteration: metrics.jsonl."""
        lines = (self.folder / "iteration-1" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def tested(self, step: int) -> list[Sample]:
        """The test problems' completions after this step of the first iteration."""
        return read_rows(self.folder / "iteration-1" / f"test-{step}.jsonl", Sample)

    @property
    def made(self) -> dict[str, Any]:
        """Core seconds and commit; unknown for a run that was ended before it could record them."""
        file = self.folder / "made.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"seconds": 0.0, "commit": "unknown"}


# 97.5% quantiles of Student's t for 2 to 10 values; that of 10 serves more values too, and errs on the safe side.
STUDENT = dict(zip(range(2, 11), (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), strict=True))


class OverSeeds(NamedTuple):
    """The mean over seeds, its standard error (None for one seed), and the value of each seed.

    df: degrees of freedom of the standard error; None: one less than there are seeds.
    """

    mean: float
    se: float | None
    each: list[float]
    df: int | None = None

    @property
    def half_width(self) -> float | None:
        """Half of the 95% interval of the mean, by Student's t; None for one seed.

        >>> round(over_seeds([1.0, 2.0, 3.0]).half_width, 2)
        2.48
        """
        return None if self.se is None else STUDENT[min((self.df or len(self.each) - 1) + 1, 10)] * self.se

    def record(self) -> dict[str, Any]:
        """What the files of results have of it: mean, half of the interval, and the value of each seed."""
        return {"mean": self.mean, "half_width": self.half_width, "each": self.each}


def over_seeds(values: Iterable[float]) -> OverSeeds:
    """Mean and standard error of the mean, s / sqrt(n), over n seeds.

    >>> over_seeds([1.0, 2.0, 3.0])
    OverSeeds(mean=2.0, se=0.5773502691896258, each=[1.0, 2.0, 3.0], df=None)
    """
    each = [float(value) for value in values]
    se = float(np.std(each, ddof=1) / np.sqrt(len(each))) if len(each) > 1 else None
    return OverSeeds(float(np.mean(each)), se, each)


class Sweep(AbstractContextManager):
    """Runs in `folder`. Several workers are processes of one thread each; one worker is this process."""

    def __init__(self, folder: Path, workers: int):
        self._folder, self._workers, self._pool = folder, workers, None

    def make(self, jobs: Sequence[Job]) -> list[Finished]:
        """The runs of the jobs; those that are not finished are made first. InputError as `run_job` raises it."""
        jobs = [job._replace(settings=replace(job.settings, out=self._folder / folder_name(job))) for job in jobs]
        missing = [job for job in jobs if not (job.settings.out / "results.json").exists()]
        if missing:
            for _ in progress_bar(self._made(missing), "runs", "run", total=len(missing)):
                pass
        return [Finished(s, json.loads((s.out / "results.json").read_text())) for s in (job.settings for job in jobs)]

    def _made(self, jobs: Sequence[Job]) -> Iterable[None]:
        if self._workers == 1:
            yield from map(_make, jobs)
            return
        self._pool = self._pool or ProcessPoolExecutor(self._workers, get_context("spawn"), torch.set_num_threads, (1,))
        try:
            for future in as_completed([self._pool.submit(_make_silently, job) for job in jobs]):
                yield future.result()
        except BrokenProcessPool:  # something ended a worker: Ctrl-C reaches them too
            raise KeyboardInterrupt from None

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def folder_name(job: Job) -> str:
    """Label and seed, for readers, and a checksum of everything that the run depends on.

    >>> folder_name(Job("plain IS", Settings(seed=3), folder_name)).split("_")[:2]
    ['plain-IS', '3']
    """
    made_with = zlib.crc32(f"{job.settings.record()} {job.task.__name__} {job.token_loss}".encode())
    return f"{re.sub('[^A-Za-z0-9.=~]+', '-', job.label)}_{job.settings.seed}_{made_with:08x}"


def _make(job: Job) -> None:
    start = sum(os.times()[:4])  # of this process and its children: other work on the machine lengthens wall time
    job.run(job)
    if rank() == 0:
        for model in job.settings.out.rglob("iteration-*/model"):
            shutil.rmtree(model)  # it is large, and only its evaluations are needed now
        made = {"seconds": round(sum(os.times()[:4]) - start, 1), "commit": commit()}
        write_file(job.settings.out / "made.json", json.dumps(made) + "\n")


def _make_silently(job: Job) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _make(job)


def commit() -> str:
    """The commit of this code, with "-dirty" where Python files were changed; "unknown" outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--short", "--", "*.py") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
