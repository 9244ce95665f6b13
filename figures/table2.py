"""Table 2: generative verifiers before and after TOPR, and votes weighted by their verdicts."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from examples.verifier import ACCURACY, CONSTANT, INVALID, WEIGHTED
from figures.common import curve
from figures.pictures import LEVELS, new_figure, plot_rows
from figures.runs import Rates, Row, Run
from figures.scales import Scale

TUNED = ()
NAMES = {"topr": "TOPR", CONSTANT: "constant verdict"}
# Column, row, row: the number is the first row minus the second.
DIFFERENCES = (
    (ACCURACY, "topr", "base"),
    (ACCURACY, "topr", CONSTANT),
    (WEIGHTED, "topr", "no verifier"),
    (WEIGHTED, "base", "no verifier"),
    (INVALID, "base", "topr"),
)


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """A run for each base model of a verifier."""
    wanted = []
    for settings in scale["verifiers"]:
        name = Path(settings.model).name
        wanted.append({"verifier": name, "arm": "topr", "lr": settings.lr, "base": settings})
    return wanted


def read(runs: list[Run], scale: Scale) -> dict:
    """The cells of the table and their differences, for each verifier."""
    data = {}
    for run in runs:
        data.setdefault(run.columns["verifier"], []).append(run.results)
    shares = {}
    for name, results in data.items():
        cells = cells_of(results)
        shares |= {f"{name}, {row}: {column}": cells[row, column] for row, column in cells}
        for column, one, other in DIFFERENCES:
            pair = f"{NAMES.get(one, one)} - {NAMES.get(other, other)}: {column}"
            shares[f"{name}, {pair}"] = cells[one, column] - cells[other, column]
    return {"shares": shares, "numbers": {}, "data": data}


def cells_of(results: list[dict]) -> pd.DataFrame:
    """The means of the table's cells: a row for each of `results`, columns (row, column)."""
    means = []
    for result in results:
        cells = pd.DataFrame(result["table2"]).unstack().dropna()
        means.append(cells.map(lambda cell: cell["mean"]))
    return pd.DataFrame(means)


def draw(data: dict) -> Figure:
    """A panel for each verifier, and in it three groups of rows."""
    figure, panels = new_figure(len(data))
    for axes, (name, results) in zip(panels, data.items(), strict=True):
        cells = cells_of(results)
        heights = {WEIGHTED: 0, INVALID: 1, ACCURACY: 2}
        for number, row in enumerate(cells.columns.unique(0)):
            at = [heights[column] + 0.3 - 0.2 * number for column in cells[row]]
            _, *style = LEVELS[number]
            plot_rows(axes, at, curve(cells[row]), (NAMES.get(row, row), *style))
        axes.set(title=f"base verifier: {name}", xlabel="%, 95% interval", xlim=(-3, 103))
        axes.set(yticks=range(3), yticklabels=heights)
    return figure
