"""The runs of figures: which are made, each in a folder of its own, and what was measured of them, as one table.

A finished run is not made again and an interrupted one goes on, so a sweep can be extended later.
"""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from multiprocessing import get_context
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import topr
import train_gsm8k
from pipeline.dry_run import counts
from pipeline.models.language_model import load_model
from pipeline.records import InputError, Sample, Task, read_records, read_text, write_file
from pipeline.report import Estimate, Table
from pipeline.runtime.processes import progress_bar, rank, ranks
from pipeline.settings import Settings, check
from tasks import verifier
from tasks.verifier import VerifierSettings
from topr_conformance.variants import VARIANTS


class Job(NamedTuple):
    """A run to be made. Worker processes import `task` and `run` by name: they are functions of modules.

    label: begins the name of its folder. copies: the key of the job whose samples it trains on. token_loss: the name of
    one of conformance.variants.VARIANTS, to train with it in place of the method's own loss.
    """

    label: str
    settings: Settings
    task: Callable[[Settings], Task]
    copies: Hashable = None
    token_loss: str | None = None

    def check(self, processes: int, figure: str = "") -> None:
        """InputError, with figure and label, for settings that so many processes cannot run."""
        check_settings = (
            verifier.check_verifier if isinstance(self.settings, VerifierSettings) else check
        )
        try:
            check_settings(self.settings, processes)
        except InputError as error:
            raise InputError(f"{figure}{self.label}: {error}") from None


Jobs = Mapping[Hashable, Job]  # those of a figure's arms, by the arms' keys; or by (arm, seed)


def sharing_samples(arms: Jobs) -> dict[Hashable, Job]:
    """The arms, all of which train on the samples of the first."""
    first, *others = arms
    return {first: arms[first]} | {key: arms[key]._replace(copies=first) for key in others}


def in_seeds(arms: Jobs, seeds_of: Callable[[Hashable], Iterable[int]]) -> dict[Hashable, Job]:
    """(arm, seed) -> its job, for each of the arm's seeds. An arm copies the samples of the same seed."""
    jobs = {}
    for key, job in arms.items():
        for seed in seeds_of(key):
            source = None if job.copies is None else (job.copies, seed)
            jobs[key, seed] = job._replace(settings=replace(job.settings, seed=seed), copies=source)
    return jobs


def folder_name(job: Job) -> str:
    """Label and seed, for readers, and a checksum of everything that the run depends on."""
    made_with = zlib.crc32(f"{job.settings.record()} {job.task.__name__} {job.token_loss}".encode())
    return f"{re.sub('[^A-Za-z0-9.=~]+', '-', job.label)}_{job.settings.seed}_{made_with:08x}"


def print_jobs(name: str, jobs: Jobs, usual: Sequence[Settings]) -> None:
    """Print the jobs: seeds, settings that differ from the usual ones, how much each run draws and trains at most."""
    by_label: dict[str, dict[str, Job]] = defaultdict(dict)
    for job in jobs.values():
        by_label[job.label][folder_name(job)] = job
    rows = []
    for label, runs in by_label.items():
        job, *_ = runs.values()
        settings, seeds = job.settings, " ".join(str(job.settings.seed) for job in runs.values())
        defaults = next(asdict(one) for one in usual if type(one) is type(settings))
        here = asdict(settings) | {"seed": defaults["seed"], "token_loss": job.token_loss}
        changed = {name: value for name, value in here.items() if value != defaults.get(name)}
        differing = " ".join(
            f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in changed.items()
        )
        problems, tests, drawn = settings.problems, settings.test_problems, 0
        if isinstance(settings, VerifierSettings):
            problems, tests = problems * settings.train_solutions, tests * settings.test_solutions
            drawn = problems + tests  # solutions
        total = counts(settings, problems, tests)
        rows.append(
            [
                label,
                seeds,
                differing,
                f"{total.sampled + drawn:,}",
                f"{settings.iterations * total.steps:,}",
            ]
        )
    Table([name, "seeds", "differs in", "samples", "steps"], rows).print()


