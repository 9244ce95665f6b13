"""Figure 8: iterations of sampling and training, with several compositions of the training set.

Three iterations on the laptop and five at the paper's scale (ours), at TOPR's two best learning
rates, and each arm at the best rate of its method. Two arms have positives alone: as many as
`uniform` has, in as many steps; and as many samples as `uniform` has. At the paper's scale
DeepSeek-R1 8B too, and Llama 3 70B, a line that is not trained; these models sample by themselves.
On MATH: fig8-math.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from figures.common import (
    METHODS,
    POSITIVES_ONLY,
    RATE_SEEDS,
    Arm,
    Figure,
    Findings,
    Rates,
    arm_line,
    arms_at_best_rates,
    by_seed,
    curves,
    different_rates,
    make_job,
    over_seeds,
    rates_of_arms,
    split_by_rate,
    with_rates,
)
from figures.runs import Job, Run, in_seeds, measurements
from figures.scales import Scale
from toprlib.plotting import Panel, Style
from toprlib.report import Estimate

ARMS = {
    "uniform": Arm("uniform", "topr", {"composition": "uniform"}),
    "its_positives": Arm(
        "positives, as many steps", "p5", {"composition": "uniform", "method": "sft"}
    ),
    "positives_only": POSITIVES_ONLY,
    "anna_karenina": Arm(
        "Anna Karenina", Style("#882255", (0, (5, 1)), "s"), {"composition": "anna_karenina"}
    ),
}
# Arm -> the name in TUNED whose best learning rate is its own.
TUNED_AS = {
    "uniform": "topr",
    "its_positives": "sft",
    "positives_only": "positives_only",
    "anna_karenina": "topr",
}
PAIRS = (
    ("anna_karenina", "uniform"),
    ("anna_karenina", "its_positives"),
    ("anna_karenina", "positives_only"),
    ("uniform", "its_positives"),
    ("uniform", "positives_only"),
)


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """Each arm at TOPR's two best learning rates, and at its own; other models at TOPR's best."""
    iterated = {"evals_per_epoch": 1, **scale.iterated}
    own_rates = {name: rates[tuned_as][0] for name, tuned_as in TUNED_AS.items()}
    jobs = arms_at_best_rates(scale, "fig8", ARMS, rates["topr"], own_rates, **iterated)
    lr = rates["topr"][0]
    for name, changes in scale.others.items():
        columns = {"rate": "best rate", "lr": lr, "arm": name}
        wanted = {**iterated, "lr": lr, **changes}
        jobs.append(make_job(scale, columns, name, METHODS["topr"], **wanted))
    return in_seeds(jobs, scale.seeds_for("fig8", seeds))


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """pass@1 and the majority vote over iterations."""
    settings = runs[0].settings
    metrics = ("pass@1", f"maj@{settings.k}")
    points = settings.iterations + 1

    def untrained(run: Run) -> dict[str, Sequence[float]]:
        """A model that is not trained stays what it is for all iterations."""
        if run.settings.iterations > 0:
            return {}
        before = run.results["before"]
        return {metric: [before[metric]["mean"]] * points for metric in metrics}

    table = measurements(runs, untrained)
    base = by_seed(table, "pass@1", ["rate", "arm"], at=0)
    shares = {"base: correct": over_seeds(base["best rate", "uniform"])}
    data = {"rates of arms": rates_of_arms(table)}
    for title, suffix, rows in split_by_rate(table):
        for metric in metrics:
            of_metric = rows[rows["metric"] == metric]
            data[f"{metric}, {title}"] = curves(of_metric, "arm")
            for what, value in {**differences(of_metric), **levels(of_metric)}.items():
                shares[f"{what}{suffix}"] = value
    return Findings(data, shares)


def differences(rows: pd.DataFrame) -> dict[str, Estimate]:
    """One arm minus another after each iteration; rows: of one metric and value of `rate`."""
    metric = rows["metric"].iloc[0]
    values = rows.pivot(index="seed", columns=["arm", "point"], values="value")
    found = {}
    for one, other in PAIRS:
        # A row for each seed, a column for each iteration but 0, which is before training.
        gain = (values[one] - values[other]).drop(columns=0)
        name = f"{ARMS[one].name} - {ARMS[other].name}: {metric}"
        for iteration, each in gain.items():
            found[f"{name} after iteration {iteration}"] = over_seeds(each)
        # Later there are too few problems that are not yet solved.
        first_three = gain.loc[:, :3].mean(axis="columns")
        first = gain.columns[0]
        last = gain.columns[-1]
        found[f"{name}, mean of iterations 1 to 3"] = over_seeds(first_three)
        found[f"{name}, last iteration"] = over_seeds(gain[last])
        found[f"{name}, last iteration - first"] = over_seeds(gain[last] - gain[first])
    return found


def levels(rows: pd.DataFrame) -> dict[str, Estimate]:
    """Each arm after each iteration; rows: of one metric and value of `rate`."""
    found = {}
    after = rows[rows["point"] > 0]
    for (name, iteration), of_arm in after.groupby(["arm", "point"], sort=False):
        label = ARMS[name].name if name in ARMS else name
        metric = of_arm["metric"].iloc[0]
        found[f"{label}: {metric} after iteration {iteration}"] = over_seeds(of_arm["value"])
    return found


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """A row for each learning rate, a column for each metric; own rates only if they differ."""
    own_rates = different_rates(data)
    drawn = []
    for title, of_arms in data.items():
        metric, _, rate = title.partition(", ")
        named = ARMS
        if rate == "own rate" and own_rates:
            named = with_rates(ARMS, own_rates)
        elif not rate.startswith("lr"):
            continue
        lines = []
        for name, y in of_arms.items():
            iterations = range(len(y["mean"]))
            lines.append(arm_line(iterations, y, named.get(name, Arm(name))))
        ylabel = f"{metric} (%), 95% interval"
        drawn.append(Panel(title, "iterations", ylabel, lines, {"xticks": lines[0].x}))
    return drawn


TUNED_NAMES = tuple(dict.fromkeys(TUNED_AS.values()))
FIGURE = Figure(arms, read, panels, tuned=lambda scale: TUNED_NAMES, rate_seeds=RATE_SEEDS)
