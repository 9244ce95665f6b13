"""The runs of figures: their settings, how they are made, and what was measured, as one table.

A finished run is not made again, and an interrupted one resumes: a figure can be given more seeds.
"""

import io
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import topr_conformance
import train_gsm8k
from examples import verifier
from figures.scales import ARMS, Scale
from toprlib import files
from toprlib.distributed import progress_bar, rank
from toprlib.records import Sample, Task
from toprlib.settings import Settings

# Runs that agree in these sample the same completions of the same training problems.
OF_SAMPLES = "model data shots chat problems n engine temperature top_p top_k max_new_tokens seed"
Rates = Mapping[str, Sequence[float]]  # arm -> learning rates, the best one first
TENTHS = {  # metrics of steps, and what figures call them
    "grad_norm": "gradient norm",
    "log_ratio_pos_q50": "log-ratio of positives",
    "clipped_by_ppo": "clipped",
}
BEST_TWO = ("best rate", "second best rate")  # names of TOPR's
Columns = Mapping[str, Any]  # arm and lr of a run, and what else tells it from the others


@dataclass(frozen=True)
class Run:
    """A run of a figure; variant: of the loss, a name in VARIANTS, in place of the method's."""

    columns: Columns
    settings: Settings
    task: Callable[[Settings], Task]  # of a module, which workers import
    variant: str | None = None

    @property
    def results(self) -> dict[str, Any]:
        """The content of results.json."""
        return json.loads((self.settings.out / "results.json").read_text(encoding="utf-8"))

    def test_samples(self, at_end: bool) -> list[Sample]:
        """The completions of the test problems before the first iteration, or at its end."""
        iterations = self.results["iterations"]
        step = iterations[0]["dataset"]["steps"] if at_end and iterations else 0
        file = self.settings.out / "iteration-1" / f"test-{step}.jsonl"
        return files.read_records(file, Sample)


# ---- what is run ---------------------------------------------------------------------------------
def plan(scale: Scale, rows: Sequence[Columns], seeds: Sequence[int], **changes: Any) -> list[Run]:
    """A run for each row and seed, with the settings of the scale, the row's arm, and `changes`."""
    runs = []
    for columns in rows:
        of_arm = dict(ARMS[columns["arm"]])
        variant = of_arm.pop("variant", None)
        of_method = scale["method changes"].get(columns["arm"], {})
        wanted = {**of_arm, **of_method, "lr": columns["lr"], **changes}
        for seed in seeds:
            settings = replace(scale["base"], **wanted, seed=seed)
            runs.append(Run({**columns, "seed": seed}, settings, scale["task"], variant))
    return runs


def at_rates(
    shared: Mapping[str, float], arms: Sequence[str], own: Mapping[str, float]
) -> list[Columns]:
    """Rows of `plan`: the arms at each shared learning rate, then each of `own` at its own."""
    rows = []
    for rate, lr in shared.items():
        rows += [{"rate": rate, "arm": arm, "lr": lr} for arm in arms]
    return rows + [{"rate": "own rate", "arm": arm, "lr": lr} for arm, lr in own.items()]


def plan_over_shares(
    scale: Scale, columns: Columns, seeds_at: Callable[[float], range], **changes: Any
) -> list[Run]:
    """A training set with a baseline for each effective share p~ of the scale.

    columns: arm, lr and the set's own share of positives, `share`; p_tilde is added.
    """
    share = columns["share"]
    sets = {"composition": "proportion", "proportion": share, "evals_per_epoch": 1, **scale["sets"]}
    runs = []
    for p_tilde in scale["shares"]:
        effective = None if p_tilde == share else p_tilde  # p~ = share takes no baseline
        wanted = {**sets, "effective_proportion": effective, **changes}
        runs += plan(scale, [{**columns, "p_tilde": p_tilde}], seeds_at(p_tilde), **wanted)
    return runs


# ---- making runs ---------------------------------------------------------------------------------
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
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = io.StringIO()


def make_runs(runs: Sequence[Run], folder: Path, map_runs: Callable[..., Any]) -> list[Run]:
    """The runs with their folders, in `folder`; those that are not finished are made.

    Runs with equal samples train on those of the first of them. map_runs: of `parallel_map`.
    """
    first = {}  # what samples depend on -> the folder of the first run with them
    missing = {True: {}, False: {}}  # whether a run samples by itself -> its folder -> the run
    placed = []
    for run in runs:
        settings = run.settings
        made_with = f"{settings.to_config()} {run.task.__name__} {run.variant}"
        name = f"{run.variant or settings.method}_{settings.lr:g}_{settings.seed}"
        out = folder / f"{name}_{zlib.crc32(made_with.encode()):08x}".replace(" ", "")
        source = out
        is_verifier = isinstance(settings, verifier.VerifierSettings)
        if settings.iterations == 1 and not is_verifier:
            of_samples = [getattr(settings, name) for name in OF_SAMPLES.split()]
            source = first.setdefault((run.task, *of_samples), out)
        samples = None if source == out else f"{source}/iteration-1/samples.jsonl"
        placed.append(replace(run, settings=replace(settings, out=out, samples=samples)))
        if not (out / "results.json").exists():
            missing[samples is None][out] = placed[-1]
    for group in missing.values():
        for _ in progress_bar(map_runs(make_run, group.values()), "runs", "run", len(group)):
            pass
    return placed


