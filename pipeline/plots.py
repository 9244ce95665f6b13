"""Pictures as data: a panel is its lines and labels, and `draw` gives all of them one style.

Colour-blind readers can tell the colours apart (Okabe and Ito 2008); line styles and markers differ too, for print in
grey. A method or an outcome looks the same in every picture.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from pipeline.evaluation import outcomes_of
from pipeline.records import write_file

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
    "group": Style("#7B3FA0", (0, (5, 1)), "<"),  # TOPR with the mean of the prompt's samples as baseline
    "asymre": Style("#8C6D1F", (0, (4, 2, 1, 2)), ">"),
    "kl": Style("#6E6E6E", (0, (2, 1)), "*"),  # naive REINFORCE with a KL(mu || pi) penalty
    "anna_karenina": Style("#882255", (0, (5, 1)), "s"),
    "per-token": Style("#E69F00", "--", "s"),  # variants of the loss: conformance/variants.py
    "per-token + token mean": Style("#CC79A7", ":", "v"),
    "geometric mean": Style("#009E73", "-.", "^"),
    "clip 0.8..1.2": Style("#D55E00", (0, (6, 1, 1, 1, 1, 1)), "D"),
    "limit": Style("#000000", (0, (8, 3)), ""),  # a bound or a reference line, not a measurement
    # The values of a parameter, from dark to light
    "p1": Style("#440154", "-", "o"),
    "p2": Style("#3B528B", "--", "s"),
    "p3": Style("#21918C", "-.", "^"),
    "p4": Style("#5EC962", (0, (6, 1, 1, 1, 1, 1)), "D"),
    "p5": Style("#C2A800", ":", "v"),
}
METHODS = ("topr", "reinforce", "tis", "sft", "off_policy", "ppo", "dpo", "group", "asymre", "kl")
VARIANTS_DRAWN = ("topr", "per-token", "per-token + token mean", "geometric mean", "clip 0.8..1.2")
PARAMETERS = ("p1", "p2", "p3", "p4", "p5")


CALLED = {  # a method's name as a label is printed like this
    "topr": "TOPR",
    "reinforce": "naive REINFORCE",
    "tis": "TIS",
    "sft": "SFT",
    "off_policy": "plain IS",
    "ppo": "PPO",
    "dpo": "DPO",
}
LABEL = 0.075  # the height of a label, as a share of that of the axes


class Line(NamedTuple):
    """A line of a panel, or its points. style: a name of STYLES; by default the label's, else the next parameter's.

    kind: rows are points whose intervals lie along x; a band is grey between the two values of x, and has no y.
    """

    x: Any
    y: Any = ()
    label: str = ""
    style: str = ""
    kind: Literal["line", "points", "rows", "band"] = "line"
    half_width: Any = None  # half of the interval at each point


class Panel(NamedTuple):
    """One pair of axes. options: what matplotlib's `Axes.set` takes, such as xscale, ylim or xticks."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    options: Mapping[str, Any] = MappingProxyType({})


def lines(x: Any, y: dict[str, Any], styles: str = "", kind: Literal["line", "points"] = "line") -> list[Line]:
    """A line for each label of y, over the same x; styles: a name of STYLES for each, or those that draw() finds.

    >>> [line.label for line in lines([0, 1], {"up": [0, 1], "down": [1, 0]}, "topr tis")]
    ['up', 'down']
    """
    names = styles.split() or [""] * len(y)
    return [Line(x, values, label, name, kind) for (label, values), name in zip(y.items(), names, strict=True)]


