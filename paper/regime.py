"""Two studies of a set with 10% positives: which negatives, and how far the model moves.

    python -m paper.regime --workers 2

D4: negatives of problems that the model mostly solves, or mostly does not; the base that is right in 46%.
D5: three learning rates, 64 or 256 steps, three effective shares; the base that is right in two thirds.
"""

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from paper.experiments import LAPTOP, METHOD_ARMS, Figure, Study
from paper.runs import Finished, Jobs, Sweep, sharing_samples
from pipeline.records import Sample, read_records, to_lines, write_file
from pipeline.report import Estimate
from pipeline.runtime.processes import command
from pipeline.settings import TINY

SETS = {"composition": "proportion", "proportion": 0.1, "examples": 1_024, "curve_points": 1}
NEGATIVES = ("easy", "hard")  # of problems with a share of right samples of 1/2 and more, and below
SHARES = {"D4": (0.16, 0.5), "D5": (0.2, 0.5, 1.0)}
RATES, BATCHES = (1e-5, 3e-5, 1e-4), (16, 4)
TRIED = 8  # samples of a problem that tell how often it is solved, and are used for nothing else


def drift(run: Finished) -> dict[str, list[float]]:
    """How far log pi of positives is from log mu, in nats: the mean over the epoch."""
    return {"drift": [run.results["iterations"][0]["training"]["log_ratio_pos_mean"]]}


def compose(samples: list[Sample], of: str, seed: int) -> list[Sample]:
    """102 positives and 922 negatives of the easy or the hard problems; the positives are the same for both."""
    problems: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        problems[sample.problem_id].append(sample)
    positives, negatives = [], {name: [] for name in NEGATIVES}
    for drawn in problems.values():
        share = np.mean([sample.outcome == "correct" for sample in drawn[:TRIED]])
        for sample in drawn[TRIED:]:
            side = positives if sample.outcome == "correct" else negatives["easy" if share >= 0.5 else "hard"]
            side.append(sample)
    rng = random.Random(seed)
    return rng.sample(positives, 102) + rng.sample(negatives[of], 922)


class D4(Study):
    """Sets that differ in the problems of their negatives."""

    rated = ()

    def make(self, sweep: Sweep) -> None:
        base, folder = replace(self.scale.base, model=str(TINY / "worded"), lr=3e-5), sweep._folder
        draws = {seed: self.job("d4-draw", replace(base, seed=seed), n=64, **SETS) for seed in self.seeds}
        jobs = {}
        for seed, run in sweep.make(draws).items():
            samples = read_records(run.settings.out / "iteration-1" / "samples.jsonl", Sample)
            for of in NEGATIVES:
                file = folder / f"d4-{of}-{seed}.jsonl"
                write_file(file, to_lines(compose(samples, of, seed)))
                for share in SHARES["D4"]:
                    changes = {
                        "samples": str(file),
                        "test_data": str(TINY),
                        "effective_proportion": share,
                        "curve_points": 1,
                    }
                    jobs[(of, share), seed] = self.job(f"d4-{of}-{share}", replace(base, seed=seed), **changes)
        self.runs = sweep.make(jobs)

    def read(self) -> Figure:
        table = self.table(drift)
        shares = {"base: correct": table.mean(("easy", 0.5), at=0)}
        for share in SHARES["D4"]:
            for of in NEGATIVES:
                shares[f"p~ = {share:.0%}, negatives of {of} problems: correct"] = table.mean((of, share))
            shares[f"p~ = {share:.0%}: easy - hard"] = table.gain(("easy", share), ("hard", share))
        arms = [(of, share) for of in NEGATIVES for share in SHARES["D4"]]
        return Figure({}, shares, {f"{of}, p~ = {p:.0%}: drift": table.mean((of, p), "drift") for of, p in arms})

    def redraw(self, file: Path) -> None:
        """No picture."""


class D5(Study):
    """One set, at three learning rates and in 64 or 256 steps."""

    rated = ()

    def arms(self) -> Jobs:
        arms: dict[Any, Any] = {}
        for batch in BATCHES:
            for rate in RATES:
                for p in SHARES["D5"]:
                    label = f"share-topr-{rate:g}-0.1-{p:g}"  # some are Figure 5's
                    changes = {**SETS, "n": 24, "lr": rate, "batch": batch, "effective_proportion": p}
                    arms[batch, rate, p] = self.job(label, self.scale.base, METHOD_ARMS["topr"], **changes)
        return sharing_samples(arms)

    def read(self) -> Figure:
        table, shares, numbers, points = self.table(drift), {}, {}, []
        for batch in BATCHES:
            for rate in RATES:
                here = f"{1024 // batch} steps, lr {rate:g}"
                ends = {p: table.mean((batch, rate, p)) for p in SHARES["D5"]}
                shares |= {f"{here}, p~ = {p:.0%}: correct": end for p, end in ends.items()}
                shares[f"{here}: 20% - 100%"] = table.gain((batch, rate, 0.2), (batch, rate, 1.0))
                shares[f"{here}: 20% - 50%"] = table.gain((batch, rate, 0.2), (batch, rate, 0.5))
                for p in SHARES["D5"]:
                    numbers[f"{here}, p~ = {p:.0%}: drift of positives (nats)"] = table.mean((batch, rate, p), "drift")
                moved = [[*table.each((batch, rate, p), "drift").values()] for p in SHARES["D5"]]
                points.append((np.abs(moved).mean(), shares[f"{here}: 20% - 100%"].mean))
        ranks = np.argsort(np.argsort(np.array(points), axis=0), axis=0)
        numbers["rank correlation of drift and 20% - 100%"] = Estimate(float(np.corrcoef(ranks.T)[0, 1]))
        return Figure({"points": points}, shares, numbers)

    def redraw(self, file: Path) -> None:
        """No picture."""


def main(workers: int = 1, seeds: int = 3, runs: Path = Path("runs/laptop"), out: Path = Path("results")) -> None:
    """Make the runs that are missing, and regime-D4.json and regime-D5.json."""
    scale = replace(LAPTOP, decisive={})
    with Sweep(runs, workers) as sweep:
        for study in (D4(scale, range(seeds)), D5(scale, range(seeds))):
            study.make(sweep)
            study.publish(f"regime-{type(study).__name__}", "python -m paper.regime", out)


if __name__ == "__main__":
    with command("regime"):
        tyro.cli(main, prog="regime", description=__doc__)
