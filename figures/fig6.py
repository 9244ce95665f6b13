"""Figure 6: TOPR and TIS over p~ on the set with 10% positives.

Over several passes, since a recovery takes time; each method at its best learning rate.
"""

import pandas as pd
from matplotlib.figure import Figure

from figures.common import Values, by_seed, curve, curves, named, rate_text
from figures.pictures import LABELS, LOOKS, P_TILDE, new_figure, plot, plot_arms, plot_over_shares
from figures.runs import Rates, Row, Run, measure, over_shares
from figures.scales import Scale

TUNED = ("topr", "tis")
LOW = (0.01, 0.1)  # p~ whose runs are drawn along the training
NEW_SEEDS = range(8, 13)  # added to those of p~ = 1% after a prediction about them
LOG_RATIO = "log-ratio of positives"


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """Both methods with all p~, evaluated after each pass."""
    passes = {"epochs": scale["passes"], "evals_per_epoch": scale["passes"]}
    wanted = []
    for arm in TUNED:
        for row in over_shares(scale, 0.1, arm=arm, lr=rates[arm][0]):
            wanted.append({**row, "changes": {**row["changes"], **passes}})
    return wanted


def read(runs: list[Run], scale: Scale) -> dict:
    """Accuracy of both methods over p~, and along the training at low p~."""
    table = measure(runs)
    by = ["arm", "p_tilde"]
    correct = by_seed(table, "correct", by)
    gain = correct - by_seed(table, "correct", by, at=0)
    after_one = by_seed(table, "correct", by, at=1)  # as in the paper
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
    shares["TIS - TOPR: highest of all p~"] = highest_of_all(correct)
    return {"shares": shares, "numbers": {}, "data": data}


def gains(correct: pd.DataFrame, suffix: str) -> Values:
    """TOPR minus TIS at each p~."""
    return named(correct["topr"] - correct["tis"], f"TOPR - TIS, p~ = {{:.0%}}{suffix}")


def highest_of_all(correct: pd.DataFrame) -> pd.Series:
    """The highest accuracy of TIS minus that of TOPR, in seeds that all p~ have."""
    complete = correct.dropna()
    return complete["tis"].max(axis="columns") - complete["topr"].max(axis="columns")


def draw(data: dict) -> Figure:
    """Accuracy over p~; accuracy along the training at low p~, and log-ratios at the lowest."""
    low = sorted(key for key in data if key.startswith("p~ = "))
    figure, (over_shares, *along, ratios) = new_figure(2 + len(low))
    lines = {key.partition(",")[0]: line for key, line in data.items() if "mean" in line}
    plot_over_shares(over_shares, lines, [LOOKS[arm] for arm in TUNED], data["p~"])
    over_shares.set(title="set with 10% positive, at the end")
    for axes, key in zip(along, low, strict=True):
        plot_arms(axes, data[key]["correct"], key.replace("p~", P_TILDE))
    for arm, line in data[low[0]][LOG_RATIO].items():
        plot(ratios, line, LOOKS[arm], range(1, len(line["mean"]) + 1), scale=1)
    ratios.set(title=f"positives, {low[0]}".replace("p~", P_TILDE), xlabel="tenth of the training")
    ratios.set(ylabel="median log-ratio (nats), 95% interval")
    return figure
