"""What notebooks share: a guess next to what was measured, and tokens on the color of their value.

`plt.style.use("notebooks.lesson")` sets the look of the pictures, by lesson.mplstyle.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

COLUMNS = 100  # characters in a row of tokens: 10 inches


def reveal(guess: Any, *measured: float) -> None:
    """Print a guess next to what was measured, or next to several numbers that are all right.

    Raises ValueError if the guess is not a number: `...`, or 1,000, which is a tuple.

    >>> reveal(80, 50, 80)
    your guess: 80; measured: 50 or 80
    """
    if not isinstance(guess, int | float):
        fix = "type one such as 12 or 0.4 in the cell above, run that cell, then this one"
        raise ValueError(f"my_guess is not a number: {fix}")
    numbers = " or ".join(f"{float(number):.3g}" for number in measured)
    print(f"your guess: {guess:.3g}; measured: {numbers}")


def draw_tokens(
    strips: Sequence[tuple[str, Sequence[str], Sequence[float]]], furthest: float
) -> Figure:
    """Tokens with their values, on green above zero and on brown below it.

    strips: for each completion a title, its tokens, and a value for each token. furthest: the
    absolute value from which on the color is darkest. The scale is logarithmic from 0.01 on.

    >>> figure = draw_tokens([("log-ratio", [" 4", " +"], [0.5, 0.0])], furthest=1)
    >>> [text.get_text().split() for text in figure.axes[0].texts]
    [['log-ratio'], ['4', '+0.50'], ['+', '0']]
    """
    shade = SymLogNorm(0.01, vmin=-furthest, vmax=furthest, clip=True)
    boxes = []  # line, column, text and color of each
    line = 0.0
    for title, tokens, values in strips:
        boxes.append((line, 0, title, "white"))
        line += 1.4
        column = 0
        for token, value in zip(tokens, values, strict=True):
            number = f"{value:+.2f}" if abs(value) >= 0.005 else "0"
            width = max(len(token.strip()), len(number), len("+0.00"))
            if column + width > COLUMNS:
                column = 0
                line += 2.6
            color = plt.colormaps["BrBG"](0.2 + 0.6 * float(shade(value)))
            boxes.append((line, column, f"{token.strip():^{width}}\n{number:^{width}}", color))
            column += width + 1
        line += 3.2
    figure = plt.figure(figsize=(COLUMNS / 10 + 0.4, line / 5), layout="none")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-2, COLUMNS + 2), ylim=(line - 0.4, -0.4))
    axes.set_axis_off()
    for y, x, text, color in boxes:
        box = {"facecolor": color, "linewidth": 0, "pad": 2}
        axes.text(x, y, text, family="monospace", va="top", bbox=box, parse_math=False)
    return figure
