"""What notebooks show: curves, tokens on the colour of their values, sliders, and a guess beside what was measured."""

import io
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

from IPython.display import display
from ipywidgets import interactive
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from pipeline.plots import Panel, draw, lines
from toy_bandit import STYLES


def plot(
    xlabel: str, ylabel: str, x: Any, panels: dict[str, dict], styles: str = "", **options: Any
) -> Figure:
    """A panel for each title, with a line for each label over the same x.

    styles and options are those of `pipeline.plots`; panels may have styles of their own, with commas between them.
    Up to three panels stand in a row, which is as wide as a cell of a notebook: its text is shown as large as it is.

    >>> plot("x", "y", [0, 1], {"squares": {"x²": [0, 1]}}).axes[0].get_title()
    'squares'
    """
    drawn = zip(panels.items(), cycle(styles.split(",")))
    columns = min(len(panels), 3)
    size = {1: (6.2, 3.4), 2: (4.4, 3.4), 3: (2.9, 2.7)}[columns]
    shown = [
        Panel(title, xlabel, ylabel, lines(x, y, names), options) for (title, y), names in drawn
    ]
    return draw(shown, columns, size)


def draw_section(section: Callable[[Axes], None]) -> Figure:
    """A section of toy_bandit.py: it prints what it checks, and draws.

    >>> draw_section(lambda axes: axes.plot([0, 1], label="x")).axes[0].get_legend().texts[0].get_text()
    'x'
    """
    figure = Figure(figsize=(6.2, 3.4), layout="constrained", dpi=100)
    axes = figure.subplots()
    axes.set_prop_cycle(**STYLES)
    section(axes)
    axes.legend()
    return figure


def reveal(guess: Any, measured: float) -> None:
    """Print a guess beside what was measured. Raises ValueError as long as the guess is no number: `...`, or 1,000."""
    if not isinstance(guess, int | float):
        raise ValueError(
            "type a number such as 12 or 0.4 for my_guess in the cell above, run it, and then this one"
        )
    print(f"your guess: {guess:.3g}; measured: {measured:.3g}")


def draw_tokens(
    strips: Sequence[tuple[str, Sequence[str], Sequence[float]]], furthest: float
) -> Figure:
    """Tokens on the colour of their values, with numbers: green above zero, brown and with a dotted line below it.

    strips: of each completion what its numbers are, its tokens, and a number for each. furthest: the value, of either
    sign, from which on the colour is darkest. The scale is logarithmic from 0.01 on.

    >>> figure = draw_tokens([("log-ratio", [" 4", " +"], [0.5, -0.25])], furthest=1)
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['log-ratio', ' 4', '+0.50', ' +', '-0.25']
    """
    size, gap, width, tall = (
        10,
        0.06,
        8.8,
        0.53,
    )  # points; inches between tokens, in all, and of a row
    figure = Figure(dpi=100)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.1, width - 0.1))
    axes.set_axis_off()
    shade, y = SymLogNorm(0.01, vmin=-furthest, vmax=furthest, clip=True), 0.0
    for title, tokens, values in strips:
        axes.text(0, y + 0.2, title, fontsize=11, va="center")
        x, y = 0.0, y + 0.35
        for token, value in zip(tokens, values, strict=True):
            label = f"{value:+.2f}" if abs(value) >= 0.005 else "0"
            texts = token.strip() or ".", label, "+0.00"
            wide = (
                max(TextPath((0, 0), text, size=size).get_extents().width for text in texts) / 72
                + 2 * gap
            )
            if x + wide > width - 0.2:
                x, y = 0.0, y + tall
            colour = colormaps["BrBG"](0.2 + 0.6 * float(shade(value)))
            axes.fill(
                [x, x + wide, x + wide, x], [y, y, y + 0.48, y + 0.48], color=colour, linewidth=0
            )
            if value <= -0.005:
                axes.plot(
                    [x + gap, x + wide - gap], [y + 0.45] * 2, ":", color="#543005", linewidth=2
                )
            axes.text(
                x + wide / 2,
                y + 0.13,
                token.replace("$", r"\$"),
                fontsize=size,
                ha="center",
                va="center",
            )
            axes.text(x + wide / 2, y + 0.33, label, fontsize=size, ha="center", va="center")
            x += wide
        y += tall + 0.1
    axes.set_ylim(y, -0.05)
    figure.set_size_inches(width, y + 0.05)
    return figure


def show_sliders(draw_at: Callable[..., Figure], **ranges: tuple[float, float, float]) -> None:
    """In a notebook: `draw_at` with a slider for each argument, from low to high in steps.

    Where nobody can move one (a printed page), the figure at their first positions: the middle of each range.
    """
    controls, content = interactive(draw_at, {"auto_display": True}, **ranges), io.BytesIO()
    controls.result.savefig(content, format="png", dpi=100)
    display(controls._repr_mimebundle_() | {"image/png": content.getvalue()}, raw=True)
