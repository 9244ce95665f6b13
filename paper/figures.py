"""The paper's Figures 1 to 9 and Table 2, and one of our own: for each, the runs it needs and what is read off them.

A figure is a function of a `Lab`, which makes the runs. It asks for all of its runs before it reads one, so that they
can be planned; where some depend on others' results, as on the laptop, these can not. Its docstring says what the paper
claims. Its panels are a function of its data alone, NAME_panels, so that it can be drawn anew without a run.
reproduce.py is the command that makes a figure, results/README.md says what came out.
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
from paper.experiments import METHODS, OF_THE_PAPER, Arm, Lab, called, training_task
from paper.sweep import Finished, Job, OverSeeds, over_seeds
from pipeline.compose import rewards_of_groups, share_of_positives
from pipeline.evaluation import collect, estimate, wins
from pipeline.methods import ppo_loss
from pipeline.plots import STYLES, Line, Panel, Style
from pipeline.records import Outcome, Sample, Task
from pipeline.settings import Settings
from tasks.verifier import ACCURACY, CONSTANT, WEIGHTED, check_verifier, to_panel
from tasks.verifier import run as run_verifier

# ---- what is read off runs --------------------------------------------------------------------------------------

Series = dict[str, list[float | None]]


def series(columns: Sequence[Sequence[float]]) -> Series:
    """A line of a figure: its mean over seeds at each point, with intervals; columns: a list of values for each seed.

    >>> series([[1.0, 2.0], [3.0, 2.0]])
    {'mean': [2.0, 2.0], 'half_width': [12.706, 0.0]}
    """
    return as_series([over_seeds(values) for values in zip(*columns, strict=True)])


def as_series(points: Sequence[OverSeeds]) -> Series:
    """Points of a line, each with half of its 95% interval; None for one seed."""
    return {"mean": [point.mean for point in points], "half_width": [point.half_width for point in points]}


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
    OverSeeds(mean=1.0, se=0.0, each=[1.0, 1.0], df=None)
    """
    return over_seeds(a - b for a, b in zip(one.each, other.each, strict=True))


def line(x: Sequence[float], y: Series, label: str, style: Style | str = "", scale: float = 100) -> Line:
    """A line with its 95% interval, in percent; None stands for what is not there.

    >>> line([1], {"mean": [0.5], "half_width": [None]}, "one seed").half_width is None
    True
    """
    mean, half_width = (scale * np.array(y[name], float) for name in ("mean", "half_width"))
    return Line(x, mean, label, style, half_width=None if np.isnan(half_width).all() else half_width)


EPOCH, TRAINING, CORRECT = "share of the epoch (%)", "share of the training (%)", "correct (%), 95% interval"
Data = Mapping[str, Any]  # a figure's, as it is made or as it is read from its file


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
    ends = {name: at_end(own[name]) for name in own}
    shares = {f"{same_names[name]}: correct at the end": at_end(same[name]) for name in same}
    shares |= {f"{names[name]}: correct at the end": ends[name] for name in own}
    shares |= {f"TOPR - {names[n]}": difference(ends["topr"], ends[n]) for n in own if n != "topr"}
    steps = {name: _last_step(own[name][0]) for name in own}
    data = {"own rate": curves, "one rate": same_curves, "steps": steps}
    return Figure(fig1_panels(data), data, shares)


def fig1_panels(data: Data) -> list[Panel]:
    """The paper's methods along the epoch. Of the others, which end close together, the ends."""

    def over_epoch(title: str, curves: Mapping[str, Series]) -> Panel:
        drawn = [line(epoch(y), y, METHODS[name].name, METHODS[name].style) for name, y in curves.items()]
        return Panel(title, EPOCH, CORRECT, drawn, {"ylim": (-3, 100)})

    def ends(title: str, names: Sequence[str]) -> Panel:
        drawn = []
        for place, name in enumerate(reversed(names)):
            end = {what: of[-1:] for what, of in own[name].items()}
            upright = line([place], end, METHODS[name].name, METHODS[name].style)
            drawn.append(upright._replace(x=upright.y, y=upright.x, kind="rows"))
        options = {"yticks": [], "ylim": (-0.5, len(names) - 0.5)}
        return Panel(f"{title}, own rate, at the end", CORRECT, "", drawn, options)

    own = data["own rate"]
    return [
        over_epoch("TOPR's learning rate for all", data["one rate"]),
        over_epoch("each at its own learning rate", {name: own[name] for name in OF_THE_PAPER}),
        ends("other bounds (Table 1)", ("topr", "tis", "off_policy", "sft")),
        ends("neighbours (ours)", ("topr", "group", "kl", "asymre")),
    ]


