"""What figures share: the methods that they compare, the table of measurements, and panels."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from figures.runs import Job, Run, with_shared_samples
from figures.scales import Changes, Scale
from toprlib.plotting import METHOD_LABELS, Line, Panel, Style
from toprlib.report import Estimate, Table


@dataclass(frozen=True)
class Arm:
    """One of the things that a figure compares.

    name: in legends. style: of its line, or the name of one. changes: settings of its runs.
    variant: of the loss, one of topr_conformance.VARIANTS.
    """

    name: str
    style: Style | str = ""
    changes: Changes = field(default_factory=dict)
    variant: str | None = None


# The methods of the paper's Figures 1 and 3.
PAPER_METHODS = ("topr", "dpo", "ppo", "reinforce")
METHODS = {
    name: Arm(METHOD_LABELS[name], name, {"method": name})
    for name in (*PAPER_METHODS, "tis", "off_policy")
}
METHODS["sft"] = Arm("SFT on positives", "sft", {"method": "sft"})
# GRPO's baseline with TOPR's weight: ours.
METHODS["group"] = Arm(
    "TOPR, group-mean baseline", Style("#7B3FA0", (0, (5, 1)), "<"), {"baseline_from": "group"}
)

# Variants of TOPR's loss in public code: conformance/topr_conformance/variants.py.
STYLES_OF_VARIANTS = {
    "per-token": Style("#E69F00", "--", "s"),
    "per-token + token mean": Style("#CC79A7", ":", "v"),
    "geometric mean": Style("#009E73", "-.", "^"),
    "clip 0.8..1.2": Style("#D55E00", (0, (6, 1, 1, 1, 1, 1)), "D"),
}
VARIANTS = {name: Arm(name, style, variant=name) for name, style in STYLES_OF_VARIANTS.items()}

OPTIMIZERS = {
    name: Arm(name, changes={"optimizer": name}) for name in ("adamw", "adafactor", "sgd")
}

# Fewer samples, and so fewer steps. Weights of positives are 1, as those of SFT.
POSITIVES_ONLY = Arm("positives only", "sft", {"composition": "positives_only"})

# Everything that a learning rate can be chosen for.
TUNED = METHODS | VARIANTS | OPTIMIZERS | {"positives_only": POSITIVES_ONLY}

# The seeds of the runs that choose learning rates; no figure trains with them.
RATE_SEEDS = range(100, 103)

# Name in TUNED -> learning rates, the best one first.
Rates = Mapping[str, Sequence[float]]


def label_with_rate(method: str, lr: float) -> str:
    """A method's name in legends, with its learning rate.

    >>> label_with_rate("topr", 1e-4)
    'TOPR, lr 1e-4'
    """
    return f"{METHODS[method].name}, {rate_text(lr)}"


def rate_text(lr: float) -> str:
    """A learning rate in legends.

    >>> rate_text(1e-4)
    'lr 1e-4'
    """
    return f"lr {lr:.0e}".replace("e-0", "e-")


# ---- what run.py needs of a figure ----


@dataclass(frozen=True)
class Findings:
    """What a figure found, as results/NAME.json keeps it.

    data: all numbers of the picture. shares: numbers in [0, 1], or their differences, that are
    worth a sentence. numbers: others that are. tables: for pages.
    """

    data: Mapping[str, Any]
    shares: Mapping[str, Estimate] = field(default_factory=dict)
    numbers: Mapping[str, Estimate] = field(default_factory=dict)
    tables: Mapping[str, Table] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """A figure is four functions of its module.

    arms: (scale, learning rates, seeds) -> its runs. read: (finished runs, scale) -> what it
    found. panels: data -> the picture. tuned: scale -> names in TUNED of which it needs the best
    learning rates. rate_seeds: those whose mean accuracy chooses these rates.
    """

    arms: Callable[[Scale, Rates, range], list[Job]]
    read: Callable[[Sequence[Run], Scale], Findings]
    panels: Callable[[Mapping[str, Any]], list[Panel]]
    tuned: Callable[[Scale], Sequence[str]] = lambda scale: ("topr",)
    # Ours: one seed, except for the figures that compare methods at their own rates.
    rate_seeds: range = RATE_SEEDS[:1]


def numbers_table(findings: Findings, name: str = "measured") -> Table:
    """The numbers worth a sentence, each with its interval; name: of the first column.

    A share's interval lies in [0, 1], a difference's in [-1, 1]; where it would reach beyond, the
    seeds' values are shown instead.
    """
    rows = []
    for what, value in findings.shares.items():
        is_difference = " - " in what
        unit = " points" if is_difference else " %"
        lowest = -1 if is_difference else 0
        rows.append([what, value.text(100, unit=unit, within=(lowest, 1))])
    for what, value in findings.numbers.items():
        rows.append([what, _number_text(what, value)])
    heading = "95% interval over seeds; or its seeds; of largest norms median and range"
    return Table([name, heading], rows)


def _number_text(what: str, value: Estimate) -> str:
    digits = 1 if value.mean >= 1 else 3
    if what.endswith("largest gradient norm"):
        return value.spread(digits)
    is_negative = min(value.each, default=-1) < 0
    return value.text(digits=digits, within=(-math.inf if is_negative else 0, math.inf))


# ---- jobs ----


def make_job(scale: Scale, columns: Mapping[str, Any], label: str, arm: Arm, **changes: Any) -> Job:
    """The run of an arm: its settings are those of the scale, then the arm's, then `changes`."""
    method_changes = scale.method_changes.get(arm.changes.get("method"), {})
    settings = replace(scale.base, **{**arm.changes, **method_changes, **changes})
    return Job(columns, label, settings, scale.task, arm.variant)


