"""The paper's Figures 1 to 9 and Table 2, and one of our own: for each, the runs it needs and what is read off them.

A figure is a function of a `Lab`, which makes the runs. It asks for all of its runs before it reads one, so that they
can be planned; where some depend on others' results, as on the laptop, these can not. Its docstring says what the paper
claims. reproduce.py is the command that makes a figure, results/README.md says what came out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

import topr
from paper.experiments import METHODS, OF_THE_PAPER, Lab, called, last_task, training_task
from paper.sweep import Finished, Job, OverSeeds, over_seeds
from pipeline.baselines import ppo_loss
from pipeline.evaluation import collect, maj_at_k
from pipeline.plots import VARIANTS_DRAWN, Line, Panel
from pipeline.records import Outcome, Sample, Task, to_lines, write_file
from pipeline.runtime.processes import on_rank_zero
from pipeline.selection import mean_rewards, rewards_of_groups, share_of_positives
from pipeline.settings import Settings
from tasks.verifier import ACCURACY, COLUMNS, WEIGHTED, check_verifier, to_panel
from tasks.verifier import run as run_verifier

# ---- what is read off runs --------------------------------------------------------------------------------------

Series = dict[str, list[float | None]]


def series(columns: Sequence[Sequence[float]]) -> Series:
    """A line of a figure: mean and standard error over seeds at each point; columns: a list of values for each seed.

    >>> series([[1.0, 2.0], [3.0, 2.0]])
    {'mean': [2.0, 2.0], 'se': [1.0, 0.0]}
    """
    points = [over_seeds(values) for values in zip(*columns, strict=True)]
    return {"mean": [point.mean for point in points], "se": [point.se for point in points]}


def along(runs: Sequence[Finished], name: str) -> Series:
    """The share of an outcome along the epoch."""
    return series([[point[name] for point in run.curve] for run in runs])


def at_end(runs: Sequence[Finished], name: str = "correct") -> OverSeeds:
    """The share of an outcome, or the mean of an estimate such as maj@16, after the last iteration."""
    values = [run.results["iterations"][-1]["after"][name] for run in runs]
    return over_seeds(value["mean"] if isinstance(value, dict) else value for value in values)


def difference(one: OverSeeds, other: OverSeeds) -> OverSeeds:
    """one - other, seed by seed: runs of a seed share their samples.

    >>> difference(over_seeds([2.0, 3.0]), over_seeds([1.0, 2.0]))
    OverSeeds(mean=1.0, se=0.0, each=[1.0, 1.0])
    """
    return over_seeds(a - b for a, b in zip(one.each, other.each, strict=True))


def line(x: Sequence[float], y: Series, label: str, style: str = "", scale: float = 100) -> Line:
    """A line with its interval of 2 standard errors, in percent."""
    half_width = None if None in y["se"] else [2 * scale * se for se in y["se"]]
    return Line(x, [scale * mean for mean in y["mean"]], label, style, half_width=half_width)


EPOCH, CORRECT = "share of the epoch (%)", "correct (%), ± 2 SE"


def epoch(y: Series) -> list[float]:
    """The position of each point of a curve along the epoch, in percent."""
    return [100 * i / (len(y["mean"]) - 1) for i in range(len(y["mean"]))]


class Figure(NamedTuple):
    """A picture, all its numbers (data), and those worth a sentence: shares in [0, 1], and other numbers."""

    panels: list[Panel]
    data: dict[str, Any]
    shares: dict[str, OverSeeds]
    numbers: Mapping[str, OverSeeds] = MappingProxyType({})


# ---- the figures ------------------------------------------------------------------------------------------------


def fig1(lab: Lab) -> Figure:
    """Test accuracy over one epoch.

    Paper: all at one learning rate, naive REINFORCE first rises and then collapses, PPO stops improving, DPO is better,
    and TOPR is best. Here: all at TOPR's best rate, and each at its own. TIS, plain IS, SFT on positives and three
    neighbours (ours) are added. On the laptop DPO makes about twice as many steps.
    """
    rates = lab.rates(list(METHODS))
    one_rate = dict.fromkeys(OF_THE_PAPER, rates["topr"])
    own, same = lab.methods(rates), lab.methods(one_rate)
    names, same_names = called(rates), called(one_rate)
    curves = {name: along(own[name], "correct") for name in own}
    same_curves = {name: along(same[name], "correct") for name in same}

    def panel(title: str, chosen: Sequence[str], curves: Mapping[str, Series], names: Mapping[str, str]) -> Panel:
        drawn = [line(epoch(curves[name]), curves[name], names[name], METHODS[name].style) for name in chosen]
        return Panel(title, EPOCH, CORRECT, drawn, {"ylim": (-3, 100)})

    panels = [
        panel("TOPR's learning rate for all", OF_THE_PAPER, same_curves, same_names),
        panel("each at its own learning rate", OF_THE_PAPER, curves, names),
        panel("other bounds (Table 1)", ("topr", "tis", "off_policy", "sft"), curves, names),
        panel("neighbours (ours)", ("topr", "group", "asymre", "kl"), curves, names),
    ]
    ends = {name: at_end(own[name]) for name in own}
    shares = {f"{same_names[name]}: correct at the end": at_end(same[name]) for name in same}
    shares |= {f"{names[name]}: correct at the end": ends[name] for name in own}
    shares |= {f"TOPR - {names[n]}": difference(ends["topr"], ends[n]) for n in own if n != "topr"}
    steps = {name: _last_step(own[name][0]) for name in own}
    return Figure(panels, {"own rate": curves, "one rate": same_curves, "steps": steps}, shares)


def fig2(lab: Lab) -> Figure:
    """TOPR's objective with a+ = 1, b+ = 1 + eps, a- = 0, b- = 1, and PPO's, as functions of pi / mu.

    Paper: they are equal on [1, 1 + eps] for positives and on [1 - eps, 1] for negatives. PPO has no gradient above the
    first interval and below the second. TOPR's is steeper for positives that have become improbable.
    """
    eps, ratio = lab.base.eps, np.linspace(0.01, 2.5, 250)
    log_ratio = torch.tensor(ratio).log()
    panels, data, numbers = [], {"ratio": ratio.tolist()}, {}
    for sign, name, low, high in ((1.0, "R = +1", 1, 1 + eps), (-1.0, "R = -1", 1 - eps, 1)):
        reward = torch.full_like(log_ratio, sign)
        ours = topr.topr_objective(log_ratio, reward, topr.Limits(1, 1 + eps, 0, 1)).numpy()
        one = torch.ones(1, dtype=log_ratio.dtype)
        ppo = np.array([-ppo_loss(x, 0 * x, sign * one, one, eps).item() for x in log_ratio[:, None]])
        drawn = [Line(ratio, ours, "TOPR", "topr"), Line(ratio, ppo, "PPO", "ppo")]
        panels.append(Panel(name, "pi / mu", "objective of one sequence", drawn, {"ylim": (-2.6, 2.6)}))
        data |= {f"TOPR, {name}": ours.tolist(), f"PPO, {name}": ppo.tolist()}
        inside, outside = (ratio >= low) & (ratio <= high), ratio > high if sign > 0 else ratio < low
        largest = {f"|TOPR - PPO| for {low:g} <= pi/mu <= {high:g}": np.abs(ours - ppo)[inside].max()}
        for method, values in (("PPO", ppo), ("TOPR", ours)):
            slopes = np.abs(np.gradient(values, ratio))
            largest[f"slope of {method} where PPO clips"] = slopes[outside][1:-1].max()
            largest[f"slope of {method} for pi/mu <= 0.5"] = slopes[ratio <= 0.5].max()
        numbers |= {f"{name}: largest {what}": over_seeds([value]) for what, value in largest.items()}
    return Figure(panels, data, {}, numbers)


def fig3(lab: Lab) -> Figure:
    """Shares of correct, incorrect and invalid completions over the epoch, all at TOPR's learning rate.

    Paper: only TOPR significantly reduces the invalid ones; REINFORCE's completions are degenerate at the end.
    """
    own_rates = lab.rates(OF_THE_PAPER)
    one_rate = dict.fromkeys(OF_THE_PAPER, own_rates["topr"])
    runs, names = lab.methods(one_rate), called(one_rate)
    own, own_names = lab.methods(own_rates), called(own_rates)
    curves = {name: {outcome: along(runs[name], outcome) for outcome in get_args(Outcome)} for name in runs}
    panels = [
        Panel(
            names[name],
            EPOCH,
            "share (%), ± 2 SE",
            [line(epoch(y), y, outcome, outcome) for outcome, y in curves[name].items()],
            {"ylim": (-3, 103)},
        )
        for name in runs
    ]
    shares = {"base: invalid": over_seeds(run.curve[0]["invalid"] for run in runs["topr"])}
    shares |= {f"{names[name]}: invalid at the end": at_end(runs[name], "invalid") for name in runs}
    shares |= {f"{own_names[name]}: invalid at the end": at_end(own[name], "invalid") for name in own}
    return Figure(panels, curves, shares)


def fig4(lab: Lab) -> Figure:
    """TOPR against positives only, all at TOPR's learning rate. On MATH: fig4-math.

    Paper: TOPR is more accurate, its maj@n is higher for all n, and fewer questions have 0 to 4 correct completions.
    The laptop trains on hard problems with few positives: with many, no difference can be measured (Figure 1).
    """
    arms = {
        "topr": ("TOPR", "topr", {}),
        "positives_only": ("positives only", "sft", {"composition": "positives_only"}),
        "sft": ("positives, as many steps", "p5", {"method": "sft"}),  # negatives stay, with weight 0
    }
    base = lab.at_topr_rate(test_samples=lab.scale.tested)
    given = _hard_samples(lab, lab.scale.hard_of) if lab.scale.hard_of else {}
    runs = lab.runs({name: replace(base, **arm[2]) for name, arm in arms.items()}, given=given)
    ks = [k for k in (1, 2, 4, 8, 16, 32) if k < base.test_samples]
    curves = {name: along(runs[name], "correct") for name in runs}
    majority = {name: series([_majority(run, lab.scale.task, ks) for run in runs[name]]) for name in runs}
    of_runs = {name: [_by_cardinality(run) for run in runs[name]] for name in runs}
    counts = {name: series(of_runs[name]) for name in runs}
    bins = range(len(counts["topr"]["mean"]))
    ticks = {"xticks": list(bins), "xticklabels": ["0", *(f"{4 * i + 1}-{4 * i + 4}" for i in bins[:-1])]}
    labels = {name: (arm[0], arm[1]) for name, arm in arms.items()}
    panels = [
        Panel(
            "hard problems" if given else "all problems",
            EPOCH,
            CORRECT,
            [line(epoch(y), y, *labels[n]) for n, y in curves.items()],
        ),
        Panel("self-consistency", "n", "maj@n (%), ± 2 SE", [line(ks, y, *labels[n]) for n, y in majority.items()]),
        Panel(
            "test problems by correct completions",
            f"correct completions of {base.test_samples}",
            "problems (%), ± 2 SE",
            [line(list(bins), y, *labels[n]) for n, y in counts.items()],
            ticks,
        ),
    ]
    ends = {name: at_end(runs[name]) for name in runs}
    few = {name: over_seeds(sum(bins[:2]) for bins in of_runs[name]) for name in runs}
    shares = {f"{arms[name][0]}: correct at the end": ends[name] for name in runs}
    shares |= {f"{arms[name][0]}: problems with at most 4 correct": few[name] for name in runs}
    shares |= {f"TOPR - {arms[name][0]}": difference(ends["topr"], ends[name]) for name in list(runs)[1:]}
    taken = runs["topr"][0].results["iterations"][0]["dataset"]["trained"]
    data = {"correct": curves, "maj@n": majority, "n": ks, "cardinality": counts, "trained on": taken}
    return Figure(panels, data, shares)


def _hard_samples(lab: Lab, problems: int) -> dict[int, Path]:
    """For each seed, a file of samples of hard problems: at most a quarter of the base model's samples are correct.

    The same samples choose the problems and are trained on.
    """
    measured = replace(lab.base, problems=problems, iterations=0, test_samples=lab.base.n)
    jobs = [Job("problems", replace(measured, seed=seed), last_task) for seed in lab.seeds]
    return {run.settings.seed: _hard_of(run) for run in lab.make(jobs)}


def _hard_of(run: Finished) -> Path:
    samples, file = run.tested(0), run.folder / "hard.jsonl"
    means = mean_rewards(samples, by_prompt=True)
    hard = [sample for sample, mean in zip(samples, means, strict=True) if mean <= -0.5]  # a quarter +1, the rest -1
    on_rank_zero(lambda: file.exists() or write_file(file, to_lines(hard)))
    return file


def _majority(run: Finished, task: Callable[[Settings], Task], ks: Sequence[int]) -> list[float]:
    answers = collect(run.tested(_last_step(run)), task(replace(run.settings, samples=None)))
    return [maj_at_k(answers, k, run.settings.seed).mean for k in ks]


def _by_cardinality(run: Finished) -> list[float]:
    """The share of test problems with 0, 1-4, 5-8, ... correct completions."""
    n = run.settings.test_samples
    rewards = np.array([sample.reward > 0 for sample in run.tested(_last_step(run))]).reshape(-1, n).sum(1)
    return (np.bincount(-(-rewards // 4), minlength=-(-n // 4) + 1) / len(rewards)).tolist()


def _last_step(run: Finished) -> int:
    return run.results["iterations"][0]["dataset"]["steps"]


def fig5(lab: Lab) -> Figure:
    """Two sets of equal size, 10% and 50% positive; a baseline sets the effective share of positives p~.

    Paper: both are best at p~ of 10 to 20% and worse above 50%. A share reached by sampling is better than the same
    share reached by a baseline.
    """
    runs = {share: of for (_, share), of in _by_share(lab, ("topr", 0.1), ("topr", 0.5)).items()}
    curves = {f"{share:.0%} positive": _over_shares(runs[share]) for share in runs}
    panel = _share_panel("TOPR", {label: line(*curves[label], label) for label in curves})
    shares = {f"{s:.0%} positive, p~ = {p:.0%}": at_end(of_p) for s, of in runs.items() for p, of_p in of.items()}
    for p, sampled, other in ((0.1, 0.1, 0.5), (0.5, 0.5, 0.1)):
        if p in runs[sampled] and p in runs[other]:
            gained = difference(at_end(runs[sampled][p]), at_end(runs[other][p]))
            shares[f"p~ = {p:.0%} by sampling - by a baseline"] = gained
    return Figure([panel], {label: y for label, (_, y) in curves.items()} | {"p~": list(runs[0.1])}, shares)


def fig6(lab: Lab) -> Figure:
    """TOPR and truncated importance sampling on the set with 10% positives. On MATH: fig6-math.

    Paper: at low p~ TIS collapses and TOPR recovers; at high p~ they are equal; the best of TIS is slightly higher.
    """
    names = called(lab.rates(["topr", "tis"]))
    runs = {names[method]: of for (method, _), of in _by_share(lab, ("topr", 0.1), ("tis", 0.1)).items()}
    curves = {name: _over_shares(runs[name]) for name in runs}
    drawn = {name: line(*curves[name], name, style) for name, style in zip(runs, names, strict=True)}
    ends = {name: {p: at_end(of_p) for p, of_p in of.items()} for name, of in runs.items()}
    shares = {f"{name}, p~ = {p:.0%}": end for name, of in ends.items() for p, end in of.items()}
    topr_ends, tis_ends = ends.values()
    shares |= {f"TOPR - TIS, p~ = {p:.0%}": difference(topr_ends[p], tis_ends[p]) for p in topr_ends}
    panel = _share_panel("10% positive", drawn)
    return Figure([panel], {name: y for name, (_, y) in curves.items()} | {"p~": list(topr_ends)}, shares)


def _by_share(lab: Lab, *wanted: tuple[str, float]) -> dict[tuple[str, float], dict[float, list[Finished]]]:
    """(method, share of positives in the set) -> effective share p~ -> runs; each method at its own learning rate."""
    rates = lab.rates([method for method, _ in wanted])
    base = replace(lab.base, curve_points=1, composition="proportion", **lab.scale.sets)
    arms = {}
    for method, share in wanted:
        of_share = replace(base, lr=rates[method], proportion=share, **METHODS[method].changes)
        for p in lab.scale.shares:  # where p~ is the share itself, the baseline would be 0
            settings = replace(of_share, effective_proportion=None if p == share else p)
            arms[f"share-{method}-{share:g}-{p:g}"] = settings
    made = iter(lab.runs(arms).values())
    return {of: {p: next(made) for p in lab.scale.shares} for of in wanted}


def _over_shares(runs: Mapping[float, list[Finished]]) -> tuple[list[float], Series]:
    columns = zip(*(at_end(of_p).each for of_p in runs.values()), strict=True)
    return [100 * p for p in runs], series(list(columns))


def _share_panel(title: str, lines: Mapping[str, Line]) -> Panel:
    ticks = [1, 2, 5, 10, 20, 50, 100]
    options = {"xscale": "log", "xticks": ticks, "xticklabels": ticks, "ylim": (-3, 90)}
    return Panel(title, "effective share of positives p~ (%)", CORRECT, list(lines.values()), options)


def fig7(lab: Lab) -> Figure:
    """TOPR against plain importance sampling, gradients clipped at 1 and at 100, 33% and 60% of the data negative.

    Paper: at 1 and 33% the two are equally accurate, but the gradients of IS grow. At 100 and 60% TOPR still improves,
    and IS makes the model worse (31% bad completions, from 12%). Both at TOPR's learning rate.
    """
    names = ("topr", "off_policy")
    base = lab.at_topr_rate(composition="proportion", **lab.scale.sets)
    arms = {
        f"fig7-{name}-{negative}-{clip}": replace(base, proportion=1 - negative, max_norm=clip, **METHODS[name].changes)
        for negative in (0.33, 0.6)
        for clip in (1.0, 100.0)
        for name in names
    }
    runs = lab.runs(arms)
    panels, data, shares, numbers = [], {}, {}, {}
    for negative in (0.33, 0.6):
        for clip in (1.0, 100.0):
            here = {name: runs[f"fig7-{name}-{negative}-{clip}"] for name in names}
            title = f"{negative:.0%} negative, gradients clipped at {clip:g}"
            correct = {name: along(here[name], "correct") for name in names}
            norms = {name: series([_norms(run) for run in here[name]]) for name in names}
            labels = {name: (METHODS[name].name, METHODS[name].style) for name in names}
            panels += [
                Panel(title, EPOCH, CORRECT, [line(epoch(y), y, *labels[n]) for n, y in correct.items()]),
                Panel(
                    title,
                    EPOCH,
                    "gradient norm, ± 2 SE",
                    [line(_middles(y), y, *labels[n], scale=1) for n, y in norms.items()],
                    {"yscale": "log"},
                ),
            ]
            data[title] = {"correct": correct, "gradient norm": norms}
            ends = {name: at_end(here[name]) for name in names}
            shares |= {f"{title}, {METHODS[name].name}: correct": ends[name] for name in names}
            shares[f"{title}: TOPR - plain IS"] = difference(ends["topr"], ends["off_policy"])
            shares |= {f"{title}, {METHODS[n].name}: invalid": at_end(here[n], "invalid") for n in names}
            top = {n: over_seeds(max(step["grad_norm"] for step in run.steps) for run in here[n]) for n in names}
            numbers |= {f"{title}, {METHODS[n].name}: largest gradient norm": top[n] for n in names}
    return Figure(panels, data, shares, numbers)


def _norms(run: Finished) -> list[float]:
    """The mean gradient norm, before clipping, in each tenth of the epoch, or at each step if there are fewer."""
    norms = np.array([step["grad_norm"] for step in run.steps])
    return [float(part.mean()) for part in np.array_split(norms, min(10, len(norms)))]


def _middles(y: Series) -> list[float]:
    return [100 * (i + 0.5) / len(y["mean"]) for i in range(len(y["mean"]))]


def fig8(lab: Lab) -> Figure:
    """Iterations of sampling and training: uniform, positives only, Anna Karenina. On MATH: fig8-math.

    Paper: on GSM8K Anna Karenina sampling reaches 79.6% pass@1, uniform sampling 75.4%; positives only is slower. Five
    iterations (ours: the paper gives no number), at TOPR's learning rate. At the paper's scale with DeepSeek-R1 8B too,
    which Anna Karenina sampling takes beyond the maj@16 of Llama 3 70B, a line that is not trained.
    """
    base = lab.at_topr_rate(curve_points=1, **lab.scale.iterated)
    names = {"uniform": "uniform", "positives_only": "positives only", "anna_karenina": "Anna Karenina"}
    styles = dict(zip(names, ("topr", "sft", "anna_karenina"), strict=True))
    runs = lab.runs({f"fig8-{name}": replace(base, composition=name) for name in names})
    runs = {name: runs[f"fig8-{name}"] for name in names}
    for name, changes in lab.scale.others.items():  # another model draws samples of its own
        runs |= lab.runs({name: replace(base, **changes)})
        names[name], styles[name] = name, ""
    panels, data, shares = [], {}, {}
    for key in ("pass@1", f"maj@{base.k}"):
        measured = {name: series([_over_iterations(run, key, base.iterations) for run in runs[name]]) for name in names}
        drawn = [line(range(base.iterations + 1), y, names[name], styles[name]) for name, y in measured.items()]
        panels.append(Panel(key, "iterations", f"{key} (%), ± 2 SE", drawn))
        data[key] = measured
        ends = {name: over_seeds(_over_iterations(run, key)[-1] for run in runs[name]) for name in names}
        shares |= {f"{names[name]}: {key}": ends[name] for name in names}
        shares |= {
            f"Anna Karenina - {names[n]}: {key}": difference(ends["anna_karenina"], ends[n]) for n in list(names)[:2]
        }
    return Figure(panels, data, shares)


def _over_iterations(run: Finished, key: str, iterations: int = 0) -> list[float]:
    """An estimate before and after each iteration; a model that is not trained stays what it is for all of them."""
    entries = [run.results["before"], *(iteration["after"] for iteration in run.results["iterations"])]
    return [entry[key]["mean"] for entry in entries * (iterations + 1 if len(entries) == 1 else 1)]


def fig9(lab: Lab) -> Figure:
    """The weight of questions of each difficulty in the data: ten equally wide buckets by the base model's accuracy.

    Paper: as p~ falls, hard questions weigh more. 128 samples a question.
    """
    base = replace(lab.base, iterations=0, test_samples=lab.scale.difficulty)
    p_tildes = (0.05, 0.1, 0.2, 0.5, 0.8)
    found: dict[float, list[list[float]]] = {p: [] for p in p_tildes}
    for run in lab.runs({"fig9": base}, training_task)["fig9"]:
        samples = run.tested(0)
        positive = share_of_positives(samples)
        for p in p_tildes:
            weights = weight_by_difficulty(samples, topr.baseline_for_proportion(positive, p))
            found[p].append([weight / np.nansum(weights) for weight in weights])
    curves = {p: series(found[p]) for p in p_tildes}
    middles = [5 + 10 * i for i in range(10)]
    drawn = [line(middles, y, f"p~ = {p:.0%}") for p, y in curves.items()]
    title, x = "what an average question weighs", "base model's accuracy on it (%)"
    panel = Panel(title, x, "weight (%), sums to 100, ± 2 SE", drawn)
    hard = {p: over_seeds(np.nansum(weights[:3]) for weights in found[p]) for p in p_tildes}
    shares = {f"p~ = {p:.0%}: weight of the three hardest buckets": hard[p] for p in p_tildes}
    return Figure([panel], {f"p~ = {p:.0%}": y for p, y in curves.items()}, shares)


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


def variants(lab: Lab) -> Figure:
    """What variants cost that public code calls TOPR and that weigh otherwise (conformance/variants.py).

    All train on the same samples, in the same order, at TOPR's learning rate. The paper makes no claim about them.
    """
    base = lab.at_topr_rate()
    names = list(VARIANTS_DRAWN[1:])
    if base.micro_batch < base.batch:
        names.remove("per-token + token mean")  # a mean over the tokens of a whole step
    arms = dict.fromkeys(["topr", *names], base)
    runs = lab.runs(arms, token_losses={name: name for name in names})
    panels = []
    for outcome in ("correct", "invalid"):
        drawn = []
        for name in runs:
            y = along(runs[name], outcome)
            drawn.append(line(epoch(y), y, "TOPR (the paper's)" if name == "topr" else name, name))
        panels.append(Panel(outcome, EPOCH, f"{outcome} (%), ± 2 SE", drawn, {"ylim": (-3, 103)}))
    ends = {name: at_end(runs[name]) for name in runs}
    shares = {f"{name}: correct at the end": end for name, end in ends.items()}
    shares |= {f"{name}: invalid at the end": at_end(runs[name], "invalid") for name in runs}
    shares |= {f"{name} - topr": difference(ends[name], ends["topr"]) for name in names}
    data = {name: {outcome: along(runs[name], outcome) for outcome in get_args(Outcome)} for name in runs}
    return Figure(panels, data, shares)


def table2(lab: Lab) -> Figure:
    """A generative verifier before and after TOPR, and weighted self-consistency with its verdicts as weights.

    Paper: accuracy 32.6 -> 70.9%, invalid 34.2 -> 0.9%; weighted self-consistency 55.5% without a verifier, 56.7% with
    the base verifier and 61.5% with the trained one.
    """
    settings = lab.scale.verifier
    job = Job("table2", settings, lab.scale.task, verify, check=check_verifier)
    runs = lab.make([job._replace(settings=replace(settings, seed=seed)) for seed in lab.seeds])
    found = [run.results for run in runs]
    none = over_seeds(each["table2"]["no verifier"][WEIGHTED]["mean"] for each in found)
    stages = {"base": 0, "trained with TOPR": -1}
    rows = {"no verifier": {WEIGHTED: none}} | {
        stage: {name: over_seeds(each["iterations"][number][name]["mean"] for each in found) for name in COLUMNS}
        for stage, number in stages.items()
    }
    base, trained = (rows[stage] for stage in stages)
    shares = {f"{stage}: {name}": value for stage, row in rows.items() for name, value in row.items()}
    shares[f"TOPR - base: {ACCURACY}"] = difference(trained[ACCURACY], base[ACCURACY])
    shares[f"TOPR - no verifier: {WEIGHTED}"] = difference(trained[WEIGHTED], none)
    shares[f"base - no verifier: {WEIGHTED}"] = difference(base[WEIGHTED], none)
    panel = to_panel({name: {column: value._asdict() for column, value in row.items()} for name, row in rows.items()})
    return Figure([panel], {"seeds": found}, shares)


def verify(job: Job) -> None:
    """Make the verifier's run of a job; its settings name its task."""
    run_verifier(job.settings)