def make_run(run: Run) -> None:
    """Train and evaluate; leaves results.json, and the run's cost in made.json."""
    settings = run.settings
    seconds = sum(os.times()[:4])  # of processors: other work lengthens only the clock's
    made = {"commit": commit(), "start": datetime.now(UTC).isoformat(timespec="seconds")}
    if isinstance(settings, verifier.VerifierSettings):
        verifier.run(settings)
    else:
        loss = topr_conformance.VARIANTS[run.variant] if run.variant else None
        train_gsm8k.experiment(settings, run.task(settings), loss)
    # Models are large, and only their evaluations are needed now.
    files.remove(*settings.out.rglob("iteration-*/model"))
    if rank() == 0:
        made["end"] = datetime.now(UTC).isoformat(timespec="seconds")
        made["seconds"] = round(sum(os.times()[:4]) - seconds, 1)
        files.write_file(settings.out / "made.json", json.dumps(made) + "\n")


def commit() -> str:
    """The commit of this code, with "-dirty" if Python files differ from it; or "unknown"."""
    is_changed = "(git diff --quiet HEAD -- '*.py' || echo -dirty)"
    status, text = subprocess.getstatusoutput(f"git rev-parse --short HEAD && {is_changed}")
    return text.replace("\n", "") if status == 0 else "unknown"


def cost(runs: Sequence[Run]) -> dict[str, Any]:
    """How many different runs there are, what they cost, when and by which code they were made."""
    folders = {run.settings.out for run in runs}
    written = [folder / "made.json" for folder in folders]
    # A run that was killed at its very end has no such file.
    made = [json.loads(file.read_text()) for file in written if file.exists()]
    return {
        "runs": len(folders),
        "core_minutes": round(sum(each["seconds"] for each in made) / 60, 1),
        "start": min((each["start"] for each in made), default=None),
        "end": max((each["end"] for each in made), default=None),
        "commits": sorted({each["commit"] for each in made}),
        "versions": runs[0].results["versions"] if runs else {},
    }


# ---- what was measured ---------------------------------------------------------------------------
def measure(
    runs: Sequence[Run], measure_more: Callable[[Run], Mapping[str, Any]] = lambda run: {}
) -> pd.DataFrame:
    """The table of what was measured in some runs, and of what a figure adds to it."""
    rows = []
    for run in runs:
        for metric, values in (in_training(run) | in_tests(run) | measure_more(run)).items():
            for point, value in enumerate(values):
                rows.append({**run.columns, "metric": metric, "point": point, "value": value})
    return pd.DataFrame(rows)


def in_tests(run: Run) -> dict[str, list[float]]:
    """Metric -> its values along the run, of results.json.

    Shares of outcomes are those along the first epoch. Estimates, such as maj@16, are those before
    training and after each iteration.
    """
    before = run.results["before"]
    iterations = run.results["iterations"]
    entries = [before, *(iteration["after"] for iteration in iterations)]
    along = iterations[0]["curve"] if iterations else entries
    measured = {}
    for name, value in before.items():
        if isinstance(value, float):
            measured[name] = [point[name] for point in along]
        elif isinstance(value, dict):
            measured[name] = [entry[name]["mean"] for entry in entries]
    return measured


def in_training(run: Run) -> dict[str, list[float]]:
    """Metrics of the first iteration's steps: means in tenths of the training, and totals."""
    if run.settings.iterations == 0:
        return {}
    lines = (run.settings.out / "iteration-1" / "metrics.jsonl").read_text().splitlines()
    steps = pd.DataFrame([json.loads(line) for line in lines])  # pandas' own reader rounds floats
    measured = {
        "realised share": [run.results["iterations"][0]["training"]["realised_share"]],
        "largest gradient norm": [steps["grad_norm"].max()],
        "steps clipped": [(steps["grad_norm"] > run.settings.max_grad_norm).mean()],
    }
    for metric, name in TENTHS.items():
        if metric in steps:
            parts = np.array_split(steps[metric].to_numpy(), min(10, len(steps)))
            # A step without positives, for instance, has no number for positives.
            measured[name] = [float(np.nanmean(part)) for part in parts]
    return measured
