"""The paper's Figures 1 to 9 and Table 2, and one of our own: for each, the runs it needs and what is read off them.

NAME_arms is a pure function of the scale and of the learning rates: the arms' keys, and the run of each. NAME reads the
figure off the finished runs. STUDIES has them all, paper/panels.py draws them, reproduce.py is the command that makes
one, and results/README.md says what the paper claims and what came out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import topr
from paper.experiments import METHODS, OF_THE_PAPER, Figure, Lab, Rates, Scale, Study, called, of_method, training_task
from paper.methods import at_both_rates, fig1, fig2, fig3, fig4, fig4_arms, variants, variants_rated
from paper.panels import COMPOSITIONS, rows_of_table2
from paper.runs import Finished, Job, Jobs, Measured, series, sharing_samples, texts
from pipeline.compose import rewards_of_groups, share_of_positives
from pipeline.records import Sample
from pipeline.report import Estimate, Table
from tasks.verifier import ACCURACY, CONSTANT, WEIGHTED, check_verifier
from tasks.verifier import run as run_verifier

# ---- sets with chosen shares of positives -----------------------------------------------------------------------


def by_share(scale: Scale, wanted: Sequence[tuple[str, float, float]], **changes: Any) -> Jobs:
    """(method, learning rate, share of positives in the set, effective share p~) -> its run.

    wanted: the first three of these; changes: of the settings.
    """
    base, arms = replace(scale.base, composition="proportion", **{"curve_points": 1, **scale.sets, **changes}), {}
    for method, rate, share in wanted:
        of_share = replace(base, lr=rate, proportion=share, **METHODS[method].changes)
        for p in scale.shares:  # where p~ is the share itself, the baseline would be 0
            settings = replace(of_share, effective_proportion=None if p == share else p)
            arms[method, rate, share, p] = Job(f"share-{method}-{rate:g}-{share:g}-{p:g}", settings, scale.task)
    return sharing_samples(arms)


def by_tenth(run: Finished, name: str) -> list[float]:
    """The mean of a number of metrics.jsonl in each tenth of the training, or at each step if there are fewer."""
    found = np.array([step.get(name, np.nan) for step in run.steps])
    return [float(np.nanmean(part)) for part in np.array_split(found, min(10, len(found)))]


SETS = {"10% positive": 0.1, "50% positive": 0.5}


def neighbours(scale: Scale, rates: Rates) -> list[float]:
    """TOPR's learning rate and its neighbours in the grid."""
    return [rate for rate in scale.rates if 1 / 4 < rate / rates["topr"] < 4]


def fig5_arms(scale: Scale, rates: Rates) -> Jobs:
    """Both sets, at each of these learning rates."""
    return by_share(scale, [("topr", rate, share) for share in SETS.values() for rate in neighbours(scale, rates)])


def fig5(lab: Lab) -> Figure:
    """Two sets of equal size, 10% and 50% positive; a baseline sets the effective share of positives p~.

    At TOPR's learning rate and at its neighbours in the grid, since the best share may move with the rate.
    """
    table, own, p_tildes = lab.table(), lab.rates["topr"], lab.scale.shares
    rates = neighbours(lab.scale, lab.rates)
    ends = {
        (rate, name): {p: table.mean(("topr", rate, share, p)) for p in p_tildes}
        for name, share in SETS.items()
        for rate in rates
    }
    data: dict[str, Any] = {"p~": list(p_tildes), "own rate": own}
    data |= {f"lr {rate:g}": {name: series(ends[rate, name].values()) for name in SETS} for rate in rates}
    shares = {}
    for name, share in SETS.items():
        shares |= {f"{name}, p~ = {p:.0%}": end for p, end in ends[own, name].items()}
        for rate in rates:
            best = max(p_tildes, key=lambda p: ends[rate, name][p].mean)
            shares[f"{name}, lr {rate:g}: highest, at p~ = {best:.0%}"] = ends[rate, name][best]
            if rate == own and 1.0 in p_tildes:
                all_positive = table.gain(("topr", own, share, best), ("topr", own, share, 1.0))
                shares[f"{name}, lr {rate:g}: p~ = {best:.0%} - p~ = 100%"] = all_positive
    for p, sampled, other in ((0.1, 0.1, 0.5), (0.5, 0.5, 0.1)):
        if p in p_tildes:
            gain = table.gain(("topr", own, sampled, p), ("topr", own, other, p))
            shares[f"p~ = {p:.0%} by sampling - by a baseline"] = gain
    return Figure(data, shares)


