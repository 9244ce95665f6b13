"""Pictures as data: a panel is its lines and labels, and `draw` gives all of them one style.

Colour-blind readers can tell the colours apart (Okabe and Ito 2008), and print in grey the dashes and markers.
"""

import io
from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from toprlib.evaluation import METRICS, parts_of
from toprlib.records import write_file
from toprlib.report import Estimate

if TYPE_CHECKING:  # imported where something is drawn: commands answer --help without it
    from matplotlib.figure import Figure


class Style(NamedTuple):
    """What distinguishes a line from others: its colour and, without colour, its dashes and marker."""

    colour: str
    dashes: Any
    marker: str


STYLES = {
    "correct": Style("#009E73", "-", "o"),
    "incorrect": Style("#56B4E9", "--", "s"),
    "invalid": Style("#D55E00", ":", "^"),
    "topr": Style("#0072B2", "-", "o"),
    "reinforce": Style("#D55E00", ":", "v"),
    "tis": Style("#56B4E9", "--", "s"),
    "sft": Style("#009E73", "-.", "^"),
    "off_policy": Style("#CC79A7", (0, (6, 1, 1, 1, 1, 1)), "D"),
    "ppo": Style("#E69F00", (0, (3, 1)), "P"),
    "dpo": Style("#000000", (0, (1, 2)), "X"),
    "limit": Style("#000000", (0, (8, 3)), ""),  # a bound or a reference line, not a measurement
    # The values of a parameter, from dark to light
    "p1": Style("#440154", "-", "o"),
    "p2": Style("#3B528B", "--", "s"),
    "p3": Style("#21918C", "-.", "^"),
    "p4": Style("#5EC962", (0, (6, 1, 1, 1, 1, 1)), "D"),
    "p5": Style("#C2A800", ":", "v"),
}
PARAMETERS = ("p1", "p2", "p3", "p4", "p5")
CALLED = {
    "reinforce": "naive REINFORCE",
    "off_policy": "plain IS",
}  # a method's name as a label: others as TOPR
CALLED |= {name: name.upper() for name in ("topr", "tis", "sft", "ppo", "dpo")}
LABEL = 0.075  # the height of a label, as a share of that of the axes


class Line(NamedTuple):
    """A line of a panel, its points, or a grey band between two values of x."""

    x: Any
    y: Any = ()
    label: str = ""
    style: Style | str = (
        ""  # or its name in STYLES; by default the label's, else the next parameter's
    )
    kind: Literal["line", "points", "rows", "band"] = (
        "line"  # rows: points whose intervals lie along x
    )
    half_width: Any = None  # half of the interval at each point
    each: Any = None  # of points and rows: the values that each point is the mean of


