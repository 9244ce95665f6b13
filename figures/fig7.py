"""Figure 7: TOPR against plain importance sampling, in a mild and in a hard setting.

Mild: 33% negatives and gradients clipped early; hard: 60% and clipped late. With two optimizers,
since AdamW divides by the gradient's size; each at the rate that is best for TOPR.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from figures.common import Values, by_seed, curves, named
from figures.pictures import CORRECT, LOOKS, new_figure, plot, plot_rows, spell_rates
from figures.runs import Rates, Row, Run, measure
from figures.scales import OPTIMIZERS, Scale

TUNED = tuple(OPTIMIZERS)
ARMS = {"topr": 0.15, "off_policy": -0.15}  # and where rows of the picture are


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """Both methods in both settings, with each optimizer."""
    sets = {"composition": "proportion", "epochs": scale["passes"], **scale["sets"]}
    wanted = []
    for optimizer in OPTIMIZERS:
        for negative, clip in zip((0.33, 0.6), scale["clips"], strict=True):
            setting = f"{optimizer}, {negative:.0%} negative, clipped at {clip:g}"
            changes = {"proportion": 1 - negative, "max_grad_norm": clip, "optimizer": optimizer}
            row = {"setting": setting, "lr": rates[optimizer][0], "changes": {**sets, **changes}}
            wanted += [{**row, "arm": arm} for arm in ARMS]
    return wanted


def read(runs: list[Run], scale: Scale) -> dict:
    """Accuracy and gradient norms in each setting."""
    table = measure(runs)
    found = {"shares": {}, "numbers": {}, "data": {}}
    for (setting, lr), rows in table.groupby(["setting", "lr"], sort=False):
        lines = {metric: curves(rows, metric) for metric in ("correct", "gradient norm")}
        found["data"][f"{setting}, lr {lr:g}"] = lines
        found["shares"] |= ends(rows, setting)
        norms = by_seed(rows, "largest gradient norm")
        found["numbers"] |= named(norms, f"{setting}, {{}}: largest gradient norm")
        name = f"{setting}: log10 of largest gradient norm, plain IS / TOPR"
        found["numbers"][name] = np.log10(norms["off_policy"]) - np.log10(norms["topr"])
    return found


def ends(rows: pd.DataFrame, setting: str) -> Values:
    """Both methods at the end of training, against the base and against each other."""
    correct = by_seed(rows, "correct")
    found = {f"{setting}: TOPR - plain IS": correct["topr"] - correct["off_policy"]}
    for metric in ("correct", "invalid", "steps clipped"):
        found |= named(by_seed(rows, metric), f"{setting}, {{}}: {metric}")
    gain = correct - by_seed(rows, "correct", at=0)
    return found | named(gain, f"{setting}, {{}} - base: correct")


def draw(data: dict) -> Figure:
    """The ends in each setting, one optimizer below the other; gradient norms in the hard one.

    Keys of data: "OPTIMIZER, SHARE negative, clipped at NORM, lr RATE".
    """
    hard = [key for key in data if "60% negative" in key]
    mild = [key for key in data if key not in hard]
    figure, panels = new_figure(2 + len(hard))
    for axes, keys in zip(panels, (mild, hard), strict=False):
        heights = -np.arange(len(keys))
        for arm, shift in ARMS.items():
            lines = [data[key]["correct"][arm] for key in keys]
            ends = {part: [line[part][-1] for line in lines] for part in lines[0]}
            plot_rows(axes, heights + shift, ends, LOOKS[arm])
        words = [key.split(", ") for key in keys]
        axes.set(title=f"{words[0][1]}, {words[0][2]}, at the end", xlabel=CORRECT)
        axes.set(yticks=heights, yticklabels=[spell(word[0], word[3]) for word in words])
        axes.set(xlim=(-3, 103), ylim=(0.5 - len(keys), 0.5))
    for axes, key in zip(panels[2:], hard, strict=True):
        for arm, line in data[key]["gradient norm"].items():
            plot(axes, line, LOOKS[arm], range(1, len(line["mean"]) + 1), scale=1)
        axes.set(
            title=spell(key), yscale="log", xlabel="tenth of the training", ylabel="gradient norm"
        )
    return figure


def spell(*words: str) -> str:
    """The words of a key as labels have them."""
    text = spell_rates(", ".join(words))
    return text.replace("adamw", "AdamW").replace("sgd", "SGD")
