"""Figure 1: test accuracy over one epoch.

The paper's methods at TOPR's learning rate, and each at its own.
Ours: TIS, plain importance sampling, SFT on positives, and a group baseline, each at its own rate.
On the laptop DPO takes about twice as many steps as the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from figures.common import (
    CORRECT,
    METHODS,
    PAPER_METHODS,
    Arm,
    Curve,
    Figure,
    Findings,
    Rates,
    accuracy_panel,
    arm_line,
    arms_at_both_rates,
    by_seed,
    curves,
    ends,
    over_seeds,
)
from figures.runs import Job, Run, in_seeds, measurements
from figures.scales import Scale
from toprlib.plotting import Panel
from toprlib.report import Estimate

# The methods of the last panel, from its lowest row upwards.
OTHERS = ("group", "sft", "off_policy", "tis", "topr")


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """The paper's methods at TOPR's learning rate, and all methods at their own."""
    jobs = arms_at_both_rates(scale, rates, PAPER_METHODS)
    return in_seeds(jobs, scale.seeds_for("fig1", seeds))


def clipped_samples(run: Run) -> dict[str, Sequence[float]]:
    """The share of samples without a gradient, in tenths of training: PPO gives them weight 0."""
    if run.settings.method != "ppo":
        return {}
    return {"clipped": run.tenths("weights_below_1e-6")}


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """Accuracy along the training, and differences at its end."""
    table = measurements(runs, clipped_samples)
    data = {}
    for rate, rows in table.query("metric == 'correct'").groupby("rate", sort=False):
        data[rate] = curves(rows, "method")
    shares = {
        **ends(table, "correct"),
        **gains(table),
        **majorities(table, f"maj@{scale.base.k}"),
        **clipped_shares(table),
    }
    lr = table[table["rate"] == "own rate"].groupby("method", sort=False)["lr"].first()
    numbers = {}
    for method in lr.index.drop("topr"):
        ratio = Estimate.over_seeds([lr[method] / lr["topr"]])
        numbers[f"{METHODS[method].name}: own rate / TOPR's"] = ratio
    return Findings(data, shares, numbers)


def gains(table: pd.DataFrame) -> dict[str, Estimate]:
    """Accuracy of one method minus another's; and how much further a method falls than TOPR."""
    # A row for each seed and a column for each method: differences are between runs of a seed,
    # which share their samples.
    correct = by_seed(table, "correct", ["rate", "method"])
    own = correct["own rate"]
    one = correct["one rate"]
    # (rate, method, seed) -> the values along the run.
    along = table[table["metric"] == "correct"].groupby(["rate", "method", "seed"])["value"]
    fall = (along.max() - along.last()).unstack(["rate", "method"])["one rate"]
    found = {}
    for method in own.columns.drop("topr"):
        found[f"TOPR - {METHODS[method].name}, own rates"] = over_seeds(own["topr"] - own[method])
    for method in PAPER_METHODS[1:]:
        name = METHODS[method].name
        found[f"TOPR - {name}, one rate"] = over_seeds(one["topr"] - one[method])
        # The paper also ranks DPO above the other two.
        if method != "dpo":
            found[f"DPO - {name}, one rate"] = over_seeds(one["dpo"] - one[method])
        further = over_seeds(fall[method] - fall["topr"])
        found[f"{name} - TOPR, one rate: fall from the highest"] = further
    return found


def majorities(table: pd.DataFrame, metric: str) -> dict[str, Estimate]:
    """Accuracy of the majority vote before training, and after it with each method of the paper."""
    base = by_seed(table, metric, ["rate", "method"], at=0)
    at_end = by_seed(table, metric, ["rate", "method"])
    found = {f"base: {metric}": over_seeds(base["own rate", "topr"])}
    for (rate, method), values in at_end.items():
        if method in PAPER_METHODS:
            found[f"{METHODS[method].name}, {rate}: {metric} at the end"] = over_seeds(values)
    return found


def clipped_shares(table: pd.DataFrame) -> dict[str, Estimate]:
    """PPO's samples without a gradient, in the first and the last tenth of training."""
    found = {}
    for tenth, at in (("first", 0), ("last", -1)):
        for rate, values in by_seed(table, "clipped", "rate", at).items():
            found[f"PPO, {rate}: clipped samples, {tenth} tenth"] = over_seeds(values)
    return found


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """The paper's methods along the epoch; the ends of the others, which lie close together."""
    own = data["own rate"]
    papers = {method: own[method] for method in PAPER_METHODS}
    rows = [end_row(at, own[method], METHODS[method]) for at, method in enumerate(OTHERS)]
    options = {"yticks": [], "ylim": (-0.5, len(OTHERS) - 0.5)}
    return [
        accuracy_panel("TOPR's learning rate for all", data["one rate"], METHODS),
        accuracy_panel("each at its own learning rate", papers, METHODS),
        Panel("other bounds and baselines, own rate, at the end", CORRECT, "", rows, options),
    ]


def end_row(at: float, y: Curve, arm: Arm) -> Any:
    """The end of a curve as a point in a row, with its interval along x."""
    end = arm_line([at], {name: values[-1:] for name, values in y.items()}, arm)
    return end._replace(x=end.y, y=[at], kind="rows")


FIGURE = Figure(arms, read, panels, tuned=lambda scale: tuple(METHODS))
