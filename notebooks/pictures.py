"""What notebooks show: curves, coloured tokens, sliders, and a guess next to what was measured."""

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from IPython.display import display
from ipywidgets import interactive
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from notebooks.checks import NotebookError
from toprlib.plotting import Panel, draw, lines

DPI = 100  # a notebook shows a picture of 10 inches in 1,000 pixels
TEXT_SIZE = 12  # points: 17 pixels
PANEL_SIZES = {1: (7.0, 4.0), 2: (5.0, 3.6), 3: (3.5, 2.9)}  # panels in a row -> inches of each

# Of `draw_tokens`, in inches.
WIDTH = 10.4
ROW_HEIGHT = 0.62
PADDING = 0.07  # on both sides of a token


def plot(
    xlabel: str,
    ylabel: str,
    x: Any,
    panels: Mapping[str, Mapping[str, Any]],
    styles: str = "",
    columns: int = 2,
    **options: Any,
) -> Figure:
    """A panel for each title, with a line for each label over the same x.

    styles and options are those of `toprlib.plotting`; panels may have styles of their own, with
    commas between them. columns: the number of panels in a row.

    >>> plot("x", "y", [0, 1], {"squares": {"x²": [0, 1]}}).axes[0].get_title()
    'squares'
    """
    new_panels = []
    for (title, y), names in zip(panels.items(), cycle(styles.split(","))):
        new_panels.append(Panel(title, xlabel, ylabel, lines(x, y, names), options))
    return show(new_panels, columns)


def show(panels: Sequence[Panel], columns: int = 2) -> Figure:
    """Panels of `toprlib.plotting` as wide as a cell of a notebook, with text to project.

    >>> figure = show([Panel("one", "x", "y", lines([0, 1], {"a": [0, 1]}))])
    >>> figure.axes[0].get_legend().texts[0].get_fontsize()
    12.0
    """
    columns = min(columns, len(panels))
    return enlarge_text(draw(panels, columns, PANEL_SIZES[columns]))


def enlarge_text(figure: Figure) -> Figure:
    """The same figure, in which all text has at least TEXT_SIZE."""
    legends = list(figure.legends)
    for axes in figure.axes:
        axes.tick_params(labelsize=TEXT_SIZE)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_fontsize(TEXT_SIZE)
        if axes.get_legend():
            legends.append(axes.get_legend())
    for legend in legends:
        for text in legend.texts:
            text.set_fontsize(TEXT_SIZE)
    return figure


def reveal(guess: Any, *measured: float) -> None:
    """Print a guess next to what was measured, or next to several numbers that are all right.

    Raises NotebookError as long as the guess is not a number: `...`, or 1,000, which is a tuple.

    >>> reveal(80, 50, 80)
    your guess: 80; measured: 50 or 80
    """
    if not isinstance(guess, int | float):
        problem = "my_guess is not a number"
        fix = "type one such as 12 or 0.4 in the cell above, run that cell, then this one"
        raise NotebookError(f"{problem}: {fix}")
    numbers = " or ".join(f"{float(number):.3g}" for number in measured)
    print(f"your guess: {guess:.3g}; measured: {numbers}")


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
    figure = Figure(dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.1, WIDTH - 0.1))
    axes.set_axis_off()
    shade = SymLogNorm(0.01, vmin=-furthest, vmax=furthest, clip=True)
    y = 0.0  # downwards, in inches
    for title, tokens, values in strips:
        axes.text(0, y + 0.22, title, fontsize=TEXT_SIZE + 1, va="center")
        x = 0.0
        y += 0.42
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
        widths.append(TextPath((0, 0), text, size=TEXT_SIZE).get_extents().width)
    return max(widths) / 72 + 2 * PADDING


def draw_token(axes: Axes, x: float, y: float, token: str, value: float, colour: Any) -> None:
    """A token's box, its text and its value, with the upper left corner at (x, y)."""
    width = token_width(token, value)
    middle = x + width / 2
    right = x + width
    bottom = y + ROW_HEIGHT - 0.05
    axes.fill([x, right, right, x], [y, y, bottom, bottom], color=colour, linewidth=0)
    if value <= -0.005:
        line = [x + PADDING, right - PADDING]
        axes.plot(line, [bottom - 0.03, bottom - 0.03], ":", color="#543005", linewidth=2)
    options = {"fontsize": TEXT_SIZE, "ha": "center", "va": "center"}
    axes.text(middle, y + 0.16, token.replace("$", r"\$"), **options)
    axes.text(middle, y + 0.39, format_value(value), **options)


def show_sliders(draw_at: Callable[..., Figure], **ranges: tuple[float, float, float]) -> None:
    """In a notebook: `draw_at` with a slider for each argument, from low to high in steps.

    On a printed page, where nobody can move one, the figure at the middle of each range. Raises
    NotebookError if `draw_at` needs a name that an earlier cell defines.
    """
    middle = {name: (low + high) / 2 for name, (low, high, _) in ranges.items()}
    try:
        figure = draw_at(**middle)
    except NameError as error:
        problem = f"{error.name} is not defined"
        fix = (
            "run the cell above that defines it (Run > Run All Above Selected Cell), then this one"
        )
        raise NotebookError(f"{problem}: {fix}") from None
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=DPI)
    controls = interactive(draw_at, {"auto_display": True}, **ranges)
    display(controls._repr_mimebundle_() | {"image/png": content.getvalue()}, raw=True)
