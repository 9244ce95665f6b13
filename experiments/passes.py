"""From the same sampled answers, which method trains the best model?

    python -m experiments.passes                # with the tiny models; about 9 core-hours
    python -m experiments.passes --quick        # to see that it works; six minutes
    python -m experiments.passes --preset single-gpu --workers 1     # with a real model

Each method has a cell: its best learning rate and number of passes, by held-out problems. Test
seeds compare the methods at their cells. With the first three of them, the two best methods of a
stage make two more iterations, on fresh samples. --out gets all evaluations, passes.csv, learning
curves, passes.png, and answers beside the predictions of predictions.csv, answers.csv and .png.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pydantic
from matplotlib.figure import Figure

from experiments import runs
from experiments.intervals import holm, interval
from toprlib.files import write_file
from toprlib.settings import command

PREDICTIONS = Path(__file__).with_name("predictions.csv")  # committed before the first run
COMPARED = tuple(runs.METHOD_SETTINGS)[:9]  # the others are only for the paper's claims
QUESTIONS = (  # pairs of methods, fixed before the first run: how far is the first one ahead?
    ("TOPR", "SFT, repeated"),
    ("TOPR, 50 %", "SFT, repeated"),
    (runs.CONTROL, "SFT, repeated"),
    ("SFT, once", "SFT, repeated"),
    ("none", "SFT, repeated"),
    ("TOPR", "naive REINFORCE"),
    ("wrong answers alone, tapered", "none"),
)
HELD_OUT_SEED = 100  # no test seed
# Learning rates as multiples of the stage's. The three in the middle are tried first.
LADDER = (0.02, 0.06, 0.2, 0.6, 2.0, 6.0, 20.0)
TEMPERATURES = (1.0, 0.7, 0.5, 0.3)  # of a model without training
MARKERS = "osv^D<>PX*dph8H"


@pydantic.dataclasses.dataclass(frozen=True)
class PassesOptions(runs.Options):
    """What a user of this experiment chooses."""

    stages: tuple[Literal[*runs.STAGES], ...] = tuple(runs.STAGES)  # of the preset laptop
    methods: tuple[Literal[*runs.METHOD_SETTINGS], ...] = COMPARED


# ---- cells: learning rates and numbers of passes -------------------------------------------------
def try_cells(
    stages: Mapping[str, runs.Stage], methods: Sequence[str], options: runs.Options
) -> pd.DataFrame:
    """Make runs until the rates beside each method's best one are tried; returns all rows."""
    ladders = {}
    planned = []
    for name, stage in stages.items():
        ladders[name] = [float(f"{factor * stage.settings.lr:.1g}") for factor in LADDER]
        rates = ladders[name][4:5] if options.quick else ladders[name][2:5]
        for method in methods:
            planned += held_out_runs(stage, method, rates, options.passes)
    while True:
        table = runs.make_runs(planned, options.workers)
        wider = []
        for cell in best_cells(table).itertuples():
            beside = [lr for lr in ladders[cell.stage] if cell.lr / 5 < lr < cell.lr * 5]
            wider += held_out_runs(stages[cell.stage], cell.method, beside, options.passes)
        added = [run for run in wider if run not in planned]
        if options.quick or not added:
            return table
        planned += added


def held_out_runs(
    stage: runs.Stage, method: str, rates: Sequence[float], passes: Sequence[float]
) -> list[runs.Run]:
    """A run with each learning rate, or at each temperature without training."""
    if method == "none":
        run = runs.Run(stage, method, stage.settings.lr, 0, HELD_OUT_SEED, "held-out")
        return [replace(run, temperature=temperature) for temperature in TEMPERATURES]
    *earlier, most = sorted(passes)
    run = runs.Run(stage, method, 0, most, HELD_OUT_SEED, "held-out", evaluate_after=tuple(earlier))
    return [replace(run, lr=lr) for lr in rates]


def best_cells(table: pd.DataFrame) -> pd.DataFrame:
    """For each stage and method the row with the highest pass@1."""
    candidates = table[(table["passes"] > 0) | (table["method"] == "none")]
    best = candidates.groupby(["stage", "method"], sort=False)["pass@1"].idxmax()
    return candidates.loc[best]


def run_at(cell: NamedTuple, stage: runs.Stage, seed: int, **changes: Any) -> runs.Run:
    """The test run of a row of `best_cells`."""
    run = runs.Run(stage, cell.method, cell.lr, cell.passes, seed, temperature=cell.temperature)
    return replace(run, changes=changes)


