"""A model that nobody made for this project, where two thirds of its samples are right: SmolLM2-135M-Instruct.

    make real-llm                                # makes the model's folder
    python -m paper.real_llm MODEL --workers 2   # the runs of results/real-llm-solved.json, from that folder

The questions are those of paper/real_llm.txt that the model mostly solves. All settings are ours.
docs/internals/curve_predictions.md: how the questions were chosen, endpoints, predictions.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import tyro

from examples.questions import FRAME, first_answer, grade, words
from paper.experiments import LAPTOP, METHOD_ARMS, Arm, Figure, Study
from paper.panels import Data, accuracy
from paper.runs import Finished, Jobs, Sweep, sharing_samples
from pipeline.plots import Panel
from pipeline.records import OUTCOMES, Problem, Task, read_text
from pipeline.report import Estimate
from pipeline.runtime.processes import command
from pipeline.settings import Settings

LINES = [line.split(" | ") for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()]
FRAME |= {word for *_, question, _ in LINES for word in words(question)}  # as examples.questions has it
SOLVED = 16  # of 32 samples, which are not used again
SETTINGS = Settings(
    chat=True,
    max_new_tokens=12,
    tokens_at_once=10_000,
    lr=1e-5,
    problems=1000,  # all
    n=24,
    test_problems=1000,  # all
    test_samples=64,
    k=16,
    curve_points=3,
    curve_samples=16,
)
ARMS = {
    "topr": METHOD_ARMS["topr"],
    "sft": Arm("positives only, as many steps", "sft", {"method": "sft"}),  # negatives stay, with weight 0
    "reinforce": METHOD_ARMS["reinforce"],
}
METRICS = ("realised_share", "log_ratio_pos_mean", "log_ratio_neg_mean")  # as results.json has them


def solved(settings: Settings) -> Task:
    """The questions that the model mostly solves, in random order: two thirds for training, the others for tests."""
    chosen = [(question, gold) for right, _, question, gold in LINES if int(right) >= SOLVED]
    random.Random(0).shuffle(chosen)
    problems = [Problem(q, q, frozenset(" ".join(words(a)) for a in gold.split("/"))) for q, gold in chosen]
    tests = len(problems) // 3
    train, test = problems[tests:][: settings.problems], problems[:tests][: settings.test_problems]
    return Task("solved", train, test, parse=first_answer, grade=grade, outcomes=OUTCOMES)


def of_files(run: Finished) -> dict[str, list[float]]:
    """Completions that end in time, and distinct texts among right ones, before and after; right ones at T = 0 after
    training; the share of positives and the epoch's metrics."""
    tested = [run.tested(step) for step in (0, run.last_step)]
    right = [[(s.problem_id, s.completion) for s in samples if s.outcome == "correct"] for samples in tested]
    measured = {name: [epoch["training"][name] for epoch in run.results["iterations"]] for name in METRICS}
    measured["distinct"] = [len(set(texts)) / max(len(texts), 1) for texts in right]
    return measured | {"ended": [float(np.mean([s.finish_reason == "stop" for s in samples])) for samples in tested]}


class RealLLM(Study):
    """Right answers along the epoch of arms that train on the same samples, and at T = 0 before and after."""

    rated = ()

    def arms(self) -> Jobs:
        base = self.scale.base
        arms = sharing_samples({name: self.job(name, base, arm) for name, arm in ARMS.items()})
        return arms | {"greedy": self.job("greedy", base, top_k=1, iterations=0, test_samples=2, k=1)}

    def seeds_of(self, arm: str) -> range:
        return range(1) if arm == "greedy" else super().seeds_of(arm)

    def read(self) -> Figure:
        table, shares, numbers, greedy = self.table(of_files), {}, {}, {}
        curves = {name: table.along(name) for name in ARMS}
        for name in ARMS:
            runs = {seed: run.settings for (arm, seed), run in self.runs.items() if arm == name}
            texts = {seed: read_text(settings.out / "greedy" / "results.json") for seed, settings in runs.items()}
            greedy[name] = {seed: json.loads(text)["before"]["correct"] for seed, text in texts.items()}
        [before] = table.each("greedy", at=0).values()
        falls = {}
        for name in ARMS:
            runs = {seed: run.measured["correct"] for (arm, seed), run in self.runs.items() if arm == name}
            falls[name] = {seed: max(curve) - curve[-1] for seed, curve in runs.items()}
        gaps = [falls["reinforce"][seed] - falls["topr"][seed] for seed in falls["topr"]]
        shares["TOPR - positives only, as many steps"] = table.gain("topr", "sft")
        shares["naive REINFORCE - TOPR: fall from the highest"] = Estimate.over_seeds(gaps)
        shares["TOPR - naive REINFORCE"] = table.gain("topr", "reinforce")
        shares["T = 0: before"] = Estimate.over_seeds([before])
        for name, arm in ARMS.items():
            shares[f"{arm.name} - base"] = table.change(name)
            shares[f"T = 0: {arm.name}"] = Estimate.over_seeds(greedy[name].values())
            shares[f"T = 0: {arm.name} - before"] = Estimate.over_seeds([x - before for x in greedy[name].values()])
            ends = table.each(name)
            shares[f"{arm.name}, T = 1 - T = 0 before"] = Estimate.over_seeds([x - before for x in ends.values()])
        points = [("before", "topr", 0), *((arm.name, name, -1) for name, arm in ARMS.items())]
        for what in ("correct", "maj@16", "invalid", "ended", "distinct"):
            shares |= {f"{text}: {what}": table.mean(name, what, at) for text, name, at in points}
        first = [r.results["iterations"][0]["dataset"]["trained"] for (arm, _), r in self.runs.items() if arm == "topr"]
        shares["samples to train on: correct"] = Estimate.over_seeds(d["positive"] / d["samples"] for d in first)
        numbers = {f"{text}: {what}": table.mean(name, what) for what in METRICS for text, name, _ in points[1:]}
        return Figure(curves, shares, numbers)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        return [accuracy("SmolLM2-135M-Instruct, questions that it mostly solves", data, ARMS)]


def main(
    model: tyro.conf.Positional[Path],
    seeds: int = 5,
    workers: int = 1,
    runs: Path = Path("runs/real-llm"),
    out: Path = Path("results"),
) -> None:
    """Make the runs that are missing, and from all of them the picture and its numbers.

    Args:
        model: folder of SmolLM2-135M-Instruct
        seeds: how many seeds, from 0; intervals are over them
        workers: runs side by side, each on one core, with 4 GB each
        runs: folder that keeps the runs
        out: folder for real-llm-solved.json and real-llm-solved.png
    """
    scale = replace(LAPTOP, base=replace(SETTINGS, model=str(model)), task=solved, decisive={})
    study = RealLLM(scale, range(seeds))
    with Sweep(runs, workers) as sweep:
        study.make(sweep)
    study.publish("real-llm-solved", f"python -m paper.real_llm MODEL --seeds {seeds}", out)


if __name__ == "__main__":
    with command("real_llm"):
        tyro.cli(main, prog="real_llm", description=__doc__)