@dataclass(frozen=True)
class Finished:
    """A finished run: its settings, with the folder that it was made in, and its results.json."""

    settings: Settings
    results: dict[str, Any]

    @cached_property
    def steps(self) -> list[dict[str, float]]:
        """The optimiser's steps of its first iteration: metrics.jsonl."""
        metrics = read_text(self.settings.out / "iteration-1" / "metrics.jsonl")
        return [json.loads(line) for line in metrics.splitlines()]

    def by_tenth(self, name: str) -> list[float]:
        """The mean of a number of metrics.jsonl in each tenth of the training, or at each step if there are fewer."""
        values = np.array([step.get(name, np.nan) for step in self.steps])
        return [float(np.nanmean(part)) for part in np.array_split(values, min(10, len(values)))]

    @property
    def last_step(self) -> int:
        """The number of the first iteration's last step; 0 for a run that does not train."""
        return sum(iteration["dataset"]["steps"] for iteration in self.results["iterations"][:1])

    def tested(self, step: int) -> list[Sample]:
        """The test problems' completions after this step of the first iteration."""
        return read_records(self.settings.out / "iteration-1" / f"test-{step}.jsonl", Sample)

    @property
    def cost(self) -> dict[str, Any]:
        """Core seconds, commit and versions; the first two unknown where the run was ended before it wrote them."""
        file = self.settings.out / "made.json"
        made = (
            json.loads(file.read_text(encoding="utf-8"))
            if file.exists()
            else {"seconds": 0.0, "commit": "unknown"}
        )
        return made | {"versions": self.results["versions"]}

    @property
    def measured(self) -> dict[str, list[float]]:
        """Shares of outcomes along its first iteration; estimates, as maj@16, before it and after each iteration."""
        iterations, before = self.results["iterations"], self.results["before"]
        entries = [before, *(iteration["after"] for iteration in iterations)]
        curve = iterations[0]["curve"] if iterations else entries
        shares = {
            name: [point[name] for point in curve]
            for name, value in before.items()
            if isinstance(value, float)
        }
        estimates = [name for name, value in before.items() if isinstance(value, dict)]
        return shares | {name: [entry[name]["mean"] for entry in entries] for name in estimates}


Series = dict[
    str, list[Any]
]  # a line of a figure in its file: mean, half_width and the seeds' values at each point


def series(points: Iterable[Estimate]) -> Series:
    """Points of a line, each with half of its 95% interval; None for one seed, and where there is no number.

    >>> series([Estimate.over_seeds([1.0, 3.0]), Estimate(2.0), Estimate(math.nan, math.nan)])
    {'mean': [2.0, 2.0, None], 'half_width': [12.706, None, None], 'each': [[1.0, 3.0], [], []]}
    """
    points, clean = [*points], lambda x: None if x is None or math.isnan(x) else x
    intervals = {
        name: [clean(getattr(point, name)) for point in points] for name in ("mean", "half_width")
    }
    return intervals | {"each": [[x for x in point.each if not math.isnan(x)] for point in points]}


def best_elsewhere(each: Mapping[float, Sequence[float]], other: float) -> Estimate | None:
    """In each seed the key that is best on average over the *other* seeds, minus the key `other`; each: by key, seed.

    The best of the same seeds would be ahead by chance. None for a single seed, or without `other`.

    >>> best_elsewhere({0.1: [1.0, 5.0], 0.2: [2.0, 3.0], 0.5: [0.0, 4.0]}, other=0.5).each  # 0.1, then 0.2
    (1.0, -1.0)
    """
    values, seeds = (
        np.array([values for key, values in each.items() if key != other]),
        range(len(each.get(other, ()))),
    )
    if len(seeds) < 2:
        return None
    chosen = [np.delete(values, seed, axis=1).mean(1).argmax() for seed in seeds]
    return Estimate.over_seeds(values[chosen[seed], seed] - each[other][seed] for seed in seeds)


class Measured:
    """A table of what was measured of runs: for an arm, a seed and a name the values along the run, or a single one.

    >>> table = Measured([("topr", 0, {"correct": [0.25, 0.5]}), ("topr", 1, {"correct": [0.25, 1.0]})])
    >>> table.each("topr", "correct"), table.along("topr")["mean"], table.gain("topr", "topr").each
    ({0: 0.5, 1: 1.0}, [0.25, 0.75], (0.0, 0.0))
    """

    def __init__(self, rows: Iterable[tuple[Hashable, int, Mapping[str, Sequence[float]]]]):
        self._values: dict[tuple[Hashable, str], dict[int, Sequence[float]]] = defaultdict(dict)
        for arm, seed, measured in rows:
            for what, values in measured.items():
                self._values[arm, what][seed] = values

    def each(self, arm: Hashable, what: str = "correct", at: int = -1) -> dict[int, float]:
        """Seed -> what was measured at a point of the run, by default the last; empty where no run has it."""
        return {seed: values[at] for seed, values in self._values.get((arm, what), {}).items()}

    def mean(self, arm: Hashable, what: str = "correct", at: int = -1) -> Estimate:
        """The mean of these over seeds."""
        return Estimate.over_seeds(self.each(arm, what, at).values())

    def gain(
        self, arm: Hashable, other: Hashable, what: str = "correct", at: int = -1
    ) -> Estimate | None:
        """One arm minus another over the seeds that both have, whose runs share their samples; None without any."""
        one, two = self.each(arm, what, at), self.each(other, what, at)
        differences = [one[seed] - two[seed] for seed in one if seed in two]
        return Estimate.over_seeds(differences) if differences else None

    def change(self, arm: Hashable, what: str = "correct") -> Estimate:
        """The end of an arm's runs minus their beginning."""
        end, begin = (self.each(arm, what, at) for at in (-1, 0))
        return Estimate.over_seeds(end[seed] - begin[seed] for seed in end)

    def along(self, arm: Hashable, what: str = "correct") -> Series:
        """The means over seeds at each point along the run."""
        return series(map(Estimate.over_seeds, zip(*self._values[arm, what].values(), strict=True)))


