"""Figure 9: how much questions of each difficulty weigh in the data, at several p~.

Questions are in ten buckets of equal width by the base model's accuracy on them. Ours: accuracy
after training on the hardest, middle and easiest third of the test questions, on the set of
Figure 5 with 50% positives.
"""

from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

import topr
from figures.common import curve, named
from figures.pictures import LEVELS, P_TILDE, new_figure, plot, plot_over_shares
from figures.runs import Rates, Row, Run, measure, over_shares
from figures.scales import Scale
from toprlib.records import Task
from toprlib.settings import Settings
from train_gsm8k import gsm8k_task

TUNED = ("topr",)
P_TILDES = (0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
BUCKETS = 10
THIRDS = ("hardest third", "middle third", "easiest third")


def training_task(settings: Settings) -> Task:
    """The training problems as test problems, to measure how hard they are."""
    task = gsm8k_task(settings)
    return replace(task, test=task.train)


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """Training over p~, and two runs without training that measure how hard questions are."""
    columns = {"arm": "topr", "lr": rates["topr"][0]}
    untrained = {"iterations": 0, "eval_samples": scale["difficulty"]}
    base = {**columns, "p_tilde": 0, "role": "base, test", "changes": untrained}
    of_training = {**base, "role": "base, training", "task": training_task}
    return [*over_shares(scale, 0.5, **columns, role="trained"), base, of_training]


def question_counts(run: Run) -> dict[str, pd.Series]:
    """For each question its correct completions after training, and all; points are questions."""
    samples = [(sample.prompt, sample.reward > 0) for sample in run.test_samples(at_end=True)]
    is_right = pd.DataFrame(samples).groupby(0, sort=False)[1]
    return {"right": is_right.sum(), "samples": is_right.count()}


def read(runs: list[Run], scale: Scale) -> dict:
    """Weights by difficulty, and accuracies of thirds."""
    table = measure(runs, question_counts)
    training = questions_of(table, "base, training")
    weights = {p: relative_weights(training, p) for p in P_TILDES}
    hardest = pd.DataFrame({p: each.iloc[:, :3].sum(axis=1) for p, each in weights.items()})
    shares = named(hardest, "p~ = {:.0%}: weight of the three hardest buckets")
    heavier = hardest[0.1] - hardest[0.8]
    shares["p~ = 10% - p~ = 80%: weight of the three hardest buckets"] = heavier
    data = {f"p~ = {p:.0%}": curve(each) for p, each in weights.items()}
    data["p~"] = scale["shares"]
    test = questions_of(table, "base, test")
    trained = questions_of(table, "trained")
    after = trained["right"] / trained["samples"]
    accuracy = accuracy_by_third(test["right", 0] / test["samples", 0], after)
    for third in THIRDS:
        data[third] = curve(accuracy[third])
        shares |= named(accuracy[third], f"{third}, p~ = {{:.0%}}: correct")
    gap = accuracy["easiest third"] - accuracy["hardest third"]
    if {0.2, 0.8} <= set(gap):
        name = "p~ = 80% - p~ = 20%: easiest third - hardest third, correct"
        shares[name] = gap[0.8] - gap[0.2]
    return {"shares": shares, "numbers": {}, "data": data}


def questions_of(table: pd.DataFrame, role: str) -> pd.DataFrame:
    """`question_counts`: a row for each seed and question, columns (right or samples, p~)."""
    rows = table[(table["role"] == role) & table["metric"].isin(["right", "samples"])]
    return rows.pivot(index=["seed", "point"], columns=["metric", "p_tilde"], values="value")


def relative_weights(questions: pd.DataFrame, p_tilde: float) -> pd.DataFrame:
    """The weight of an average question in each bucket, as a share of the sum over buckets.

    A question weighs the sum of |reward - baseline| over its samples; rewards are -1 and 1, and the
    baseline makes p~ the effective share. Returns a row for each seed, a column for each bucket,
    the hardest first; NaN in empty buckets.
    """
    rows = {}
    for seed, counts in questions.groupby("seed"):
        right = counts["right", 0]
        samples = counts["samples", 0]
        baseline = topr.baseline_for_proportion(right.sum() / samples.sum(), p_tilde)
        weight = right * abs(1 - baseline) + (samples - right) * abs(-1 - baseline)
        # The easiest bucket includes questions that are always answered correctly.
        bucket = (right * BUCKETS // samples).clip(upper=BUCKETS - 1)
        means = weight.groupby(bucket).mean().reindex(range(BUCKETS))
        rows[seed] = means / means.sum()
    return pd.DataFrame.from_dict(rows, orient="index")


def accuracy_by_third(before: pd.Series, after: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Accuracy after training on each third of the questions, by how hard they are for the base.

    before: the base's accuracy, after: that for each p~, both for each (seed, question). Returns
    for each of THIRDS a row for each seed, a column for each p~.
    """
    # Equally hard questions stay in order.
    by_base = before.groupby("seed")
    third = by_base.rank(method="first").sub(1) * len(THIRDS) // by_base.transform("size")
    means = after.groupby(["seed", third.rename("third")]).mean()
    return {name: means.xs(number, level="third") for number, name in enumerate(THIRDS)}


def draw(data: dict) -> Figure:
    """Weights against difficulty, and accuracies of thirds against p~."""
    figure, (weights, thirds) = new_figure(2)
    middles = [100 * (bucket + 0.5) / BUCKETS for bucket in range(BUCKETS)]
    for p, look in zip(P_TILDES, LEVELS, strict=True):
        key = f"p~ = {p:.0%}"
        plot(weights, data[key], (key.replace("p~", P_TILDE), *look[1:]), middles)
    weights.set(title="what an average question weighs", ylim=(0, None))
    weights.set(xlabel="base model's accuracy on a question (%)")
    weights.set(ylabel="weight (%), 95% interval")
    plot_over_shares(thirds, {name: data[name] for name in THIRDS}, LEVELS[::2], data["p~"])
    thirds.set(title="test questions after training")
    return figure
