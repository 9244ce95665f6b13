"""The dataset: from graded samples to the batches of an epoch.

samples -> choice -> examples (token ids) -> baseline -> rows -> log mu: train.jsonl -> steps -> batches
"""

import math
import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import groupby, product

import numpy as np
import torch
from torch import Tensor

from pipeline.models.language_model import LanguageModel, collate, token_logprobs, without_completions
from pipeline.records import Example, InputError, Sample
from pipeline.runtime.processes import device, from_all_ranks, progress_bar, rank, ranks
from pipeline.selection import baselines_of, choose
from pipeline.settings import Settings
from topr import Step

Row = list[Example]  # examples of one prompt, which are computed together and learnt from in the same step


def compose(
    settings: Settings, samples: Sequence[Sample], lm: LanguageModel, stop: Sequence[str], number: int = 1
) -> tuple[list[Row], dict]:
    """What iteration `number` trains on, in the order of training, and the counts of it for dataset.json.

    Every chosen sample comes once, or DPO's pairs. The baseline is subtracted; log mu is that of the samples, NaN where
    they have none. The order depends on the seed and on the samples alone. InputError where nothing can be learnt.
    """
    rng = random.Random(settings.seed_of(f"order {number}"))
    is_all = settings.composition == "uniform" and settings.examples is None
    chosen = list(range(len(samples))) if is_all else choose(settings, samples, number)
    if not chosen:
        raise InputError(f"--composition {settings.composition}: none of the {len(samples)} samples fits; draw more")
    examples = encode(samples, lm, stop, str(settings.samples or "samples.jsonl"), chosen)
    taken = [samples[i] for i in chosen]
    baselines = baselines_of(settings, taken) if settings.has_baseline else [0.0] * len(taken)
    examples = [replace(example, reward=example.reward - c) for example, c in zip(examples, baselines, strict=True)]
    learns_negatives = settings.method in ("ppo", "dpo") or settings.bounds.b_neg > 0
    if not learns_negatives and all(example.reward <= 0 for example in examples):
        raise InputError(f"--method {settings.method}: no positive sample, and it learns from nothing else; draw more")
    if settings.method == "dpo":
        rows = pairs_of_prompt(examples, settings.pairs, rng)
    else:
        rows = rows_of_prompt(examples, settings.row_size, rng)
    if not rows:
        raise InputError("--method dpo: no problem has both a positive and a negative sample to pair")
    counts = {
        "composition": settings.composition,
        "seed": settings.seed_of(f"composition {number}"),
        "drawn": _count(samples),
        "trained": _count(taken),
        "baseline": sum(baselines) / len(baselines),  # the mean, where they differ
    }
    return [[replace(example, row=i) for example in row] for i, row in enumerate(rows)], counts


def _count(samples: Sequence[Sample]) -> dict[str, int]:
    problems = {sample.prompt for sample in samples}
    return {"samples": len(samples), "positive": sum(s.reward >= 0 for s in samples), "problems": len(problems)}


def group_rows(examples: Sequence[Example]) -> list[Row]:
    """The rows that the lines of train.jsonl make.

    >>> group_rows([Example([1], [2], -3.0, 1.0, row=row) for row in (0, 0, 1)])[0][1].row
    0
    """
    return [list(row) for _, row in groupby(examples, key=lambda example: example.row)]


# ---- examples, baseline, rows -----------------------------------------------------------------------------------


def encode(
    samples: Sequence[Sample],
    lm: LanguageModel,
    stop: Sequence[str] = (),
    source: str = "samples",
    numbers: Sequence[int] | None = None,
) -> list[Example]:
    """Samples, or those at the given indices, as token ids; log mu is the sum of token_logmu, NaN without them.

    A sample without token_ids is text from elsewhere: its completion is encoded. An end of sequence is added if it was
    finished (finish_reason "stop") and has no `stop` string, or the model would never learn to stop. InputError names
    the line of `source` that does not fit.
    """
    tokenizer = lm.tokenizer
    chosen = {i: samples[i] for i in (range(len(samples)) if numbers is None else numbers)}
    prompts = {sample.prompt: None for sample in chosen.values()}
    prompt_ids = dict(zip(prompts, tokenizer(list(prompts))["input_ids"], strict=True))
    examples = []
    for number, sample in chosen.items():
        where = f"{source}:{number + 1}: field"
        ids = sample.token_ids
        if ids is None:
            ids = tokenizer(sample.completion, add_special_tokens=False)["input_ids"]
            if sample.finish_reason == "stop" and not any(string in sample.completion for string in stop):
                ids.append(tokenizer.eos_token_id)
        size = len(prompt_ids[sample.prompt]) + len(ids)
        if size > lm.context:
            raise InputError(f"{where} completion: {size} tokens with its prompt, the model's context is {lm.context}")
        if not 0 <= min(ids) <= max(ids) < len(tokenizer):
            raise InputError(f"{where} token_ids: outside the model's vocabulary of {len(tokenizer)} tokens")
        if sample.token_ids is not None and lm.text(ids) != sample.completion:
            raise InputError(f"{where} token_ids: are not the completion's in this model's vocabulary; leave them out")
        if not prompt_ids[sample.prompt]:
            raise InputError(f"{where} prompt: is empty")
        if sample.token_logmu is not None and len(sample.token_logmu) != len(ids):
            raise InputError(f"{where} token_logmu: {len(sample.token_logmu)} of them, {len(ids)} tokens")
        logmu = sum_logmu(sample.token_logmu)
        examples.append(Example(prompt_ids[sample.prompt], ids, logmu, sample.reward, number, -1, sample.token_logmu))
    return examples


