"""Figure 6: TOPR and TIS over p~ on the set with 10% positives. On MATH: fig6-math.

Over several passes, since a recovery takes time; each method at its best learning rate.
"""

import pandas as pd
from matplotlib.figure import Figure

from figures.common import Values, by_seed, curve, curves, named, rate_text
from figures.pictures import (
    CORRECT,
    LABELS,
    LOOKS,
    P_TILDE,
    TRAINING,
    new_figure,
    plot,
    plot_over_shares,
)
from figures.runs import Rates, Run, measure, plan_over_shares
from figures.scales import Scale, seeds_for

TUNED = ("topr", "tis")
LOW = (0.01, 0.1)  # p~ whose runs are drawn along the training
NEW_SEEDS = range(8, 13)  # added to those of p~ = 1% after a prediction about them
LOG_RATIO = "log-ratio of positives"


def runs(scale: Scale, rates: Rates, seeds: range) -> list[Run]:
    """Both methods with all p~, evaluated after each pass."""

    def seeds_at(p: float) -> range:
        return seeds_for(scale, f"fig6, p~ = {p:.0%}", seeds)

    passes = scale["passes"]
    points = passes if passes > 1 else scale["base"].evals_per_epoch
    changes = {"epochs": passes, "evals_per_epoch": points}
    wanted = []
    for arm in TUNED:
        columns = {"arm": arm, "lr": rates[arm][0], "share": 0.1}
        wanted += plan_over_shares(scale, columns, seeds_at, **changes)
    return wanted


def read(runs: list[Run], scale: Scale) -> dict:
    """Accuracy of both methods over p~, and along the training at low p~."""
    table = measure(runs)
    by = ["arm", "p_tilde"]
    correct = by_seed(table, "correct", by)
    gain = correct - by_seed(table, "correct", by, at=0)
    # With several passes there is a point after each one. The paper makes one.
    after_one = correct if scale["passes"] == 1 else by_seed(table, "correct", by, at=1)
    shares = gains(correct, "") | gains(after_one, ", after one pass")
    new = correct[correct.index.isin(NEW_SEEDS)]
    if len(new):
        shares |= gains(new.dropna(axis="columns"), ", seeds 8 to 12")
    data = {"p~": scale["shares"]}
    for arm, lr in table.groupby("arm", sort=False)["lr"].first().items():
        label = f"{LABELS[arm]}, {rate_text(lr)}"
        data[label] = curve(correct[arm])
        shares |= named(correct[arm], f"{label}, p~ = {{:.0%}}")
        shares |= named(gain[arm], f"{LABELS[arm]} - base, p~ = {{:.0%}}")
    for p in set(LOW) & set(scale["shares"]):
        rows = table[table["p_tilde"] == p]
        data[f"p~ = {p:.0%}"] = {metric: curves(rows, metric) for metric in ("correct", LOG_RATIO)}
    complete = correct.dropna()  # low p~ have more seeds than the others
    highest = {arm: complete[arm].max(axis="columns") for arm in TUNED}
    shares["TIS - TOPR: highest of all p~"] = highest["tis"] - highest["topr"]
    return {"shares": shares, "numbers": {}, "data": data}


def gains(correct: pd.DataFrame, suffix: str) -> Values:
    """TOPR minus TIS at each p~."""
    return named(correct["topr"] - correct["tis"], f"TOPR - TIS, p~ = {{:.0%}}{suffix}")


def draw(data: dict) -> Figure:
    """Accuracy over p~; accuracy along the training at low p~, and log-ratios at the lowest."""
    low = sorted(key for key in data if key.startswith("p~ = "))
    figure, (over_shares, *along, ratios) = new_figure(2 + len(low))
    lines = {key.partition(",")[0]: line for key, line in data.items() if "mean" in line}
    plot_over_shares(over_shares, lines, [LOOKS[arm] for arm in TUNED], data["p~"])
    over_shares.set(title="set with 10% positive, at the end")
    for axes, key in zip(along, low, strict=True):
        for arm in TUNED:
            plot(axes, data[key]["correct"][arm], LOOKS[arm])
        axes.set(title=key.replace("p~", P_TILDE), ylabel=CORRECT, **TRAINING)
    for arm in TUNED:
        plot(ratios, data[low[0]][LOG_RATIO][arm], LOOKS[arm], scale=1)
    ratios.set(title=f"positives, {low[0]}".replace("p~", P_TILDE), **TRAINING)
    ratios.set(ylabel="median log-ratio (nats), 95% interval")
    return figure