def fig2(lab: Lab) -> Figure:
    """TOPR's objective with a+ = 1, b+ = 1 + eps, a- = 0, b- = 1, and PPO's, as functions of pi / mu.

    Paper: they are equal on [1, 1 + eps] for positives and on [1 - eps, 1] for negatives. PPO has no gradient above the
    first interval and below the second. TOPR's is steeper for positives that have become improbable.
    """
    eps, ratio = lab.base.eps, np.linspace(0.01, 2.5, 250)
    log_ratio = torch.tensor(ratio).log()
    data, numbers = {"ratio": ratio.tolist()}, {}
    for sign, name, low, high in ((1.0, "R = +1", 1, 1 + eps), (-1.0, "R = -1", 1 - eps, 1)):
        reward = torch.full_like(log_ratio, sign)
        ours = topr.topr_objective(log_ratio, reward, topr.Limits(1, 1 + eps, 0, 1)).numpy()
        one = torch.ones(1, dtype=log_ratio.dtype)
        ppo = np.array([-ppo_loss(x, 0 * x, sign * one, one, eps).item() for x in log_ratio[:, None]])
        data |= {f"TOPR, {name}": ours.tolist(), f"PPO, {name}": ppo.tolist()}
        inside, outside = (ratio >= low) & (ratio <= high), ratio > high if sign > 0 else ratio < low
        largest = {f"|TOPR - PPO| for {low:g} <= pi/mu <= {high:g}": np.abs(ours - ppo)[inside].max()}
        for method, values in (("PPO", ppo), ("TOPR", ours)):
            slopes = np.abs(np.gradient(values, ratio))
            largest[f"slope of {method} where PPO clips"] = slopes[outside][1:-1].max()
            largest[f"slope of {method} for pi/mu <= 0.5"] = slopes[ratio <= 0.5].max()
        numbers |= {f"{name}: largest {what}": over_seeds([value]) for what, value in largest.items()}
    return Figure(fig2_panels(data), data, {}, numbers)


def fig2_panels(data: Data) -> list[Panel]:
    """Positives left, negatives right."""
    panels = []
    for name in ("R = +1", "R = -1"):
        drawn = [Line(data["ratio"], data[f"{method}, {name}"], method, method.lower()) for method in ("TOPR", "PPO")]
        axes = r"$\pi / \mu$", "objective of one sequence"
        panels.append(Panel(name.replace("-", "−"), *axes, drawn, {"ylim": (-2.6, 2.6)}))
    return panels


def fig3(lab: Lab) -> Figure:
    """Shares of correct, incorrect and invalid completions over the epoch, all at TOPR's learning rate.

    Paper: only TOPR significantly reduces the invalid ones; REINFORCE's completions are degenerate at the end.
    """
    own_rates = lab.rates(OF_THE_PAPER)
    one_rate = dict.fromkeys(OF_THE_PAPER, own_rates["topr"])
    runs, names = lab.methods(one_rate), called(one_rate)
    own, own_names = lab.methods(own_rates), called(own_rates)
    curves = {name: {outcome: along(runs[name], outcome) for outcome in get_args(Outcome)} for name in runs}
    shares = {"base: invalid": over_seeds(run.curve[0]["invalid"] for run in runs["topr"])}
    shares |= {f"{names[name]}: invalid at the end": at_end(runs[name], "invalid") for name in runs}
    shares |= {f"{own_names[name]}: invalid at the end": at_end(own[name], "invalid") for name in own}
    return Figure(fig3_panels(curves), curves, shares)


def fig3_panels(data: Data) -> list[Panel]:
    """A panel for each method."""
    return [
        Panel(
            METHODS[name].name,
            EPOCH,
            "share (%), 95% interval",
            [line(epoch(y), y, outcome, outcome) for outcome, y in curves.items()],
            {"ylim": (-3, 103)},
        )
        for name, curves in data.items()
    ]


POSITIVES = {
    "topr": Arm("TOPR", "topr", {}),
    "positives_only": Arm("positives only", "sft", {"composition": "positives_only"}),
    "sft": Arm("positives, as many steps", "p5", {"method": "sft"}),  # negatives stay, with weight 0
}


