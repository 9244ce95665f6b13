"""Numbers of figures: intervals over seeds, from a table of measurements.

A table has a row for each number that was measured: columns that tell runs apart, such as arm and
lr; then seed, metric, point (0, 1, ... along the run) and value.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from figures.pictures import LABELS

# The 97.5 % quantile of Student's t for 2, 3, ... 13 values. More values use the last one, which
# makes their interval slightly too wide.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)

Values = dict[str, Iterable[float]]  # name of a number -> its values in the seeds


def interval(values: Iterable[float]) -> dict[str, Any]:
    """The mean over seeds and half the width of its 95 % interval by Student's t.

    NaN is a seed without a value. One value has no interval; without values the mean is None.

    >>> interval([1.0, math.nan, 3.0])
    {'mean': 2.0, 'half_width': 12.706, 'each': [1.0, 3.0]}
    """
    each = [float(value) for value in values if not math.isnan(value)]
    mean = float(np.mean(each)) if each else None
    half_width = None
    if len(each) > 1:
        standard_error = float(np.std(each, ddof=1) / len(each) ** 0.5)
        half_width = STUDENT_T[min(len(each), 13) - 2] * standard_error
    return {"mean": mean, "half_width": half_width, "each": each}


def by_seed(table: pd.DataFrame, metric: str, by: Any = "arm", at: int = -1) -> pd.DataFrame:
    """A metric at a point of the runs, by default the last: a row for each seed, columns for arms.

    by: columns of the table that tell arms apart. NaN where an arm has no run with a seed.
    """
    columns = [by] if isinstance(by, str) else by
    # The rows of a run are in the order of its points: its nth row is its nth point.
    rows = table[table["metric"] == metric].groupby([*columns, "seed"], sort=False).nth(at)
    # Without sorting, arms stay in the order of the figure's runs.
    return rows.set_index(["seed", *columns])["value"].unstack(by, sort=False)


def named(values: pd.DataFrame, text: str, labels: Mapping[Any, str] = LABELS) -> Values:
    """The columns of `by_seed` by name; text: a form with {} for the arm's label."""
    return {text.format(labels.get(arm, arm)): column for arm, column in values.items()}


def minus(values: pd.DataFrame, other: str, text: str, labels: Mapping = LABELS) -> Values:
    """One column minus each of the others; text: a form with {} for the other's label."""
    return named(values.drop(columns=other).rsub(values[other], axis="index"), text, labels)


def curve(values: pd.DataFrame) -> dict[str, list]:
    """The intervals of a line; values: a row for each seed, a column for each point.

    >>> curve(pd.DataFrame({"start": [1.0, 3.0], "end": [2.0, math.nan]}))
    {'mean': [2.0, 2.0], 'half_width': [12.706, None], 'each': [[1.0, 3.0], [2.0]]}
    """
    points = [interval(column) for _, column in values.items()]
    return {part: [point[part] for point in points] for part in ("mean", "half_width", "each")}


def curves(table: pd.DataFrame, metric: str) -> dict[str, dict[str, list]]:
    """A metric along the runs of each arm."""
    lines = {}
    for arm, rows in table[table["metric"] == metric].groupby("arm", sort=False):
        lines[arm] = curve(rows.pivot(index="seed", columns="point", values="value"))
    return lines


def by_rate(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(title, suffix of names, rows) for each value of the column `rate`."""
    for rate, rows in table.groupby("rate", sort=False):
        title = rate if rate == "own rate" else f"lr {rows['lr'].iloc[0]:g}"
        yield title, "" if rate == "best rate" else f", {rate}", rows


def rates_of_arms(table: pd.DataFrame) -> dict[str, float]:
    """The learning rate of each arm where each has its own."""
    own = table[table["rate"] == "own rate"]
    return dict(zip(own["arm"], own["lr"], strict=True))


def rate_text(lr: float) -> str:
    """A learning rate in names: "lr 1e-4"."""
    return f"lr {lr:.0e}".replace("e-0", "e-")
