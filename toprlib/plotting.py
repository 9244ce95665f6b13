"""Figures as data: a panel is its lines and labels, and `draw` gives all panels one style.

Color-blind readers can distinguish the colors (Okabe and Ito 2008). In greyscale, lines differ by
their dashes and markers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from toprlib.report import Estimate, split_entry


class Style(NamedTuple):
    """How a line looks: its color and, for greyscale, its dashes and marker as in matplotlib."""

    colour: str
    dashes: Any
    marker: str


DASH_DOTS = (0, (6, 1, 1, 1, 1, 1))
STYLES = {
    "correct": Style("#009E73", "-", "o"),
    "incorrect": Style("#56B4E9", "--", "s"),
    "invalid": Style("#D55E00", ":", "^"),
    "topr": Style("#0072B2", "-", "o"),
    "reinforce": Style("#D55E00", ":", "v"),
    "tis": Style("#56B4E9", "--", "s"),
    "sft": Style("#009E73", "-.", "^"),
    "off_policy": Style("#CC79A7", DASH_DOTS, "D"),
    "ppo": Style("#E69F00", (0, (3, 1)), "P"),
    "dpo": Style("#000000", (0, (1, 2)), "X"),
    "limit": Style("#000000", (0, (8, 3)), ""),  # a bound or a reference line, not a measurement
    # values of a parameter, from dark to light
    "p1": Style("#440154", "-", "o"),
    "p2": Style("#3B528B", "--", "s"),
    "p3": Style("#21918C", "-.", "^"),
    "p4": Style("#5EC962", DASH_DOTS, "D"),
    "p5": Style("#C2A800", ":", "v"),
}
PARAMETERS = ("p1", "p2", "p3", "p4", "p5")
METHOD_LABELS = {
    "topr": "TOPR",
    "tis": "TIS",
    "sft": "SFT",
    "reinforce": "naive REINFORCE",
    "off_policy": "plain IS",
    "ppo": "PPO",
    "dpo": "DPO",
}
MANY_POINTS = 24  # a line of more points has a marker at some of them only
SAMPLES_SEEN = "samples trained on"
PERCENT = {"ylim": (-3, 103)}  # lines at 0 and 100 % stay visible


class Line(NamedTuple):
    """A line of a panel, or its points, or a grey band between two values of x.

    x, y: n numbers each; NaN leaves a gap. label: its name in the legend; that of a method is
    replaced by METHOD_LABELS. style: a Style or a name in STYLES; by default that of the label if
    there is one, else the next of PARAMETERS.
    kind: "points" are not joined; "rows" are points whose intervals lie along x; a "band" covers x.
    half_width: half of the interval at each point. each: for points and rows, the values that each
    point is the mean of.
    """

    x: Any
    y: Any = ()
    label: str = ""
    style: Style | str = ""
    kind: Literal["line", "points", "rows", "band"] = "line"
    half_width: Any = None
    each: Any = None


class Panel(NamedTuple):
    """A pair of axes. options: arguments of matplotlib's `Axes.set`, such as xscale or ylim."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    options: Mapping[str, Any] = {}


def lines(x: Any, y: Mapping[str, Any], styles: str = "") -> list[Line]:
    """A line over the same x for each label of y; styles: their names, separated by spaces.

    >>> [line.label for line in lines([0, 1], {"up": [0, 1], "down": [1, 0]}, "topr tis")]
    ['up', 'down']
    """
    names = styles.split() or [""] * len(y)
    new_lines = []
    for (label, values), style in zip(y.items(), names, strict=True):
        new_lines.append(Line(x, values, label, style))
    return new_lines