def draw(panels: Sequence[Panel], columns: int = 2) -> "Figure":
    """A figure with `columns` panels in a row. A line's label stands beside its end, and on no other label.

    >>> figure = draw([Panel("identity", "x", "x", [Line([0, 1], [0, 1], "topr")])])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['TOPR']
    """
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.2 * columns, 3.4 * rows), layout="constrained", dpi=100)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, **panel.options)
        others, named = cycle(PARAMETERS), []
        for line in panel.lines:
            if line.kind == "band":
                axes.axvspan(*line.x, color="#e2e2e2", zorder=0)
                above = {"ha": "center", "va": "bottom", "fontsize": "small"}
                axes.annotate(line.label, (float(np.mean(line.x)), 0.01), xycoords=("data", "axes fraction"), **above)
            else:
                style = STYLES[line.style or (line.label if line.label in STYLES else next(others))]
                _add(axes, line, style, len(axes.lines))
                named += [(line, style)] if line.label else []
        _name_ends(axes, named)
        for name in ("x", "y"):
            _plain_ticks(axes, name, is_given=f"{name}ticks" in panel.options)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _add(axes: Any, line: Line, style: Style, number: int) -> None:
    is_line = line.kind == "line"
    x, y = np.asarray(line.x, float), np.asarray(line.y, float)
    axes.plot(
        x,
        y,
        label=line.label or None,
        color=style.colour,
        linestyle=style.dashes if is_line else "none",
        marker=style.marker,
        linewidth=2,
        markersize=5 if is_line else 6,
        # Some of a long line's points, others than on the line before: where lines meet, both are seen.
        markevery=(number * len(x) // 24, max(len(x) // 6, 1)) if is_line and len(x) > 24 else 1,
        alpha=1 if len(x) < 100 or is_line else 0.5,
    )
    if line.half_width is not None:
        half_width = np.asarray(line.half_width, float)
        if not is_line:
            along = {"xerr" if line.kind == "rows" else "yerr": half_width}
            axes.errorbar(x, y, **along, fmt="none", ecolor=style.colour, capsize=3)
            return
        axes.fill_between(x, y - half_width, y + half_width, color=style.colour, alpha=0.2, linewidth=0)


def _name_ends(axes: Any, lines: Sequence[tuple[Line, Style]]) -> None:
    """Right of the axes, the label of each line at the height of its end or near it, and joined to it in its style."""
    axes.autoscale_view()  # the limits are known only then
    ends = []
    for line, style in lines:
        x, y = np.asarray(line.x, float), np.asarray(line.y, float)
        if np.isnan(y).all():
            continue
        last = int(np.nanargmax(np.where(np.isnan(y), np.nan, x)))
        _, height = (axes.transScale + axes.transLimits).transform((x[last], y[last]))
        ends.append((float(np.clip(height, 0, 1)), float(x[last]), line, style))
    ends.sort(key=lambda end: end[0])
    for place, (height, x, line, style) in zip(_apart([end[0] for end in ends]), ends, strict=True):
        look = {"color": "#999999", "linewidth": 0.7}  # beside points it should not look like a line
        if line.kind == "line":
            look = {"color": style.colour, "linestyle": style.dashes, "linewidth": 1.5}
        leader = {"arrowstyle": "-", "shrinkA": 1, "shrinkB": 4, "relpos": (0, 0.5), **look}
        where = {"xycoords": ("data", "axes fraction"), "textcoords": "axes fraction", "annotation_clip": False}
        name = CALLED.get(line.label, line.label)
        axes.annotate(name, (x, height), (1.05, place), va="center", arrowprops=leader, **where)


def _apart(wanted: Sequence[float]) -> list[float]:
    """Rising heights in [0, 1], moved as little as it takes to be LABEL apart.

    >>> [round(place, 3) for place in _apart([0.2, 0.2, 1.0, 1.0])]
    [0.163, 0.238, 0.925, 1.0]
    """

    def middle(group: Sequence[float]) -> float:
        half = (len(group) - 1) * LABEL / 2
        return max(min(sum(group) / len(group), 1 - half), half)

    groups: list[list[float]] = []  # of those that touch each other
    for height in wanted:
        groups.append([height])
        while len(groups) > 1 and middle(groups[-1]) - middle(groups[-2]) < LABEL * len(groups[-2] + groups[-1]) / 2:
            touching = groups.pop()
            groups[-1] += touching
    return [middle(group) + (i - (len(group) - 1) / 2) * LABEL for group in groups for i in range(len(group))]


def _plain_ticks(axes: Any, name: str, is_given: bool) -> None:
    """60 and 70, not 62.5; on a logarithmic axis 0.2, not 2 x 10^-1, but powers of ten where many zeros would be."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axis, scale = (axes.xaxis, axes.get_xscale()) if name == "x" else (axes.yaxis, axes.get_yscale())
    axis.set_minor_locator(NullLocator())
    if is_given:
        return
    if scale == "linear":
        axis.set_major_locator(MaxNLocator("auto", steps=(1, 2, 5, 10)))
        return
    low, high = axis.get_view_interval()
    if scale == "log" and high < 300 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    if max(-low, high) < 1e6 and (scale == "symlog" or low > 1e-4):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}".replace("-", "−"))


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    write_file(path, _to_png(figure, dpi=150))


def draw_curve(iterations: Sequence[dict], title: str) -> "Figure":
    """Accuracy with +- 2 standard errors, and the outcomes, over training; the mean reward, where there is one.

    iterations: those of results.json, each with a `curve`: points with samples_seen, the outcome shares, and "pass@1"
    with its mean and se, as "reward" has. An iteration's curve begins where the one before it ended.
    """
    points, seen, before = [], [], 0
    for iteration in iterations:
        curve = iteration["curve"][1 if points else 0 :]
        points += curve
        seen += [before + point["samples_seen"] for point in curve]
        before = seen[-1]

    def measured(name: str, unit: float) -> list[Line]:
        mean = [unit * point[name]["mean"] for point in points]
        return [Line(seen, mean, style="correct", half_width=[2 * unit * point[name]["se"] for point in points])]

    x = "samples trained on"
    panels = [Panel(title, x, "pass@1 (%), ± 2 SE", measured("pass@1", 100))]
    outcomes = [Line(seen, [100 * point[name] for point in points], name) for name in outcomes_of(points[0])]
    panels.append(Panel("outcomes", x, "share of completions (%)", outcomes, {"ylim": (-3, 103)}))
    if "reward" in points[0]:
        panels.append(Panel("reward", x, "mean reward, ± 2 SE", measured("reward", 1)))
    return draw(panels)


class Strip(NamedTuple):
    """A completion to be drawn: what its numbers are, its tokens, and a number for each."""

    title: str
    tokens: Sequence[str]
    values: Sequence[float]


def draw_tokens(strips: Sequence[Strip], furthest: float) -> "Figure":
    """Tokens on the colour of their values, with numbers: green above zero, brown and with a dotted line below it.

    furthest: the value, of either sign, from which on the colour is darkest. The scale is logarithmic from 0.01 on.

    >>> figure = draw_tokens([Strip("log-ratio", [" 4", " +"], [0.5, -0.25])], furthest=1)
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['log-ratio', ' 4', '+0.50', ' +', '-0.25']
    """
    from matplotlib import colormaps
    from matplotlib.colors import SymLogNorm
    from matplotlib.figure import Figure
    from matplotlib.textpath import TextPath

    size, gap, width, tall = 10, 0.06, 10.0, 0.47  # points; inches between tokens, in all, and of a row
    figure = Figure(dpi=100)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.1, width - 0.1))
    axes.set_axis_off()
    shade, y = SymLogNorm(0.01, vmin=-furthest, vmax=furthest, clip=True), 0.0
    for strip in strips:
        axes.text(0, y + 0.2, strip.title, fontsize=11, va="center")
        x, y = 0.0, y + 0.35
        for token, value in zip(strip.tokens, strip.values, strict=True):
            wide = max(TextPath((0, 0), token or " ", size=size).get_extents().width / 72, 0.4) + 2 * gap
            if x + wide > width - 0.2:
                x, y = 0.0, y + tall
            colour = colormaps["BrBG"](0.2 + 0.6 * float(shade(value)))
            axes.fill([x, x + wide, x + wide, x], [y, y, y + 0.42, y + 0.42], color=colour, linewidth=0)
            if value <= -0.005:
                axes.plot([x + gap, x + wide - gap], [y + 0.4] * 2, ":", color="#543005", linewidth=2)
            axes.text(x + wide / 2, y + 0.13, token.replace("$", r"\$"), fontsize=size, ha="center", va="center")
            told = f"{value:+.2f}" if abs(value) >= 0.005 else "0"
            axes.text(x + wide / 2, y + 0.3, told, fontsize=7.5, ha="center", va="center")
            x += wide
        y += tall + 0.1
    axes.set_ylim(y, -0.05)
    figure.set_size_inches(width, y + 0.05)
    return figure


def show_sliders(draw_at: Callable[..., "Figure"], **ranges: tuple[float, float, float]) -> None:
    """In a notebook: `draw_at` with a slider for each argument, from low to high in steps; without widgets, a picture.

    Where nobody can move a slider (a printed page, a viewer without widgets) the same cell shows the figure at the
    sliders' first positions: the middle of each range.
    """
    from IPython.display import display
    from ipywidgets import FloatSlider, Image, VBox

    sliders = {
        name: FloatSlider((low + high) / 2, min=low, max=high, step=step, description=name)
        for name, (low, high, step) in ranges.items()
    }

    def picture() -> bytes:
        return _to_png(draw_at(**{name: slider.value for name, slider in sliders.items()}), dpi=100)

    image = Image(value=picture(), format="png", layout={"max_width": "100%"})
    for slider in sliders.values():
        slider.observe(lambda _: setattr(image, "value", picture()), "value")
    box = VBox([*sliders.values(), image])
    display(box._repr_mimebundle_() | {"image/png": bytes(image.value)}, raw=True)


def _to_png(figure: "Figure", dpi: int) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    return content.getvalue()
