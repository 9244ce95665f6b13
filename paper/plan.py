"""The runs of a figure, listed and checked before the first of them is made."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paper.experiments import Lab, Scale
from paper.sweep import Job, folder_name
from pipeline.records import InputError
from pipeline.settings import Settings
from tasks.verifier import VerifierSettings

LEFT_OUT = ("seed", "reuse", "samples")  # of what a job changes: those that change with the seed


class NotMade(Exception):
    """Something was to be read off a run that is only planned."""


@dataclass(frozen=True)
class Planned:
    """A run that is not made: it has settings and a folder, and whoever reads its results gets NotMade."""

    settings: Settings

    @property
    def folder(self) -> Path:
        """The folder that the run would have."""
        return self.settings.out

    def __getattr__(self, name: str) -> object:
        raise NotMade(f"{name} of {self.folder}")


class Plan:
    """In place of a sweep: keeps the jobs that it is given, each once, and makes none."""

    def __init__(self):
        self.jobs: dict[str, Job] = {}  # by the name of the run's folder

    def make(self, jobs: Sequence[Job]) -> list[Planned]:
        """The runs of the jobs, planned."""
        names = [folder_name(job) for job in jobs]
        self.jobs |= {name: job for name, job in zip(names, jobs, strict=True) if name not in self.jobs}
        return [Planned(replace(job.settings, out=Path(name))) for name, job in zip(names, jobs, strict=True)]


def planned(figure: Callable[[Lab], object], scale: Scale, seeds: range) -> list[Job]:
    """The jobs that a figure asks for before it reads a result: all of them, unless some depend on others' results.

    At the scale of the paper none does. The laptop chooses learning rates by runs.
    """
    plan = Plan()
    with suppress(NotMade):
        figure(Lab(plan, scale, seeds))
    return list(plan.jobs.values())


def check_jobs(name: str, jobs: Sequence[Job], processes: int) -> None:
    """InputError, with figure and label, for the first job whose settings cannot be run on so many processes."""
    for job in jobs:
        try:
            job.check(job.settings, processes)
        except InputError as error:
            raise InputError(f"{name}, {job.label}: {error}") from None


def print_jobs(name: str, jobs: Sequence[Job], scale: Scale) -> None:
    """Print the jobs: seeds, settings that differ from the scale's, and how much each run draws and trains at most."""
    table = Table(name, "seeds", "differs in", "samples", "steps")
    by_label: dict[str, list[Job]] = {}
    for job in jobs:
        by_label.setdefault(job.label, []).append(job)
    for label, [job, *others] in by_label.items():
        seeds = " ".join(str(each.settings.seed) for each in (job, *others))
        table.add_row(label, seeds, differing(job, scale), *(f"{size:,}" for size in sizes(job.settings)))
    Console().print(table)


def differing(job: Job, scale: Scale) -> str:
    """What a job changes in the scale's usual run.

    >>> from paper.experiments import LAPTOP
    >>> differing(Job("ppo", replace(LAPTOP.base, method="ppo", lr=1e-4, seed=3), LAPTOP.task), LAPTOP)
    'method=ppo lr=0.0001'
    """
    here = asdict(job.settings) | {"token_loss": job.token_loss}
    usual = asdict(scale.verifier if isinstance(job.settings, VerifierSettings) else scale.base)
    changed = {name: value for name, value in here.items() if name not in LEFT_OUT and value != usual.get(name)}
    return " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in changed.items())


def sizes(settings: Settings) -> tuple[int, int]:
    """Samples drawn and optimiser steps made by a run that finds as many problems as it asks for, at most.

    >>> sizes(Settings(problems=10, n=4, batch=8, test_problems=5, test_samples=2, curve_points=1))
    (60, 5)
    """
    problems, tested = settings.problems, settings.test_problems
    if isinstance(settings, VerifierSettings):
        problems, tested = problems * settings.train_solutions, tested * settings.test_solutions
    drawn = problems * settings.drawn_per_problem
    trained = 2 * problems * settings.pairs if settings.method == "dpo" else min(drawn, settings.examples or drawn)
    along = settings.curve_samples * (settings.curve_points - 1) * settings.iterations
    of_tests = tested * (settings.test_samples * (1 + settings.iterations) + along)
    solutions = problems + tested if isinstance(settings, VerifierSettings) else 0
    return settings.iterations * drawn + of_tests + solutions, settings.iterations * ceil(trained / settings.batch)
