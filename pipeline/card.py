"""The card of a base model: what it writes, and at which effective share of positives training on that begins fastest.

    python -m pipeline.card --model tiny/base --problems 64 --n 16
    python -m pipeline.card --task examples.sums.sums --model FOLDER

At pi = mu the mean gradient of log pi is 0, so that positives and negatives pull in one direction, and their weights
change the noise alone. An optimiser that divides by the gradient's root mean square is then fastest at the share
p~* = E- / (E+ + E-) (ours). E+, E-: mean squared gradient of log pi / length of a positive, of a negative, where each
coordinate's square is divided by its mean over all samples, as in AdamW. It says nothing of later steps.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from math import comb, sqrt
from pydoc import locate
from typing import Any

import numpy as np

from pipeline.records import Example, InputError, Task, write_file
from pipeline.report import Estimate, Table
from pipeline.runtime.processes import command, progress_bar, ranks
from pipeline.settings import Count, Settings, check, read_settings

OF = 8  # right completions of a problem among which different texts are counted; ours
COORDINATES = 20_000  # of the gradients, drawn at random; they move E-/E+ by about 1%; ours


@dataclass(frozen=True)
class CardSettings(Settings):
    """Settings of a run, of which those count that say how completions are drawn."""

    problems: Count = 64  # training problems to sample from, the first ones (ours)
    task: str = "train_gsm8k.gsm8k_task"  # MODULE.FUNCTION that makes the task (ours)
    gradients: Count = 512  # samples whose gradients are taken, at most (ours)


def best_share(e_pos: float, e_neg: float) -> float:
    """The effective share p~* at which the first steps are fastest: E- / (E+ + E-), whatever the share of positives."""
    return e_neg / (e_pos + e_neg)


def pace(p: float, p_tilde: float, e_pos: float, e_neg: float) -> float:
    """The pace of the first steps at the effective share p_tilde, relative to that on positives only (p_tilde = 1).

    (a + b) / sqrt(p a^2 E+ + (1 - p) b^2 E-), where a = p~/p weighs a positive, b = (1 - p~)/(1 - p) a negative.
    """
    a, b = p_tilde / p, (1 - p_tilde) / (1 - p)
    return (a + b) * sqrt(p * e_pos / (p * a**2 * e_pos + (1 - p) * b**2 * e_neg))


def expected_distinct(texts: Sequence[str], size: int = OF) -> float:
    """How many different texts are expected among `size` drawn without replacement from at least as many.

    >>> round(expected_distinct(["a"] * 4 + ["b"] * 4, size=2), 3)  # 1 + 4/7
    1.571
    """
    total = comb(len(texts), size)
    return sum(1 - comb(len(texts) - count, size) / total for count in Counter(texts).values())


def gradients_of(model: Any, examples: Sequence[Example], coordinates: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """log pi of each example, (n,), and squares of the gradient of log pi / length, (n, coordinates), all or drawn."""
    import torch

    from pipeline.models.language_model import collate, token_logprobs

    weights, squares, found = [weight for weight in model.parameters() if weight.requires_grad], [], []
    size = sum(weight.numel() for weight in weights)
    drawn = np.random.default_rng(seed).integers(size, size=coordinates) if size > coordinates else np.arange(size)
    for example in progress_bar(examples, "gradients", "sample"):
        logp = token_logprobs(model, collate([[example]], weights[0].device)).sum()
        gradient = torch.autograd.grad(logp / len(example.completion_ids), weights, materialize_grads=True)
        squares.append(torch.cat([part.flatten() for part in gradient]).cpu()[drawn].square().numpy())
        found.append(logp.item())
    return np.array(found), np.stack(squares)


def mean_squares(squares: np.ndarray, is_right: np.ndarray, times: np.ndarray | int = 1) -> tuple[float, float]:
    """E+ and E- of samples, (n,), from their squared gradients (n, D), where each counts so many times.

    >>> mean_squares(np.array([[1.0, 0.0], [3.0, 0.0]]), np.array([True, False]))  # a coordinate never used is left out
    (0.5, 1.5)
    """
    counts = (np.stack([is_right, ~is_right]) * times).astype(squares.dtype)  # (2, n)
    sums, each = counts @ squares, counts.sum(1)
    if not each.all():
        return np.nan, np.nan
    sums = sums[:, sums.sum(0) > 1e-10 * sums.sum(0).max()]  # what is below is 0 but for rounding
    pos, neg = (sums / (sums.sum(0) / each.sum())).mean(1, dtype=float) / each
    return float(pos), float(neg)


def over_problems(squares: np.ndarray, is_right: np.ndarray, problems: Sequence[str], seed: int) -> list[float]:
    """The 95% interval of E-/E+, its ends, by a bootstrap of 200 draws over the problems of the (n,) samples."""
    rng, (names, number) = np.random.default_rng(seed), np.unique(problems, return_inverse=True)
    drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=200)[:, number]
    found = [mean_squares(squares, is_right, times) for times in drawn]
    return np.nanquantile([neg / pos for pos, neg in found], [0.025, 0.975]).tolist()


def card(settings: CardSettings, task: Task) -> dict[str, Any]:
    """What card.json holds. InputError where model and task do not fit, or all completions are right, or all wrong."""
    from pipeline.dataset import encode, read_inputs
    from pipeline.evaluation import evaluate
    from pipeline.models.language_model import load_model
    from pipeline.sampling import ENGINES, draw_samples

    inputs, lm, seed = read_inputs(settings, task), load_model(settings.model, None, settings), settings.seed
    settings.out.mkdir(parents=True, exist_ok=True)
    task, given = inputs.task, (settings.model, lambda: lm, inputs, settings, settings.out / "vllm.log")
    with ENGINES[settings.engine or "hf"](*given) as engine:
        samples = draw_samples(task, task.train, settings.n, engine, inputs.sampling, settings.seed_of("samples 1"))
    found = {"model": settings.model, "seed": seed, **evaluate(samples, task, settings.n, seed)}
    is_right = np.array([sample.outcome == task.outcomes[0] for sample in samples])
    texts: dict[str, list[str]] = {}
    for sample in compress(samples, is_right):
        texts.setdefault(sample.problem_id, []).append(sample.completion)
    distinct = [expected_distinct(right) for right in texts.values() if len(right) >= OF]
    found |= {"distinct": float(np.mean(distinct)) if distinct else None, "distinct_problems": len(distinct)}
    some = random.Random(seed).sample(range(len(samples)), min(settings.gradients, len(samples)))
    if len(set(is_right := is_right[some])) < 2:
        raise InputError(f"--model {settings.model}: its completions are all right, or all wrong: nothing to weigh")
    examples = encode(samples, lm, task.stop, numbers=some)
    logmu, squares = gradients_of(lm.model, examples, COORDINATES, seed)
    for name, of in (("logmu", logmu), ("length", np.array([len(example.completion_ids) for example in examples]))):
        found |= {f"{name}_right": float(of[is_right].mean()), f"{name}_wrong": float(of[~is_right].mean())}
    e_pos, e_neg = mean_squares(squares, is_right)
    ends = over_problems(squares, is_right, [samples[i].problem_id for i in some], seed)
    found |= {"gradients": len(some), "e_pos": e_pos, "e_neg": e_neg, "ratio": e_neg / e_pos, "ratio_interval": ends}
    found |= {"best_share": best_share(e_pos, e_neg), "best_share_interval": [best_share(1, ratio) for ratio in ends]}
    found |= {f"pace_{s:g}": pace(found["pass@1"]["mean"], s, e_pos, e_neg) for s in (0.1, 0.2, 0.5, 0.7, 0.9)}
    write_file(settings.out / "card.json", json.dumps(found, indent=2) + "\n")
    return found


def main() -> None:
    """The command: settings in, card.json and a table out; one line and a non-zero exit status on bad input."""
    with command("card"):
        settings = read_settings(sys.argv[1:], {"laptop": CardSettings()}, __doc__, "runs/card-")
        check(settings)
        if not callable(make := locate(settings.task)):
            raise InputError(f"--task {settings.task}: there is no such function; give MODULE.FUNCTION")
        if settings.samples is not None or ranks() > 1:
            raise InputError("a card draws its own samples, in one process: leave out --samples and torchrun")
        text = {float: "{:.3g}".format, dict: lambda of: Estimate.read(of).text(digits=3)}
        text[list] = lambda ends: " to ".join(map(text[float], ends))
        found = card(settings, make(settings))
        Table(["card", ""], [[name, text.get(type(of), str)(of)] for name, of in found.items()]).print()


if __name__ == "__main__":
    main()
