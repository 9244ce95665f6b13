"""Line 4 of Algorithm 1, and what follows from it: which samples, in which order, as tensors.

A training set is a list of examples in the order of training; for DPO, each two of them are a pair.
A reward of 0 or more counts as positive, as in `topr`.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean, mean
from typing import NamedTuple

import torch

import topr
from toprlib.distributed import device, gather, progress_bar, rank, ranks
from toprlib.language_model import LanguageModel
from toprlib.records import Example, InputError, Sample

MAX_PAIRS = 16  # per prompt (Section 4.3)
MISMATCH_TOLERANCE = 0.02  # nats per token that an engine's mean log mu may be off


# ---- which samples (Section 4.3) -----------------------------------------------------------------
def choose_samples(
    composition: str,
    samples: Sequence[Sample],
    size: int,
    rng: random.Random,
    proportion: float | None = None,
) -> list[int]:
    """The indices of `size` random samples, ascending; fewer if too few fit the composition.

    uniform: whatever their rewards. anna_karenina: the first positive of each problem, then
    negatives. proportion: this part of them is positive, also with too few samples of one sign.

    >>> samples = [Sample(prompt="?", completion="!", reward=reward) for reward in (-1, 1, 1, -1)]
    >>> names = ("uniform", "positives_only", "anna_karenina", "proportion")
    >>> [choose_samples(name, samples, 4, random.Random(0), 0.75) for name in names]
    [[0, 1, 2, 3], [1, 2], [0, 1, 3], [1, 2]]
    """
    positives = [i for i, sample in enumerate(samples) if sample.reward >= 0]
    negatives = [i for i, sample in enumerate(samples) if sample.reward < 0]
    count = size  # of positives
    if composition == "uniform":
        return sorted(rng.sample(range(len(samples)), min(size, len(samples))))
    if composition == "positives_only":
        negatives = []
    if composition == "anna_karenina":
        firsts: dict[str, int] = {}
        for i in positives:
            firsts.setdefault(samples[i].prompt, i)
        positives = list(firsts.values())
    if composition == "proportion":
        most = min(len(positives) / proportion, len(negatives) / (1 - proportion))
        size = min(size, int(most + 1e-9))  # 3 / (1 - 0.7) is 9.999999999999998
        count = round(proportion * size)
    chosen = rng.sample(positives, min(count, len(positives)))
    chosen += rng.sample(negatives, min(size - len(chosen), len(negatives)))
    return sorted(chosen)


def mean_rewards(samples: Sequence[Sample], of: str) -> list[float]:
    """A mean reward for each sample: of all samples ("mean"), or of its prompt's ("group").

    "zero": 0 for each, so that rewards stay as they are.

    >>> rewards = [("a", 1.0), ("a", 0.0), ("b", 5.0)]
    >>> samples = [Sample(prompt=prompt, completion="!", reward=r) for prompt, r in rewards]
    >>> [mean_rewards(samples, of) for of in ("zero", "mean", "group")]
    [[0.0, 0.0, 0.0], [2.0, 2.0, 2.0], [0.5, 0.5, 5.0]]
    """
    if of == "zero":
        return [0.0] * len(samples)
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt if of == "group" else "", []).append(sample.reward)
    # `mean` rounds once, `fmean` twice: the mean of equal rewards is that reward.
    means = {group: mean(rewards) for group, rewards in groups.items()}
    return [means[sample.prompt if of == "group" else ""] for sample in samples]


# ---- token ids -----------------------------------------------------------------------------------
def tokenize_samples(
    samples: Sequence[Sample],
    indices: Sequence[int],
    lm: LanguageModel,
    stop: Sequence[str] = (),
    keep_logmu: bool = False,
) -> list[Example]:
    """The samples at these indices as examples, with rewards as they are.

    A finished completion gets the end of sequence if it has none, and no stop string ended it.
    keep_logmu: keep the samples' token_logmu. Raises InputError for a sample that the model cannot
    be trained on.
    """
    texts = list(dict.fromkeys(samples[index].prompt for index in indices))
    ids_of_prompt = dict(zip(texts, lm.prompt_ids(texts), strict=True))
    examples = []
    for index in indices:
        sample = samples[index]
        prompt_ids = ids_of_prompt[sample.prompt]
        ids = sample.token_ids or lm.completion_ids(sample.prompt, sample.completion)
        has_end = ids[-1:] and ids[-1] in lm.ends
        is_stopped = any(string in sample.completion for string in stop)
        if sample.finish_reason == "stop" and not has_end and not is_stopped:
            ids = [*ids, lm.ends[0]]
        if not prompt_ids or not 0 < len(ids) <= lm.context - len(prompt_ids):
            raise InputError(f"sample {index + 1}: empty, or longer than the model's context")
        if not set(ids[:-1]).isdisjoint(lm.ends):
            raise InputError(f"sample {index + 1}: text after the end of sequence; remove the text")
        token_logmu = None
        if keep_logmu:
            token_logmu = sample.token_logmu
            if token_logmu is None or len(token_logmu) != len(ids):
                raise InputError(f"sample {index + 1}: token_logmu needs {len(ids)} numbers")
        engine = sum(sample.token_logmu_engine) if sample.token_logmu_engine else None
        examples.append(Example(prompt_ids, ids, sample.reward, index, 0, token_logmu, engine))
    return examples


# ---- the order of training -----------------------------------------------------------------------
def shuffle_examples(examples: Sequence[Example], rng: random.Random) -> list[Example]:
    """The examples in random order.

    >>> examples = [Example([prompt], [2], 1.0, i) for i, prompt in enumerate((7, 7, 8))]
    >>> sorted(example.sample for example in shuffle_examples(examples, random.Random(0)))
    [0, 1, 2]
    """
    # Grouped by prompt before the second shuffle: the order of the published results rests on it.
    groups = _group_by_prompt(rng.sample(examples, len(examples)))
    shuffled = list(chain.from_iterable(groups))
    rng.shuffle(shuffled)
    return shuffled


def pair_examples(examples: Sequence[Example], rng: random.Random) -> list[Example]:
    """Up to MAX_PAIRS random pairs of each prompt, shuffled: positive, negative, positive, ...

    >>> examples = [Example([7], [2], reward, 0) for reward in (1.0, -1.0, -1.0)]
    >>> [example.reward for example in pair_examples(examples, random.Random(0))]
    [1.0, -1.0, 1.0, -1.0]
    """
    pairs = []
    for group in _group_by_prompt(examples):
        positives = [example for example in group if example.reward >= 0]
        negatives = [example for example in group if example.reward < 0]
        numbers = range(len(positives) * len(negatives))  # of all pairs: there may be millions
        for number in rng.sample(numbers, min(MAX_PAIRS, len(numbers))):
            positive, negative = divmod(number, len(negatives))
            pairs.append((positives[positive], negatives[negative]))
    rng.shuffle(pairs)
    return list(chain.from_iterable(pairs))


def _group_by_prompt(examples: Iterable[Example]) -> list[list[Example]]:
    groups: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        groups.setdefault(tuple(example.prompt_ids), []).append(example)
    return list(groups.values())


def print_dataset(iteration: int, samples: Sequence[Sample], examples: Sequence[Example]) -> None:
    """Rank zero prints what an iteration trains on."""
    if rank() > 0:
        return
    rewards = [example.reward for example in examples]
    positive = 100 * fmean(reward > 0 for reward in rewards)
    cut_off = 100 * fmean(sample.finish_reason == "length" for sample in samples)
    message = f"{len(rewards):,} examples of {len(samples):,} samples ({cut_off:.1f} % cut off)"
    print(f"iteration {iteration}: {message}, {positive:.1f} % positive", flush=True)


# ---- the optimizer steps of an epoch -------------------------------------------------------------
class StepPlan(NamedTuple):
    """An optimizer step: this rank's micro-batches of examples, and all ranks' completions."""

    micro_batches: list[list[Example]]
    completions: int


def plan_steps(
    examples: Sequence[Example], batch_size: int, micro_batch_size: int, uses_pairs: bool = False
) -> list[StepPlan]:
    """The optimizer steps over the examples, in order, as this rank has them.

    batch_size: completions per step, over all ranks. micro_batch_size: completions per forward
    pass; those of similar length are together, and so are the two of a pair. All ranks have
    equally many micro-batches in a step, because FSDP2 gathers weights together: a rank without
    examples left gets a filler with reward 0 and line -1, from which nothing is learned.

    >>> steps = plan_steps([Example([1], [2], 1.0, i) for i in range(3)], 2, 1)
    >>> [(len(step.micro_batches), step.completions) for step in steps]
    [(2, 2), (1, 1)]
    """
    size = 2 if uses_pairs else 1  # of a unit, whose examples stay in one micro-batch
    units = [examples[start : start + size] for start in range(0, len(examples), size)]
    per_step = max(batch_size // size, 1)
    per_pass = max(micro_batch_size // size, 1)
    steps = []
    for start in range(0, len(units), per_step):
        of_step = sorted(units[start : start + per_step], key=_count_tokens)
        own = of_step[rank() :: ranks()]
        passes = -(-len(of_step[:: ranks()]) // per_pass)  # of the first rank
        filler = [replace(example, reward=0.0, line=-1) for example in of_step[0]]
        micro_batches = []
        for first in range(0, passes * per_pass, per_pass):
            of_pass = own[first : first + per_pass] or [filler]
            micro_batches.append(list(chain.from_iterable(of_pass)))
        steps.append(StepPlan(micro_batches, size * len(of_step)))
    return steps


def _count_tokens(examples: Sequence[Example]) -> int:
    return sum(len(example.prompt_ids) + len(example.completion_ids) for example in examples)


# ---- log mu --------------------------------------------------------------------------------------
@torch.no_grad()
def add_logmu(
    examples: Sequence[Example], steps: Sequence[StepPlan], model: torch.nn.Module
) -> list[Example]:
    """The examples with log mu of each token, by `model`, in the batches of `steps`.

    steps: over these examples, or over one of each sample. The whole vocabulary counts; top-k is
    ignored. Every rank calls this.
    """
    token_logmu = {}  # sample -> values
    for micro_batches, _ in progress_bar(steps, "scoring", "step"):
        for batch in micro_batches:
            tensors = collate(batch)
            token_logp = topr.token_logprobs(model, tensors).float().cpu()  # (B, T)
            for example, row, mask in zip(batch, token_logp, tensors.mask.cpu() > 0, strict=True):
                # The shortest decimals of these float32 values: train.jsonl is half as large.
                token_logmu[example.sample] = [float(str(value)) for value in row[mask].numpy()]
    for part in gather(token_logmu):
        token_logmu |= part
    return [replace(example, token_logmu=token_logmu[example.sample]) for example in examples]


def print_mismatch(iteration: int, examples: Iterable[Example]) -> None:
    """Rank zero prints how far an engine's log mu is from the trainer's, if it computes one."""
    mismatch = engine_mismatch(examples)
    if rank() == 0 and mismatch is not None:
        message = f"log mu by the engine less that by the trainer: {mismatch:.2g} nats per token"
        print(f"iteration {iteration}: {message}", flush=True)
        if not abs(mismatch) <= MISMATCH_TOLERANCE:
            fix = "compare the first tokens of a prompt and the dtype, or set --engine hf"
            print(f"warning: the engine samples from another distribution; {fix}", flush=True)


def engine_mismatch(examples: Iterable[Example]) -> float | None:
    """The mean of an engine's log mu less the trainer's, in nats per token; None without one."""
    difference = 0.0
    tokens = 0
    for example in examples:
        if example.logmu_engine is None:
            return None
        difference += example.logmu_engine - sum(example.token_logmu)
        tokens += len(example.completion_ids)
    return difference / tokens


# ---- tensors -------------------------------------------------------------------------------------
def to_tensors(
    steps: Iterable[StepPlan], sharded_model: torch.nn.Module | None = None
) -> Iterator[tuple[Iterator[topr.Batch], int]]:
    """The steps as `topr.train` takes them; the tensors of a micro-batch are made when it begins.

    sharded_model: by FSDP2. It then gathers its weights once in a step, and sums its gradients
    over the ranks once, in the last micro-batch.
    """
    for step in steps:
        yield _collate_each(step.micro_batches, sharded_model), step.completions


def _collate_each(
    micro_batches: Sequence[Sequence[Example]], sharded_model: torch.nn.Module | None
) -> Iterator[topr.Batch]:
    for number, examples in enumerate(micro_batches, start=1):
        if sharded_model is not None:
            is_last = number == len(micro_batches)
            sharded_model.set_requires_gradient_sync(is_last)
            sharded_model.set_reshard_after_backward(is_last)
        yield collate(examples)


def collate(examples: Sequence[Example]) -> topr.Batch:
    """A micro-batch in tensors: rows [ prompt | completion | padding ]; without log mu, zeros.

    >>> first = Example([5, 6], [7, 1], 1.0, 0)
    >>> batch = collate([first, Example([5], [8, 9, 1], -1.0, 1, 0, [-0.5, -1.0, -2.0])])
    >>> batch.input_ids.tolist(), batch.mask.tolist()
    ([[5, 6, 7, 1], [5, 8, 9, 1]], [[0, 1, 1], [1, 1, 1]])
    """
    rows = [example.prompt_ids + example.completion_ids for example in examples]
    longest = max(len(row) for row in rows)  # L
    input_ids = torch.zeros(len(examples), longest, dtype=torch.long)  # (B, L)
    mask = torch.zeros_like(input_ids)  # (B, L)
    token_logmu = torch.zeros(len(examples), longest)  # (B, L)
    for row, example in enumerate(examples):
        start = len(example.prompt_ids)
        end = start + len(example.completion_ids)
        input_ids[row, :end] = torch.tensor(rows[row])
        mask[row, start:end] = 1
        if example.token_logmu is not None:
            token_logmu[row, start:end] = torch.tensor(example.token_logmu)
    first = min(len(example.prompt_ids) for example in examples)  # column with a completion: L - T
    reward = torch.tensor([example.reward for example in examples])  # (B,)
    tensors = (input_ids, mask[:, first:], token_logmu[:, first:], reward)
    return topr.Batch(*[tensor.to(device()) for tensor in tensors])
