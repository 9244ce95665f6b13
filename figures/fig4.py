"""Figure 4: TOPR against training on positives only. On MATH: fig4-math.

Accuracy along the epoch, the majority vote of n samples (maj@n), and how many problems have how
many correct completions; at TOPR's two best learning rates, and each arm at its own best rate.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from figures.common import (
    CORRECT,
    EPOCH,
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
    curve,
    curves,
    different_rates,
    evenly,
    over_seeds,
    rates_of_arms,
    split_by_rate,
    with_rates,
)
from figures.runs import Job, Run, in_seeds, measurements
from figures.scales import Scale
from toprlib.plotting import Panel, Style
from toprlib.report import Estimate

# By their names in TUNED.
ARMS = {
    "topr": METHODS["topr"],
    "positives_only": POSITIVES_ONLY,
    # Negatives stay in the batches, with weight 0.
    "sft": Arm("positives, as many steps", "p5", {"method": "sft"}),
}
BASE = Arm("base", Style("#6E6E6E", (0, (2, 1)), "*"))

# A problem has few correct completions if at most this many are correct.
FEW = 4
WITH_FEW = f"problems with at most {FEW} correct"
STILL_FEW = "few correct before, and still"


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """Each arm at TOPR's two best learning rates, and at its own."""
    own_rates = {name: rates[name][0] for name in ARMS}
    jobs = arms_at_best_rates(scale, "fig4", ARMS, rates["topr"], own_rates, **scale.tested)
    return in_seeds(jobs, scale.seeds_for("fig4", seeds))


def vote_sizes(num_samples: int) -> list[int]:
    """The n of maj@n: below the number of samples, so that each has an interval.

    >>> vote_sizes(24)
    [1, 2, 4, 8, 16]
    """
    return [n for n in (1, 2, 4, 8, 16, 32) if n < num_samples]


def measure_answers(run: Run) -> dict[str, Sequence[float]]:
    """What the test problems' completions show before and after training."""
    sizes = vote_sizes(run.settings.eval_samples)
    before = run.answers(0)
    after = run.answers(run.last_step)
    base_votes = [run.majority_accuracy(before, n) for n in sizes]
    had_few = before.correct.sum(1) <= FEW
    has_few = after.correct.sum(1) <= FEW
    right = [(one.prompt, one.completion) for one in run.test_samples(0) if one.reward > 0]
    return {
        "maj@n": [run.majority_accuracy(after, n) for n in sizes],
        "base maj@n": base_votes,
        "cardinality": by_cardinality(after.correct),
        "few": [has_few.mean()],
        "still few": [has_few[had_few].mean()],
        "ahead": [after.correct.mean() - base_votes[-1]],
        "vote": [base_votes[-1] - base_votes[0]],
        "distinct": [len(set(right)) / max(len(right), 1)],
    }


