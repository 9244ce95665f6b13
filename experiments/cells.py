"""The best learning rate and number of passes of each method on each stage: its cell.

Cells are chosen by held-out problems, with a seed that no test uses. One run of the most passes is
evaluated after each number of passes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from experiments.runs import Options, Run, Stage, make_runs

SEED = 100
# Learning rates as multiples of the stage's. The three in the middle are tried first.
LADDER = (0.02, 0.06, 0.2, 0.6, 2.0, 6.0, 20.0)
TEMPERATURES = (1.0, 0.7, 0.5, 0.3)  # of a model without training


def try_cells(
    stages: Mapping[str, Stage], methods: Sequence[str], options: Options
) -> pd.DataFrame:
    """Make runs until the rates beside each method's best one are tried; returns all rows."""
    planned = []
    for stage, method in product(stages.values(), methods):
        rates = rates_of(stage)[4:5] if options.quick else rates_of(stage)[2:5]
        planned += held_out_runs(stage, method, rates, options.passes)
    while True:
        table = make_runs(planned, options.workers)
        wider = []
        for cell in best_cells(table).itertuples():
            stage = stages[cell.stage]
            beside = [lr for lr in rates_of(stage) if cell.lr / 5 < lr < cell.lr * 5]
            wider += held_out_runs(stage, cell.method, beside, options.passes)
        added = [run for run in wider if run not in planned]
        if options.quick or not added:
            return table
        planned += added


def rates_of(stage: Stage) -> list[float]:
    """The learning rates of LADDER, with one digit each."""
    return [float(f"{factor * stage.settings.lr:.1g}") for factor in LADDER]


def held_out_runs(
    stage: Stage, method: str, rates: Sequence[float], passes: Sequence[float]
) -> list[Run]:
    """A run with each learning rate, or at each temperature without training."""
    if method == "none":
        run = Run(stage, method, stage.settings.lr, 0, SEED, "held-out")
        return [replace(run, temperature=temperature) for temperature in TEMPERATURES]
    *earlier, most = sorted(passes)
    run = Run(stage, method, 0, most, SEED, "held-out", evaluate_after=tuple(earlier))
    return [replace(run, lr=lr) for lr in rates]


def best_cells(table: pd.DataFrame) -> pd.DataFrame:
    """For each stage and method the row with the highest pass@1."""
    candidates = table[(table["passes"] > 0) | (table["method"] == "none")]
    best = candidates.groupby(["stage", "method"], sort=False)["pass@1"].idxmax()
    return candidates.loc[best]


def run_at(cell: NamedTuple, stage: Stage, seed: int, **changes: Any) -> Run:
    """The test run of a row of `best_cells`."""
    run = Run(stage, cell.method, cell.lr, cell.passes, seed, temperature=cell.temperature)
    return replace(run, changes=changes)
