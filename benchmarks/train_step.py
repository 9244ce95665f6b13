"""Samples trained per second: completions that share their prompt's row, a padded row for each, and TRL's GRPO.

    make .venv-trl/ready
    .venv-trl/bin/python benchmarks/train_step.py

The same Llama with random weights, the same tokens and AdamW on each side; 16 completions of one prompt a step. A side
is timed from the beginning of its first step to the end of its last; before that our two layouts' log pi are compared.
"""

import random
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import trl_sides
from measuring import Comparison, Goal, in_turn, report
from shapes import SHAPES, Shape, adamw, draw, make_model, plain, shared_logprobs, train_ours

import topr
from pipeline.models.language_model import META, collate, load_model
from pipeline.settings import TINY

SHARED, PADDED, TRL = "topr, shared rows", "topr, padded rows", "TRL"


STEPS = {"0-shot": 10, "8-shot, short": 2, "8-shot": 1}  # in a turn
AGAINST_TRL = {"0-shot": 1.5, "8-shot, short": 5.0, "8-shot": 5.0}
AGAINST_PADDED = {"8-shot, short": 3.5, "8-shot": 3.5}


@dataclass(frozen=True)
class Settings:
    """What is measured; every default is ours."""

    completions: int = 16
    """of a prompt, all in one step (paper, Section 4.1)"""
    rounds: int = 5
    """times that each side is measured"""
    scale: float = 1.0
    """prompts and completions of this share of their length, to try it out"""
    lr: float = 1e-5
    """AdamW's"""
    seed: int = 0
    """seed of weights, tokens and lengths"""
    out: Path = Path("runs/bench")
    """folder to write train_step.json into"""


def compare(settings: Settings, shape: Shape) -> Comparison:
    """The three sides on one shape."""
    base, tokenizer = make_model(settings.seed), load_model(str(TINY / "base"), META).tokenizer
    timed, rng = STEPS[shape.name], random.Random(settings.seed)
    drawn = draw(rng, shape, timed, settings.completions, settings.scale)
    layouts = {
        SHARED: ([topr.Step([collate([examples])], len(examples)) for examples in drawn], shared_logprobs),
        PADDED: ([topr.Step([plain(examples)], len(examples)) for examples in drawn], topr.sequence_logprobs),
    }
    with torch.no_grad():
        shared, padded = (logprobs(base, steps[0].micro_batches[0]) for steps, logprobs in layouts.values())
    torch.testing.assert_close(shared, padded, rtol=1e-5, atol=1e-3)

    def speed(train: Callable[[torch.nn.Module], float]) -> Callable[[], float]:
        return lambda: settings.completions * timed / train(deepcopy(base))

    def ours(side: str) -> Callable[[], float]:
        steps, logprobs = layouts[side]
        return speed(lambda model: train_ours(model, adamw(model, settings.lr), steps, logprobs))

    sides = {SHARED: ours(SHARED), PADDED: ours(PADDED)}
    sides[TRL] = speed(lambda model: trl_sides.train(model, tokenizer, drawn, settings.lr))
    for side in sides.values():
        side()  # the first time is slower
    goals = [Goal(SHARED, TRL, AGAINST_TRL[shape.name])]
    if shape.name in AGAINST_PADDED:
        goals.append(Goal(SHARED, PADDED, AGAINST_PADDED[shape.name]))
    lengths = f"a prompt of {shape.prompt} tokens, {settings.completions} completions of up to {shape.completion}"
    sizes = [batch.prompt_ids.numel() + batch.completion_ids.numel() for [batch], _ in layouts[SHARED][0]]
    rows_of_all = [batch.input_ids.numel() for [batch], _ in layouts[PADDED][0]]
    notes = [
        f"tokens that the model computes a step: {mean(sizes):,.0f} shared, {mean(rows_of_all):,.0f} in padded rows"
    ]
    return Comparison(f"{shape.name}: {lengths}", "samples/s", in_turn(sides, settings.rounds), goals, notes)


def main(settings: Settings) -> None:
    """Measure every shape, print, write."""
    comparisons = [compare(settings, shape) for shape in SHAPES]
    report(settings.out, "train_step", "python benchmarks/train_step.py", comparisons, trl=trl_sides.trl.__version__)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
