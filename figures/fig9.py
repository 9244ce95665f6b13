"""Figure 9: how much questions of each difficulty weigh in the data, at several p~.

Questions are in ten buckets of equal width by the base model's accuracy on them. Ours: accuracy
after training on the hardest, middle and easiest third of the test questions, on the set of
Figure 5 with 50% positives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

import topr
from figures.common import (
    METHODS,
    P_TILDE,
    Figure,
    Findings,
    Rates,
    arms_over_p_tilde,
    curve,
    line,
    make_job,
    over_seeds,
    p_tilde_panel,
    percent,
)
from figures.runs import Job, Run, in_seeds, measurements, with_shared_samples
from figures.scales import Scale, training_task
from toprlib.plotting import Panel

P_TILDES = (0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
BUCKETS = 10
THIRDS = ("hardest third", "middle third", "easiest third")
STYLES = {"hardest third": "p1", "middle third": "p3", "easiest third": "p5"}


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """Training over p~, and two runs without training that measure how hard questions are."""
    lr = rates["topr"][0]
    columns = {"role": "trained", "method": "topr", "lr": lr, "share": 0.5}
    trained = with_shared_samples(arms_over_p_tilde(scale, columns))
    untrained = {"iterations": 0, "eval_samples": scale.difficulty}
    test = make_job(scale, {"role": "base, test"}, "fig9-test", METHODS["topr"], **untrained)
    training = replace(test, columns={"role": "base, training"}, label="fig9", task=training_task)
    return in_seeds([*trained, test, training], seeds)


def question_counts(run: Run) -> dict[str, Sequence[float]]:
    """For each question its correct completions after training, and all of them.

    The points of these two metrics are questions.
    """
    samples = run.test_samples(run.last_step)
    rewards = pd.DataFrame({"prompt": [sample.prompt for sample in samples]})
    rewards["is_right"] = [sample.reward > 0 for sample in samples]
    questions = rewards.groupby("prompt", sort=False)["is_right"]
    return {"right": questions.sum().tolist(), "samples": questions.count().tolist()}


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """Weights by difficulty, and accuracies of thirds."""
    table = measurements(runs, question_counts)
    training = questions_of(table[table["role"] == "base, training"])
    data = {}
    shares = {}
    hardest = {}
    for p in P_TILDES:
        weights = relative_weights(training, p)
        hardest[p] = weights.iloc[:, :3].sum(axis="columns")
        data[f"p~ = {p:.0%}"] = curve(weights)
        shares[f"p~ = {p:.0%}: weight of the three hardest buckets"] = over_seeds(hardest[p])
    heavier = over_seeds(hardest[0.1] - hardest[0.8])
    shares["p~ = 10% - p~ = 80%: weight of the three hardest buckets"] = heavier

    test = questions_of(table[table["role"] == "base, test"])
    trained = questions_of(table[table["role"] == "trained"], "p_tilde")
    accuracy = accuracy_by_third(
        test["right"] / test["samples"], trained["right"] / trained["samples"]
    )
    data["p~"] = list(scale.shares)
    for third in THIRDS:
        of_third = accuracy[third]
        data[third] = curve(of_third)
        for p, values in of_third.items():
            shares[f"{third}, p~ = {p:.0%}: correct"] = over_seeds(values)
    gap = accuracy["easiest third"] - accuracy["hardest third"]
    if {0.2, 0.8} <= set(gap):
        name = "p~ = 80% - p~ = 20%: easiest third - hardest third, correct"
        shares[name] = over_seeds(gap[0.8] - gap[0.2])
    return Findings(data, shares)


def questions_of(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """`question_counts` of some runs: a row for each seed and question, columns right and samples.

    by: more columns that distinguish the runs; then each of the two has a column for each of
    their values.
    """
    counts = rows[rows["metric"].isin(["right", "samples"])]
    index = ["seed", "point"]
    return counts.pivot(index=index, columns=["metric", *by], values="value").rename_axis(
        index={"point": "question"}
    )


def weight_by_difficulty(
    right: pd.Series | Sequence[int], samples: pd.Series | int, baseline: float
) -> pd.Series:
    """The weight of an average question in each of BUCKETS, the hardest first; NaN in empty ones.

    right: how many of each question's samples are correct. samples: how many there are. A question
    weighs the sum of |reward - baseline| over its samples; rewards are -1 and 1.

    >>> weights = weight_by_difficulty([1, 1, 4], samples=4, baseline=0.5)
    >>> weights.dropna().to_dict()  # 1 * 0.5 + 3 * 1.5 with one of four correct
    {2: 5.0, 9: 2.0}
    """
    right = pd.Series(right)
    wrong = samples - right
    weight = right * abs(1 - baseline) + wrong * abs(-1 - baseline)
    # The easiest bucket includes questions that are always answered correctly.
    bucket = (right * BUCKETS // samples).clip(upper=BUCKETS - 1)
    return weight.groupby(bucket).mean().reindex(range(BUCKETS))


def relative_weights(questions: pd.DataFrame, p_tilde: float) -> pd.DataFrame:
    """`weight_by_difficulty` as a share of the sum over buckets, if p~ is the effective share.

    questions: see `questions_of`. Returns a row for each seed and a column for each bucket.
    """
    by_seed = {}
    for seed, each in questions.groupby("seed"):
        positives = each["right"].sum() / each["samples"].sum()
        baseline = topr.baseline_for_proportion(positives, p_tilde)
        weights = weight_by_difficulty(each["right"], each["samples"], baseline)
        by_seed[seed] = weights / weights.sum()
    return pd.DataFrame.from_dict(by_seed, orient="index")


def accuracy_by_third(before: pd.Series, after: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Accuracy after training on each third of the questions, by how hard they are for the base.

    before: the base model's accuracy for each (seed, question). after: that after training, with
    a column for each p~. Returns for each of THIRDS a row for each seed, a column for each p~.
    """
    # Equally hard questions stay in order; array_split would make the same thirds.
    by_base = before.groupby("seed")
    third = by_base.rank(method="first").sub(1) * len(THIRDS) // by_base.transform("size")
    means = after.groupby(["seed", third.rename("third")]).mean()
    return {name: means.xs(number, level="third") for number, name in enumerate(THIRDS)}


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """Weights against difficulty, and accuracies of thirds against p~."""
    middles = [100 * (i + 0.5) / BUCKETS for i in range(BUCKETS)]
    weights = []
    for key, y in data.items():
        if key.startswith("p~ = "):
            weights.append(line(middles, y, key.replace("p~", P_TILDE)))
    highest = max(np.nanmax(one.y) for one in weights)
    x = "base model's accuracy on a question (%)"
    y_label = "weight of a question (%), 95% interval"
    title = "what an average question weighs"
    thirds = [line(percent(data["p~"]), data[name], name, STYLES[name]) for name in THIRDS]
    return [
        Panel(title, x, y_label, weights, {"ylim": (0, 1.1 * float(highest))}),
        p_tilde_panel("test questions after training", thirds),
    ]


FIGURE = Figure(arms, read, panels)