def fig6_arms(scale: Scale, rates: Rates) -> Jobs:
    """Both methods on the set with 10% positives, over several passes, since a recovery takes time."""
    passes = {"epochs": scale.passes, "curve_points": scale.base.curve_points}
    return by_share(scale, [(method, rate, 0.1) for method, rate in rates.items()], **passes)


def fig6(lab: Lab) -> Figure:
    """TOPR and truncated importance sampling on the set with 10% positives. On MATH: fig6-math."""
    low, p_tildes, names = "log-ratio of positives", lab.scale.shares, called(lab.rates)
    table = lab.table(lambda run: {low: by_tenth(run, "log_ratio_pos_q50")})

    def arm(method: str, p: float) -> tuple[str, float, float, float]:
        return method, lab.rates[method], 0.1, p

    data: dict[str, Any] = {text: series(table.mean(arm(m, p)) for p in p_tildes) for m, text in names.items()}
    data["p~"] = list(p_tildes)
    for p in [p for p in (0.01, 0.1) if p in p_tildes]:
        data[f"p~ = {p:.0%}"] = {what: {m: table.along(arm(m, p), what) for m in names} for what in ("correct", low)}
    shares = {f"{text}, p~ = {p:.0%}": table.mean(arm(m, p)) for m, text in names.items() for p in p_tildes}
    shares |= {f"TOPR - TIS, p~ = {p:.0%}": table.gain(arm("topr", p), arm("tis", p)) for p in p_tildes}
    return Figure(data, shares)


def fig7_arms(scale: Scale, rates: Rates) -> Jobs:
    """(optimiser, share of negatives, gradient norm to clip at, method)."""
    base = replace(scale.base, composition="proportion", epochs=scale.passes, **scale.sets)
    arms = {}
    for optimizer, rate in rates.items():
        of_optimizer = of_method(scale, optimizer, base, rate)
        for negative, clip in zip((0.33, 0.6), scale.clips, strict=True):
            for method in ("topr", "off_policy"):
                changes = {"proportion": 1 - negative, "max_norm": clip, **METHODS[method].changes}
                label = f"fig7-{optimizer}-{negative}-{clip}-{method}"
                arms[optimizer, negative, clip, method] = Job(label, replace(of_optimizer, **changes), scale.task)
    return sharing_samples(arms)


def fig7(lab: Lab) -> Figure:
    """TOPR against plain importance sampling: 33% negative and gradients clipped early, 60% and clipped late.

    With three optimisers, since two divide by the gradient's size; each at the learning rate that is best for TOPR.
    """

    def norms(run: Finished) -> dict[str, Sequence[float]]:
        each = np.array([step["grad_norm"] for step in run.steps])
        found = {"clipped": (each > run.settings.max_norm).mean(), "above": (each > 1).mean(), "largest": each.max()}
        return {"gradient norm": by_tenth(run, "grad_norm")} | {name: [value] for name, value in found.items()}

    table, data, shares, numbers = lab.table(norms), {}, {}, {}
    for arm in fig7_arms(lab.scale, lab.rates):
        optimizer, negative, clip, method = arm
        here = f"{optimizer}, {negative:.0%} negative, clipped at {clip:g}"
        name = f"{here}, {METHODS[method].name}"
        of_here = data.setdefault(f"{here}, lr {lab.rates[optimizer]:g}", {"correct": {}, "gradient norm": {}})
        for what in of_here:
            of_here[what][method] = table.along(arm, what)
        shares[f"{name}: correct"] = table.mean(arm)
        shares[f"{name}: invalid"] = table.mean(arm, "invalid")
        shares[f"{name}: steps clipped"] = table.mean(arm, "clipped")
        if method != "topr":
            shares[f"{here}: TOPR - {METHODS[method].name}"] = table.gain((optimizer, negative, clip, "topr"), arm)
        shares[f"{name}: steps with a norm above 1"] = table.mean(arm, "above")
        numbers[f"{name}: largest gradient norm"] = table.mean(arm, "largest")
        numbers[f"{name}: gradient norm, last tenth"] = table.mean(arm, "gradient norm")
    return Figure(data, shares, numbers)


# ---- several iterations -----------------------------------------------------------------------------------------


def fig8_arms(scale: Scale, rates: Rates) -> Jobs:
    """COMPOSITIONS; and other models of the scale, which draw samples of their own."""
    base = replace(scale.base, lr=rates["topr"], curve_points=1, **scale.iterated)
    control = {"proportion": base.problems / base.examples, "n": base.candidates}
    changes = {key: {**arm.changes, **(control if key == "control" else {})} for key, arm in COMPOSITIONS.items()}
    arms = {key: Job(f"fig8-{key}", replace(base, **changes[key]), scale.task) for key in COMPOSITIONS}
    others = {name: Job(name, replace(base, **of_other), scale.task) for name, of_other in scale.others.items()}
    return {**sharing_samples(arms), **others}