def best_two_rates(rates: Sequence[float]) -> dict[str, float]:
    """The best and the second best learning rate, by their names in the column `rate`.

    >>> best_two_rates([3e-5, 1e-4, 1e-5])
    {'best rate': 3e-05, 'second best rate': 0.0001}
    """
    return dict(zip(("best rate", "second best rate"), rates, strict=False))


def rate_suffix(rate: str) -> str:
    """What names of numbers end with at a learning rate of `best_two_rates`.

    >>> rate_suffix("best rate"), rate_suffix("second best rate")
    ('', ', second best rate')
    """
    return "" if rate == "best rate" else f", {rate}"


def split_by_rate(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(title, suffix of numbers, rows) for each value of the column `rate`.

    The title is the learning rate, or "own rate" where each arm has its own.

    >>> table = pd.DataFrame({"rate": ["best rate", "own rate"], "lr": [3e-5, 1e-4]})
    >>> [(title, suffix) for title, suffix, _ in split_by_rate(table)]
    [('lr 3e-05', ''), ('own rate', ', own rate')]
    """
    for rate, rows in table.groupby("rate", sort=False):
        title = rate if rate == "own rate" else f"lr {rows['lr'].iloc[0]:g}"
        yield title, rate_suffix(rate), rows


def arms_at_best_rates(
    scale: Scale,
    figure: str,
    arms: Mapping[str, Arm],
    topr_rates: Sequence[float],
    own_rates: Mapping[str, float],
    **changes: Any,
) -> list[Job]:
    """Arms at TOPR's two best learning rates, and each at its own.

    A run of two columns `rate` is made once: its folder is the same. Columns: rate, lr, arm.
    """
    wanted = []
    for rate, lr in best_two_rates(topr_rates).items():
        wanted += [(rate, name, lr) for name in arms]
    wanted += [("own rate", name, lr) for name, lr in own_rates.items()]
    jobs = []
    for rate, name, lr in wanted:
        columns = {"rate": rate, "lr": lr, "arm": name}
        label = f"{figure}-{name}-{lr:g}"
        jobs.append(make_job(scale, columns, label, arms[name], lr=lr, **changes))
    return with_shared_samples(jobs)


def arms_at_both_rates(scale: Scale, rates: Rates, at_one_rate: Sequence[str]) -> list[Job]:
    """Methods at TOPR's learning rate, and all of `rates` at their own.

    Columns: rate, method, lr.
    """
    topr_lr = rates["topr"][0]
    wanted = [("one rate", name, topr_lr) for name in at_one_rate]
    wanted += [("own rate", name, each[0]) for name, each in rates.items()]
    jobs = []
    for rate, name, lr in wanted:
        columns = {"rate": rate, "method": name, "lr": lr}
        jobs.append(make_job(scale, columns, name, TUNED[name], lr=lr))
    return with_shared_samples(jobs)


def arms_over_p_tilde(scale: Scale, columns: Mapping[str, Any], **changes: Any) -> list[Job]:
    """A training set with a baseline for each effective share of positives p~ of the scale.

    columns: method, lr, and share, which is the set's share of positives; p_tilde is added.
    """
    method = columns["method"]
    lr = columns["lr"]
    share = columns["share"]
    sets = {"composition": "proportion", "proportion": share, "evals_per_epoch": 1, **scale.sets}
    jobs = []
    for p_tilde in scale.shares:
        label = f"share-{method}-{lr:g}-{share:g}-{p_tilde:g}"
        # Without a baseline p~ is the share itself.
        effective = None if p_tilde == share else p_tilde
        wanted = {**sets, "lr": lr, "effective_proportion": effective, **changes}
        of_run = {**columns, "p_tilde": p_tilde}
        jobs.append(make_job(scale, of_run, label, METHODS[method], **wanted))
    return jobs


# ---- the table of measurements ----


def by_seed(table: pd.DataFrame, metric: str, by: str | list[str], at: int = -1) -> pd.DataFrame:
    """A metric at a point of the runs, by default the last: a row for each seed, columns for arms.

    table: that of `runs.measurements`. by: its columns that distinguish arms; there is a column
    for each of their values. NaN where an arm has no run with a seed.

    >>> rows = [("topr", 0, 0.25), ("topr", 1, 0.5), ("ppo", 0, 0.75), ("ppo", 1, 1.0)]
    >>> table = pd.DataFrame(rows, columns=["method", "seed", "value"]).assign(metric="correct")
    >>> correct = by_seed(table, "correct", "method")
    >>> over_seeds(correct["ppo"] - correct["topr"]).each
    (0.5, 0.5)
    """
    columns = [by] if isinstance(by, str) else by
    # The rows of a run are in the order of its points: its nth row is its nth point.
    rows = table[table["metric"] == metric]
    chosen = rows.groupby([*columns, "seed"], sort=False).nth(at)
    # Without sorting, arms stay in the order of the figure's runs, and so do lines and tables.
    return chosen.set_index(["seed", *columns])["value"].unstack(by, sort=False)


def over_seeds(values: pd.Series) -> Estimate:
    """The mean over seeds, of which those without a value are left out."""
    present = values.dropna()
    return Estimate.over_seeds(present) if len(present) else Estimate(math.nan)


# A line of a figure in its file: mean, half_width and each, a list with an entry for each point.
Curve = Mapping[str, list[Any]]


def curve(values: pd.DataFrame) -> Curve:
    """A line with 95% intervals; values: a row for each seed, a column for each point.

    None where there is no number, and for the interval of a single seed.

    >>> curve(pd.DataFrame({"start": [1.0, 3.0], "end": [2.0, math.nan]}))
    {'mean': [2.0, 2.0], 'half_width': [12.706, None], 'each': [[1.0, 3.0], [2.0]]}
    """
    estimates = [over_seeds(column) for _, column in values.items()]
    return {
        "mean": [None if math.isnan(point.mean) else point.mean for point in estimates],
        "half_width": [point.half_width for point in estimates],
        "each": [list(point.each) for point in estimates],
    }


def curves(rows: pd.DataFrame, by: str) -> dict[Any, Curve]:
    """A line along the runs for each value of a column; rows: of the table, one metric for each."""
    lines = {}
    for name, of_arm in rows.groupby(by, sort=False):
        by_point = of_arm.pivot(index="seed", columns="point", values="value")
        lines[name] = curve(by_point)
    return lines


def change(table: pd.DataFrame, metric: str, by: str | list[str]) -> pd.DataFrame:
    """The end of the runs minus their beginning, as `by_seed`."""
    return by_seed(table, metric, by) - by_seed(table, metric, by, at=0)


def ends(table: pd.DataFrame, metric: str) -> dict[str, Estimate]:
    """A metric at the end of each method at each learning rate, by its name in legends."""
    # A method whose own rate is TOPR's is in the table twice.
    rows = table.drop_duplicates(["method", "lr", "seed", "metric", "point"])
    at_end = by_seed(rows, metric, ["method", "lr"])
    return {
        f"{label_with_rate(*arm)}: {metric} at the end": over_seeds(values)
        for arm, values in at_end.items()
    }


def rates_of_arms(table: pd.DataFrame) -> dict[str, float]:
    """The learning rate of each arm where each has its own."""
    own = table[table["rate"] == "own rate"]
    return own.groupby("arm", sort=False)["lr"].first().to_dict()


# ---- lines and panels, from the data of results/NAME.json ----

EPOCH = "share of the epoch (%)"
TRAINING = "share of the training (%)"
CORRECT = "correct (%), 95% interval"
P_TILDE = r"$\tilde p$"
# Limits of an axis that shows all shares.
ALL_SHARES = {"ylim": (-3, 103)}


def line(
    x: Sequence[float], y: Curve, label: str, style: Style | str = "", scale: float = 100
) -> Line:
    """A line with its 95% interval, by default in percent; None where there is no number.

    >>> line([1], {"mean": [0.5], "half_width": [None]}, "one seed").half_width is None
    True
    """
    mean = scale * np.array(y["mean"], float)
    half_width = scale * np.array(y["half_width"], float)  # None becomes NaN
    each = [scale * np.array(values) for values in y.get("each", ())]
    if np.isnan(half_width).all():
        half_width = None
    return Line(x, mean, label, style, half_width=half_width, each=each)


def arm_line(x: Sequence[float], y: Curve, arm: Arm, scale: float = 100) -> Line:
    """A line with the name and the style of an arm."""
    return line(x, y, arm.name, arm.style, scale)


def different_rates(data: Mapping[str, Any]) -> Mapping[str, float]:
    """The own learning rate of each arm; none if all are the same, which is TOPR's best.

    >>> different_rates({"rates of arms": {"topr": 3e-5, "sft": 3e-5}})
    {}
    """
    rates = data.get("rates of arms", {})
    return rates if len(set(rates.values())) > 1 else {}


def with_rates(arms: Mapping[str, Arm], rates: Mapping[str, float]) -> dict[str, Arm]:
    """The arms with their learning rates in their names, for legends.

    >>> with_rates({"topr": METHODS["topr"]}, {"topr": 3e-5})["topr"].name.splitlines()
    ['TOPR', 'lr 3e-5']
    """
    named = {}
    for name, arm in arms.items():
        named[name] = replace(arm, name=f"{arm.name}\n{rate_text(rates[name])}")
    return named


def evenly(y: Curve) -> list[float]:
    """The positions of a curve's points along the training, in percent, from its beginning.

    >>> evenly({"mean": [0.1, 0.2, 0.3]})
    [0.0, 50.0, 100.0]
    """
    last = len(y["mean"]) - 1
    return [100 * i / last for i in range(last + 1)]


def accuracy_panel(
    title: str, lines: Mapping[str, Curve], arms: Mapping[str, Arm], x: str = EPOCH
) -> Panel:
    """Accuracy along the training with some arms."""
    drawn = [arm_line(evenly(y), y, arms[name]) for name, y in lines.items()]
    return Panel(title, x, CORRECT, drawn, {"ylim": (-3, 100)})


def tenths_panel(title: str, ylabel: str, lines: Mapping[str, Curve], **options: Any) -> Panel:
    """What was measured of some methods in tenths of the training, each at its middle."""
    drawn = []
    for method, y in lines.items():
        count = len(y["mean"])
        middles = [100 * (i + 0.5) / count for i in range(count)]
        drawn.append(arm_line(middles, y, METHODS[method], scale=1))
    return Panel(title, TRAINING, ylabel, drawn, options)


def p_tilde_panel(title: str, lines: Sequence[Line]) -> Panel:
    """Accuracy against the effective share of positives p~, in percent."""
    ticks = [1, 2, 5, 10, 20, 50, 100]
    options = {"xscale": "log", "xticks": ticks, "xticklabels": ticks, "ylim": (-3, 100)}
    return Panel(title, f"effective share of positives {P_TILDE} (%)", CORRECT, lines, options)


def percent(shares: Sequence[float]) -> list[float]:
    """Shares in percent."""
    return [100 * share for share in shares]
