"""Samples trained per second: completions that share their prompt's row, a padded row for each, and TRL's GRPO.

    make .venv-trl/ready
    .venv-trl/bin/python -m benchmarks train_step

The same Llama with random weights, the same tokens and AdamW on each side; 16 completions of one prompt a step. A side
is timed from the beginning of its first step to the end of its last; before that our two layouts' log pi are compared.
"""

import random
from collections.abc import Callable
from copy import deepcopy
from statistics import mean
from typing import Any

import torch

import topr
from benchmarks import trl_sides
from benchmarks.measuring import Comparison, Goal, Settings, in_turn, record
from benchmarks.shapes import SHAPES, Shape, adamw, draw, make_model, plain, shared_logprobs, train_ours
from pipeline.models.language_model import META, collate, load_model
from pipeline.settings import TINY

SHARED, PADDED, TRL = "topr, shared rows", "topr, padded rows", "TRL"
STEPS = {"0-shot": 10, "8-shot, short": 2, "8-shot": 1}  # in a turn
AGAINST_TRL = {"0-shot": 1.5, "8-shot, short": 5.0, "8-shot": 5.0}
AGAINST_PADDED = {"8-shot, short": 3.5, "8-shot": 3.5}


def compare(settings: Settings, shape: Shape) -> Comparison:
    """The three sides on one shape."""
    base, tokenizer = make_model(settings.seed), load_model(str(TINY / "base"), META).tokenizer
    timed, n = STEPS[shape.name], 2 if settings.small else 16
    drawn = draw(random.Random(settings.seed), shape, timed, n, settings.small)
    layouts = {
        SHARED: ([topr.Step([collate([examples])], n) for examples in drawn], shared_logprobs),
        PADDED: ([topr.Step([plain(examples)], n) for examples in drawn], topr.sequence_logprobs),
    }
    with torch.no_grad():
        shared, padded = (logprobs(base, steps[0].micro_batches[0]) for steps, logprobs in layouts.values())
    torch.testing.assert_close(shared, padded, rtol=1e-5, atol=1e-3)

    def speed(train: Callable[[torch.nn.Module], float]) -> Callable[[], float]:
        return lambda: n * timed / train(deepcopy(base))

    sides = {
        SHARED: speed(lambda model: train_ours(model, adamw(model), *layouts[SHARED])),
        PADDED: speed(lambda model: train_ours(model, adamw(model), *layouts[PADDED])),
        TRL: speed(lambda model: trl_sides.train(model, tokenizer, drawn, lr=1e-5)),
    }
    for side in sides.values():
        side()  # the first time is slower
    goals = [Goal(SHARED, TRL, AGAINST_TRL[shape.name])]
    if shape.name in AGAINST_PADDED:
        goals.append(Goal(SHARED, PADDED, AGAINST_PADDED[shape.name]))
    what = f"{shape.name}: a prompt of {shape.prompt} tokens, {n} completions of up to {shape.completion}"
    sizes = [batch.prompt_ids.numel() + batch.completion_ids.numel() for [batch], _ in layouts[SHARED][0]]
    padded_sizes = [batch.input_ids.numel() for [batch], _ in layouts[PADDED][0]]
    told = f"{mean(sizes):,.0f} shared, {mean(padded_sizes):,.0f} in padded rows"
    notes = [f"tokens that the model computes a step: {told}"]
    return Comparison(what, "samples/s", in_turn(sides, settings.rounds), goals, notes)


def measure(settings: Settings) -> dict[str, Any]:
    """Every shape."""
    return record([compare(settings, shape) for shape in SHAPES], trl=trl_sides.trl.__version__)