def fig4(lab: Lab) -> Figure:
    """TOPR against positives only, all at TOPR's learning rate. On MATH: fig4-math.

    Paper: TOPR is more accurate, its maj@n is higher for all n, and fewer questions have 0 to 4 correct completions.
    """
    base = lab.at_topr_rate(test_samples=lab.scale.tested)
    runs = lab.runs({name: replace(base, **arm.changes) for name, arm in POSITIVES.items()})
    ks = [k for k in (1, 2, 4, 8, 16, 32) if k < base.test_samples]
    curves = {name: along(runs[name], "correct") for name in runs}
    of_n = {name: [_majority(run, lab.scale.task, ks) for run in runs[name]] for name in runs}
    majority = {name: series(of_n[name]) for name in runs}
    of_runs = {name: [_by_cardinality(run) for run in runs[name]] for name in runs}
    counts = {name: series(of_runs[name]) for name in runs}
    ends = {name: at_end(runs[name]) for name in runs}
    few = {name: over_seeds(sum(bins[:2]) for bins in of_runs[name]) for name in runs}
    shares = {f"{POSITIVES[name].name}: correct at the end": ends[name] for name in runs}
    shares |= {f"{POSITIVES[name].name}: problems with at most 4 correct": few[name] for name in runs}
    shares |= {f"TOPR - {POSITIVES[name].name}": difference(ends["topr"], ends[name]) for name in list(runs)[1:]}
    won = {name: over_seeds(each[-1] for each in of_n[name]) for name in runs}
    shares |= {f"{POSITIVES[name].name}: maj@{ks[-1]}": won[name] for name in runs}
    taken = runs["topr"][0].results["iterations"][0]["dataset"]["trained"]
    data = {"correct": curves, "maj@n": majority, "n": ks, "cardinality": counts, "trained on": taken}
    return Figure(fig4_panels(data), data, shares)


def fig4_panels(data: Data) -> list[Panel]:
    """Accuracy along the epoch, maj@n, and the test problems by how often each is solved."""

    def drawn(x: Callable[[Series], Sequence[float]], of: Mapping[str, Series]) -> list[Line]:
        return [line(x(y), y, POSITIVES[name].name, POSITIVES[name].style) for name, y in of.items()]

    ks, bins = data["n"], range(len(data["cardinality"]["topr"]["mean"]))
    of_n = {"xscale": "log", "xticks": ks, "xticklabels": ks}
    of_bins = {"xticks": bins, "xticklabels": ["0", *(f"{4 * i + 1}-{4 * i + 4}" for i in bins[:-1])]}
    counted = "test problems by correct completions", "correct completions of a problem", "problems (%), 95% interval"
    return [
        Panel("accuracy", EPOCH, CORRECT, drawn(epoch, data["correct"])),
        Panel("self-consistency", "n", "maj@n (%), 95% interval", drawn(lambda _: ks, data["maj@n"]), of_n),
        Panel(*counted, drawn(lambda _: bins, data["cardinality"]), of_bins),
    ]


