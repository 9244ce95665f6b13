"""Figure 7: TOPR against plain importance sampling, in a mild and in a hard setting.

Mild: 33% negatives and gradients clipped early; hard: 60% and clipped late. On the laptop with two
optimizers, since AdamW divides by the gradient's size; each at the rate that is best for TOPR.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from figures.common import (
    CORRECT,
    METHODS,
    OPTIMIZERS,
    Figure,
    Findings,
    Rates,
    by_seed,
    change,
    curves,
    line,
    make_job,
    over_seeds,
    tenths_panel,
)
from figures.runs import Job, Run, in_seeds, measurements, with_shared_samples
from figures.scales import Scale
from toprlib.plotting import Line, Panel
from toprlib.report import Estimate

NEGATIVE_SHARES = (0.33, 0.6)
COMPARED = ("topr", "off_policy")


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """Both methods in both settings, with each optimizer of the scale."""
    sets = {"composition": "proportion", "epochs": scale.passes, **scale.sets}
    jobs = []
    for optimizer in scale.optimizers:
        lr = rates[optimizer][0]
        for negative, clip in zip(NEGATIVE_SHARES, scale.clips, strict=True):
            setting = f"{optimizer}, {negative:.0%} negative, clipped at {clip:g}"
            changes = {**sets, "lr": lr, "proportion": 1 - negative, "max_grad_norm": clip}
            for method in COMPARED:
                columns = {"setting": setting, "lr": lr, "method": method}
                label = f"fig7-{optimizer}-{negative}-{clip}-{method}"
                optimized = {**changes, **OPTIMIZERS[optimizer].changes}
                jobs.append(make_job(scale, columns, label, METHODS[method], **optimized))
    return in_seeds(with_shared_samples(jobs), seeds)


def gradient_norms(run: Run) -> dict[str, Sequence[float]]:
    """The norms of the gradient before clipping, and how often it was clipped."""
    norms = run.steps()["grad_norm"]
    return {
        "largest gradient norm": [norms.max()],
        "steps clipped": [(norms > run.settings.max_grad_norm).mean()],
        "gradient norm": run.tenths("grad_norm"),
    }


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """Accuracy and gradient norms in each setting."""
    table = measurements(runs, gradient_norms)
    data = {}
    shares = {}
    numbers = {}
    for (setting, lr), rows in table.groupby(["setting", "lr"], sort=False):
        lines = {}
        for metric in ("correct", "gradient norm"):
            lines[metric] = curves(rows[rows["metric"] == metric], "method")
        data[f"{setting}, lr {lr:g}"] = lines
        shares |= ends_in_setting(rows, setting)
        numbers |= norms_in_setting(rows, setting)
    return Findings(data, shares, numbers)


def ends_in_setting(rows: pd.DataFrame, setting: str) -> dict[str, Estimate]:
    """Both methods at the end of training, against the base and against each other."""
    risen = change(rows, "correct", "method")
    found = {}
    for method in COMPARED:
        name = f"{setting}, {METHODS[method].name}"
        for metric in ("correct", "invalid", "steps clipped"):
            found[f"{name}: {metric}"] = over_seeds(by_seed(rows, metric, "method")[method])
        found[f"{name} - base: correct"] = over_seeds(risen[method])
    correct = by_seed(rows, "correct", "method")
    found[f"{setting}: TOPR - plain IS"] = over_seeds(correct["topr"] - correct["off_policy"])
    return found


def norms_in_setting(rows: pd.DataFrame, setting: str) -> dict[str, Estimate]:
    """The largest gradient norm of a run with each method, and how they compare."""
    largest = by_seed(rows, "largest gradient norm", "method")
    ratio = np.log10(largest["off_policy"]) - np.log10(largest["topr"])
    found = {f"{setting}: log10 of largest gradient norm, plain IS / TOPR": over_seeds(ratio)}
    for method in COMPARED:
        name = f"{setting}, {METHODS[method].name}"
        found[f"{name}: largest gradient norm"] = over_seeds(largest[method])
    return found


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """The ends in each setting, and the gradient norms in the hard one.

    Keys of data: "OPTIMIZER, SHARE negative, clipped at NORM, lr RATE".
    """
    by_setting = {}
    for key in data:
        _, negative, clip, _ = key.split(", ")
        by_setting.setdefault(f"{negative}, {clip}", []).append(key)
    drawn = []
    for setting, keys in by_setting.items():
        drawn.append(ends_panel(setting, {key: data[key]["correct"] for key in keys}))
    for key in data:
        if "60% negative" in key:
            ylabel = "gradient norm, mean over a tenth"
            drawn.append(tenths_panel(key, ylabel, data[key]["gradient norm"], yscale="log"))
    return drawn


def ends_panel(setting: str, lines: Mapping[str, Any]) -> Panel:
    """Accuracy at the end, with one optimizer below the other."""
    rows = -np.arange(len(lines))
    drawn = []
    for method, shift in (("topr", 0.15), ("off_policy", -0.15)):
        drawn.append(ends_line(method, [of_key[method] for of_key in lines.values()], rows + shift))
    labels = []
    for key in lines:
        optimizer, _, _, lr = key.split(", ")
        labels.append(f"{optimizer}, {lr}")
    count = len(lines)
    axis = {"yticks": rows, "yticklabels": labels, "xlim": (-3, 103), "ylim": (0.5 - count, 0.5)}
    return Panel(f"{setting}, at the end", CORRECT, "", drawn, axis)


def ends_line(method: str, lines: Sequence[Mapping[str, Any]], y: np.ndarray) -> Line:
    """The last points of some curves, one below the other, with their intervals along x."""
    ends = {}
    for part in ("mean", "half_width", "each"):
        ends[part] = [of_key[part][-1] for of_key in lines]
    points = line(y, ends, METHODS[method].name, METHODS[method].style)
    return points._replace(x=points.y, y=y, kind="rows")


FIGURE = Figure(arms, read, panels, tuned=lambda scale: tuple(scale.optimizers))