@torch.no_grad()
def score(steps: "Steps", lm: LanguageModel, logprobs: Callable[..., Tensor] = token_logprobs) -> list[Row]:
    """The rows of `steps`, each example with token_logmu and logmu by `lm`, the model that starts the iteration.

    The full vocabulary counts, whatever sampling cut off. These are the batches that will train, with their padding,
    precision and share of each rank, so that training starts at a ratio of 1. logprobs: (model, batch) -> (B, C).
    """
    found: dict[tuple[int, int], list[float]] = {}
    for number in progress_bar(range(len(steps)), "scoring", "step"):
        for examples, batch in zip(steps.examples(number), steps[number].micro_batches, strict=True):
            all_token_logp = logprobs(lm.model, batch).cpu().numpy()
            for example, token_logp in zip(examples, all_token_logp, strict=True):
                own = token_logp[: len(example.completion_ids)].astype(np.float32)
                # The shortest decimal that is this float32 again: files stay small, and nothing is lost in them.
                found[example.row, example.sample] = [float(str(x)) for x in own]
    found = {key: token_logmu for part in from_all_ranks(found) for key, token_logmu in part.items()}
    return [[_with_logmu(example, found[example.row, example.sample]) for example in row] for row in steps.rows]


def _with_logmu(example: Example, token_logmu: list[float]) -> Example:
    return replace(example, token_logmu=token_logmu, logmu=sum_logmu(token_logmu))


def sum_logmu(token_logmu: Sequence[float] | None) -> float:
    """log mu(y|x), the sum over tokens in float32, as training sums log pi; NaN where it is not known.

    >>> sum_logmu([-1.0, -0.5])
    -1.5
    """
    return float("nan") if token_logmu is None else float(np.sum(token_logmu, dtype=np.float32))


def engine_mismatch(samples: Sequence[Sample], rows: Sequence[Row]) -> dict[str, float] | None:
    """How far log mu as the sampling engine computed it is from the trainer's, per sequence, in nats; None if unknown.

    mean, largest absolute value and quantiles (5, 50, 95%) of the difference engine - trainer.

    >>> sample = Sample(prompt="?", completion="!", reward=1.0, token_logmu_engine=[-1.25])
    >>> engine_mismatch([sample], [[Example([1], [2], -1.0, 1.0, sample=0, token_logmu=[-1.0])]])["mean"]
    -0.25
    """
    trained = {example.sample: example.token_logmu for row in rows for example in row}
    pairs = [(samples[i].token_logmu_engine, token_logmu) for i, token_logmu in sorted(trained.items())]
    difference = np.array([math.fsum(engine) - math.fsum(trainer) for engine, trainer in pairs if engine])
    if not len(difference):
        return None
    quantiles = {f"q{q:02}": float(np.quantile(difference, q / 100)) for q in (5, 50, 95)}
    return {"mean": float(difference.mean()), "largest": float(np.abs(difference).max()), **quantiles}


def check_logmu(samples: Sequence[Sample], source: str = "samples") -> None:
    """InputError names the first sample that comes without log mu.

    >>> check_logmu([Sample(prompt="1 + 1 =", completion=" 2", reward=1.0)])
    Traceback (most recent call last):
    pipeline.records.InputError: samples:1: field token_logmu: is missing, there is no log mu to trust
    """
    for line, sample in enumerate(samples, start=1):
        if sample.token_logmu is None:
            raise InputError(f"{source}:{line}: field token_logmu: is missing, there is no log mu to trust")


