"""A model that nobody made for this project: SmolLM2-135M-Instruct on examples/capitals.py, by three methods.

    make real-llm                      # makes the model's folder, and one run
    python -m paper.real_llm MODEL     # the runs of results/real-llm.json, from that folder

TOPR, positives only and naive REINFORCE, at one learning rate, with as many steps and on the same samples. The rate is
that of a run of TOPR with seed 100, which no result uses. All settings are ours; a run of `make real-llm` is twice as
long.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from examples.capitals import capitals
from paper.experiments import LAPTOP, METHODS, Lab
from paper.figures import CORRECT, EPOCH, Figure, along, at_end, difference, epoch, line
from paper.sweep import Sweep, over_seeds
from pipeline.plots import Panel
from pipeline.records import Sample
from pipeline.runtime.processes import command
from pipeline.settings import Settings
from reproduce import publish

SETTINGS = Settings(
    chat=True,
    max_new_tokens=12,
    problems=24,
    n=8,
    completions_per_row=8,
    lr=1e-5,
    test_problems=24,
    test_samples=8,
    k=4,
    curve_points=2,
)
ARMS = ("topr", "sft", "reinforce")


@dataclass(frozen=True)
class Options:
    """Every setting of the command; all ours."""

    model: tyro.conf.Positional[Path]
    """folder of SmolLM2-135M-Instruct"""
    seeds: int = 3
    """how many seeds, from 0; intervals are over them"""
    workers: int = 2
    """runs side by side, each on one core, with 4 GB each"""
    runs: Path = Path("runs/real-llm")
    """folder that keeps the runs"""
    out: Path = Path("results")
    """folder for real-llm.json and real-llm.png"""


def ended(samples: list[Sample]) -> float:
    """The share of completions that end before the limit."""
    return sum(sample.finish_reason == "stop" for sample in samples) / len(samples)


def figure(lab: Lab, base: Settings) -> Figure:
    """Right answers along the epoch."""
    runs = lab.runs({name: replace(base, **METHODS[name].changes) for name in ARMS}, task=capitals)
    curves = {name: along(runs[name], "correct") for name in ARMS}
    called = {name: METHODS[name].name for name in ARMS}
    ends = {name: at_end(runs[name]) for name in ARMS}
    shares = {"before": over_seeds(run.results["before"]["correct"] for run in runs["topr"])}
    shares |= {f"{called[name]}: right at the end": ends[name] for name in ARMS}
    shares |= {f"TOPR - {called[name]}": difference(ends["topr"], ends[name]) for name in ARMS[1:]}
    shares["before: ended within the limit"] = over_seeds(ended(run.tested(0)) for run in runs["topr"])
    for name in ARMS:
        last = (run.tested(run.steps[-1]["step"]) for run in runs[name])
        shares[f"{called[name]}: ended within the limit"] = over_seeds(map(ended, last))
    drawn = [line(epoch(curves[name]), curves[name], called[name], METHODS[name].style) for name in ARMS]
    panel = Panel("SmolLM2-135M-Instruct, capitals", EPOCH, CORRECT, drawn, {"ylim": (-3, 100)})
    return Figure([panel], curves, shares)


def main(options: Options) -> None:
    """Make the runs that are missing, and from all of them the picture and its numbers."""
    with Sweep(options.runs, options.workers) as sweep:
        lab = Lab(sweep, LAPTOP, range(options.seeds))
        found = figure(lab, replace(SETTINGS, model=str(options.model)))
        publish("real-llm", found, lab, f"python -m paper.real_llm MODEL --seeds {options.seeds}", options.out)


if __name__ == "__main__":
    with command("real_llm"):
        main(tyro.cli(Options, prog="real_llm", description=__doc__))
