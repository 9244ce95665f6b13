"""The dataset: from graded samples to the steps of an epoch.

samples -> examples (token ids) -> log mu -> baseline -> rows -> steps
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pipeline.models import LanguageModel
from pipeline.records import InputError, Sample
from pipeline.rows import Example, SharedRows, batches_within, collate, token_logprobs
from topr import dpo_loss

Row = list[Example]


def encode(
    samples: Sequence[Sample], lm: LanguageModel, stop: Sequence[str] = (), source: str = "samples"
) -> list[Example]:
    """Samples as token ids; log mu is their sum of token_logmu, or NaN until `score` has found it.

    A sample without token_ids is text from elsewhere: its completion is encoded, and given an end of sequence if it
    was finished (finish_reason "stop") and has no `stop` string, or the model would never learn to stop. InputError
    names the line of `source` that does not fit.
    """
    tokenizer = lm.tokenizer
    prompts = {sample.prompt: None for sample in samples}
    prompt_ids = dict(zip(prompts, tokenizer(list(prompts))["input_ids"], strict=True))
    examples = []
    for line, sample in enumerate(samples, start=1):
        ids = sample.token_ids
        if ids is None:
            ids = tokenizer(sample.completion, add_special_tokens=False)["input_ids"]
            if sample.finish_reason == "stop" and not any(string in sample.completion for string in stop):
                ids.append(tokenizer.eos_token_id)
        size = len(prompt_ids[sample.prompt]) + len(ids)
        if size > lm.context:
            raise InputError(
                f"{source}:{line}: field completion: {size} tokens with its prompt, the model's context is {lm.context}"
            )
        if not 0 <= min(ids) <= max(ids) < len(tokenizer):
            raise InputError(f"{source}:{line}: field token_ids: outside the model's {len(tokenizer)} words")
        if not prompt_ids[sample.prompt]:
            raise InputError(f"{source}:{line}: field prompt: is empty")
        if sample.token_logmu is not None and len(sample.token_logmu) != len(ids):
            raise InputError(
                f"{source}:{line}: field token_logmu: {len(sample.token_logmu)} of them, {len(ids)} tokens"
            )
        logmu = float("nan") if sample.token_logmu is None else float(np.sum(sample.token_logmu, dtype=np.float32))
        examples.append(Example(prompt_ids[sample.prompt], ids, logmu, sample.reward))
    return examples


def has_logmu(samples: Sequence[Sample], source: str = "samples") -> bool:
    """Whether the samples bring their log mu; InputError where only some do.

    >>> has_logmu([Sample(prompt="1 + 1 =", completion=" 2", reward=1.0)])
    False
    """
    brings = [sample.token_logmu is not None for sample in samples]
    if any(brings) and not all(brings):
        raise InputError(f"{source}:{brings.index(False) + 1}: field token_logmu: give it on every line or on none")
    return all(brings)


@torch.no_grad()
def score(
    samples: Sequence[Sample],
    lm: LanguageModel,
    per_row: int,
    tokens_at_once: int,
    stop: Sequence[str] = (),
    source: str = "samples",
) -> list[Sample]:
    """The samples with token_ids and, by `lm`, token_logmu: log mu, when `lm` is the iteration's first model.

    The full vocabulary counts, whatever the sampler cut off, and the forward pass is the one that trains, in the
    same row layout and precision, so that the ratio starts at 1. tokens_at_once bounds a batch, padding included.
    """
    examples = encode(samples, lm, stop, source)
    scored: list[Sample | None] = [None for _ in samples]
    widths = {
        tuple(row): len(examples[row[0]].prompt_ids) + sum(len(examples[i].completion_ids) for i in row)
        for row in _rows_of_one_prompt(examples, per_row)
    }
    rows = sorted(widths, key=widths.__getitem__)
    with tqdm(total=len(examples), desc="scoring", unit="sample") as progress:
        for batch in batches_within(tokens_at_once, [widths[row] for row in rows]):
            numbers = [i for row in rows[batch] for i in row]
            laid_out = collate([[examples[i] for i in row] for row in rows[batch]], lm.model.device)
            for i, token_logp in zip(numbers, token_logprobs(lm.model, laid_out).cpu().numpy(), strict=True):
                ids = examples[i].completion_ids
                # The shortest decimal that is this float32 again: files stay small, and nothing is lost in them.
                token_logmu = [float(str(x)) for x in token_logp[: len(ids)]]
                scored[i] = samples[i].model_copy(update={"token_ids": ids, "token_logmu": token_logmu})
            progress.update(len(numbers))
    return scored


def subtract_baseline(examples: Sequence[Example], baseline: float) -> list[Example]:
    """The same examples with reward - baseline (Section 3.2 of the paper).

    >>> subtract_baseline([Example([1], [2], logmu=-3.0, reward=1.0)], 0.5)
    [Example(prompt_ids=[1], completion_ids=[2], logmu=-3.0, reward=0.5)]
    """
    return [replace(example, reward=example.reward - baseline) for example in examples]


def share_of_positives(examples: Sequence[Example]) -> float:
    """The share of examples whose reward is not negative.

    >>> share_of_positives([Example([1], [2], -3.0, reward) for reward in (1.0, 0.0, -1.0, -1.0)])
    0.5
    """
    return sum(example.reward >= 0 for example in examples) / len(examples)


def weight_by_difficulty(samples: Sequence[Sample], baseline: float, buckets: int = 10) -> list[float]:
    """What an average question of each difficulty weighs in the dataset (Fig. 9): sum of |reward - baseline|.

    Rewards are -1 and +1, so that a correct sample weighs 1 - c, an incorrect one 1 + c. The questions are put into
    equally wide buckets by their share of correct samples, the hardest first; NaN where a bucket is empty.

    >>> samples = [Sample(prompt="?", completion="!", reward=reward) for reward in (1.0, -1.0, -1.0, -1.0)]
    >>> weight_by_difficulty(samples, baseline=0.5, buckets=2)
    [5.0, nan]
    """
    weights: list[list[float]] = [[] for _ in range(buckets)]
    rewards: dict[str, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.prompt, []).append(sample.reward)
    for of_question in rewards.values():
        correct = sum(reward > 0 for reward in of_question)
        bucket = min(correct * buckets // len(of_question), buckets - 1)
        weights[bucket].append(sum(abs(reward - baseline) for reward in of_question))
    return [sum(bucket) / len(bucket) if bucket else math.nan for bucket in weights]


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


def dpo_loss_of_rows(
    logp: Tensor, logmu: Tensor, reward: Tensor, length: Tensor, denominator: int, beta: float
) -> Tensor:
    """`topr.dpo_loss` of a micro-batch made of `pairs_of_prompt`, with the arguments of the other losses (B,).

    >>> zero, reward = torch.zeros(2), torch.tensor([1.0, -1.0])
    >>> dpo_loss_of_rows(zero, zero, reward, torch.ones(2), denominator=2, beta=0.1)  # log 2, a pair
    tensor(0.6931)
    """
    is_positive = reward >= 0
    columns = [column[chosen] for column in (logp, logmu) for chosen in (is_positive, ~is_positive)]
    return dpo_loss(*columns, beta=beta, denominator=denominator / 2)


class Steps(Sequence[list[SharedRows]]):
    """The optimiser steps of an epoch, in order: each gives its micro-batches, laid out when they are asked for.

    batch: completions a step; micro_batch: completions a forward pass, which decides memory and nothing else.

    >>> steps = Steps([[Example([1], [2], -3.0, 1.0)]] * 5, batch=2, micro_batch=1, device="cpu")
    >>> len(steps), [len(micro.reward) for micro in steps[0]]
    (3, [1, 1])
    """

    def __init__(self, rows: Sequence[Row], batch: int, micro_batch: int, device: torch.device | str):
        per_row = max(len(row) for row in rows)
        self._rows, self._device = rows, device
        self._step, self._micro = max(batch // per_row, 1), max(micro_batch // per_row, 1)

    def samples_until(self, step: int) -> int:
        """The number of completions in the first `step` steps."""
        return sum(len(row) for row in self._rows[: step * self._step])

    def __len__(self) -> int:
        return -(-len(self._rows) // self._step)

    def __getitem__(self, step: int) -> list[SharedRows]:
        if not 0 <= step < len(self):
            raise IndexError(step)
        rows = self._rows[step * self._step : (step + 1) * self._step]
        return [collate(rows[i : i + self._micro], self._device) for i in range(0, len(rows), self._micro)]


def _rows_of_one_prompt(examples: Sequence[Example], per_row: int) -> list[list[int]]:
    """The examples' numbers, up to `per_row` of the same prompt together, in the order of their first appearance."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for i, example in enumerate(examples):
        by_prompt.setdefault(tuple(example.prompt_ids), []).append(i)
    return [group[i : i + per_row] for group in by_prompt.values() for i in range(0, len(group), per_row)]
