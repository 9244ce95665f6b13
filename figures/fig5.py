"""Figure 5: accuracy against the effective share of positives p~, at TOPR's two best rates.

On two sets of equal size, with 10% and with 50% positives; a baseline sets p~.
"""

import pandas as pd
from matplotlib.figure import Figure

from figures.common import Values, by_rate, by_seed, curve, minus, named
from figures.pictures import LEVELS, new_figure, plot_over_shares
from figures.runs import Rates, Row, Run, best_two, measure, over_shares
from figures.scales import Scale

TUNED = ("topr",)
SETS = {"10% positive": 0.1, "50% positive": 0.5}


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """Both sets at both learning rates, each with all p~."""
    wanted = []
    for name, share in SETS.items():
        for rate, lr in best_two(rates["topr"]).items():
            wanted += over_shares(scale, share, set=name, rate=rate, lr=lr, arm="topr")
    return wanted


def read(runs: list[Run], scale: Scale) -> dict:
    """Accuracy of both sets over p~ at each learning rate."""
    table = measure(runs)
    base = by_seed(table, "correct", ["set", "rate", "p_tilde"], at=0)
    shares = {"base: correct": base["50% positive", "best rate", 1.0]}
    numbers = {}
    best = table.loc[table["rate"] == "best rate", "lr"].iloc[0]
    data = {"p~": scale["shares"], "own rate": best, "realised share": {}}
    for title, suffix, rows in by_rate(table):
        correct = by_seed(rows, "correct", ["set", "p_tilde"])
        realised = by_seed(rows, "realised share", ["set", "p_tilde"])
        data[title] = {name: curve(correct[name]) for name in SETS}
        data["realised share"][title] = {name: curve(realised[name]) for name in SETS}
        for name, values in compare(correct).items():
            shares[f"{name}{suffix}"] = values
        # In each seed, over p~.
        alike = correct["10% positive"].corrwith(correct["50% positive"], axis="columns")
        numbers[f"correlation of the two sets over p~{suffix}"] = alike
    return {"shares": shares, "numbers": numbers, "data": data}


def compare(correct: pd.DataFrame) -> Values:
    """Accuracies and their differences; correct: a row for each seed, columns (set, p~)."""
    found = {}
    for name in SETS:
        of_set = correct[name]
        found |= named(of_set, f"{name}, p~ = {{:.0%}}")
        if 0.2 in of_set:
            rivals = of_set[[p for p in of_set if p in (0.01, 0.2, 0.8, 1.0)]]
            found |= minus(rivals, 0.2, f"{name}: p~ = 20% - p~ = {{:.0%}}")
        for p in {0.5, 1.0} & set(of_set if len(of_set) > 1 else ()):
            gain = best_on_other_seeds(of_set, p)
            found[f"{name}: best p~ on other seeds - p~ = {p:.0%}"] = gain
    # At p~ = 10% one set has it by sampling, since its own share needs no baseline, and the other
    # by a baseline; at 50% it is the other way round.
    for p, one, other in ((0.1, *SETS), (0.5, *reversed(SETS))):
        if p in correct[one]:
            gain = correct[one, p] - correct[other, p]
            found[f"p~ = {p:.0%} by sampling - by a baseline"] = gain
    return found


def best_on_other_seeds(values: pd.DataFrame, other: float) -> list[float]:
    """In each seed the column that is best on average over the *other* seeds, minus `other`.

    The best of the same seeds would be ahead by chance. values: a row for each seed, at least two.

    >>> best_on_other_seeds(pd.DataFrame({0.1: [1., 5.], 0.2: [2., 3.], 0.5: [0., 4.]}), 0.5)
    [1.0, -1.0]
    """
    rivals = values.drop(columns=other)
    gains = []
    for seed in values.index:
        best = rivals.drop(index=seed).mean().idxmax()
        gains.append(float(rivals.loc[seed, best] - values.loc[seed, other]))
    return gains


def draw(data: dict) -> Figure:
    """A panel for each learning rate."""
    rates = [key for key in data if key.startswith("lr")]
    figure, panels = new_figure(len(rates))
    for axes, rate in zip(panels, rates, strict=True):
        axes.axvspan(10, 20, color="#e2e2e2", zorder=0, label="the paper's best")
        plot_over_shares(axes, data[rate], LEVELS[::5], data["p~"])
        is_best = rate == f"lr {data['own rate']:g}"
        axes.set(title=f"{rate} (TOPR's best)" if is_best else rate)
    return figure
