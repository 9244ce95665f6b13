"""Table 2: generative verifiers before and after TOPR, and votes weighted by their verdicts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from figures.common import Figure, Findings, Rates, by_seed, over_seeds
from figures.runs import Job, Run, in_seeds
from figures.scales import Scale
from tasks.verifier import ACCURACY, CONSTANT, INVALID, WEIGHTED, to_panel
from toprlib.plotting import Panel
from toprlib.report import Estimate

# Column, row, row: the number is the first row minus the second.
DIFFERENCES = (
    (ACCURACY, "topr", "base"),
    (ACCURACY, "topr", CONSTANT),
    (WEIGHTED, "topr", "no verifier"),
    (WEIGHTED, "base", "no verifier"),
    (INVALID, "base", "topr"),
)
NAMES = {"topr": "TOPR", CONSTANT: "constant verdict"}


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """A run for each base model of a verifier."""
    jobs = []
    for model in (scale.verifier.model, *scale.other_verifiers):
        name = Path(model).name
        settings = replace(scale.verifier, model=model)
        jobs.append(Job({"verifier": name}, f"table2-{name}", settings, scale.task))
    return in_seeds(jobs, seeds)


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """The cells of the table and their differences, for each verifier."""
    data = {}
    for run in runs:
        data.setdefault(run.job.columns["verifier"], []).append(run.results)
    shares = {}
    for name, results in data.items():
        cells = cells_of(results)
        for (row, column), values in by_seed(cells, "mean", ["row", "column"]).items():
            shares[f"{name}, {row}: {column}"] = over_seeds(values)
        for what, value in differences(cells).items():
            shares[f"{name}, {what}"] = value
    return Findings(data, shares)


def cells_of(results: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The means of the table's cells in some runs; results: results.json of each."""
    cells = []
    for seed, run in enumerate(results):
        for row, columns in run["table2"].items():
            for column, cell in columns.items():
                cells.append({"seed": seed, "row": row, "column": column, "value": cell["mean"]})
    return pd.DataFrame(cells).assign(metric="mean")


def differences(cells: pd.DataFrame) -> dict[str, Estimate]:
    """Differences of rows, in the same runs."""
    means = by_seed(cells, "mean", ["row", "column"])
    found = {}
    for column, one, other in DIFFERENCES:
        name = f"{NAMES.get(one, one)} - {NAMES.get(other, other)}: {column}"
        found[name] = over_seeds(means[one, column] - means[other, column])
    return found


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """A panel for each verifier."""
    drawn = []
    for name, results in data.items():
        means = by_seed(cells_of(results), "mean", ["row", "column"])
        rows = {}
        for (row, column), values in means.items():
            rows.setdefault(row, {})[column] = over_seeds(values).to_json()
        drawn.append(to_panel(rows)._replace(title=f"base verifier: {name}"))
    return drawn


FIGURE = Figure(arms, read, panels, tuned=lambda scale: ())