def by_cardinality(correct: np.ndarray) -> list[float]:
    """The share of problems with 0, 1 to 4, 5 to 8, ... correct completions; correct: (Q, N) bool.

    >>> by_cardinality(np.array([[False] * 5, [True] * 5]))
    [0.5, 0.0, 0.5]
    """
    problems, completions = correct.shape
    # 0, then one bin for every four.
    bins = np.ceil(correct.sum(1) / 4).astype(int)
    highest = -(-completions // 4)
    return (np.bincount(bins, minlength=highest + 1) / problems).tolist()


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """Accuracies and votes of each arm at each rate."""
    sizes = vote_sizes(scale.tested["eval_samples"])
    table = measurements(runs, measure_answers)
    at_best = table[(table["rate"] == "best rate") & (table["arm"] == "topr")]
    shares = {
        "base: correct": over_seeds(by_seed(at_best, "correct", "arm", at=0)["topr"]),
        f"base: maj@{sizes[-1]} - pass@1": over_seeds(by_seed(at_best, "vote", "arm")["topr"]),
        "base: distinct texts among right ones": over_seeds(
            by_seed(at_best, "distinct", "arm")["topr"]
        ),
    }
    numbers = {}
    lines = {}
    for title, suffix, rows in split_by_rate(table):
        for what, value in compare(rows, f"maj@{sizes[-1]}").items():
            shares[f"{what}{suffix}"] = value
        needed = samples_needed(rows, sizes)
        numbers[f"samples of TOPR for maj@{sizes[-1]} of positives only{suffix}"] = needed
        lines[title] = lines_at_rate(rows)
    # Before training all arms are the same.
    base = at_best[at_best["metric"] == "base maj@n"]
    base_votes = curve(base.pivot(index="seed", columns="point", values="value"))
    for of_rate in lines.values():
        of_rate["maj@n"]["base"] = base_votes
    data = {"n": sizes, "rates of arms": rates_of_arms(table), **lines}
    return Findings(data, shares, numbers)


def compare(rows: pd.DataFrame, largest_vote: str) -> dict[str, Estimate]:
    """Each arm at the end of training, and TOPR minus the others; rows: of one value of `rate`."""
    correct = by_seed(rows, "correct", "arm")
    vote = by_seed(rows, "maj@n", "arm")
    few = by_seed(rows, "few", "arm")
    still_few = by_seed(rows, "still few", "arm")
    found = {}
    for name, arm in ARMS.items():
        found[f"{arm.name}: correct at the end"] = over_seeds(correct[name])
        found[f"{arm.name}: {largest_vote}"] = over_seeds(vote[name])
        found[f"{arm.name}: {WITH_FEW}"] = over_seeds(few[name])
        found[f"{arm.name}: {STILL_FEW}"] = over_seeds(still_few[name])
    for name in ("positives_only", "sft"):
        pair = f"TOPR - {ARMS[name].name}"
        found[pair] = over_seeds(correct["topr"] - correct[name])
        found[f"{pair}: {largest_vote}"] = over_seeds(vote["topr"] - vote[name])
    for what, values in ((WITH_FEW, few), (STILL_FEW, still_few)):
        fewer = values["positives_only"] - values["topr"]
        found[f"positives only - TOPR: {what}"] = over_seeds(fewer)
    ahead = by_seed(rows, "ahead", "arm")["topr"]
    found[f"TOPR: pass@1 - {largest_vote} of the base"] = over_seeds(ahead)
    return found


def samples_needed(rows: pd.DataFrame, sizes: Sequence[int]) -> Estimate:
    """How many of TOPR's samples must vote to reach the largest vote of positives only.

    In each seed the smallest of `sizes` that suffices; twice the largest if none does.
    """
    votes = rows[rows["metric"] == "maj@n"]
    topr = votes[votes["arm"] == "topr"].pivot(index="seed", columns="point", values="value")
    wanted = by_seed(rows, "maj@n", "arm")["positives_only"]
    # A row for each seed, a column for each size: whether a vote of so many suffices.
    suffices = topr.set_axis(sizes, axis="columns").ge(wanted, axis="index")
    needed = suffices.idxmax(axis="columns").where(suffices.any(axis="columns"), 2 * sizes[-1])
    return over_seeds(needed)


def lines_at_rate(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The lines of the three panels at one value of `rate`, by metric and arm."""
    lines = {}
    for metric in ("correct", "maj@n", "cardinality"):
        lines[metric] = curves(rows[rows["metric"] == metric], "arm")
    return lines


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """A row for each metric; columns for TOPR's best rate, and for each arm at its own.

    If all arms have the same rate, the second column is TOPR's second best rate.
    """
    best, *others = [title for title in data if title.startswith("lr")]
    own_rates = different_rates(data)
    columns = {best: ARMS}
    if own_rates:
        columns["own rate"] = with_rates(ARMS, own_rates)
    else:
        columns |= dict.fromkeys(others, ARMS)
    accuracy = []
    votes = []
    problems = []
    for title, named in columns.items():
        lines = data[title]
        accuracy.append(accuracy_panel(title, lines["correct"], named))
        votes.append(votes_panel(title, lines["maj@n"], named, data["n"]))
        problems.append(problems_panel(title, lines["cardinality"], named))
    return [*accuracy, *votes, *problems]


def accuracy_panel(title: str, lines: Mapping[str, Any], named: Mapping[str, Arm]) -> Panel:
    """Accuracy along the epoch."""
    drawn = [arm_line(evenly(y), y, named[name]) for name, y in lines.items()]
    return Panel(f"accuracy, {title}", EPOCH, CORRECT, drawn)


def votes_panel(
    title: str, lines: Mapping[str, Any], named: Mapping[str, Arm], sizes: Sequence[int]
) -> Panel:
    """maj@n against n."""
    named = {**named, "base": BASE}
    drawn = [arm_line(sizes, y, named[name]) for name, y in lines.items()]
    axis = {"xscale": "log", "xticks": sizes, "xticklabels": sizes}
    return Panel(f"self-consistency, {title}", "n", "maj@n (%), 95% interval", drawn, axis)


def problems_panel(title: str, lines: Mapping[str, Any], named: Mapping[str, Arm]) -> Panel:
    """How many problems have how many correct completions."""
    bins = range(len(lines["topr"]["mean"]))
    drawn = [arm_line(bins, y, named[name]) for name, y in lines.items()]
    labels = ["0", *(f"{4 * i + 1}-{4 * i + 4}" for i in bins[:-1])]
    axis = {"xticks": bins, "xticklabels": labels}
    x = "correct completions of a problem"
    return Panel(f"test problems, {title}", x, "problems (%), 95% interval", drawn, axis)


FIGURE = Figure(arms, read, panels, tuned=lambda scale: tuple(ARMS), rate_seeds=RATE_SEEDS)
