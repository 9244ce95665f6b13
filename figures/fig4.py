"""Figure 4: TOPR against training on positives only.

Accuracy along the epoch, the majority vote of n samples (maj@n), and how many problems have how
many correct completions; at TOPR's two best learning rates, and each arm at its own best rate.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from figures.common import Values, by_rate, by_seed, curves, minus, named, rates_of_arms
from figures.pictures import LOOKS, new_figure, own_rates, plot, plot_arms, set_ticks
from figures.runs import Rates, Row, Run, at_rates, best_two, measure
from figures.scales import RATE_SEEDS, Scale
from toprlib.evaluation import estimate, majority_is_correct, to_answers

TUNED = ("topr", "positives_only", "sft")
TUNING_SEEDS = RATE_SEEDS
# sft: negatives stay in the batches, with weight 0.
ARMS = {arm: LOOKS[arm] for arm in TUNED} | {"sft": LOOKS["its_positives"]}
LABELS = {arm: look[0] for arm, look in ARMS.items()}
FEW = "problems with at most 4 correct"
STILL_FEW = "few correct before, and still"


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """Each arm at TOPR's two best learning rates, and at its own."""
    own = {arm: rates[arm][0] for arm in TUNED}
    wanted = at_rates(best_two(rates["topr"]), TUNED, own)
    return [{**row, "changes": scale["fig4"]} for row in wanted]


def votes_below(samples: int) -> list[int]:
    """The n of maj@n: below the number of samples, so that each has an interval."""
    return [n for n in (1, 2, 4, 8, 16, 32) if n < samples]


def measure_answers(run: Run) -> dict[str, list[float]]:
    """What the test problems' completions show before and after training."""
    task = run.task(run.settings)
    samples = run.test_samples(at_end=False)
    before = to_answers(samples, task)
    after = to_answers(run.test_samples(at_end=True), task)
    votes = {"base maj@n": [], "maj@n": []}
    for n in votes_below(run.settings.eval_samples):
        for name, answers in (("base maj@n", before), ("maj@n", after)):
            vote = estimate(majority_is_correct, answers, n, run.settings.seed)
            votes[name].append(vote["mean"])
    base = votes["base maj@n"]
    has_few = after.correct.sum(1) <= 4
    still_few = has_few[before.correct.sum(1) <= 4]
    fours = np.ceil(after.correct.sum(1) / 4).astype(int)  # 0, 1 to 4, 5 to 8, ... are correct
    most = -(-run.settings.eval_samples // 4)
    right = [(sample.prompt, sample.completion) for sample in samples if sample.reward > 0]
    return votes | {
        "cardinality": np.bincount(fours, minlength=most + 1) / len(fours),
        FEW: [has_few.mean()],
        STILL_FEW: [still_few.mean()],
        "ahead": [after.correct.mean() - base[-1]],
        "vote": [base[-1] - base[0]],
        "distinct": [len(set(right)) / max(len(right), 1)],
    }


def read(runs: list[Run], scale: Scale) -> dict:
    """Accuracies and votes of each arm at each rate."""
    sizes = votes_below(scale["fig4"]["eval_samples"])
    vote = f"maj@{sizes[-1]}"
    table = measure(runs, measure_answers)
    base = table[(table["rate"] == "best rate") & (table["arm"] == "topr")]
    shares = {
        "base: correct": by_seed(base, "correct", at=0)["topr"],
        f"base: {vote} - pass@1": by_seed(base, "vote")["topr"],
        "base: distinct texts among right ones": by_seed(base, "distinct")["topr"],
    }
    numbers = {}
    data = {"n": sizes, "rates of arms": rates_of_arms(table)}
    for title, suffix, rows in by_rate(table):
        shares |= compare(rows, vote, suffix)
        name = f"samples of TOPR for {vote} of positives only{suffix}"
        numbers[name] = samples_needed(rows, sizes)
        metrics = ("correct", "maj@n", "cardinality")
        data[title] = {metric: curves(rows, metric) for metric in metrics}
        # Before training all arms are the same.
        data[title]["maj@n"]["base"] = curves(base, "base maj@n")["topr"]
    return {"shares": shares, "numbers": numbers, "data": data}


def compare(rows: pd.DataFrame, vote: str, suffix: str) -> Values:
    """Each arm at the end of training, and TOPR minus the others; rows: of one value of `rate`."""
    correct = by_seed(rows, "correct")
    votes = by_seed(rows, "maj@n")
    found = named(correct, f"{{}}: correct at the end{suffix}", LABELS)
    found |= minus(correct, "topr", f"TOPR - {{}}{suffix}", LABELS)
    found |= named(votes, f"{{}}: {vote}{suffix}", LABELS)
    found |= minus(votes, "topr", f"TOPR - {{}}: {vote}{suffix}", LABELS)
    for metric in (FEW, STILL_FEW):
        values = by_seed(rows, metric)
        found |= named(values, f"{{}}: {metric}{suffix}", LABELS)
        fewer = values["positives_only"] - values["topr"]
        found[f"positives only - TOPR: {metric}{suffix}"] = fewer
    ahead = by_seed(rows, "ahead")["topr"]
    return found | {f"TOPR: pass@1 - {vote} of the base{suffix}": ahead}


def samples_needed(rows: pd.DataFrame, sizes: list[int]) -> pd.Series:
    """How many of TOPR's samples must vote to reach the largest vote of positives only.

    In each seed the smallest of `sizes` that suffices; twice the largest if none does.
    """
    votes = rows[(rows["metric"] == "maj@n") & (rows["arm"] == "topr")]
    topr = votes.pivot(index="seed", columns="point", values="value").set_axis(sizes, axis=1)
    suffices = topr.ge(by_seed(rows, "maj@n")["positives_only"], axis=0)  # (seeds, sizes)
    return suffices.idxmax(axis=1).where(suffices.any(axis=1), 2 * sizes[-1])


def draw(data: dict) -> Figure:
    """Accuracy at TOPR's best rate and at own rates; votes and problems at TOPR's best rate."""
    figure, (accuracy, own, votes, problems) = new_figure(4)
    rate = next(key for key in data if key.startswith("lr"))
    bins = range(len(data[rate]["cardinality"]["topr"]["mean"]))
    for arm, look in ARMS.items():
        plot(votes, data[rate]["maj@n"][arm], look, data["n"])
        plot(problems, data[rate]["cardinality"][arm], look, bins)
    plot(votes, data[rate]["maj@n"]["base"], LOOKS["base"], data["n"])
    plot_arms(accuracy, data[rate]["correct"], f"accuracy, {rate}", ARMS)
    title = own_rates(data["rates of arms"], LABELS)
    plot_arms(own, data["own rate"]["correct"], title, ARMS)
    own.sharey(accuracy)
    votes.set(title=f"majority vote, {rate}", xlabel="n", ylabel="maj@n (%), 95% interval")
    set_ticks(votes, data["n"])
    ranges = ["0", *(f"{4 * i + 1}-{4 * i + 4}" for i in bins[:-1])]
    problems.set(title=f"test problems, {rate}", xticks=bins, xticklabels=ranges)
    problems.set(xlabel="correct completions of a problem", ylabel="problems (%), 95% interval")
    return figure