class Panel(NamedTuple):
    """One pair of axes. options: what matplotlib's `Axes.set` takes, such as xscale, ylim or xticks."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    options: Mapping[str, Any] = {}


def lines(x: Any, y: dict[str, Any], styles: str = "") -> list[Line]:
    """A line for each label of y, over the same x; styles: a name of STYLES for each, or those that draw() finds.

    >>> [line.label for line in lines([0, 1], {"up": [0, 1], "down": [1, 0]}, "topr tis")]
    ['up', 'down']
    """
    names = styles.split() or [""] * len(y)
    return [
        Line(x, values, label, name) for (label, values), name in zip(y.items(), names, strict=True)
    ]


def draw(
    panels: Sequence[Panel], columns: int = 2, size: tuple[float, float] = (6.2, 3.4)
) -> "Figure":
    """A figure with `columns` panels in a row, each of a size in inches. A line's label stands beside its end.

    >>> draw([Panel("identity", "x", "x", [Line([0, 1], [0, 1], "topr")])]).axes[0].texts[0].get_text()
    'TOPR'
    """
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained", dpi=100)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, **panel.options)
        others, named = cycle(PARAMETERS), []
        for line in panel.lines:
            if line.kind == "band":
                axes.axvspan(*line.x, color="#e2e2e2", zorder=0)
                above = {"ha": "center", "va": "bottom", "fontsize": "small"}
                axes.annotate(
                    line.label,
                    (float(np.mean(line.x)), 0.01),
                    xycoords=("data", "axes fraction"),
                    **above,
                )
                continue
            style = line.style or (line.label if line.label in STYLES else next(others))
            style = STYLES[style] if isinstance(style, str) else style
            line = line._replace(x=np.asarray(line.x, float), y=np.asarray(line.y, float))
            _add(axes, line, style, len(axes.lines))
            named += [(line, style)] if line.label and not np.isnan(line.y).all() else []
        _name_ends(axes, named)
        _plain_ticks(axes.xaxis, is_given="xticks" in panel.options)
        _plain_ticks(axes.yaxis, is_given="yticks" in panel.options)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _add(axes: Any, line: Line, style: Style, number: int) -> None:
    x, y, half = (
        line.x,
        line.y,
        None if line.half_width is None else np.asarray(line.half_width, float),
    )
    look = {
        "label": line.label or None,
        "color": style.colour,
        "linewidth": 2,
        "marker": style.marker,
    }
    if (
        line.kind == "line"
    ):  # some of a long line's points, others than on the line before: both show where they meet
        every = (number * len(x) // 24, max(len(x) // 6, 1)) if len(x) > 24 else 1
        axes.plot(x, y, linestyle=style.dashes, markersize=5, markevery=every, **look)
        if half is not None:
            axes.fill_between(x, y - half, y + half, color=style.colour, alpha=0.2, linewidth=0)
        return
    axes.plot(x, y, linestyle="none", markersize=6, alpha=1 if len(x) < 100 else 0.5, **look)
    if half is not None:
        along = {"xerr" if line.kind == "rows" else "yerr": half}
        axes.errorbar(x, y, **along, fmt="none", ecolor=style.colour, capsize=3)
    for at, values in zip(y if line.kind == "rows" else x, line.each or (), strict=False):
        dots = (values, [at] * len(values))
        axes.scatter(
            *(dots if line.kind == "rows" else dots[::-1]),
            s=9,
            color="#333333",
            linewidths=0,
            zorder=3,
        )


def _name_ends(axes: Any, lines: Sequence[tuple[Line, Style]]) -> None:
    """Right of the axes, the label of each line at the height of its end or near it, and joined to it in its style."""
    axes.autoscale_view()  # the limits are set only then
    ends = []
    for line, style in lines:
        last = int(np.nanargmax(np.where(np.isnan(line.y), np.nan, line.x)))
        _, height = (axes.transScale + axes.transLimits).transform((line.x[last], line.y[last]))
        ends.append((float(np.clip(height, 0, 1)), float(line.x[last]), line, style))
    ends.sort(key=lambda end: end[0])
    for place, (height, x, line, style) in zip(_apart([end[0] for end in ends]), ends, strict=True):
        look = {
            "color": "#999999",
            "linewidth": 0.7,
        }  # beside points it should not look like a line
        if line.kind == "line":
            look = {"color": style.colour, "linestyle": style.dashes, "linewidth": 1.5}
        leader = {"arrowstyle": "-", "shrinkA": 1, "shrinkB": 4, "relpos": (0, 0.5), **look}
        where = {
            "xycoords": ("data", "axes fraction"),
            "textcoords": "axes fraction",
            "annotation_clip": False,
        }
        name = CALLED.get(line.label, line.label)
        axes.annotate(name, (x, height), (1.05, place), va="center", arrowprops=leader, **where)


def _apart(wanted: Sequence[float]) -> list[float]:
    """Rising heights in [0, 1], moved as little as it takes to be LABEL apart.

    >>> [round(place, 4) for place in _apart([0.2, 0.2, 1.0, 1.0])]
    [0.1625, 0.2375, 0.925, 1.0]
    """
    steps = LABEL * np.arange(len(wanted))
    free = (
        np.array(wanted) - steps
    )  # the nearest that rises, by the max-min formula of isotonic regression:
    means = [
        [free[first : last + 1].mean() for last in range(first, len(free))]
        for first in range(len(free))
    ]
    rising = [
        max(min(means[first][i - first :]) for first in range(i + 1)) for i in range(len(free))
    ]
    return (np.clip(rising, 0, max(1 - steps.max(initial=0), 0)) + steps).tolist()


def _plain_ticks(axis: Any, is_given: bool) -> None:
    """60 and 70, not 62.5; on a logarithmic axis 0.2, not 2 x 10^-1, but powers of ten where many zeros would be."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axis.set_minor_locator(NullLocator())
    scale, (low, high) = axis.get_scale(), axis.get_view_interval()
    if is_given:
        return
    if scale == "linear":
        axis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10)))
    elif scale == "log" and high < 300 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if scale != "linear" and max(-low, high) < 1e6 and (scale == "symlog" or low > 1e-4):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}".replace("-", "−"))


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_file(path, content.getvalue())