def fig8(lab: Lab) -> Figure:
    """Iterations of sampling and training: uniform, positives only, Anna Karenina, a control. On MATH: fig8-math.

    Five iterations (ours: the paper gives no number), at TOPR's learning rate. The control (ours) has as many samples
    and positives as Anna Karenina's sets and any positives. At the paper's scale with DeepSeek-R1 8B too, and with
    Llama 3 70B, a line that is not trained.
    """
    uniform = [lab.runs["uniform", seed] for seed in lab.seeds]
    iterations, keys = uniform[0].settings.iterations, ("pass@1", f"maj@{uniform[0].settings.k}")

    def level(run: Finished) -> dict[str, Sequence[float]]:
        """A model that is not trained stays what it is for all iterations."""
        return {} if run.settings.iterations else {key: run.measured[key] * (iterations + 1) for key in keys}

    table, data, shares = lab.table(level), {}, {}
    names = {name: name for name in lab.scale.others}
    names = {key: arm.name for key, arm in COMPOSITIONS.items()} | names
    others = [key for key in COMPOSITIONS if key != "anna_karenina"]
    for key in keys:
        data[key] = {name: table.along(name, key) for name in names}
        for i in range(1, iterations + 1):
            after = f"{key} after iteration {i}"
            shares |= {f"{text}: {after}": table.mean(name, key, at=i) for name, text in names.items()}
            for other in others:
                gain = table.gain("anna_karenina", other, key, at=i)
                shares[f"Anna Karenina - {names[other]}: {after}"] = gain
    drawn = [run.results["iterations"][0]["dataset"]["drawn"] for run in uniform]
    to_draw = Estimate.over_seeds(50_000 * counts["samples"] / counts["positive"] for counts in drawn)
    numbers = {"samples to draw for 50,000 positives (uniform sampling trains on any 50,000)": to_draw}
    return Figure(data, shares, numbers, {"iterations": iterations_table(data, shares)})


def iterations_table(data: Mapping[str, Any], shares: Mapping[str, Estimate]) -> Table:
    """What each composition reaches after each iteration, and Anna Karenina sampling minus the others."""
    rows = []
    for key, curves in data.items():
        names = {name: COMPOSITIONS[name].name if name in COMPOSITIONS else name for name in curves}
        rows += [[f"{key}: {text}", *texts(curves[name])] for name, text in names.items()]
        iterations = range(1, len(rows[-1]) - 1)
        for between in [f"Anna Karenina - {names[name]}" for name in COMPOSITIONS if name != "anna_karenina"]:
            gains = [shares[f"{between}: {key} after iteration {i}"].text(100) for i in iterations]
            rows.append([f"{key}: {between} (points)", "", *gains])
    return Table(["", "before", *(f"iteration {i}" for i in iterations)], rows)


# ---- difficulty -------------------------------------------------------------------------------------------------


def fig9_arms(scale: Scale, rates: Rates) -> Jobs:
    """The set with 50% positives of Figure 5; and the base model on the test and on the training questions."""
    base = replace(scale.base, iterations=0, test_samples=scale.difficulty)
    bases = {"test": Job("fig9-test", base, scale.task), "training": Job("fig9", base, training_task)}
    return {**by_share(scale, [("topr", rates["topr"], 0.5)]), **bases}


def fig9(lab: Lab) -> Figure:
    """The weight of questions of each difficulty in the data: ten equally wide buckets by the base model's accuracy.

    Ours: the accuracy on test questions of each difficulty after training, on the set with 50% positives of Figure 5.
    """
    named = {f"p~ = {p:.0%}": p for p in (0.05, 0.1, 0.2, 0.5, 0.8)}
    weights, hard = {}, {}
    for name, p in named.items():
        each = [np.array(weights_of(lab.runs["training", seed], p)) for seed in lab.seeds]
        weights[name] = series(map(Estimate.over_seeds, zip(*each, strict=True)))
        hard[f"{name}: weight of the three hardest buckets"] = Estimate.over_seeds(np.nansum(w[:3]) for w in each)
    data, shares = {**weights, "p~": list(lab.scale.shares)}, hard
    arms = {p: ("topr", lab.rates["topr"], 0.5, p) for p in lab.scale.shares}
    thirds = Measured(
        (p, seed, {"thirds": by_third(lab.runs["test", seed], lab.runs[arm, seed])})
        for p, arm in arms.items()
        for seed in lab.seeds
    )
    for number, third in enumerate(("hardest third", "middle third", "easiest third")):
        accuracy = {p: thirds.mean(p, "thirds", at=number) for p in arms}
        shares |= {f"{third}, p~ = {p:.0%}: correct": value for p, value in accuracy.items()}
        data[third] = series(accuracy.values())
    return Figure(data, shares)


