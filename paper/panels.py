"""Lines and panels that several figures draw, from the numbers of their files."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paper.experiments import METHOD_ARMS, Arm
from paper.runs import Series
from pipeline.plots import Line, Panel, Style

Data = Mapping[str, Any]  # that of results/NAME.json
EPOCH, TRAINING, CORRECT = (
    "share of the epoch (%)",
    "share of the training (%)",
    "correct (%), 95% interval",
)
WHOLE, P_TILDE = {"ylim": (-3, 103)}, r"$\tilde p$"  # WHOLE: all shares


def line(
    x: Sequence[float], y: Series, label: str, style: Style | str = "", scale: float = 100
) -> Line:
    """A line with its 95% interval, in percent; None where there is no number.

    >>> line([1], {"mean": [0.5], "half_width": [None]}, "one seed").half_width is None
    True
    """
    mean, half_width = (scale * np.array(y[name], float) for name in ("mean", "half_width"))
    each = [[scale * value for value in values] for values in y.get("each", ())]
    return Line(
        x,
        mean,
        label,
        style,
        half_width=None if np.isnan(half_width).all() else half_width,
        each=each,
    )


def epoch(y: Series) -> list[float]:
    """The position of each point of a curve along the epoch, in percent."""
    return [100 * i / (len(y["mean"]) - 1) for i in range(len(y["mean"]))]


def arm_lines(curves: Mapping[str, Series], arms: Mapping[str, Arm], x: Any = epoch) -> list[Line]:
    """A line for each of some arms, with its name and style; x: a function of a line's points."""
    return [line(x(y), y, arms[key].name, arms[key].style) for key, y in curves.items()]


def tenths_panel(title: str, ylabel: str, curves: Mapping[str, Series], **options: Any) -> Panel:
    """What was measured of some of METHOD_ARMS in tenths of the training, each at its middle."""
    middles = {
        key: [100 * (i + 0.5) / len(y["mean"]) for i in range(len(y["mean"]))]
        for key, y in curves.items()
    }
    drawn = [
        line(middles[key], y, METHOD_ARMS[key].name, METHOD_ARMS[key].style, 1)
        for key, y in curves.items()
    ]
    return Panel(title, TRAINING, ylabel, drawn, options)


def accuracy(
    title: str, curves: Mapping[str, Series], arms: Mapping[str, Arm], x: str = EPOCH
) -> Panel:
    """Accuracy along the training with each of some arms."""
    return Panel(title, x, CORRECT, arm_lines(curves, arms), {"ylim": (-3, 100)})


def shares_panel(
    title: str, p_tildes: Sequence[float], y: Mapping[tuple[str, str], Series], *also: Line
) -> Panel:
    """Accuracy against the effective share of positives p~; y: by label and style of its line."""
    ticks, x = [1, 2, 5, 10, 20, 50, 100], [100 * p for p in p_tildes]
    options = {"xscale": "log", "xticks": ticks, "xticklabels": ticks, "ylim": (-3, 100)}
    drawn = [line(x, each, *named) for named, each in y.items()]
    return Panel(
        title, f"effective share of positives {P_TILDE} (%)", CORRECT, [*also, *drawn], options
    )
