"""Pictures of figures: a look for each thing that they compare, and panels of lines."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Line = Mapping[str, Any]  # of `common.curve`
Look = tuple[str, str, Any, str]  # label, color, and for greyscale dashes and a marker

DOTS = (0, (1, 2))
DASHES = (0, (3, 1))
LONG_DASHES = (0, (5, 1))
DASH_DOT_DOTS = (0, (6, 1, 1, 1, 1, 1))
# Color-blind readers can tell these colors apart (Okabe and Ito 2008).
LOOKS: dict[str, Look] = {
    "topr": ("TOPR", "#0072B2", "-", "o"),
    "dpo": ("DPO", "#000000", DOTS, "X"),
    "ppo": ("PPO", "#E69F00", DASHES, "P"),
    "reinforce": ("naive REINFORCE", "#D55E00", ":", "v"),
    "tis": ("TIS", "#56B4E9", "--", "s"),
    "off_policy": ("plain IS", "#CC79A7", DASH_DOT_DOTS, "D"),
    "sft": ("SFT on positives", "#009E73", "-.", "^"),
    "group": ("TOPR, group-mean baseline", "#7B3FA0", LONG_DASHES, "<"),
    "positives_only": ("positives only", "#117733", DOTS, "*"),
    "its_positives": ("positives, as many steps", "#C2A800", "-.", "v"),
    "uniform": ("uniform", "#0072B2", "-", "o"),
    "anna_karenina": ("Anna Karenina", "#882255", LONG_DASHES, "s"),
    "base": ("base", "#6E6E6E", "--", "d"),
    "per-token": ("per-token", "#E69F00", "--", "s"),
    "per-token + token mean": ("per-token + token mean", "#CC79A7", ":", "v"),
    "geometric mean": ("geometric mean", "#009E73", "-.", "^"),
    "clip 0.8..1.2": ("clip 0.8..1.2", "#D55E00", DASH_DOT_DOTS, "D"),
    "correct": ("correct", "#009E73", "-", "o"),
    "incorrect": ("incorrect", "#56B4E9", "--", "s"),
    "invalid": ("invalid", "#D55E00", ":", "^"),
}
LABELS = {name: look[0] for name, look in LOOKS.items()}
# Values of a parameter, from dark to light.
LEVELS: list[Look] = [
    ("", "#440154", "-", "o"),
    ("", "#414487", "--", "s"),
    ("", "#2A788E", "-.", "^"),
    ("", "#22A884", DASH_DOT_DOTS, "D"),
    ("", "#7AD151", ":", "v"),
    ("", "#C2A800", LONG_DASHES, "P"),
]
CORRECT = "correct (%), 95% interval"
TRAINING = "share of the training (%)"
P_TILDE = r"$\tilde p$"


def new_figure(count: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels: three in a row, or else two."""
    columns = 3 if count == 3 else min(count, 2)
    rows = -(-count // columns)
    width = 12.4 if count > 1 else 6.2  # inches
    figure = Figure(figsize=(width, 3.6 * rows), layout="constrained", dpi=150)
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(count)]


def save(figure: Figure, path: Path) -> None:
    """Write the picture, with one legend for all panels that is long enough to show dashes."""
    handles = {}
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_title(spell_rates(axes.get_title()))
        axes.spines[["top", "right"]].set_visible(False)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    look = {"frameon": False, "handlelength": 4, "ncols": 4, "loc": "outside lower center"}
    figure.legend(handles.values(), handles.keys(), **look)
    figure.savefig(path)


def spell_rates(text: str) -> str:
    """Learning rates as 1e-4, however a number was printed.

    >>> spell_rates("own rates: TOPR 3e-05; SFT 0.0001; PPO 9.5e-05")
    'own rates: TOPR 3e-5; SFT 1e-4; PPO 9.5e-5'
    """
    return re.sub(r"\b0\.000(\d)\b", r"\1e-4", text).replace("e-0", "e-")


def plot(
    axes: Axes, line: Line, look: Look, x: Sequence[float] | None = None, scale: float = 100
) -> None:
    """A line with its 95 % interval, in percent; x: by default percent of the training."""
    mean = scale * np.array(line["mean"], float)  # None becomes NaN, a gap
    half_width = scale * np.array(line["half_width"], float)
    x = np.linspace(0, 100, len(mean)) if x is None else x
    # Of many points some have a marker, at other places in each line: both show where lines meet.
    spacing = max(len(mean) // 8, 1)
    style = dict(zip(("label", "color", "ls", "marker"), look, strict=True))
    style["markevery"] = (10 * len(axes.lines) % spacing, spacing)
    axes.plot(x, mean, lw=2, markersize=5, **style)
    axes.fill_between(x, mean - half_width, mean + half_width, color=look[1], alpha=0.2, lw=0)


def plot_arms(axes: Axes, lines: Mapping[str, Line], title: str, looks: Mapping = LOOKS) -> None:
    """Accuracy of some arms along the training."""
    for arm, line in lines.items():
        plot(axes, line, looks[arm])
    axes.set(title=title, xlabel=TRAINING, ylabel=CORRECT)


def plot_rows(axes: Axes, heights: Sequence[float], ends: Line, look: Look) -> None:
    """Points in rows, in percent along x, with their intervals and a dot for each seed."""
    label, color, _, marker = look
    mean = 100 * np.array(ends["mean"], float)
    half_width = 100 * np.array(ends["half_width"], float)
    style = {"label": label, "color": color, "marker": marker, "ls": "none"}
    axes.errorbar(mean, heights, xerr=half_width, capsize=3, **style)
    for height, values in zip(heights, ends["each"], strict=True):
        axes.scatter(100 * np.array(values), [height] * len(values), s=9, color="#333333", zorder=3)


def plot_over_shares(
    axes: Axes, lines: Mapping[str, Line], looks: Sequence[Look], shares: Sequence[float]
) -> None:
    """Accuracy against the effective share of positives p~."""
    for (label, line), look in zip(lines.items(), looks, strict=True):
        plot(axes, line, (label, *look[1:]), 100 * np.array(shares))
    axes.set(xlabel=f"effective share of positives {P_TILDE} (%)", ylabel=CORRECT)
    set_ticks(axes, [1, 2, 5, 10, 20, 50, 100])


def set_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """A logarithmic axis x with these ticks."""
    axes.set(xscale="log", xticks=ticks, xticklabels=ticks)
    axes.minorticks_off()


def own_rates(rates: Mapping[str, float], labels: Mapping[str, str] = LABELS) -> str:
    """The title of a panel in which each arm has its own learning rate."""
    texts = [f"{labels[arm]} {lr:g}" for arm, lr in rates.items()]
    return textwrap.fill(f"own rates: {'; '.join(texts)}", 50)