def estimates(
    entries: Mapping[float, Mapping[str, Any]], label: str = "", style: str = "", scale: float = 1
) -> Line:
    """The line of a metric along x: x -> its entry in results.json. Around it are +- 2 standard errors."""
    each = [Estimate.read(entry) for entry in entries.values()]
    half_width = [scale * (estimate.half_width or 0.0) for estimate in each]
    return Line(
        [*entries],
        [scale * estimate.mean for estimate in each],
        label,
        style,
        half_width=half_width,
    )


def draw_curve(iterations: Sequence[Mapping[str, Any]], title: str) -> "Figure":
    """Outcomes and the metrics that say so over training; the `curve` of each iteration begins where the last ended."""
    points, seen = {}, 0
    for iteration in iterations:
        points |= {seen + point["samples_seen"]: point for point in iteration["curve"]}
        seen = max(points)
    x, panels = "samples trained on", []
    outcomes, metrics = parts_of(iterations[0]["curve"][0])
    for name, metric in metrics.items():
        if name in METRICS:  # of one sample
            by_samples = {n: point[name] for n, point in points.items()}
            label = f"{metric.label or name}{' (%)' if metric.in_percent else ''}, ± 2 SE"
            drawn = estimates(by_samples, style="correct", scale=100 if metric.in_percent else 1)
            panels.append(Panel(name if panels else title, x, label, [drawn]))
    shares = lines(
        [*points], {name: [100 * point[name] for point in points.values()] for name in outcomes}
    )
    panels.insert(1, Panel("outcomes", x, "share of completions (%)", shares, {"ylim": (-3, 103)}))
    return draw([*panels, *learnt_from(iterations)])


def learnt_from(iterations: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The panel of what training saw in each tenth of an epoch; none for results.json of older versions."""
    tenths = [
        iteration["training"]["tenths"] for iteration in iterations if "training" in iteration
    ]
    ends = [
        *accumulate((iteration["curve"][-1]["samples_seen"] for iteration in iterations), initial=0)
    ]
    epochs = zip(ends, ends[1:], [len(of["realised_share"]) for of in tenths], strict=False)
    x = [
        begin + (end - begin) * (part + 0.5) / count
        for begin, end, count in epochs
        for part in range(count)
    ]
    names = {
        "realised_share": "realised share\nof positives",
        "weight_neg_mean": "mean weight\nof negatives",
    }
    y = {
        label: 100 * np.array([x for of in tenths for x in of[name]], float)
        for name, label in names.items()
    }
    shown = lines(x, y, "correct incorrect")
    return (
        [Panel("what is learnt from", "samples trained on", "%", shown, {"ylim": (-3, 103)})]
        if tenths
        else []
    )