def estimates(
    entries: Mapping[float, Mapping[str, Any]], label: str = "", style: str = "", scale: float = 1
) -> Line:
    """The line of a metric with its intervals; entries: x -> the metric in results.json.

    >>> estimates({0: {"mean": 0.5, "se": 0.01}}, scale=100).half_width
    [2.0]
    """
    means = []
    half_widths = []
    for entry in entries.values():
        estimate = Estimate.from_json(entry)
        means.append(scale * estimate.mean)
        half_widths.append(scale * (estimate.half_width or 0.0))
    return Line(list(entries), means, label, style, half_width=half_widths)


# ---- drawing -------------------------------------------------------------------------------------
def draw(
    panels: Sequence[Panel], columns: int = 2, size: tuple[float, float] = (6.2, 3.4)
) -> Figure:
    """A figure with `columns` panels in a row, each of `size` inches.

    A legend is to the right of its panel, or of the whole figure if all panels have the same one.

    >>> figure = draw([Panel("identity", "x", "x", [Line([0, 1], [0, 1], "topr")])])
    >>> figure.axes[0].get_legend().texts[0].get_text()
    'TOPR'
    """
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    figsize = (size[0] * columns, size[1] * rows)
    figure = Figure(figsize=figsize, layout="constrained", dpi=100)
    for number, panel in enumerate(panels, start=1):
        _draw_panel(figure.add_subplot(rows, columns, number), panel)
    _add_legends(figure)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    # Set the scales first: later artists adapt to them.
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, **panel.options)
    unused_styles = cycle(PARAMETERS)
    for line in panel.lines:
        if line.kind == "band":
            axes.axvspan(*line.x, color="#e2e2e2", zorder=0, label=line.label or None)
            continue
        style = _find_style(line, unused_styles)
        y = np.asarray(line.y, float)
        if not np.isnan(y).all():  # else the legend would name a line that nobody can see
            _draw_line(axes, line._replace(x=np.asarray(line.x, float), y=y), style)
    _set_plain_ticks(axes.xaxis, has_ticks="xticks" in panel.options)
    _set_plain_ticks(axes.yaxis, has_ticks="yticks" in panel.options)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _add_legends(figure: Figure) -> None:
    """Legends next to the axes, where they cover no line; the constrained layout makes room."""
    look = {"frameon": False, "handlelength": 4, "markerscale": 0.8}  # long enough to show dashes
    entries = [axes.get_legend_handles_labels() for axes in figure.axes]
    first_handles, first_labels = entries[0]
    is_shared = len(entries) > 1 and all(labels == first_labels for _, labels in entries)
    if is_shared and first_labels:
        figure.legend(first_handles, first_labels, loc="outside right upper", **look)
        return
    for axes, (handles, labels) in zip(figure.axes, entries, strict=True):
        if labels:
            axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1, 1), **look)


def _find_style(line: Line, unused_styles: Iterator[str]) -> Style:
    if isinstance(line.style, Style):
        return line.style
    if line.style:
        return STYLES[line.style]
    return STYLES[line.label if line.label in STYLES else next(unused_styles)]