def by_third(base: Finished, trained: Finished) -> list[float]:
    """Accuracy after training on the third of the test questions that is hardest for the base, the next, the last."""
    groups = [rewards_of_groups(run.tested(run.last_step)).values() for run in (base, trained)]
    before, after = (np.array([np.mean([r > 0 for r in rewards]) for rewards in of_run]) for of_run in groups)
    hardest_first = after[np.argsort(before, kind="stable")]
    return [float(third.mean()) for third in np.array_split(hardest_first, 3)]


def weights_of(run: Finished, p: float) -> list[float]:
    """The share of the weight that each bucket has at an effective share p~."""
    samples = run.tested(0)
    weights = weight_by_difficulty(samples, topr.baseline_for_proportion(share_of_positives(samples), p))
    return [weight / np.nansum(weights) for weight in weights]


def weight_by_difficulty(samples: Sequence[Sample], baseline: float, buckets: int = 10) -> list[float]:
    """The weight of an average question of each difficulty in the dataset (Fig. 9): the sum of |reward - baseline|.

    Rewards are -1 and +1, so a correct sample weighs 1 - c and an incorrect one 1 + c. Questions are in equally wide
    buckets by their share of correct samples, the hardest first; NaN where a bucket is empty.

    >>> samples = [Sample(prompt="?", completion="!", reward=reward) for reward in (1.0, -1.0, -1.0, -1.0)]
    >>> weight_by_difficulty(samples, baseline=0.5, buckets=2)
    [5.0, nan]
    """
    weights: list[list[float]] = [[] for _ in range(buckets)]
    for of_question in rewards_of_groups(samples).values():
        correct = sum(reward > 0 for reward in of_question)
        bucket = min(correct * buckets // len(of_question), buckets - 1)
        weights[bucket].append(sum(abs(reward - baseline) for reward in of_question))
    return [sum(bucket) / len(bucket) if bucket else math.nan for bucket in weights]


# ---- Table 2 ----------------------------------------------------------------------------------------------------


def table2_arms(scale: Scale, rates: Rates) -> Jobs:
    """A run for each base verifier."""
    return {
        Path(model).name: Job(
            f"table2-{Path(model).name}",
            replace(scale.verifier, model=model),
            scale.task,
            run=verify,
            check=check_verifier,
        )
        for model in (scale.verifier.model, *scale.other_verifiers)
    }


def verify(job: Job) -> None:
    """Make the verifier's run of a job; its settings name its task."""
    run_verifier(job.settings)


def table2(lab: Lab) -> Figure:
    """A generative verifier before and after TOPR, and weighted self-consistency with its verdicts as weights."""
    data = {name: [lab.runs[name, s].results for s in lab.seeds] for name in table2_arms(lab.scale, lab.rates)}
    shares = {}
    for name, found in data.items():
        table = rows_of_table2(found)
        for row, columns in found[0]["table2"].items():
            shares |= {f"{name}, {row}: {column}": table.mean(row, column) for column in columns}
        shares[f"{name}, TOPR - base: {ACCURACY}"] = table.gain("topr", "base", ACCURACY)
        shares[f"{name}, TOPR - constant verdict: {ACCURACY}"] = table.gain("topr", CONSTANT, ACCURACY)
        for text, row in (("TOPR", "topr"), ("base", "base")):
            shares[f"{name}, {text} - no verifier: {WEIGHTED}"] = table.gain(row, "no verifier", WEIGHTED)
    return Figure(data, shares)


# ---- all of them ------------------------------------------------------------------------------------------------


STUDIES = {
    "fig1": Study(fig1, at_both_rates, lambda _: list(METHODS)),
    "fig2": Study(fig2),
    "fig3": Study(fig3, at_both_rates, lambda _: OF_THE_PAPER),
    "fig4": Study(fig4, fig4_arms, lambda _: ["topr"]),
    "fig5": Study(fig5, fig5_arms, lambda _: ["topr"]),
    "fig6": Study(fig6, fig6_arms, lambda _: ["topr", "tis"]),
    "fig7": Study(fig7, fig7_arms, lambda scale: list(scale.optimizers)),
    "fig8": Study(fig8, fig8_arms, lambda _: ["topr"]),
    "fig9": Study(fig9, fig9_arms, lambda _: ["topr"]),
    "table2": Study(table2, table2_arms),
    "variants": Study(variants, lambda s, rates: at_both_rates(s, rates, list(rates)), variants_rated),
}
