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
from toprlib.distributed import progress_bar
from toprlib.records import Sample, Task
from toprlib.settings import Settings

# Runs that agree in these sample the same completions of the same training problems.
OF_SAMPLES = "model data shots chat problems n engine temperature top_p top_k max_new_tokens seed"
TENTHS = {  # metrics of steps, and what figures call them
    "grad_norm": "gradient norm",
    "log_ratio_pos_q50": "log-ratio of positives",
    "clipped_by_ppo": "clipped",
}
Rates = Mapping[str, Sequence[float]]  # arm -> learning rates, the best one first
# A run of each seed: arm, lr, and what else tells it from the others, the columns of tables. Its
# `changes` to settings, `base` settings and `task` are no columns; the scale has the usual ones.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """A run of a figure; variant: of the loss, a name in VARIANTS, in place of the method's."""

    columns: Mapping[str, Any]
    settings: Settings
    task: Callable[[Settings], Task]  # of a module, which workers import
    variant: str | None

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
def at_rates(
    shared: Mapping[str, float], arms: Sequence[str], own: Mapping[str, float]
) -> list[Row]:
    """Arms at each shared learning rate, then each of `own` at its own; columns rate, arm, lr."""
    rows = []
    for rate, lr in shared.items():
        rows += [{"rate": rate, "arm": arm, "lr": lr} for arm in arms]
    return rows + [{"rate": "own rate", "arm": arm, "lr": lr} for arm, lr in own.items()]


def best_two(rates: Sequence[float]) -> dict[str, float]:
    """The best and, if there is one, the second best learning rate, by name."""
    return dict(zip(("best rate", "second best rate"), rates, strict=False))


def over_shares(scale: Scale, share: float, **columns: Any) -> list[Row]:
    """A training set of this share of positives, with a baseline for each effective share p~."""
    sets = {"composition": "proportion", "proportion": share, "evals_per_epoch": 1, **scale["sets"]}
    rows = []
    for p_tilde in scale["shares"]:
        effective = None if p_tilde == share else p_tilde  # p~ = share takes no baseline
        changes = {**sets, "effective_proportion": effective}
        rows.append({**columns, "share": share, "p_tilde": p_tilde, "changes": changes})
    return rows


def plan(scale: Scale, figure: str, rows: Sequence[Row], seeds: range) -> list[Run]:
    """A run for each row and seed; there are more seeds where a claim needs them."""
    runs = []
    for row in rows:
        of_arm = dict(ARMS.get(row["arm"], {}))
        variant = of_arm.pop("variant", None)
        changes = {**of_arm, "lr": row["lr"], **row.get("changes", {})}
        columns = {key: row[key] for key in row if key not in ("changes", "base", "task")}
        parts = (figure, f"{figure}, p~ = {row.get('p_tilde', 0):.0%}")
        least = max(scale["seeds"].get(part, 0) for part in parts)
        for seed in range(seeds.start, max(seeds.stop, seeds.start + least)):
            settings = replace(row.get("base", scale["base"]), **changes, seed=seed)
            task = row.get("task", train_gsm8k.gsm8k_task)
            runs.append(Run({**columns, "seed": seed}, settings, task, variant))
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
    first = {}  # what samples depend on -> those of the first run with them
    missing = {True: {}, False: {}}  # whether a run samples by itself -> its folder -> the run
    placed = []
    for run in runs:
        settings = run.settings
        made_with = f"{settings.to_config()} {run.task.__name__} {run.variant}"
        name = f"{run.variant or settings.method}_{settings.lr:g}_{settings.seed}"
        out = folder / f"{name}_{zlib.crc32(made_with.encode()):08x}".replace(" ", "")
        own = out / "iteration-1" / "samples.jsonl"
        is_finished = (out / "results.json").exists()
        is_verifier = isinstance(settings, verifier.VerifierSettings)
        source = own
        if settings.iterations == 1 and not is_verifier and (own.exists() or not is_finished):
            of_samples = [getattr(settings, name) for name in OF_SAMPLES.split()]
            source = first.setdefault((run.task, *of_samples), own)
        samples = None if source == own else str(source)
        placed.append(replace(run, settings=replace(settings, out=out, samples=samples)))
        if not is_finished:
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
