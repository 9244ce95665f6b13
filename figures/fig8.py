"""Figure 8: iterations of sampling and training, with several compositions of the training set.

Three iterations (ours) at TOPR's two best learning rates, and each arm at the best rate of its
method. Two arms have positives alone: as many as `uniform` has, in as many steps; and as many
samples as `uniform` has.
"""

import pandas as pd
from matplotlib.figure import Figure

from figures.common import Values, by_rate, by_seed, curves, named, rates_of_arms
from figures.pictures import LABELS, LOOKS, new_figure, own_rates, plot
from figures.runs import Rates, Row, Run, at_rates, best_two, measure
from figures.scales import RATE_SEEDS, Scale

TUNED = ("topr", "sft", "positives_only")
TUNING_SEEDS = RATE_SEEDS
# Arm -> the one whose learning rate is its own.
ARMS = {
    "uniform": "topr",
    "its_positives": "sft",
    "positives_only": "positives_only",
    "anna_karenina": "topr",
}


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """Each arm at TOPR's two best learning rates, and at its own."""
    own = {arm: rates[tuned_as][0] for arm, tuned_as in ARMS.items()}
    changes = {"evals_per_epoch": 1, **scale["fig8"]}
    wanted = at_rates(best_two(rates["topr"]), list(ARMS), own)
    return [{**row, "changes": changes} for row in wanted]


def read(runs: list[Run], scale: Scale) -> dict:
    """pass@1 and the majority vote over iterations."""
    metrics = ("pass@1", f"maj@{runs[0].settings.k}")
    table = measure(runs)
    base = by_seed(table, "pass@1", ["rate", "arm"], at=0)
    shares = {"base: correct": base["best rate", "uniform"]}
    data = {"rates of arms": rates_of_arms(table)}
    for title, suffix, rows in by_rate(table):
        for metric in metrics:
            data[f"{metric}, {title}"] = curves(rows, metric)
            shares |= compare(rows[rows["metric"] == metric], metric, suffix)
    return {"shares": shares, "numbers": {}, "data": data}


def compare(rows: pd.DataFrame, metric: str, suffix: str) -> Values:
    """Each arm after each iteration, and one minus another; rows: of one value of `rate`."""
    values = rows[rows["point"] > 0].pivot(index="seed", columns=["arm", "point"], values="value")
    found = {}
    for arm in rows["arm"].unique():
        after = f"{LABELS.get(arm, arm)}: {metric} after iteration {{}}{suffix}"
        found |= named(values[arm], after)
    pairs = [("anna_karenina", other) for other in ARMS if other != "anna_karenina"]
    pairs += [("uniform", "its_positives"), ("uniform", "positives_only")]
    for one, other in pairs:
        gain = values[one] - values[other]  # (seeds, iterations)
        name = f"{LABELS[one]} - {LABELS[other]}: {metric}"
        found |= named(gain, f"{name} after iteration {{}}{suffix}")
        # Later there are too few problems that are not yet solved.
        found[f"{name}, mean of iterations 1 to 3{suffix}"] = gain.loc[:, :3].mean(axis="columns")
        last = gain.iloc[:, -1]
        found[f"{name}, last iteration{suffix}"] = last
        found[f"{name}, last iteration - first{suffix}"] = last - gain.iloc[:, 0]
    return found


def draw(data: dict) -> Figure:
    """A row for TOPR's best learning rate and one for own rates, a column for each metric."""
    rate = next(key for key in data if ", lr" in key).partition(", ")[2]
    keys = [key for key in data if key.endswith((rate, "own rate"))]
    figure, panels = new_figure(len(keys))
    for axes, key in zip(panels, keys, strict=True):
        for arm, line in data[key].items():
            iterations = range(len(line["mean"]))
            plot(axes, line, LOOKS[arm], iterations)
        metric = key.partition(",")[0]
        title = own_rates(data["rates of arms"]) if key.endswith("own rate") else key
        axes.set(title=title, xlabel="iterations", xticks=iterations)
        axes.set(ylabel=f"{metric} (%), 95% interval")
    return figure