def rows_of_prompt(examples: Sequence[Example], per_row: int, rng: random.Random) -> list[Row]:
    """All examples once, in random order, up to `per_row` of the same prompt together in a row.

    >>> examples = [Example([prompt], [2], -3.0, 1.0) for prompt in (7, 7, 7, 8)]
    >>> sorted(len(row) for row in rows_of_prompt(examples, 2, random.Random(0)))
    [1, 1, 2]
    """
    shuffled = rng.sample(examples, len(examples))
    rows = [[shuffled[i] for i in row] for row in _rows_of_one_prompt(shuffled, per_row)]
    rng.shuffle(rows)
    return rows


def pairs_of_prompt(examples: Sequence[Example], most: int, rng: random.Random) -> list[Row]:
    """Up to `most` random pairs (positive, negative) of each prompt, a row each: what DPO learns from. Shuffled.

    >>> examples = [Example([7], [2], -3.0, reward) for reward in (1.0, -1.0, -1.0)]
    >>> [[example.reward for example in row] for row in pairs_of_prompt(examples, 16, random.Random(0))]
    [[1.0, -1.0], [1.0, -1.0]]
    """
    rows = []
    for group in _rows_of_one_prompt(examples, per_row=len(examples)):
        positives = [examples[i] for i in group if examples[i].reward >= 0]
        negatives = [examples[i] for i in group if examples[i].reward < 0]
        pairs = list(product(positives, negatives))
        rows += [list(pair) for pair in rng.sample(pairs, min(most, len(pairs)))]
    rng.shuffle(rows)
    return rows


class Steps(Sequence[Step]):
    """The optimiser steps of an epoch, in order: each gives this rank's micro-batches, laid out when asked for.

    rows: those of the epoch. batch: completions a step, over all ranks; micro_batch: completions a forward pass, which
    decides memory and nothing else. A slice of steps is steps. Ranks have equally many micro-batches; one that has no
    rows left gets empty ones.

    >>> steps = Steps([[Example([1], [2], -3.0, 1.0)]] * 5, batch=2, micro_batch=1, device="cpu")
    >>> len(steps), [len(batch.reward) for batch in steps[0].micro_batches], len(steps[1:])
    (3, [1, 1], 2)
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch: int,
        micro_batch: int,
        device: torch.device | str,
        rank: int = 0,
        ranks: int = 1,
    ):
        per_row = max(len(row) for row in rows)
        size, micro = max(batch // per_row, 1), max(micro_batch // per_row, 1)
        self._steps = [rows[i : i + size] for i in range(0, len(rows), size)]
        self._micro, self._device, self._rank, self._ranks = micro, device, rank, ranks
        self._shares = per_row > 1  # in every batch or in none: ranks have to run the model equally often

    @classmethod
    def of(cls, settings: Settings, rows: Sequence[Row]) -> "Steps":
        """The steps of an epoch by the settings, for this rank and its device."""
        return cls(rows, settings.batch, settings.micro_batch, device(), rank(), ranks())

    @property
    def rows(self) -> list[Row]:
        """The rows of all steps and ranks."""
        return [row for rows in self._steps for row in rows]

    def samples_until(self, step: int) -> int:
        """The number of completions in the first `step` steps, over all ranks."""
        return sum(len(row) for rows in self._steps[:step] for row in rows)

    def examples(self, step: int) -> list[list[Example]]:
        """The examples of this rank's micro-batches, in the order of their completions."""
        return [[example for row in rows if is_own for example in row] for rows, is_own in self._micro_batches(step)]

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, step: int | slice) -> "Step | Steps":
        if isinstance(step, slice):
            part = copy(self)
            part._steps = self._steps[step]
            return part
        batches = [(collate(rows, self._device, self._shares), is_own) for rows, is_own in self._micro_batches(step)]
        micro_batches = [batch if is_own else without_completions(batch) for batch, is_own in batches]
        return Step(micro_batches, sum(len(row) for row in self._steps[step]))

    def _micro_batches(self, step: int) -> list[tuple[Sequence[Row], bool]]:
        """The rows of each micro-batch, and whether they are this rank's own."""
        rows = self._steps[step]
        own = rows[self._rank :: self._ranks]
        count = -(-len(rows[:: self._ranks]) // self._micro)  # the first rank has the most
        own_batches = [own[i : i + self._micro] for i in range(0, len(own), self._micro)]
        return [(batch, True) for batch in own_batches] + [(rows[:1], False)] * (count - len(own_batches))


def _rows_of_one_prompt(examples: Sequence[Example], per_row: int) -> list[list[int]]:
    """The examples' numbers, up to `per_row` of the same prompt together, in the order of their first appearance."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, example in enumerate(examples):
        by_prompt.setdefault(tuple(example.prompt_ids), []).append(i)
    return [group[i : i + per_row] for group in by_prompt.values() for i in range(0, len(group), per_row)]
