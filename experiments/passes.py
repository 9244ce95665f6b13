"""From the same sampled answers, which method trains the best model?

    python -m experiments.passes                        # tiny models; 9 core-hours
    python -m experiments.passes --stages base          # one of the stages
    python -m experiments.passes --quick                # to see that it works; 3 minutes
    python -m experiments.passes --preset single-gpu --workers 1    # a real model

Each method has its best learning rate and number of passes, chosen by held-out problems. Test
seeds compare the methods there. The two best methods of a stage also make two more rounds, each on
fresh samples. --out gets the table of all evaluations, passes.csv, and its picture, passes.png.
"""

from itertools import product
from typing import Literal

import pandas as pd
import pydantic
from matplotlib.figure import Figure

from experiments import cells, runs
from experiments.intervals import holm, interval
from toprlib.files import write_file
from toprlib.settings import command

QUESTIONS = (  # pairs of methods, fixed before the first run: how far is the first one ahead?
    ("TOPR", "SFT, repeated"),
    ("TOPR, 50 %", "SFT, repeated"),
    (runs.CONTROL, "SFT, repeated"),
    ("SFT, once", "SFT, repeated"),
    ("none", "SFT, repeated"),
    ("TOPR", "naive REINFORCE"),
    ("wrong answers alone, tapered", "none"),
)
MARKERS = "osv^D<>PX*dph8H"


@pydantic.dataclasses.dataclass(frozen=True)
class PassesOptions(runs.Options):
    """What a user of this experiment chooses."""

    stages: tuple[Literal[*runs.STAGES], ...] = tuple(runs.STAGES)  # of the preset laptop
    methods: tuple[Literal[*runs.METHODS], ...] = tuple(runs.METHODS)[:9]  # to compare


def answer_questions(table: pd.DataFrame) -> pd.DataFrame:
    """QUESTIONS on each stage by each metric: the mean difference over seeds, in points.

    table: a row for each stage, method and seed. p: of a difference of 0, by Holm's correction for
    all questions on one metric.
    """
    rows = []
    for metric in runs.METRICS:
        values = 100 * table.pivot(index="seed", columns=["stage", "method"], values=metric)
        answers = []
        for stage, (first, second) in product(table["stage"].unique(), QUESTIONS):
            if (stage, first) in values and (stage, second) in values:
                lead, half_width, p = interval(values[stage, first] - values[stage, second])
                answer = {"metric": metric, "stage": stage, "question": f"{first} - {second}"}
                answers.append({**answer, "difference": f"{lead:.1f} ± {half_width:.1f}", "p": p})
        corrected = holm([answer["p"] for answer in answers])
        for answer, p in zip(answers, corrected, strict=True):
            rows.append({**answer, "p": round(p, 4)})
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame) -> Figure:
    """pass@1 on held-out problems over passes, each method at its best rate; a panel a stage."""
    stages = table["stage"].unique()
    figure = Figure(figsize=(5 * len(stages), 6), layout="constrained", dpi=150)
    panels = figure.subplots(1, len(stages), squeeze=False)[0]
    for axes, stage in zip(panels, stages, strict=True):
        of_stage = table[table["stage"] == stage]
        for cell, marker in zip(cells.best_cells(of_stage).itertuples(), MARKERS, strict=False):
            of_method = of_stage[of_stage["method"] == cell.method]
            is_best = (of_method["lr"] == cell.lr) & (of_method["temperature"] == cell.temperature)
            curve = of_method[is_best]
            axes.plot(curve["passes"], 100 * curve["pass@1"], marker=marker, label=cell.method)
        axes.set_xscale("symlog", linthresh=0.5)
        axes.set(title=stage, xlabel="passes over the samples", ylabel="right answers (%)")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="outside lower center", frameon=False)
    return figure


def main() -> None:
    """The command line."""
    with command("experiments.passes"):
        options = runs.read_options(PassesOptions, "experiments.passes", __doc__)
        stages = runs.make_stages(options.stages, options)
        held_out = cells.try_cells(stages, options.methods, options)
        best = cells.best_cells(held_out)
        planned = []
        for cell, seed in product(best.itertuples(), options.seeds):
            planned.append(cells.run_at(cell, stages[cell.stage], seed))
        tested = runs.make_runs(planned, options.workers)
        teaching = best[~best["method"].isin(["none", runs.CONTROL])]
        best_two = teaching.sort_values("pass@1").groupby("stage").tail(2)
        planned = []
        for cell, seed in product(best_two.itertuples(), options.seeds):
            planned.append(cells.run_at(cell, stages[cell.stage], seed, iterations=3))
        iterated = runs.make_runs(planned, options.workers)
        later = iterated[iterated["iteration"] > 1]  # the first iteration is in `tested`
        csv = pd.concat([held_out, tested, later]).to_csv(index=False, float_format="%.6g")
        write_file(options.out / "passes.csv", csv)
        draw(held_out).savefig(options.out / "passes.png")
        ends = tested.groupby(["stage", "method", "seed"]).tail(1)
        print(answer_questions(ends).to_string(index=False))


if __name__ == "__main__":
    main()
