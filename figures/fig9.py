"""Figure 9: how much questions of each difficulty weigh in the data, at several p~.

Questions are in ten buckets of equal width by the base model's accuracy on them.
"""

from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

import topr
from figures.common import curve, named
from figures.pictures import LEVELS, P_TILDE, new_figure, plot
from figures.runs import Rates, Row, Run, measure
from figures.scales import Scale
from toprlib.records import Task
from toprlib.settings import Settings
from train_gsm8k import gsm8k_task

TUNED = ()
P_TILDES = (0.05, 0.1, 0.2, 0.5, 0.8, 1.0)
BUCKETS = 10


def training_task(settings: Settings) -> Task:
    """The training problems as test problems, to measure how hard they are."""
    task = gsm8k_task(settings)
    return replace(task, test=task.train)


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """A run without training, which measures how hard questions are."""
    untrained = {"iterations": 0, "eval_samples": scale["difficulty"]}
    return [{"arm": "base", "lr": 1e-5, "task": training_task, "changes": untrained}]  # lr: unused


def question_counts(run: Run) -> dict[str, pd.Series]:
    """For each question its correct completions, and all; points are questions."""
    samples = [(sample.prompt, sample.reward > 0) for sample in run.test_samples(at_end=False)]
    is_right = pd.DataFrame(samples).groupby(0, sort=False)[1]
    return {"right": is_right.sum(), "samples": is_right.count()}


def read(runs: list[Run], scale: Scale) -> dict:
    """Weights by difficulty."""
    table = measure(runs, question_counts)
    counts = table[table["metric"].isin(["right", "samples"])]
    questions = counts.pivot(index=["seed", "point"], columns="metric", values="value")
    weights = {p: relative_weights(questions, p) for p in P_TILDES}
    hardest = pd.DataFrame({p: each.iloc[:, :3].sum(axis=1) for p, each in weights.items()})
    shares = named(hardest, "p~ = {:.0%}: weight of the three hardest buckets")
    heavier = hardest[0.1] - hardest[0.8]
    shares["p~ = 10% - p~ = 80%: weight of the three hardest buckets"] = heavier
    data = {f"p~ = {p:.0%}": curve(each) for p, each in weights.items()}
    return {"shares": shares, "numbers": {}, "data": data}


def relative_weights(questions: pd.DataFrame, p_tilde: float) -> pd.DataFrame:
    """The weight of an average question in each bucket, as a share of the sum over buckets.

    A question weighs the sum of |reward - baseline| over its samples; rewards are -1 and 1, and the
    baseline makes p~ the effective share. Returns a row for each seed, a column for each bucket,
    the hardest first; NaN in empty buckets.
    """
    rows = {}
    for seed, counts in questions.groupby("seed"):
        right = counts["right"]
        samples = counts["samples"]
        baseline = topr.baseline_for_proportion(right.sum() / samples.sum(), p_tilde)
        weight = right * abs(1 - baseline) + (samples - right) * abs(-1 - baseline)
        # The easiest bucket includes questions that are always answered correctly.
        bucket = (right * BUCKETS // samples).clip(upper=BUCKETS - 1)
        means = weight.groupby(bucket).mean().reindex(range(BUCKETS))
        rows[seed] = means / means.sum()
    return pd.DataFrame.from_dict(rows, orient="index")


def draw(data: dict) -> Figure:
    """Weights against difficulty."""
    figure, [axes] = new_figure(1)
    middles = [100 * (bucket + 0.5) / BUCKETS for bucket in range(BUCKETS)]
    for (key, line), look in zip(data.items(), LEVELS, strict=True):
        plot(axes, line, (key.replace("p~", P_TILDE), *look[1:]), middles)
    axes.set(title="what an average question weighs", ylim=(0, None))
    axes.set(xlabel="base model's accuracy on a question (%)", ylabel="weight (%), 95% interval")
    return figure