class Sweep(AbstractContextManager):
    """Runs in `folder`. Several workers are processes of one thread each; one worker is this process."""

    def __init__(self, folder: Path, workers: int):
        self._folder = folder
        self._pool = (
            ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
            if workers > 1
            else None
        )

    def make(self, jobs: Jobs) -> dict[Hashable, Finished]:
        """The runs of the jobs; those that are not finished are made first. InputError as `check` raises it."""
        placed = {}
        for key, job in jobs.items():
            reuse = (
                job.settings.reuse
                if job.copies is None
                else self._folder / folder_name(jobs[job.copies])
            )
            placed[key] = job._replace(
                settings=replace(job.settings, out=self._folder / folder_name(job), reuse=reuse)
            )
        for copies in (False, True):  # those that draw samples come first
            wanted = {
                job.settings.out: job
                for job in placed.values()
                if (job.copies is not None) == copies
            }
            missing = [job for out, job in wanted.items() if not (out / "results.json").exists()]
            made = (self._pool.map if self._pool else map)(_make, missing)
            try:
                for _ in progress_bar(made, "runs", "run", total=len(missing)) if missing else ():
                    pass
            except BrokenProcessPool:  # something ended a worker: Ctrl-C reaches them too
                raise KeyboardInterrupt from None
        texts = {
            key: (job.settings.out / "results.json").read_text(encoding="utf-8")
            for key, job in placed.items()
        }
        return {
            key: Finished(placed[key].settings, json.loads(text)) for key, text in texts.items()
        }

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _make(job: Job) -> None:
    job.check(ranks())
    start = sum(
        os.times()[:4]
    )  # of this process and its children: other work on the machine lengthens wall time
    if isinstance(job.settings, VerifierSettings):
        verifier.run(job.settings)
    else:
        learn = job.token_loss and learn_with(job.token_loss, load_model(job.settings.model).model)
        train_gsm8k.experiment(job.settings, job.task(job.settings), learn)
    if rank() == 0:
        for model in job.settings.out.rglob("iteration-*/model"):
            shutil.rmtree(model)  # it is large, and only its evaluations are needed now
        made = {"seconds": round(sum(os.times()[:4]) - start, 1), "commit": commit()}
        write_file(job.settings.out / "made.json", json.dumps(made) + "\n")


def _start_worker() -> None:
    """One thread, and nothing printed."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = io.StringIO()


def commit() -> str:
    """The commit of this code, with "-dirty" where Python files were changed; "unknown" outside a repository."""
    git = partial(
        subprocess.check_output, cwd=Path(__file__).parent.parent, text=True, stderr=DEVNULL
    )
    try:
        changed = git("git status --short -- *.py".split())
        return git("git rev-parse --short HEAD".split()).strip() + "-dirty" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def learn_with(
    variant: str, mu: torch.nn.Module
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The loss and the log-probabilities with which `topr.train` learns by one of conformance.variants.VARIANTS.

    `topr.train` hands a loss one number per sequence. So the loss is naive REINFORCE's, and log pi(y|x), (B,), is made
    so that its gradient is the variant's. The reported weights are then 1. A completion with reward 0 gets no gradient.
    mu: the model that the samples are from, which gives log mu of each token.

    >>> loss, logprobs = learn_with("per-token", torch.nn.Identity())
    >>> loss.keywords["limits"] == topr.PRESETS["reinforce"]
    True
    """
    token_loss = VARIANTS[variant]

    def logprobs(pi: torch.nn.Module, batch: topr.Batch) -> Tensor:
        with torch.no_grad():
            token_logmu = topr.token_logprobs(mu, batch)
        token_logp = topr.token_logprobs(pi, batch)  # (B, C), 0 on padding, which is on the right
        leaf = token_logp.detach().requires_grad_()
        mask = torch.arange(leaf.shape[1], device=leaf.device) < batch.length[:, None]
        loss = token_loss(
            leaf, token_logmu, batch.reward, mask.to(leaf.dtype)
        )  # a mean over the micro-batch
        [gradient] = torch.autograd.grad(loss, leaf)
        # naive REINFORCE: the gradient of its mean over the batch, in each log pi(y|x)
        naive = (
            -torch.where(batch.reward == 0, torch.inf, batch.reward)
            / batch.length
            / len(batch.reward)
        )
        weighted = (gradient / naive[:, None] * token_logp).sum(1)
        return (
            weighted + (token_logp.sum(1) - weighted).detach()
        )  # the value of log pi(y|x), the gradient of weighted

    return partial(topr.topr_loss, limits=topr.PRESETS["reinforce"]), logprobs
