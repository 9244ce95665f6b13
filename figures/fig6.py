"""Figure 6: TOPR and TIS over p~ on the set with 10% positives. On MATH: fig6-math.

Over several passes, since a recovery takes time; each method at its best learning rate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from figures.common import (
    METHODS,
    P_TILDE,
    TRAINING,
    Figure,
    Findings,
    Rates,
    accuracy_panel,
    arms_over_p_tilde,
    by_seed,
    change,
    curve,
    curves,
    label_with_rate,
    line,
    over_seeds,
    p_tilde_panel,
    percent,
    tenths_panel,
)
from figures.runs import Job, Run, in_seeds, measurements, with_shared_samples
from figures.scales import Scale
from toprlib.plotting import Panel
from toprlib.report import Estimate

# The p~ whose runs are drawn along the training.
LOW = (0.01, 0.1)
# Seeds that were added to those of p~ = 1% after a prediction about them.
NEW_SEEDS = range(8, 13)
LOG_RATIO = "log-ratio of positives"


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """Both methods with all p~; those that decide claims have more seeds.

    Evaluated after each pass.
    """
    points = scale.passes if scale.passes > 1 else scale.base.evals_per_epoch
    jobs = []
    for method in ("topr", "tis"):
        columns = {"method": method, "lr": rates[method][0], "share": 0.1}
        jobs += arms_over_p_tilde(scale, columns, epochs=scale.passes, evals_per_epoch=points)
    seeded = []
    for job in with_shared_samples(jobs):
        part = f"fig6, p~ = {job.columns['p_tilde']:.0%}"
        seeded += in_seeds([job], scale.seeds_for(part, seeds))
    return seeded


def log_ratios(run: Run) -> dict[str, Sequence[float]]:
    """The median log pi - log mu of positives, in tenths of the training."""
    return {LOG_RATIO: run.tenths("log_ratio_pos_q50")}


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """Accuracy of both methods over p~, and along the training at low p~."""
    table = measurements(runs, log_ratios)
    correct = by_seed(table, "correct", ["method", "p_tilde"])[["topr", "tis"]]
    lr = table.groupby("method")["lr"].first()
    labels = {method: label_with_rate(method, lr[method]) for method in ("topr", "tis")}
    data = {}
    for method, label in labels.items():
        data[label] = curve(correct[method][list(scale.shares)])
    data["p~"] = list(scale.shares)
    for p, rows in table[table["p_tilde"].isin(LOW)].groupby("p_tilde"):
        lines = {}
        for metric in ("correct", LOG_RATIO):
            lines[metric] = curves(rows[rows["metric"] == metric], "method")
        data[f"p~ = {p:.0%}"] = lines
    # With several passes there is a point after each one. The paper makes one.
    after_one_pass = by_seed(table, "correct", ["method", "p_tilde"], at=1)
    shares = {}
    for (method, p), values in correct.items():
        shares[f"{labels[method]}, p~ = {p:.0%}"] = over_seeds(values)
    shares |= gains(correct, "")
    shares |= gains(after_one_pass if scale.passes > 1 else correct, ", after one pass")
    new = correct[correct.index.isin(NEW_SEEDS)]
    if len(new):
        of_all_new = new.dropna(axis="columns")
        shares |= gains(of_all_new, f", seeds {NEW_SEEDS[0]} to {NEW_SEEDS[-1]}")
    for (method, p), values in change(table, "correct", ["method", "p_tilde"]).items():
        shares[f"{METHODS[method].name} - base, p~ = {p:.0%}"] = over_seeds(values)
    shares["TIS - TOPR: highest of all p~"] = highest_of_all(correct)
    return Findings(data, shares)


def gains(correct: pd.DataFrame, suffix: str) -> dict[str, Estimate]:
    """TOPR minus TIS at each p~."""
    found = {}
    for p, difference in (correct["topr"] - correct["tis"]).items():
        found[f"TOPR - TIS, p~ = {p:.0%}{suffix}"] = over_seeds(difference)
    return found


def highest_of_all(correct: pd.DataFrame) -> Estimate:
    """The highest accuracy of TIS over all p~ minus that of TOPR, in seeds that all p~ have."""
    # Low p~ have more seeds than the others.
    complete = correct.dropna()
    highest = {method: complete[method].max(axis="columns") for method in ("topr", "tis")}
    return over_seeds(highest["tis"] - highest["topr"])


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """Accuracy over p~; accuracy and log-ratios along the training at low p~."""
    lines = []
    for label, y in data.items():
        if "mean" in y:
            name = label.partition(",")[0]
            lines.append(line(percent(data["p~"]), y, name, name.lower()))
    drawn = [p_tilde_panel("set with 10% positive, at the end", lines)]
    for title in [key for key in data if key.startswith("p~ = ")]:
        heading = title.replace("p~", P_TILDE)
        drawn.append(accuracy_panel(heading, data[title]["correct"], METHODS, TRAINING))
        ylabel = "median log-ratio (nats), 95% interval"
        drawn.append(tenths_panel(f"positives, {heading}", ylabel, data[title][LOG_RATIO]))
    return drawn


FIGURE = Figure(arms, read, panels, tuned=lambda scale: ("topr", "tis"))
