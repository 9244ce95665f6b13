"""A model that nobody made for this project: SmolLM2-135M-Instruct on examples/questions.py, with five arms.

    make real-llm                      # makes the model's folder, and one run
    python -m paper.real_llm MODEL     # the runs of results/real-llm.json, from that folder

All settings are ours. docs/internals/share_predictions.md: endpoints, and how the learning rate of all arms is chosen.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import tyro

from examples.questions import RATES, TESTS, questions
from paper.experiments import LAPTOP, METHODS, Arm, Figure, Study
from paper.panels import Data, accuracy
from paper.runs import Finished, Jobs, Sweep, sharing_samples
from pipeline.plots import Panel
from pipeline.records import Task
from pipeline.report import Estimate
from pipeline.runtime.processes import command
from pipeline.settings import Settings

SIZES = {"problems": 96, "n": 8, "completions_per_row": 8, "test_problems": TESTS, "test_samples": 16, "k": 16}
SETTINGS = Settings(chat=True, max_new_tokens=12, curve_points=3, curve_samples=4, **SIZES)
ARMS = {
    "topr": METHODS["topr"],
    "sft": Arm("positives only, as many steps", "sft", {"method": "sft"}),  # negatives stay, with weight 0
    "reinforce": METHODS["reinforce"],
    "topr-15": Arm("TOPR, p~ = 15%", "p1", {"effective_proportion": 0.15}),
    "topr-70": Arm("TOPR, p~ = 70%", "p4", {"effective_proportion": 0.7}),
}
METRICS = ("realised_share", "log_ratio_pos_mean", "log_ratio_neg_mean")  # as results.json has them


def held_out(settings: Settings) -> Task:
    """The training questions, and as test questions those kept for learning rates."""
    return questions(replace(settings, test_problems=RATES), slice(TESTS, TESTS + RATES))


def of_files(run: Finished) -> dict[str, list[float]]:
    """Completions that end in time, and distinct texts among right ones, before and after; the epoch's metrics."""
    tested = [run.tested(step) for step in (0, run.last_step)]
    right = [[(s.problem_id, s.completion) for s in samples if s.outcome == "correct"] for samples in tested]
    found = {name: [epoch["training"][name] for epoch in run.results["iterations"]] for name in METRICS}
    found["distinct"] = [len(set(texts)) / max(len(texts), 1) for texts in right]
    return found | {"ended": [float(np.mean([s.finish_reason == "stop" for s in samples])) for samples in tested]}


class RealLLM(Study):
    """Right answers along the epoch of arms that train on the same samples; the first model too where it is greedy."""

    def rate_arms(self) -> Jobs:
        arms = super().rate_arms().items()
        return {k: one._replace(task=held_out, settings=replace(one.settings, test_samples=16)) for k, one in arms}

    def arms(self) -> Jobs:
        base = replace(self.scale.base, lr=self.rates["topr"])
        arms = sharing_samples({name: self.job(name, base, arm) for name, arm in ARMS.items()})
        return arms | {"greedy": self.job("greedy", base, top_k=1, iterations=0, test_samples=2, k=1)}

    def read(self) -> Figure:
        table = self.table(of_files)
        curves = {name: table.along(name) for name in ARMS}
        top = int(np.argmax(curves["reinforce"]["mean"]))  # of the mean over seeds: a seed's own maximum is partly luck
        end, most = (table.each("reinforce", at=at) for at in (-1, top))
        shares = {"naive REINFORCE: end - maximum": Estimate.over_seeds([end[seed] - most[seed] for seed in end])}
        shares |= {"TOPR - positives only": table.gain("topr", "sft"), "p~ 15% - 100%": table.gain("topr-15", "sft")}
        shares["before: correct at T = 0"] = table.mean("greedy", at=0)
        points = [("before", "topr", 0), *((arm.name, name, -1) for name, arm in ARMS.items())]
        for what in ("correct", "maj@16", "invalid", "ended", "distinct"):
            shares |= {f"{text}: {what}": table.mean(name, what, at) for text, name, at in points}
        numbers = {f"{text}: {what}": table.mean(name, what) for what in METRICS for text, name, _ in points[1:]}
        return Figure(curves, shares, numbers)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        return [accuracy("SmolLM2-135M-Instruct, short questions", data, ARMS)]


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
        out: folder for real-llm.json and real-llm.png
    """
    scale = replace(LAPTOP, base=replace(SETTINGS, model=str(model)), task=questions, rates=(3e-6, 1e-5, 3e-5))
    study = RealLLM(scale, range(seeds))
    with Sweep(runs, workers) as sweep:
        study.make(sweep)
    study.publish("real-llm", f"python -m paper.real_llm MODEL --seeds {seeds}", out)


if __name__ == "__main__":
    with command("real_llm"):
        tyro.cli(main, prog="real_llm", description=__doc__)