# ---- answers -------------------------------------------------------------------------------------
def answer_questions(table: pd.DataFrame) -> pd.DataFrame:
    """QUESTIONS on each stage by each metric: the mean difference over seeds, in points.

    table: a row for each stage, method and seed. p: of a difference of 0, by Holm's correction for
    all questions on one metric. A seed with which one of the methods diverged does not count.
    """
    rows = []
    stages = table["stage"].unique()
    for metric, stage, (first, second) in product(runs.METRICS, stages, QUESTIONS):
        of_stage = table[table["stage"] == stage]
        values = 100 * of_stage.pivot(index="seed", columns="method", values=metric)
        if first in values and second in values:
            lead, half_width, p = interval((values[first] - values[second]).dropna())
            row = {"metric": metric, "stage": stage, "question": f"{first} - {second}"}
            rows.append({**row, "difference": lead, "half width": half_width, "p": p})
    keys = ["metric", "stage", "question"]
    answers = pd.DataFrame(rows, columns=[*keys, "difference", "half width", "p"])
    answers["p"] = answers.groupby("metric")["p"].transform(holm)
    answers = answers.merge(pd.read_csv(PREDICTIONS), how="left", on=keys)
    answers["as predicted"] = answers["difference"].between(answers["low"], answers["high"])
    return answers


def draw(table: pd.DataFrame) -> Figure:
    """pass@1 on held-out problems over passes, each method at its best rate; a panel a stage."""
    stages = table["stage"].unique()
    figure = Figure(figsize=(5 * len(stages), 6), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(stages), squeeze=False)[0]
    for axes, stage in zip(panels, stages, strict=True):
        of_stage = table[table["stage"] == stage]
        curves = of_stage.merge(best_cells(of_stage)[["method", "lr", "temperature"]])
        for (method, curve), marker in zip(curves.groupby("method"), MARKERS, strict=False):
            axes.plot(curve["passes"], 100 * curve["pass@1"], marker=marker, label=method)
        axes.set_xscale("symlog", linthresh=0.5)
        ticks = of_stage["passes"].unique()
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set(title=stage, xlabel="passes over the samples", ylabel="right answers (%)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(stages), loc="outside lower center", frameon=False)
    return figure


def draw_answers(answers: pd.DataFrame) -> Figure:
    """How far TOPR is ahead of SFT on repeated right answers, by stage and metric."""
    figure = Figure(figsize=(5, 4.5), layout="constrained", dpi=200)
    axes = figure.subplots()
    leads = answers[answers["question"] == "TOPR - SFT, repeated"]
    places = np.arange(leads["stage"].nunique())
    titles = {"pass@1": "at T = 1", "greedy": "at T = 0", "vote": "by vote"}
    for shift, marker, (metric, title) in zip((-0.2, 0, 0.2), "osv", titles.items(), strict=True):
        of_metric = leads[leads["metric"] == metric]
        difference, half_width = of_metric[["difference", "half width"]].to_numpy().T
        style = {"fmt": marker, "ms": 9, "lw": 2, "label": title}
        axes.errorbar(difference, places + shift, xerr=half_width, **style)
    axes.axvline(0, color="black", lw=1)
    axes.set_yticks(places, leads["stage"].unique())
    axes.invert_yaxis()
    axes.set(xlabel="right answers: TOPR minus SFT, repeated (points)")
    figure.legend(ncols=3, loc="outside lower center", frameon=False)
    return figure


def main() -> None:
    """The command line."""
    with command("experiments.passes"):
        options = runs.read_options(PassesOptions, "experiments.passes", __doc__)
        stages = runs.make_stages(options.stages, options)
        held_out = try_cells(stages, options.methods, options)
        best = best_cells(held_out)
        others = best[~best["method"].isin(["none", runs.CONTROL])]
        best_two = others.sort_values("pass@1").groupby("stage").tail(2)
        planned = []
        for cell, seed in product(best.itertuples(), options.seeds):
            planned.append(run_at(cell, stages[cell.stage], seed))
        for cell, seed in product(best_two.itertuples(), options.seeds[:3]):
            planned.append(run_at(cell, stages[cell.stage], seed, iterations=3))
        tested = runs.make_runs(planned, options.workers)
        # A run of three iterations repeats the run of one.
        tested = tested.drop_duplicates(["stage", "method", "seed", "iteration", "passes"])
        csv = pd.concat([held_out, tested]).to_csv(index=False, float_format="%.6g")
        write_file(options.out / "passes.csv", csv)
        draw(held_out).savefig(options.out / "passes.png")
        ends = tested[tested["iteration"] <= 1].groupby(["stage", "method", "seed"]).tail(1)
        answers = answer_questions(ends)
        csv = answers.to_csv(index=False, float_format="%.6g")
        write_file(options.out / "answers.csv", csv)
        draw_answers(answers).savefig(options.out / "answers.png")
        print(answers.round(4).to_string(index=False))


if __name__ == "__main__":
    main()
