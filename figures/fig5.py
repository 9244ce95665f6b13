"""Figure 5: accuracy against the effective share of positives p~.

On two sets of equal size, with 10% and with 50% positives; a baseline sets p~. At TOPR's two best
learning rates, since the best p~ may depend on the rate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from figures.common import (
    Figure,
    Findings,
    Rates,
    arms_over_p_tilde,
    best_two_rates,
    by_seed,
    curve,
    line,
    over_seeds,
    p_tilde_panel,
    percent,
    split_by_rate,
)
from figures.runs import Job, Run, in_seeds, measurements, with_shared_samples
from figures.scales import Scale
from toprlib.plotting import Line, Panel
from toprlib.report import Estimate

# Name of a set -> its share of positives, and the style of its line.
SETS = {"10% positive": 0.1, "50% positive": 0.5}
STYLES = {"10% positive": "p1", "50% positive": "p3"}


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """Both sets at both learning rates, each with all p~."""
    jobs = []
    for name, share in SETS.items():
        for rate, lr in best_two_rates(rates["topr"]).items():
            columns = {"set": name, "share": share, "rate": rate, "lr": lr, "method": "topr"}
            jobs += arms_over_p_tilde(scale, columns)
    return in_seeds(with_shared_samples(jobs), scale.seeds_for("fig5", seeds))


def realised_share(run: Run) -> dict[str, Sequence[float]]:
    """The share of positives in the summed weights of training, which p~ is meant to set."""
    training = run.results["iterations"][0]["training"]
    return {"realised": [training["realised_share"]]}


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """Accuracy of both sets over p~ at each learning rate."""
    table = measurements(runs, realised_share)
    base = by_seed(table, "correct", ["set", "rate", "p_tilde"], at=0)
    shares = {"base: correct": over_seeds(base["50% positive", "best rate", 1.0])}
    numbers = {}
    own_lr = table.loc[table["rate"] == "best rate", "lr"].iloc[0]
    data = {"p~": list(scale.shares), "own rate": own_lr, "realised share": {}}
    for title, suffix, rows in split_by_rate(table):
        correct = by_seed(rows, "correct", ["set", "p_tilde"])
        realised = by_seed(rows, "realised", ["set", "p_tilde"])
        for what, value in compare(correct).items():
            shares[f"{what}{suffix}"] = value
        # In each seed, over p~.
        alike = correct["10% positive"].corrwith(correct["50% positive"], axis="columns")
        numbers[f"correlation of the two sets over p~{suffix}"] = over_seeds(alike)
        data[title] = {name: curve(correct[name]) for name in SETS}
        data["realised share"][title] = {name: curve(realised[name]) for name in SETS}
    return Findings(data, shares, numbers)


def compare(correct: pd.DataFrame) -> dict[str, Estimate]:
    """Accuracies and their differences; correct: a row for each seed, columns (set, p~)."""
    found = {}
    for name in SETS:
        of_set = correct[name]
        for p, values in of_set.items():
            found[f"{name}, p~ = {p:.0%}"] = over_seeds(values)
        for p in (0.01, 0.8, 1.0):
            if {0.2, p} <= set(of_set):
                found[f"{name}: p~ = 20% - p~ = {p:.0%}"] = over_seeds(of_set[0.2] - of_set[p])
        for p in (0.5, 1.0):
            if p in of_set and len(of_set) > 1:
                gain = best_on_other_seeds(of_set, p)
                found[f"{name}: best p~ on other seeds - p~ = {p:.0%}"] = gain
    # A set's own share needs no baseline, so at p~ = 10% one set has it by sampling, and the other
    # by a baseline; at 50% it is the other way round.
    ten = correct["10% positive"]
    fifty = correct["50% positive"]
    if 0.1 in ten:
        found["p~ = 10% by sampling - by a baseline"] = over_seeds(ten[0.1] - fifty[0.1])
    if 0.5 in ten:
        found["p~ = 50% by sampling - by a baseline"] = over_seeds(fifty[0.5] - ten[0.5])
    return found


def best_on_other_seeds(values: pd.DataFrame, other: float) -> Estimate:
    """In each seed the column that is best on average over the *other* seeds, minus `other`.

    The best of the same seeds would be ahead by chance. values: a row for each seed, at least two.

    >>> best_on_other_seeds(pd.DataFrame({0.1: [1., 5.], 0.2: [2., 3.], 0.5: [0., 4.]}), 0.5).each
    (1.0, -1.0)
    """
    # As the other seeds choose, so no number both chooses and is compared.
    rivals = values.drop(columns=other)
    gains = {}
    for seed in values.index:
        best = rivals.drop(index=seed).mean().idxmax()
        gains[seed] = rivals.loc[seed, best] - values.loc[seed, other]
    return over_seeds(pd.Series(gains))


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """A panel for each learning rate."""
    paper = Line([10, 20], label="paper's\nbest", kind="band")
    drawn = []
    for title in [key for key in data if key.startswith("lr")]:
        is_best = title == f"lr {data['own rate']:g}"
        lines = [paper]
        for name, y in data[title].items():
            lines.append(line(percent(data["p~"]), y, name, STYLES[name]))
        heading = f"{title} (TOPR's best)" if is_best else title
        drawn.append(p_tilde_panel(heading, lines))
    return drawn


FIGURE = Figure(arms, read, panels)