def _majority(run: Finished, task: Callable[[Settings], Task], ks: Sequence[int]) -> list[float]:
    answers = collect(run.tested(_last_step(run)), task(run.settings))
    return [estimate(wins, answers, k, run.settings.seed).mean for k in ks]


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
    share reached by a baseline. Here at TOPR's learning rate and at its neighbours in the grid, since the best share
    may move with the rate.
    """
    own = lab.rates(["topr"])["topr"]
    rates = [rate for rate in lab.scale.rates if 1 / 4 < rate / own < 4]
    sets = {"10% positive": 0.1, "50% positive": 0.5}
    runs = _by_share(lab, [("topr", rate, share) for share in sets.values() for rate in rates])
    data: dict[str, Any] = {"p~": list(lab.scale.shares), "own rate": own}
    data |= {f"lr {rate:g}": {name: _over_shares(runs["topr", rate, sets[name]]) for name in sets} for rate in rates}
    shares = {}
    for name, share in sets.items():
        ends = {rate: {p: at_end(of_p) for p, of_p in runs["topr", rate, share].items()} for rate in rates}
        shares |= {f"{name}, p~ = {p:.0%}": end for p, end in ends[own].items()}
        for rate, of_p in ends.items():
            best = max(of_p, key=lambda p: of_p[p].mean)
            shares[f"{name}, lr {rate:g}: highest, at p~ = {best:.0%}"] = of_p[best]
            if rate == own and 1.0 in of_p:
                shares[f"{name}, lr {rate:g}: p~ = {best:.0%} - p~ = 100%"] = difference(of_p[best], of_p[1.0])
    for p, sampled, other in ((0.1, 0.1, 0.5), (0.5, 0.5, 0.1)):
        if p in lab.scale.shares:
            with_p = [at_end(runs["topr", own, share][p]) for share in (sampled, other)]
            shares[f"p~ = {p:.0%} by sampling - by a baseline"] = difference(*with_p)
    return Figure(fig5_panels(data), data, shares)


def fig5_panels(data: Data) -> list[Panel]:
    """A panel for each learning rate, with both sets."""
    paper = Line([10, 20], label="paper's\nbest", kind="band")
    panels = []
    for title, of_sets in data.items():
        if title.startswith("lr"):
            x, styles = _percent(data["p~"]), ("p1", "p3")
            drawn = [line(x, y, name, style) for (name, y), style in zip(of_sets.items(), styles, strict=True)]
            best = " (TOPR's best)" * (title == f"lr {data['own rate']:g}")
            panels.append(_share_panel(f"{title}{best}", [paper, *drawn]))
    return panels


def fig6(lab: Lab) -> Figure:
    """TOPR and truncated importance sampling on the set with 10% positives. On MATH: fig6-math.

    Paper: at low p~ TIS collapses and TOPR recovers; at high p~ they are equal; the best of TIS is slightly higher.
    Here over several passes, since a recovery takes time.
    """
    rates = lab.rates(["topr", "tis"])
    names = called(rates)
    passes = {"epochs": lab.scale.passes, "curve_points": lab.base.curve_points}
    found = _by_share(lab, [(method, rates[method], 0.1) for method in names], **passes)
    runs = {method: found[method, rates[method], 0.1] for method in names}
    data: dict[str, Any] = {name: _over_shares(runs[method]) for method, name in names.items()}
    data["p~"] = list(lab.scale.shares)
    for p in [p for p in (0.01, 0.1) if p in lab.scale.shares]:
        correct = {method: along(runs[method][p], "correct") for method in names}
        low = {method: series([_by_tenth(run, "log_ratio_pos_q50") for run in runs[method][p]]) for method in names}
        data[f"p~ = {p:.0%}"] = {"correct": correct, "log-ratio of positives": low}
    ends = {method: {p: at_end(of_p) for p, of_p in runs[method].items()} for method in names}
    shares = {f"{names[method]}, p~ = {p:.0%}": end for method, of_p in ends.items() for p, end in of_p.items()}
    shares |= {f"TOPR - TIS, p~ = {p:.0%}": difference(ends["topr"][p], ends["tis"][p]) for p in lab.scale.shares}
    return Figure(fig6_panels(data), data, shares)


def fig6_panels(data: Data) -> list[Panel]:
    """Accuracy at the end against the effective share; at single shares accuracy and log-ratio along the training."""
    ends, panels = [], []
    for key, found in data.items():
        if "mean" in found:
            name, _, _ = key.partition(",")
            ends.append(line(_percent(data["p~"]), found, name, name.lower()))
        elif key != "p~":
            correct, low = (
                [line(x(y), y, METHODS[n].name, METHODS[n].style, scale) for n, y in found[what].items()]
                for what, x, scale in (("correct", epoch, 100), ("log-ratio of positives", _middles, 1))
            )
            panels.append(Panel(_symbols(key), TRAINING, CORRECT, correct, {"ylim": (-3, 100)}))
            panels.append(Panel(f"positives, {_symbols(key)}", TRAINING, "median log-ratio (nats), 95% interval", low))
    return [_share_panel("set with 10% positive, at the end", ends), *panels]


def _symbols(text: str) -> str:
    return text.replace("p~", r"$\tilde p$")


def _by_share(
    lab: Lab, wanted: Sequence[tuple[str, float, float]], **changes: Any
) -> dict[tuple[str, float, float], dict[float, list[Finished]]]:
    """(method, learning rate, share of positives in the set) -> effective share p~ -> runs."""
    base = replace(lab.base, composition="proportion", **{"curve_points": 1, **lab.scale.sets, **changes})
    arms = {}
    for method, rate, share in wanted:
        of_share = replace(base, lr=rate, proportion=share, **METHODS[method].changes)
        for p in lab.scale.shares:  # where p~ is the share itself, the baseline would be 0
            settings = replace(of_share, effective_proportion=None if p == share else p)
            arms[f"share-{method}-{rate:g}-{share:g}-{p:g}"] = settings
    made = iter(lab.runs(arms).values())
    return {of: {p: next(made) for p in lab.scale.shares} for of in wanted}


def _by_tenth(run: Finished, name: str) -> list[float]:
    """The mean of a number of metrics.jsonl in each tenth of the training, or at each step if there are fewer."""
    found = np.array([step.get(name, np.nan) for step in run.steps])
    return [float(np.nanmean(part)) for part in np.array_split(found, min(10, len(found)))]


def _over_shares(runs: Mapping[float, list[Finished]]) -> Series:
    return series(list(zip(*(at_end(of_p).each for of_p in runs.values()), strict=True)))


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def _share_panel(title: str, lines: Sequence[Line]) -> Panel:
    ticks = [1, 2, 5, 10, 20, 50, 100]
    options = {"xscale": "log", "xticks": ticks, "xticklabels": ticks, "ylim": (-3, 100)}
    return Panel(title, r"effective share of positives $\tilde p$ (%)", CORRECT, lines, options)


def fig7(lab: Lab) -> Figure:
    """TOPR against plain importance sampling: 33% negative and gradients clipped early, 60% and clipped late.

    Paper: clipped at 1 and with 33% the two are equally accurate, but the gradients of IS grow. At 100 and 60% TOPR
    still improves, and IS makes the model worse (31% bad completions, from 12%). Here with three optimisers, since two
    of them divide by the gradient's size; each at the learning rate that is best for TOPR. The picture has the second.
    """
    methods, rates = ("topr", "off_policy"), lab.rates(list(lab.scale.optimizers))
    base = replace(lab.base, composition="proportion", epochs=lab.scale.passes, **lab.scale.sets)
    arms = {
        (optimizer, negative, clip, method): replace(
            lab.of_method(optimizer, base, rates[optimizer]),
            proportion=1 - negative,
            max_norm=clip,
            **METHODS[method].changes,
        )
        for optimizer in rates
        for negative, clip in zip((0.33, 0.6), lab.scale.clips, strict=True)
        for method in methods
    }
    made = lab.runs({"fig7-{}-{}-{}-{}".format(*arm): settings for arm, settings in arms.items()})
    runs = dict(zip(arms, made.values(), strict=True))
    data: dict[str, dict[str, dict[str, Series]]] = {}
    shares, numbers = {}, {}
    for (optimizer, negative, clip, method), of_arm in runs.items():
        here = f"{optimizer}, {negative:.0%} negative, clipped at {clip:g}"
        name = f"{here}, {METHODS[method].name}"
        norms = [np.array([step["grad_norm"] for step in run.steps]) for run in of_arm]
        tenths = [_by_tenth(run, "grad_norm") for run in of_arm]
        of_here = data.setdefault(f"{here}, lr {rates[optimizer]:g}", {"correct": {}, "gradient norm": {}})
        of_here["correct"][method] = along(of_arm, "correct")
        of_here["gradient norm"][method] = series(tenths)
        shares[f"{name}: correct"] = at_end(of_arm)
        shares[f"{name}: invalid"] = at_end(of_arm, "invalid")
        shares[f"{name}: steps clipped"] = over_seeds(_clipped(run) for run in of_arm)
        if method != "topr":
            own = at_end(runs[optimizer, negative, clip, "topr"])
            shares[f"{here}: TOPR - {METHODS[method].name}"] = difference(own, at_end(of_arm))
        shares[f"{name}: steps with a norm above 1"] = over_seeds((of_run > 1).mean() for of_run in norms)
        numbers[f"{name}: largest gradient norm"] = over_seeds(of_run.max() for of_run in norms)
        numbers[f"{name}: gradient norm, last tenth"] = over_seeds(of_run[-1] for of_run in tenths)
    return Figure(fig7_panels(data), data, shares, numbers)


def fig7_panels(data: Data) -> list[Panel]:
    """Where IS should break: 60% negative, and gradients clipped late."""
    kinds = (
        ("correct", CORRECT, {"ylim": (-3, 100)}, epoch, 100),
        ("gradient norm", "gradient norm, mean over a tenth", {"yscale": "log"}, _middles, 1),
    )
    panels = []
    for title, found in data.items():
        if "60% negative" in title:
            for what, label, options, x, scale in kinds:
                drawn = [line(x(y), y, METHODS[n].name, METHODS[n].style, scale) for n, y in found[what].items()]
                panels.append(Panel(title, TRAINING, label, drawn, options))
    return panels


def _clipped(run: Finished) -> float:
    """The share of the steps whose gradient was clipped."""
    return float(np.mean([step["grad_norm"] > run.settings.max_norm for step in run.steps]))


def _middles(y: Series) -> list[float]:
    return [100 * (i + 0.5) / len(y["mean"]) for i in range(len(y["mean"]))]


def fig8(lab: Lab) -> Figure:
    """Iterations of sampling and training: uniform, positives only, Anna Karenina, a control. On MATH: fig8-math.

    Paper: on GSM8K Anna Karenina sampling reaches 79.6% pass@1, uniform sampling 75.4%; positives only is slower. Five
    iterations (ours: the paper gives no number), at TOPR's learning rate. The control (ours) has as many samples and
    positives as Anna Karenina's sets and any positives. At the paper's scale with DeepSeek-R1 8B too, which Anna
    Karenina sampling takes beyond the maj@16 of Llama 3 70B, a line that is not trained.
    """
    base = lab.at_topr_rate(curve_points=1, **lab.scale.iterated)
    control = {"proportion": base.problems / base.examples, "n": base.candidates}
    changed = {"control": {"composition": "proportion", **control}}
    made = lab.runs({f"fig8-{key}": replace(base, **changed.get(key, {"composition": key})) for key in COMPOSITIONS})
    runs = dict(zip(COMPOSITIONS, made.values(), strict=True))
    for name, changes in lab.scale.others.items():  # another model draws samples of its own
        runs |= lab.runs({name: replace(base, **changes)})
    names = {name: COMPOSITIONS[name][0] if name in COMPOSITIONS else name for name in runs}
    data, shares = {}, {}
    for key in ("pass@1", f"maj@{base.k}"):
        each = {name: [_over_iterations(run, key, base.iterations) for run in runs[name]] for name in names}
        data[key] = {name: series(values) for name, values in each.items()}
        for i in range(1, base.iterations + 1):
            here = {name: over_seeds(values[i] for values in each[name]) for name in names}
            shares |= {f"{names[name]}: {key} after iteration {i}": here[name] for name in names}
            shares |= {
                f"Anna Karenina - {names[other]}: {key} after iteration {i}": difference(
                    here["anna_karenina"], here[other]
                )
                for other in COMPOSITIONS
                if other != "anna_karenina"
            }
    first = [run.results["iterations"][0]["dataset"]["drawn"] for run in runs["uniform"]]
    to_draw = over_seeds(50_000 * counts["samples"] / counts["positive"] for counts in first)
    numbers = {"samples to draw for 50,000 positives (uniform sampling trains on any 50,000)": to_draw}
    return Figure(fig8_panels(data), data, shares, numbers)


COMPOSITIONS = {  # names and styles
    "uniform": ("uniform", "topr"),
    "positives_only": ("positives only", "sft"),
    "anna_karenina": ("Anna Karenina", Style("#882255", (0, (5, 1)), "s")),
    "control": ("as many positives, any", "p5"),
}


def fig8_panels(data: Data) -> list[Panel]:
    """pass@1 and maj@k over the iterations."""
    panels = []
    for key, of_key in data.items():
        drawn = [line(range(len(y["mean"])), y, *COMPOSITIONS.get(name, (name, ""))) for name, y in of_key.items()]
        panels.append(Panel(key, "iterations", f"{key} (%), 95% interval", drawn, {"xticks": drawn[0].x}))
    return panels


def _over_iterations(run: Finished, key: str, iterations: int = 0) -> list[float]:
    """An estimate before and after each iteration; a model that is not trained stays what it is for all of them."""
    entries = [run.results["before"], *(iteration["after"] for iteration in run.results["iterations"])]
    return [entry[key]["mean"] for entry in entries * (iterations + 1 if len(entries) == 1 else 1)]


def fig9(lab: Lab) -> Figure:
    """The weight of questions of each difficulty in the data: ten equally wide buckets by the base model's accuracy.

    Paper: as p~ falls, hard questions weigh more. 128 samples a question. Appendix D takes this for the reason that a
    low p~ is best; hence (ours) the accuracy on test questions of each difficulty after training at each p~, on the set
    with 50% positives of Figure 5.
    """
    base = replace(lab.base, iterations=0, test_samples=lab.scale.difficulty)
    rate = lab.rates(["topr"])["topr"]
    trained = _by_share(lab, [("topr", rate, 0.5)])["topr", rate, 0.5]
    tested = lab.runs({"fig9-test": base})["fig9-test"]
    p_tildes = (0.05, 0.1, 0.2, 0.5, 0.8)
    found: dict[float, list[list[float]]] = {p: [] for p in p_tildes}
    for run in lab.runs({"fig9": base}, training_task)["fig9"]:
        samples = run.tested(0)
        positive = share_of_positives(samples)
        for p in p_tildes:
            weights = weight_by_difficulty(samples, topr.baseline_for_proportion(positive, p))
            found[p].append([weight / np.nansum(weights) for weight in weights])
    data: dict[str, Any] = {f"p~ = {p:.0%}": series(found[p]) for p in p_tildes} | {"p~": list(lab.scale.shares)}
    hard = {p: over_seeds(np.nansum(weights[:3]) for weights in found[p]) for p in p_tildes}
    shares = {f"p~ = {p:.0%}: weight of the three hardest buckets": hard[p] for p in p_tildes}
    thirds = [_by_third(of_p, tested) for of_p in trained.values()]  # p~ -> third -> seeds
    for number, third in enumerate(("hardest third", "middle third", "easiest third")):
        y = {p: over_seeds(of_thirds[number]) for p, of_thirds in zip(trained, thirds, strict=True)}
        shares |= {f"{third}, p~ = {p:.0%}: correct": value for p, value in y.items()}
        data[third] = as_series(list(y.values()))
    return Figure(fig9_panels(data), data, shares)


def fig9_panels(data: Data) -> list[Panel]:
    """What a question weighs at each effective share, and the accuracy on thirds of the test questions against it."""
    weights = {key: y for key, y in data.items() if key.startswith("p~ = ")}
    drawn = [line([5 + 10 * i for i in range(10)], y, _symbols(key)) for key, y in weights.items()]
    axes = "base model's accuracy on a question (%)", "weight of a question (%), 95% interval"
    highest = max(float(np.nanmax(one.y)) for one in drawn)
    panels = [Panel("what an average question weighs", *axes, drawn, {"ylim": (0, 1.1 * highest)})]
    thirds = {key: y for key, y in data.items() if key.endswith("third")}
    of_thirds = zip(thirds.items(), ("p1", "p3", "p5"), strict=True)
    drawn = [line(_percent(data["p~"]), y, key, style) for (key, y), style in of_thirds]
    return [*panels, _share_panel("test questions after training", drawn)]


def _by_third(runs: Sequence[Finished], tested: Sequence[Finished]) -> list[list[float]]:
    """Accuracy after training on the third of the test questions that is hardest for the base, on the next, the last.

    tested: of the same seeds, runs that sample from the base on these questions. A list for each third, over seeds.
    """
    found = []
    for run, base in zip(runs, tested, strict=True):
        samples = base.tested(0), run.tested(_last_step(run))
        before, after = ([[r > 0 for r in of] for of in rewards_of_groups(x).values()] for x in samples)
        order = np.argsort([np.mean(of_question) for of_question in before], kind="stable")
        accuracy = np.array([np.mean(of_question) for of_question in after])[order]
        found.append([float(third.mean()) for third in np.array_split(accuracy, 3)])
    return [list(of_third) for of_third in zip(*found, strict=True)]


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


VARIANTS_DRAWN = {  # and their styles
    "topr": STYLES["topr"],
    "per-token": Style("#E69F00", "--", "s"),
    "per-token + token mean": Style("#CC79A7", ":", "v"),
    "geometric mean": Style("#009E73", "-.", "^"),
    "clip 0.8..1.2": Style("#D55E00", (0, (6, 1, 1, 1, 1, 1)), "D"),
}


def variants(lab: Lab) -> Figure:
    """What variants cost that public code calls TOPR and that weigh otherwise (conformance/variants.py).

    All train on the same samples, in the same order, at TOPR's learning rate and each at its own. The paper makes no
    claim about them.
    """
    names = list(VARIANTS_DRAWN)[1:]
    if lab.base.micro_batch < lab.base.batch:
        names.remove("per-token + token mean")  # a mean over the tokens of a whole step
    rates = lab.rates(["topr", *names])
    arms = dict.fromkeys([*((name, rates["topr"]) for name in rates), *rates.items()])  # each once
    made = lab.runs(
        {f"{name}, lr {rate:g}": replace(lab.base, lr=rate) for name, rate in arms},
        token_losses={f"{name}, lr {rate:g}": name for name, rate in arms if name != "topr"},
    )
    runs = dict(zip(arms, made.values(), strict=True))
    ends = {arm: at_end(of_arm) for arm, of_arm in runs.items()}
    shares = {}
    for (name, rate), end in ends.items():
        here = f"{name}, lr {rate:g}"
        shares |= {f"{here}: correct at the end": end}
        shares |= {f"{here}: invalid at the end": at_end(runs[name, rate], "invalid")}
        shares |= {f"{here} - topr": difference(end, ends["topr", rates["topr"]])} if name != "topr" else {}
    curves = {arm: {outcome: along(runs[arm], outcome) for outcome in get_args(Outcome)} for arm in runs}
    data = {
        "one rate": {name: curves[name, rates["topr"]] for name in rates},
        "own rate": {name: curves[name, rate] for name, rate in rates.items()},
    }
    return Figure(variants_panels(data), data, shares)


def variants_panels(data: Data) -> list[Panel]:
    """Correct and invalid completions along the epoch: at TOPR's learning rate, and each at its own if they differ."""
    titles = {"one rate": "TOPR's learning rate", "own rate": "its own learning rate"}
    if data["own rate"] == data["one rate"]:
        del titles["own rate"]
    panels = []
    for key, title in titles.items():
        for outcome in ("correct", "invalid"):
            drawn = [line(epoch(y[outcome]), y[outcome], name, VARIANTS_DRAWN[name]) for name, y in data[key].items()]
            y_label = f"{outcome} (%), 95% interval"
            panels.append(Panel(f"{outcome}, {title}", EPOCH, y_label, drawn, {"ylim": (-3, 103)}))
    return panels


