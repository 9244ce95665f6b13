"""The best learning rate and number of passes of each method on each stage: its cell.

Cells are chosen by held-out problems, with a seed that no test uses. One run of the most passes is
evaluated after each number of passes.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pandas as pd

from experiments.runs import Options, Run, Stage, make_runs

SEED = 100
# Learning rates that may be tried, as multiples of the stage's own. The three in the middle are
# tried first, and then those beside the best one.
LADDER = (0.02, 0.06, 0.2, 0.6, 2.0, 6.0, 20.0)
TEMPERATURES = (1.0, 0.7, 0.5, 0.3)  # of a model without training


def try_cells(stages: Sequence[Stage], methods: Sequence[str], options: Options) -> pd.DataFrame:
    """Make runs until each method's best learning rate lies between others; returns their rows."""
    tried = {}
    for stage, method in product(stages, methods):
        ladder = rates_of(stage)
        tried[stage, method] = {ladder[4]} if options.quick else set(ladder[2:5])
    while True:
        runs = []
        for (stage, method), rates in tried.items():
            runs += held_out_runs(stage, method, sorted(rates), options.passes)
        table = make_runs(runs, options.workers)
        count = sum(map(len, tried.values()))
        for (stage, method), cell in best_cells(table, stages).items():
            if method != "none" and not options.quick:
                tried[stage, method] |= rates_beside(cell["lr"], rates_of(stage))
        if sum(map(len, tried.values())) == count:
            return table


def rates_of(stage: Stage) -> list[float]:
    """The learning rates of LADDER, with one digit each."""
    return [float(f"{factor * stage.settings.lr:.1g}") for factor in LADDER]


def rates_beside(best: float, ladder: Sequence[float]) -> set[float]:
    """A rate and those next to it on the ladder.

    >>> sorted(rates_beside(3.0, [1.0, 3.0, 10.0, 30.0]))
    [1.0, 3.0, 10.0]
    """
    index = ladder.index(best)
    return set(ladder[max(index - 1, 0) : index + 2])


def held_out_runs(
    stage: Stage, method: str, rates: Sequence[float], passes: Sequence[float]
) -> list[Run]:
    """A run with each learning rate, or at each temperature without training."""
    *earlier, most = sorted(passes)
    if method == "none":
        run = Run(stage, method, stage.settings.lr, 0, SEED, "held-out")
        return [replace(run, temperature=temperature) for temperature in TEMPERATURES]
    run = Run(stage, method, 0, most, SEED, "held-out", evaluate_after=tuple(earlier))
    return [replace(run, lr=lr) for lr in rates]


def best_cells(table: pd.DataFrame, stages: Sequence[Stage]) -> dict[tuple[Stage, str], pd.Series]:
    """The row of each stage and method with the highest pass@1."""
    rows = table[(table["passes"] > 0) | (table["method"] == "none")]
    best = {}
    for stage in stages:
        of_stage = rows[rows["stage"] == stage.name]
        for index in of_stage.groupby("method", sort=False)["pass@1"].idxmax():
            best[stage, rows.loc[index, "method"]] = rows.loc[index]
    return best


def run_at(cell: pd.Series, stage: Stage, method: str, seed: int, **changes: Any) -> Run:
    """The test run of a method at a cell."""
    lr, passes, temperature = cell["lr"], cell["passes"], cell["temperature"]
    return Run(stage, method, lr, passes, seed, temperature=temperature, changes=changes)
