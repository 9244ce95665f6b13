"""A model that nobody made for this project: SmolLM2-135M-Instruct on examples/capitals.py, by three methods.

    make real-llm                      # makes the model's folder, and one run
    python -m paper.real_llm MODEL     # the runs of results/real-llm.json, from that folder

All settings are ours. The learning rate is that of a run of TOPR with seed 100, which no result uses.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import tyro

from examples.capitals import capitals
from paper.experiments import LAPTOP, METHODS, Figure, Study
from paper.panels import Data, accuracy
from paper.runs import Finished, Jobs, Sweep, sharing_samples
from pipeline.plots import Panel
from pipeline.runtime.processes import command
from pipeline.settings import Settings

SIZES = {"problems": 24, "n": 8, "completions_per_row": 8, "test_problems": 24, "test_samples": 8, "k": 4}
SETTINGS = Settings(chat=True, max_new_tokens=12, lr=1e-5, curve_points=2, **SIZES)
ARMS = ("topr", "sft", "reinforce")


class RealLLM(Study):
    """Right answers along the epoch, and completions that end before the limit; all train on the same samples."""

    rated = ()

    def arms(self) -> Jobs:
        return sharing_samples({name: self.job(name, self.scale.base, METHODS[name]) for name in ARMS})

    def read(self) -> Figure:
        def ended(run: Finished) -> dict[str, list[float]]:
            tested = [run.tested(step) for step in (0, run.last_step)]
            return {"ended": [float(np.mean([s.finish_reason == "stop" for s in samples])) for samples in tested]}

        table = self.table(ended)
        shares = {"before": table.mean("topr", at=0)}
        shares |= {f"{METHODS[name].name}: right at the end": table.mean(name) for name in ARMS}
        shares |= {f"TOPR - {METHODS[name].name}": table.gain("topr", name) for name in ARMS[1:]}
        shares["before: ended within the limit"] = table.mean("topr", "ended", at=0)
        shares |= {f"{METHODS[name].name}: ended within the limit": table.mean(name, "ended") for name in ARMS}
        return Figure({name: table.along(name) for name in ARMS}, shares)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        return [accuracy("SmolLM2-135M-Instruct, capitals", data, METHODS)]


def main(
    model: tyro.conf.Positional[Path],
    seeds: int = 3,
    workers: int = 2,
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
    study = RealLLM(replace(LAPTOP, base=replace(SETTINGS, model=str(model)), task=capitals), range(seeds))
    with Sweep(runs, workers) as sweep:
        study.make(sweep)
    study.publish("real-llm", f"python -m paper.real_llm MODEL --seeds {seeds}", out)


if __name__ == "__main__":
    with command("real_llm"):
        tyro.cli(main, prog="real_llm", description=__doc__)
