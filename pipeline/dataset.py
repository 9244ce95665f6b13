"""The dataset: from graded samples to the steps of an epoch.

samples -> examples (token ids) -> baseline -> rows -> steps, and through these log mu
"""

import math
import random
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pipeline.models.loading import LanguageModel
from pipeline.models.rows import Example, SharedRows, collate, token_logprobs, without_completions
from pipeline.records import InputError, Sample
from pipeline.runtime.processes import rank
from topr import dpo_loss, from_all_ranks

Row = list[Example]


def encode(
    samples: Sequence[Sample],
    lm: LanguageModel,
    stop: Sequence[str] = (),
    source: str = "samples",
    numbers: Sequence[int] | None = None,
) -> list[Example]:
    """Samples, or those with the given numbers, as token ids; log mu is the sum of token_logmu, NaN without them.

    A sample without token_ids is text from elsewhere: its completion is encoded, and given an end of sequence if it
    was finished (finish_reason "stop") and has no `stop` string, or the model would never learn to stop. InputError
    names the line of `source` that does not fit.
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
            raise InputError(f"{where} token_ids: outside the model's {len(tokenizer)} words")
        if sample.token_ids is not None and lm.text(ids) != sample.completion:
            raise InputError(f"{where} token_ids: are not the completion's in this model's vocabulary; leave them out")
        if not prompt_ids[sample.prompt]:
            raise InputError(f"{where} prompt: is empty")
        if sample.token_logmu is not None and len(sample.token_logmu) != len(ids):
            raise InputError(f"{where} token_logmu: {len(sample.token_logmu)} of them, {len(ids)} tokens")
        logmu = float("nan") if sample.token_logmu is None else float(np.sum(sample.token_logmu, dtype=np.float32))
        examples.append(Example(prompt_ids[sample.prompt], ids, logmu, sample.reward, number, sample.token_logmu))
    return examples


@torch.no_grad()
def score(
    samples: Sequence[Sample],
    lm: LanguageModel,
    steps: "Steps | None" = None,
    by: str | None = None,
    logprobs: Callable[..., Tensor] = token_logprobs,
) -> list[Sample]:
    """The samples, those in `steps` with token_ids and, by `lm`, token_logmu: log mu, when `lm` starts the iteration.

    The full vocabulary counts, whatever the sampler cut off. Given the steps that will train, these are the very
    batches, with the same padding and precision, shared out to the ranks alike, so that the ratio starts at 1; without,
    it is every sample, 64 at a time. by: what to note as logmu_by. logprobs: (model, batch) -> (B, C).
    """
    steps = steps or Steps([[example] for example in encode(samples, lm)], 64, 64, lm.model.device)
    found: dict[int, dict] = {}
    for step in tqdm(range(len(steps)), desc="scoring", unit="step", disable=rank() > 0):
        for examples, batch in zip(steps.examples(step), steps[step], strict=True):
            all_token_logp = logprobs(lm.model, batch).cpu().numpy()
            for example, token_logp in zip(examples, all_token_logp, strict=True):
                ids = example.completion_ids
                # The shortest decimal that is this float32 again: files stay small, and nothing is lost in them.
                token_logmu = [float(str(x)) for x in token_logp[: len(ids)].astype(np.float32)]
                found[example.number] = {"token_ids": ids, "token_logmu": token_logmu, "logmu_by": by}
    updates = {number: update for part in from_all_ranks(found) for number, update in part.items()}
    return [sample.model_copy(update=updates.get(number, {})) for number, sample in enumerate(samples)]


def engine_mismatch(samples: Sequence[Sample]) -> dict[str, float] | None:
    """How far log mu as the sampling engine computed it is from the trainer's, per sequence, in nats; None if unknown.

    mean, largest absolute value and quantiles (5, 50, 95%) of the difference engine - trainer.

    >>> sample = Sample(prompt="?", completion="!", reward=1.0, token_logmu=[-1.0], token_logmu_engine=[-1.25])
    >>> engine_mismatch([sample])["mean"]
    -0.25
    """
    seen = [sample for sample in samples if sample.token_logmu and sample.token_logmu_engine]
    if not seen:
        return None
    difference = np.array([math.fsum(s.token_logmu_engine) - math.fsum(s.token_logmu) for s in seen])
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


def subtract_baselines(examples: Sequence[Example], baselines: Sequence[float]) -> list[Example]:
    """The same examples, each with reward - baseline (Section 3.2 of the paper).

    >>> subtract_baselines([Example([1], [2], logmu=-3.0, reward=1.0)], [0.5])[0].reward
    0.5
    """
    return [replace(example, reward=example.reward - b) for example, b in zip(examples, baselines, strict=True)]


def mean_rewards(samples: Sequence[Sample], by_prompt: bool) -> list[float]:
    """For each sample the mean reward of all of them or, by prompt, of those of the same prompt.

    >>> samples = [Sample(prompt=x, completion="!", reward=r) for x, r in (("a", 1.0), ("a", 0.0), ("b", 5.0))]
    >>> mean_rewards(samples, by_prompt=True), mean_rewards(samples, by_prompt=False)
    ([0.5, 0.5, 5.0], [2.0, 2.0, 2.0])
    """
    groups = _rewards_of_groups(samples, by_prompt)
    means = {group: sum(rewards) / len(rewards) for group, rewards in groups.items()}
    return [means[sample.prompt if by_prompt else ""] for sample in samples]


def _rewards_of_groups(samples: Sequence[Sample], by_prompt: bool) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt if by_prompt else "", []).append(sample.reward)
    return groups


def share_of_positives(examples: Sequence[Example | Sample]) -> float:
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
    for of_question in _rewards_of_groups(samples, by_prompt=True).values():
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
    """The optimiser steps of an epoch, in order: each gives this rank's micro-batches, laid out when asked for.

    batch: completions a step, over all ranks; micro_batch: completions a forward pass, which decides memory and nothing
    else. A slice of steps is steps. Ranks have equally many micro-batches: one short of rows gets them without
    completions.

    >>> steps = Steps([[Example([1], [2], -3.0, 1.0)]] * 5, batch=2, micro_batch=1, device="cpu")
    >>> len(steps), [len(micro.reward) for micro in steps[0]], len(steps[1:])
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

    def samples_until(self, step: int) -> int:
        """The number of completions in the first `step` steps, over all ranks."""
        return sum(len(row) for rows in self._steps[:step] for row in rows)

    def examples(self, step: int) -> list[list[Example]]:
        """The examples of this rank's micro-batches, in the order of their completions."""
        return [[example for row in rows if is_own for example in row] for rows, is_own in self._micro_batches(step)]

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, step: int | slice) -> "list[SharedRows] | Steps":
        if isinstance(step, slice):
            part = copy(self)
            part._steps = self._steps[step]
            return part
        batches = [(collate(rows, self._device, self._shares), is_own) for rows, is_own in self._micro_batches(step)]
        return [batch if is_own else without_completions(batch) for batch, is_own in batches]

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
