"""What notebooks show: curves, coloured tokens, sliders, and a guess next to what was measured."""

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

from toprlib.plotting import Panel, draw, lines
from toy_bandit import STYLES

# Of `draw_tokens`: points, and inches.
FONT_SIZE = 10
WIDTH = 8.8
ROW_HEIGHT = 0.53
PADDING = 0.06  # on both sides of a token


def plot(
    xlabel: str, ylabel: str, x: Any, panels: dict[str, dict], styles: str = "", **options: Any
) -> Figure:
    """A panel for each title, with a line for each label over the same x.

    styles and options are those of `toprlib.plotting`; panels may have styles of their own, with
    commas between them. Panels stand in rows of two, which are as wide as a cell of a notebook.

    >>> plot("x", "y", [0, 1], {"squares": {"x²": [0, 1]}}).axes[0].get_title()
    'squares'
    """
    columns = min(len(panels), 2)
    size = (6.2, 3.4) if columns == 1 else (4.4, 3.0)
    shown = []
    for (title, y), names in zip(panels.items(), cycle(styles.split(","))):
        shown.append(Panel(title, xlabel, ylabel, lines(x, y, names), options))
    return draw(shown, columns, size)


def draw_section(section: Callable[[Axes], None]) -> Figure:
    """A section of toy_bandit.py: it prints what it checks, and draws.

    >>> figure = draw_section(lambda axes: axes.plot([0, 1], label="x"))
    >>> figure.axes[0].get_legend().texts[0].get_text()
    'x'
    """
    figure = Figure(figsize=(6.2, 3.4), layout="constrained", dpi=100)
    axes = figure.subplots()
    axes.set_prop_cycle(**STYLES)
    section(axes)
    axes.legend()
    return figure


def reveal(guess: Any, measured: float) -> None:
    """Print a guess next to what was measured.

    Raises ValueError as long as the guess is not a number: `...`, or 1,000, which is a tuple.
    """
    if not isinstance(guess, int | float):
        message = (
            "my_guess is not a number; type one such as 12 or 0.4 in the cell above and run it"
        )
        raise ValueError(f"{message}, then run this cell")
    print(f"your guess: {guess:.3g}; measured: {measured:.3g}")


def draw_tokens(
    strips: Sequence[tuple[str, Sequence[str], Sequence[float]]], furthest: float
) -> Figure:
    """Tokens on the colour of their values: green above zero, brown with a dotted line below it.

    strips: for each completion what its values are, its tokens, and a value for each token.
    furthest: the absolute value from which on the colour is darkest. The scale is logarithmic from
    0.01 on.

    >>> figure = draw_tokens([("log-ratio", [" 4", " +"], [0.5, -0.25])], furthest=1)
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['log-ratio', ' 4', '+0.50', ' +', '-0.25']
    """
    figure = Figure(dpi=100)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.1, WIDTH - 0.1))
    axes.set_axis_off()
    shade = SymLogNorm(0.01, vmin=-furthest, vmax=furthest, clip=True)
    y = 0.0  # downwards, in inches
    for title, tokens, values in strips:
        axes.text(0, y + 0.2, title, fontsize=11, va="center")
        x = 0.0
        y += 0.35
        for token, value in zip(tokens, values, strict=True):
            width = token_width(token, value)
            if x + width > WIDTH - 0.2:
                x = 0.0
                y += ROW_HEIGHT
            colour = colormaps["BrBG"](0.2 + 0.6 * float(shade(value)))
            draw_token(axes, x, y, token, value, colour)
            x += width
        y += ROW_HEIGHT + 0.1
    axes.set_ylim(y, -0.05)
    figure.set_size_inches(WIDTH, y + 0.05)
    return figure


def format_value(value: float) -> str:
    """A value with two decimals and its sign; 0 if it rounds to that."""
    return f"{value:+.2f}" if abs(value) >= 0.005 else "0"


def token_width(token: str, value: float) -> float:
    """The width of a token's box, in inches."""
    widths = []
    for text in (token.strip() or ".", format_value(value), "+0.00"):
        widths.append(TextPath((0, 0), text, size=FONT_SIZE).get_extents().width)
    return max(widths) / 72 + 2 * PADDING


def draw_token(axes: Axes, x: float, y: float, token: str, value: float, colour: Any) -> None:
    """A token's box, its text and its value, with the upper left corner at (x, y)."""
    width = token_width(token, value)
    middle = x + width / 2
    right = x + width
    axes.fill([x, right, right, x], [y, y, y + 0.48, y + 0.48], color=colour, linewidth=0)
    if value <= -0.005:
        line = [x + PADDING, right - PADDING]
        axes.plot(line, [y + 0.45, y + 0.45], ":", color="#543005", linewidth=2)
    options = {"fontsize": FONT_SIZE, "ha": "center", "va": "center"}
    axes.text(middle, y + 0.13, token.replace("$", r"\$"), **options)
    axes.text(middle, y + 0.33, format_value(value), **options)


def show_sliders(draw_at: Callable[..., Figure], **ranges: tuple[float, float, float]) -> None:
    """In a notebook: `draw_at` with a slider for each argument, from low to high in steps.

    On a printed page, where nobody can move one, the figure at the middle of each range.
    """
    controls = interactive(draw_at, {"auto_display": True}, **ranges)
    content = io.BytesIO()
    controls.result.savefig(content, format="png", dpi=100)
    display(controls._repr_mimebundle_() | {"image/png": content.getvalue()}, raw=True)