def _draw_line(axes: Axes, line: Line, style: Style) -> None:
    """Draw a line, points or rows with their intervals."""
    label = METHOD_LABELS.get(line.label, line.label)
    look = {"label": label or None, "color": style.colour, "marker": style.marker}
    if line.kind == "line":
        every = 1
        if len(line.x) > MANY_POINTS:
            # Each line has its markers at other points, so that both show where two lines meet.
            spacing = len(line.x) // 6
            every = (len(axes.lines) * spacing // 4 % spacing, spacing)
        dashes = style.dashes
        axes.plot(line.x, line.y, ls=dashes, lw=2, markersize=5, markevery=every, **look)
        if line.half_width is not None:
            half_width = np.asarray(line.half_width, float)
            low = line.y - half_width
            high = line.y + half_width
            axes.fill_between(line.x, low, high, color=style.colour, alpha=0.2, linewidth=0)
        return
    alpha = 1 if len(line.x) < 100 else 0.5
    axes.plot(line.x, line.y, linestyle="none", markersize=6, alpha=alpha, **look)
    _draw_intervals(axes, line, style.colour)


def _draw_intervals(axes: Axes, line: Line, colour: str) -> None:
    """The intervals of points (upright) or rows (level), and dots for the single values."""
    is_level = line.kind == "rows"
    if line.half_width is not None:
        half_width = np.asarray(line.half_width, float)
        errors = {"xerr" if is_level else "yerr": half_width}
        axes.errorbar(line.x, line.y, **errors, fmt="none", ecolor=colour, capsize=3)
    # `each` may be empty: some results keep means and intervals without the single values.
    positions = line.y if is_level else line.x
    for position, values in zip(positions, line.each or (), strict=False):
        at = [position] * len(values)
        x, y = (values, at) if is_level else (at, values)
        axes.scatter(x, y, s=9, color="#333333", linewidths=0, zorder=3)


def _set_plain_ticks(axis: Axis, has_ticks: bool) -> None:
    """Ticks such as 60 and 70 instead of 62.5; on a logarithmic axis 0.2 instead of 2 x 10^-1."""
    axis.set_minor_locator(NullLocator())
    if has_ticks:
        return
    scale = axis.get_scale()
    low, high = axis.get_view_interval()
    if scale == "linear":
        axis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10)))
        return
    if scale == "log" and high < 300 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    # A number with many zeros stays a power of ten.
    is_short = max(-low, high) < 1e6 and (scale == "symlog" or low > 1e-4)
    if is_short:
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}".replace("-", "−"))


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, format="png", dpi=150)


# ---- the figure of a run -------------------------------------------------------------------------
def draw_curve(iterations: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """pass@1, outcomes and mean reward over training, and the weights in training.

    iterations: those of results.json; the curve of each one continues that of the one before it.
    """
    points = _join_curves(iterations)
    x = list(points)
    outcomes, metrics = split_entry(points[0])
    pass_1 = estimates({n: point["pass@1"] for n, point in points.items()}, scale=100)
    shares = {}
    for name in outcomes:
        shares[name] = [100 * point[name] for point in points.values()]
    panels = [
        Panel(title, SAMPLES_SEEN, "pass@1 (%), ± 2 SE", [pass_1._replace(style="correct")]),
        Panel("outcomes", SAMPLES_SEEN, "share of completions (%)", lines(x, shares), PERCENT),
    ]
    if "reward" in metrics:
        reward = estimates({n: point["reward"] for n, point in points.items()}, style="correct")
        panels.append(Panel("reward", SAMPLES_SEEN, "mean reward, ± 2 SE", [reward]))
    return draw(panels + _training_panels(iterations))


def _join_curves(iterations: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The evaluations of all iterations, by the samples trained on since the first one began."""
    points: dict[int, Mapping[str, Any]] = {}
    begin = 0
    for iteration in iterations:
        for point in iteration["curve"]:
            points[begin + point["samples_seen"]] = point
        begin = max(points)
    return points


def _training_panels(iterations: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """What training measured in each tenth of an epoch; none for a loss without weights."""
    x = []
    shares = []
    weights = []
    begin = 0
    for iteration in iterations:
        tenths = iteration["training"]["tenths"]
        seen = iteration["curve"][-1]["samples_seen"]
        parts = len(tenths["realised_share"])  # fewer than ten in an epoch of fewer steps
        x += [begin + seen * (part + 0.5) / parts for part in range(parts)]
        shares += tenths["realised_share"]
        weights += tenths["weight_neg_mean"]
        begin += seen
    y = {
        "realised share\nof positives": 100 * np.array(shares, float),  # None becomes NaN
        "mean weight\nof negatives": 100 * np.array(weights, float),
    }
    if np.isnan(list(y.values())).all():
        return []
    label = "share or weight (%)"
    two_lines = lines(x, y, "correct incorrect")
    return [Panel("weights in training", SAMPLES_SEEN, label, two_lines, PERCENT)]