def table2(lab: Lab) -> Figure:
    """A generative verifier before and after TOPR, and weighted self-consistency with its verdicts as weights.

    Paper: accuracy 32.6 -> 70.9%, invalid 34.2 -> 0.9%; weighted self-consistency 55.5% without a verifier, 56.7% with
    the base verifier and 61.5% with the trained one.
    """
    data, shares = {}, {}
    verifiers = {Path(model).name: model for model in (lab.scale.verifier.model, *lab.scale.other_verifiers)}
    jobs = [
        Job(
            f"table2-{name}",
            replace(lab.scale.verifier, model=model, seed=seed),
            lab.scale.task,
            verify,
            check=check_verifier,
        )
        for name, model in verifiers.items()
        for seed in lab.seeds
    ]
    made = iter(lab.make(jobs))
    for name in verifiers:
        data[name] = [next(made).results for _ in lab.seeds]
        rows = _rows_of_table2(data[name])
        none, base, trained = (rows[row] for row in ("no verifier", "base", "topr"))
        shares |= {
            f"{name}, {row}: {column}": value for row, of_row in rows.items() for column, value in of_row.items()
        }
        shares[f"{name}, TOPR - base: {ACCURACY}"] = difference(trained[ACCURACY], base[ACCURACY])
        shares[f"{name}, TOPR - constant verdict: {ACCURACY}"] = difference(trained[ACCURACY], rows[CONSTANT][ACCURACY])
        for row, of_row in (("TOPR", trained), ("base", base)):
            shares[f"{name}, {row} - no verifier: {WEIGHTED}"] = difference(of_row[WEIGHTED], none[WEIGHTED])
    return Figure(table2_panels(data), data, shares)


def table2_panels(data: Data) -> list[Panel]:
    """A panel for each base verifier."""
    return [to_panel(_rows_of_table2(found))._replace(title=f"base verifier: {name}") for name, found in data.items()]


def _rows_of_table2(found: Sequence[Data]) -> dict[str, dict[str, OverSeeds]]:
    """Row -> column -> over seeds; found: the results of a run for each seed."""
    return {
        row: {column: over_seeds(each["table2"][row][column]["mean"] for each in found) for column in columns}
        for row, columns in found[0]["table2"].items()
    }


def verify(job: Job) -> None:
    """Make the verifier's run of a job; its settings name its task."""
    run_verifier(job.settings)
