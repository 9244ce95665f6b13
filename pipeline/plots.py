"""Pictures as data: a panel is its lines and labels, and `draw` gives all of them one style.

Colour-blind readers can tell the colours apart (Okabe and Ito 2008); line styles and markers differ too, for print in
grey. A method or an outcome looks the same in every picture.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from pipeline.records import Outcome, write_file

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


LEGENDS = {  # never on the data: place, and columns
    "beside": ({"loc": "upper left", "bbox_to_anchor": (1, 1)}, 1),
    "below": ({"loc": "upper center", "bbox_to_anchor": (0.5, -0.17)}, 2),
}


class Line(NamedTuple):
    """A line of a panel, or its points. style: a name of STYLES; by default the label's, else the next parameter's."""

    x: Any
    y: Any
    label: str = ""
    style: str = ""
    kind: Literal["line", "points", "rows"] = "line"  # rows: points whose intervals lie along x
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


def draw(
    panels: Sequence[Panel], columns: int = 2, legend: Literal["beside", "below", "at the lines"] = "beside"
) -> "Figure":
    """A figure with `columns` panels in a row; legend: where the lines' labels stand.

    >>> figure = draw([Panel("identity", "x", "x", [Line([0, 1], [0, 1], "topr")])])
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['topr']
    """
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.6 * columns, 3.4 * rows), layout="constrained", dpi=100)
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, number)
        axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, **panel.options)
        others = cycle(PARAMETERS)
        for line in panel.lines:
            name = line.style or (line.label if line.label in STYLES else next(others))
            _add(axes, line, STYLES[name], len(axes.lines))
        if legend == "at the lines":
            for line, drawn in zip(panel.lines, axes.lines, strict=True):
                style = {"color": drawn.get_color(), "fontsize": "small", "va": "center", "annotation_clip": False}
                end = drawn.get_xdata()[-1], drawn.get_ydata()[-1]
                axes.annotate(line.label, end, (6, 0), textcoords="offset points", **style)
        elif any(line.label for line in panel.lines):
            where, columns_of_legend = LEGENDS[legend]
            axes.legend(fontsize="small", frameon=False, ncols=columns_of_legend, **where)
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
        markersize=4 if is_line else 5,
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


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    write_file(path, _to_png(figure, dpi=150))


def draw_curve(iterations: Sequence[dict], title: str) -> "Figure":
    """Accuracy with +- 2 standard errors, and the three outcomes, over training.

    iterations: those of results.json, each with a `curve`: points with samples_seen, the outcome shares, and "pass@1"
    with its mean and se. An iteration's curve begins where the one before it ended.
    """
    points, seen, before = [], [], 0
    for iteration in iterations:
        curve = iteration["curve"][1 if points else 0 :]
        points += curve
        seen += [before + point["samples_seen"] for point in curve]
        before = seen[-1]
    mean = [100 * point["pass@1"]["mean"] for point in points]
    half_width = [200 * point["pass@1"]["se"] for point in points]
    shares = {name: [100 * point[name] for point in points] for name in get_args(Outcome)}
    x = "samples trained on"
    accuracy = Panel(title, x, "pass@1 (%), ± 2 SE", [Line(seen, mean, style="correct", half_width=half_width)])
    outcomes = [Line(seen, share, name) for name, share in shares.items()]
    return draw([accuracy, Panel("outcomes", x, "share of completions (%)", outcomes, {"ylim": (-3, 103)})])


def draw_tokens(tokens: Sequence[str], values: Sequence[float], title: str, furthest: float) -> "Figure":
    """A completion as a strip: tokens on the colour of their values, green above zero and brown below, with numbers.

    furthest: the value, of either sign, from which on the colour is darkest; the same for strips to be compared.

    >>> figure = draw_tokens([" 4", " +"], [0.5, -0.25], "log-ratio", furthest=1)
    >>> [text.get_text() for text in figure.axes[0].texts]
    [' 4', '+0.50', ' +', '-0.25']
    """
    from matplotlib import colormaps
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.textpath import TextPath

    size, gap, width = 9, 0.06, 9.2  # points; inches between tokens, and in all
    places, x, row = [], 0.0, 0
    for token in tokens:
        token_width = max(TextPath((0, 0), token or " ", size=size).get_extents().width / 72, 0.36) + 2 * gap
        if x + token_width > width - 0.2:
            x, row = 0.0, row + 1
        places.append((x, row, token_width))
        x += token_width
    figure = Figure(figsize=(width, 0.45 * (row + 1) + 0.4), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.1, width - 0.1), ylim=(0.45 * (row + 1), -0.4))
    axes.set_axis_off()
    axes.set_title(title, loc="left", y=0.99, pad=-12, fontsize=10)
    norm = TwoSlopeNorm(0, -furthest, furthest)
    for token, value, (x, row, token_width) in zip(tokens, values, places, strict=True):
        y, colour = 0.45 * row, colormaps["BrBG"](0.5 + 0.6 * (norm(min(max(value, -furthest), furthest)) - 0.5))
        axes.fill([x, x + token_width, x + token_width, x], [y, y, y + 0.4, y + 0.4], color=colour, linewidth=0)
        axes.text(x + token_width / 2, y + 0.12, token.replace("$", r"\$"), fontsize=size, ha="center", va="center")
        axes.text(x + token_width / 2, y + 0.3, f"{value:+.2f}", fontsize=6.5, ha="center", va="center")
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
