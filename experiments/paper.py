"""Which of the paper's claims hold for the models here?

    python -m experiments.paper                 # with the tiny models; fig1 fig8: only two figures
    python -m experiments.paper --quick         # to see that it works; four minutes
    python -m experiments.paper --preset paper --passes 1 --workers 1    # with the paper's model

A claim says that one model is above another, below it, or level with it: within two points. Each
method has the learning rate and number of passes of `experiments.passes`, and the verifier those of
its preset. --out gets a row for each claim, paper.csv, its picture, paper.png, and a row for each
model and seed, models.csv. The verdict is "reproduced" if the whole 95 % interval over seeds agrees
with the claim, "contradicted" if none of it does, and else "inconclusive". Intervals are not
corrected for the number of claims.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal, NamedTuple

import pandas as pd
import pydantic
import tyro
from matplotlib.figure import Figure

from examples import verifier
from experiments import passes, runs
from experiments.intervals import interval
from toprlib.files import read_records, write_file
from toprlib.records import InputError, Sample
from toprlib.settings import command


# ---- the claims ----------------------------------------------------------------------------------
class Claim(NamedTuple):
    """How the first model compares with the second."""

    figure: str
    first: str
    relation: str
    second: str
    metric: str = "pass@1"
    paper: float | None = None  # its difference in points, if its text has one


SENTENCES = {
    "fig1": "TOPR is best, DPO comes next; naive REINFORCE collapses",
    "fig3": "only TOPR reduces invalid answers",
    "fig4": "training on wrong answers, too, is better than on right ones alone",
    "fig5": "an effective proportion of 10 to 20 % is best, whatever the share of right answers",
    "fig6": "TOPR recovers at low proportions, where TIS does not",
    "fig7": "plain IS is as good as TOPR until most answers are wrong and gradients large",
    "fig8": "several iterations improve further, and Anna Karenina sampling improves most",
    "table2": "a verifier learns its form and its verdicts, and improves the vote",
}
RELATIONS = {"above": (0, math.inf), "below": (-math.inf, 0), "level with": (-2, 2)}  # in points
FEW_RIGHT = "problems with 0 to 4 right"  # of all samples of a test problem
MOSTLY_WRONG = {"n": 24, "composition": "proportion", "proportion": 0.4, "max_grad_norm": 100.0}
ROUNDS = {"n": 64, "iterations": 3}  # n: a composition trains on some of these samples
# name -> method; changes to settings, besides the method's; iteration, 0 for before training
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    **{method: (method, {}, 1) for method in runs.METHOD_SETTINGS},
    "base": ("TOPR", {}, 0),
    "naive REINFORCE at TOPR's rate": ("TOPR", {"method": "reinforce"}, 1),
    "TOPR, mostly wrong": ("TOPR, Adafactor", MOSTLY_WRONG, 1),
    "plain IS, mostly wrong": ("plain IS, Adafactor", MOSTLY_WRONG, 1),
    "uniform, iteration 1": ("TOPR", ROUNDS, 1),
    "uniform, iteration 3": ("TOPR", ROUNDS, 3),
    "right ones, iteration 3": ("SFT, repeated", ROUNDS, 3),
    "Anna Karenina, iteration 3": ("TOPR", {**ROUNDS, "composition": "anna_karenina"}, 3),
}
# Training sets with a share of right answers, and a baseline for the effective proportion p~.
for method, share, p_tilde in product(("TOPR", "TIS"), (0.1, 0.5), (0.01, 0.1, 0.2, 0.5)):
    changes = {"n": 24, "composition": "proportion", "proportion": share}
    if p_tilde != share:
        changes["effective_proportion"] = p_tilde
    MODELS[f"{method}, {share:.0%} right, p~ = {p_tilde:.0%}"] = (method, changes, 1)
CLAIMS = (
    Claim("fig1", "TOPR", "above", "base"),
    Claim("fig1", "TOPR", "above", "naive REINFORCE"),
    Claim("fig1", "TOPR", "above", "PPO"),
    Claim("fig1", "TOPR", "above", "DPO"),
    Claim("fig1", "DPO", "above", "PPO"),
    Claim("fig1", "DPO", "above", "naive REINFORCE"),
    Claim("fig1", "naive REINFORCE at TOPR's rate", "below", "base"),
    Claim("fig3", "TOPR", "below", "base", "invalid"),
    Claim("fig3", "PPO", "level with", "base", "invalid"),
    Claim("fig3", "DPO", "level with", "base", "invalid"),
    Claim("fig3", "naive REINFORCE", "above", "base", "invalid"),
    Claim("fig4", "TOPR", "above", "SFT, once"),
    Claim("fig4", "TOPR", "above", "SFT, repeated"),
    Claim("fig4", "TOPR", "above", "SFT, repeated", "vote"),
    Claim("fig4", "TOPR", "below", "SFT, repeated", FEW_RIGHT),
    Claim("fig5", "TOPR, 10% right, p~ = 20%", "above", "TOPR, 10% right, p~ = 1%"),
    Claim("fig5", "TOPR, 10% right, p~ = 20%", "level with", "TOPR, 10% right, p~ = 10%"),
    Claim("fig5", "TOPR, 10% right, p~ = 20%", "above", "TOPR, 10% right, p~ = 50%"),
    Claim("fig5", "TOPR, 50% right, p~ = 20%", "above", "TOPR, 50% right, p~ = 50%"),
    Claim("fig5", "TOPR, 10% right, p~ = 20%", "level with", "TOPR, 50% right, p~ = 20%"),
    Claim("fig5", "TOPR, 10% right, p~ = 10%", "above", "TOPR, 50% right, p~ = 10%"),
    Claim("fig6", "TOPR, 10% right, p~ = 1%", "above", "base"),
    Claim("fig6", "TOPR, 10% right, p~ = 1%", "above", "TIS, 10% right, p~ = 1%"),
    Claim("fig6", "TOPR, 10% right, p~ = 50%", "level with", "TIS, 10% right, p~ = 50%"),
    Claim("fig6", "TIS, 10% right, p~ = 20%", "above", "TOPR, 10% right, p~ = 20%"),
    Claim("fig7", "plain IS, Adafactor", "level with", "TOPR, Adafactor"),
    Claim("fig7", "TOPR, mostly wrong", "above", "base"),
    Claim("fig7", "plain IS, mostly wrong", "below", "base"),
    Claim("fig7", "plain IS, mostly wrong", "above", "base", "invalid", 19.0),
    Claim("fig8", "uniform, iteration 3", "above", "uniform, iteration 1"),
    Claim("fig8", "uniform, iteration 3", "above", "right ones, iteration 3"),
    Claim("fig8", "Anna Karenina, iteration 3", "above", "uniform, iteration 3", paper=4.2),
    Claim("table2", "trained verifier", "above", "verifier", verifier.ACCURACY, 38.3),
    Claim("table2", "trained verifier", "below", "verifier", verifier.INVALID, -33.3),
    Claim("table2", "trained verifier", "above", "no verifier", verifier.WEIGHTED, 6.0),
)
EXAMPLES_PER_PROBLEM = 50_000 / 7_473  # that an iteration trains on (Section 4.3)


@pydantic.dataclasses.dataclass(frozen=True)
class PaperOptions(runs.Options):
    """What a user of this experiment chooses."""

    figures: tyro.conf.Positional[tuple[Literal[*SENTENCES], ...]] = tuple(SENTENCES)  # to check


# ---- what was measured ---------------------------------------------------------------------------
def measure_models(claims: Sequence[Claim], options: runs.Options) -> list[dict[str, Any]]:
    """A row of metrics for each model of the claims and each seed; makes the runs."""
    stages = runs.make_stages(["base"], options)
    [stage] = stages.values()
    names = dict.fromkeys([claim.first for claim in claims] + [claim.second for claim in claims])
    methods = dict.fromkeys(MODELS[name][0] for name in names)
    tried = passes.try_cells(stages, list(methods), options)
    best = passes.best_cells(tried).set_index("method", drop=False)
    planned = {}
    for name, seed in product(names, options.seeds):
        method, changes, _ = MODELS[name]
        if "n" in changes:
            changes = {**changes, "examples": round(EXAMPLES_PER_PROBLEM * stage.settings.problems)}
        planned[name, seed] = passes.run_at(best.loc[method], stage, seed, **changes)
    runs.make_runs(list(planned.values()), options.workers)
    rows = []
    for (name, seed), run in planned.items():
        *_, iteration = MODELS[name]
        of_iteration = [row for row in runs.read_run(run) if row["iteration"] == iteration]
        for row in of_iteration:  # none if the run diverged
            if iteration == 1:
                row[FEW_RIGHT] = share_with_few_right(run)
            rows.append({**row, "model": name, "seed": seed})
    return rows


def share_with_few_right(run: runs.Run) -> float:
    """The share of test problems with at most four right answers after the first iteration."""
    results = json.loads((run.folder / "results.json").read_text())
    steps = results["iterations"][0]["dataset"]["steps"]
    samples = read_records(run.folder / "iteration-1" / f"test-{steps}.jsonl", Sample)
    is_right = pd.Series([sample.reward > 0 for sample in samples])
    right = is_right.groupby([sample.problem_id for sample in samples]).sum()
    return float((right <= 4).mean())


def measure_verifiers(options: runs.Options) -> list[dict[str, Any]]:
    """A row of metrics for each row of Table 2 and each seed; makes the runs."""
    if options.preset not in verifier.PRESETS:
        raise InputError(f"table2: has no preset {options.preset}; name the figures to check")
    settings = verifier.PRESETS[options.preset]
    if options.quick:
        settings = replace(settings, problems=8, test_problems=10, test_solutions=4)
    folder = options.runs / f"verifier-{options.preset}"
    planned = {}
    for seed in options.seeds:
        planned[seed] = replace(settings, seed=seed, out=folder / str(seed))
    missing = [run for run in planned.values() if not (run.out / "results.json").exists()]
    runs.map_parallel(verifier.run, missing, options.workers)
    names = {"no verifier": "no verifier", "base": "verifier", settings.method: "trained verifier"}
    rows = []
    for seed, run in planned.items():
        table = json.loads((run.out / "results.json").read_text())["table2"]
        for row, name in names.items():
            metrics = {metric: entry["mean"] for metric, entry in table[row].items()}
            rows.append({"model": name, "seed": seed, **metrics})
    return rows


# ---- verdicts ------------------------------------------------------------------------------------
def check_claim(claim: Claim, measured: pd.DataFrame) -> dict[str, Any]:
    """The row of a claim: the first model minus the second, in points."""
    differences = 100 * (measured.loc[claim.first] - measured.loc[claim.second])
    mean, half_width, _ = interval(differences[claim.metric].dropna())
    row = {
        "figure": claim.figure,
        "claim": f"{claim.first} {claim.relation} {claim.second}",
        "metric": claim.metric,
        "paper": claim.paper,
        "difference": mean,
        "half width": half_width,
        "verdict": judge(mean - half_width, mean + half_width, claim.relation),
    }
    others = ["greedy", "vote"] if claim.metric == "pass@1" else []
    for metric in others:
        other_mean, other_half_width, _ = interval(differences[metric].dropna())
        row[metric] = f"{other_mean:.1f} ± {other_half_width:.1f}"
    return row


def judge(lowest: float, highest: float, relation: str) -> str:
    """The verdict on a claim about a difference that is between `lowest` and `highest`.

    >>> judge(1.0, 3.0, "above"), judge(-1.0, 3.0, "above"), judge(-1.0, 1.0, "level with")
    ('reproduced', 'inconclusive', 'reproduced')
    """
    low, high = RELATIONS[relation]
    if low < lowest and highest < high:
        return "reproduced"
    return "contradicted" if highest < low or high < lowest else "inconclusive"


def draw(table: pd.DataFrame) -> Figure:
    """The differences in points with their intervals; a panel for each figure of the paper."""
    panels = list(table.groupby("figure", sort=False))
    heights = [1 + len(rows) for _, rows in panels]
    figure = Figure(figsize=(12, 0.35 * sum(heights)), layout="constrained", dpi=150)
    all_axes = figure.subplots(len(panels), height_ratios=heights, squeeze=False)[:, 0]
    for axes, (name, rows) in zip(all_axes, panels, strict=True):
        labels = rows["claim"] + " (" + rows["metric"] + "): " + rows["verdict"]
        axes.axvline(0, color="black", lw=1)
        axes.errorbar(rows["difference"], labels, xerr=rows["half width"], fmt="o", capsize=3)
        axes.set_title(f"{name}: {SENTENCES[name]}", loc="right")
        axes.invert_yaxis()
    return figure


def main() -> None:
    """The command line."""
    with command("experiments.paper"):
        options = runs.read_options(PaperOptions, "experiments.paper", __doc__)
        claims = [claim for claim in CLAIMS if claim.figure in options.figures]
        of_models = [claim for claim in claims if claim.figure != "table2"]
        rows = []
        if "table2" in options.figures:
            rows += measure_verifiers(options)
        if of_models:
            rows += measure_models(of_models, options)
        measured = pd.DataFrame(rows).set_index(["model", "seed"]).select_dtypes("number")
        table = pd.DataFrame([check_claim(claim, measured) for claim in claims])
        write_file(options.out / "models.csv", measured.to_csv(float_format="%.6g"))
        write_file(options.out / "paper.csv", table.to_csv(index=False, float_format="%.6g"))
        draw(table).savefig(options.out / "paper.png")
        print(table.to_string(index=False))


if __name__ == "__main__":
    main()
