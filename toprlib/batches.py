"""From samples to the batches of an epoch: token ids, order, optimizer steps, tensors.

A row is what has to be in one micro-batch: a completion, or the two of a pair for DPO.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

import topr
from topr import Batch
from toprlib.distributed import device as own_device
from toprlib.distributed import gather, progress_bar, rank, ranks
from toprlib.language_model import LanguageModel
from toprlib.records import Example, InputError, Sample

MAX_PAIRS = 16  # per prompt (Section 4.3)


# ---- token ids -----------------------------------------------------------------------------------
def tokenize_samples(
    samples: Sequence[Sample],
    indices: Sequence[int],
    lm: LanguageModel,
    stop: Sequence[str] = (),
    source: str = "samples.jsonl",
    keep_logmu: bool = False,
) -> list[Example]:
    """The samples at these indices as examples, with rewards as they are.

    keep_logmu: keep the samples' token_logmu, which must exist. Raises InputError, which
    names a line of `source`, for a sample that the model cannot be trained on.
    """
    texts = list(dict.fromkeys(samples[index].prompt for index in indices))
    ids_of_prompt = dict(zip(texts, lm.prompt_ids(texts), strict=True)) if texts else {}
    examples = []
    for index in indices:
        sample = samples[index]
        prompt_ids = ids_of_prompt[sample.prompt]
        place = {"file": source, "line": index + 1}
        completion_ids = sample.token_ids or tokenize_completion(sample, lm, stop, place)
        check_tokens(sample, prompt_ids, completion_ids, lm, place)
        token_logmu = None
        if keep_logmu:
            token_logmu = _own_logmu(sample, len(completion_ids), place)
        example = Example(prompt_ids, completion_ids, sample.reward, index, 0, token_logmu)
        examples.append(example)
    return examples


def tokenize_completion(
    sample: Sample, lm: LanguageModel, stop: Sequence[str], place: dict
) -> list[int]:
    """The token ids of a completion that is text, up to and including its end of sequence.

    Padding, and white space and special tokens after the end, are left out. An end of sequence is
    added if the completion was finished (finish_reason "stop") and has neither an end of sequence
    nor a stop string. place: file and line of the sample. Raises InputError if it is empty, or if
    what follows its end cannot be left out.
    """
    tokenizer = lm.tokenizer
    ids = lm.completion_ids(sample.prompt, sample.completion)
    while ids and ids[-1] == tokenizer.pad_token_id and ids[-1] not in lm.ends:
        ids.pop()
    if not ids:
        # A model may end at once, but then there is the token that ends it.
        raise InputError("is empty; remove this sample", field="completion", **place)
    for length, token in enumerate(ids, start=1):
        if token in lm.ends:
            rest = tokenizer.decode(ids[length:], skip_special_tokens=True)
            if rest.strip():
                message = "has text after its end of sequence; leave that text out"
                raise InputError(message, field="completion", **place)
            return ids[:length]
    has_stop = any(string in sample.completion for string in stop)
    if sample.finish_reason == "stop" and not has_stop:
        if _is_special(ids[-1], tokenizer):
            message = f"ends with {tokenizer.decode(ids[-1:])}, no end of sequence of this model"
            fix = "remove this token, or add --chat if the chat template writes it"
            raise InputError(f"{message}; {fix}", field="completion", **place)
        ids.append(lm.chat.end if lm.chat else tokenizer.eos_token_id)
    return ids


def _is_special(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a token is a mark such as <|eot_id|>, and no text."""
    if token == tokenizer.unk_token_id:
        return False
    is_skipped = tokenizer.decode([token], skip_special_tokens=True) == ""
    return is_skipped and tokenizer.decode([token]) != ""


def check_tokens(
    sample: Sample,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    lm: LanguageModel,
    place: dict,
) -> None:
    """Raises InputError for token ids that the model cannot be trained on.

    place: file and line of the sample.
    """
    if not prompt_ids:
        raise InputError("is empty; remove this sample", field="prompt", **place)
    size = len(prompt_ids) + len(completion_ids)
    if size > lm.context:
        message = f"{size} tokens with its prompt exceed the context of {lm.context}; shorten it"
        raise InputError(message, field="completion", **place)
    # A vocabulary may be larger than its tokenizer's: such tokens have no text, but a log mu.
    if min(completion_ids) < 0 or max(completion_ids) >= lm.vocabulary:
        message = f"are outside the model's vocabulary of {lm.vocabulary}; leave them out"
        raise InputError(message, field="token_ids", **place)
    if sample.token_ids is not None and lm.text(completion_ids) != sample.completion:
        message = "do not spell the completion in this model's vocabulary; leave them out"
        raise InputError(message, field="token_ids", **place)
    if not lm.ends.isdisjoint(completion_ids[:-1]):
        message = "have tokens after an end of sequence; remove those"
        raise InputError(message, field="token_ids", **place)
    if lm.chat and not lm.chat.marks <= set(prompt_ids):
        message = "lacks tokens of the chat template; give it as the template writes it"
        raise InputError(message, field="prompt", **place)


def _own_logmu(sample: Sample, length: int, place: dict) -> list[float]:
    if sample.token_logmu is None:
        message = "is missing; add it, or leave --trust-logmu out"
        raise InputError(message, field="token_logmu", option="--trust-logmu", **place)
    if len(sample.token_logmu) != length:
        message = f"{len(sample.token_logmu)} values for {length} tokens; give one for each"
        raise InputError(message, field="token_logmu", **place)
    return sample.token_logmu


# ---- the order of training -----------------------------------------------------------------------
def shuffle_examples(examples: Sequence[Example], rng: random.Random) -> list[list[Example]]:
    """Each example as a row, in random order.

    >>> examples = [Example([prompt], [2], 1.0, i) for i, prompt in enumerate((7, 7, 8))]
    >>> sorted(example.sample for [example] in shuffle_examples(examples, random.Random(0)))
    [0, 1, 2]
    """
    # Grouped by prompt before the second shuffle: the order of the published results rests on it.
    groups = group_by_prompt(rng.sample(examples, len(examples)))
    rows = [[example] for example in chain.from_iterable(groups)]
    rng.shuffle(rows)
    return rows


def pair_examples(examples: Sequence[Example], rng: random.Random) -> list[list[Example]]:
    """Up to MAX_PAIRS random pairs [positive, negative] of each prompt, for DPO; shuffled.

    >>> examples = [Example([7], [2], reward, 0) for reward in (1.0, -1.0, -1.0)]
    >>> [pair[0].reward for pair in pair_examples(examples, random.Random(0))]
    [1.0, 1.0]
    """
    rows = []
    for group in group_by_prompt(examples):
        positives = [example for example in group if example.reward >= 0]
        negatives = [example for example in group if example.reward < 0]
        pairs = range(len(positives) * len(negatives))  # by number: there may be millions
        for pair in rng.sample(pairs, min(MAX_PAIRS, len(pairs))):
            positive, negative = divmod(pair, len(negatives))
            rows.append([positives[positive], negatives[negative]])
    rng.shuffle(rows)
    return rows


def group_by_prompt(examples: Iterable[Example]) -> list[list[Example]]:
    """The examples of each prompt, in the order in which prompts and examples come.

    >>> groups = group_by_prompt([Example([prompt], [2], 1.0, 0) for prompt in (7, 8, 7)])
    >>> [len(group) for group in groups]
    [2, 1]
    """
    groups: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        groups.setdefault(tuple(example.prompt_ids), []).append(example)
    return list(groups.values())


def number_rows(rows: Sequence[Sequence[Example]]) -> list[list[Example]]:
    """The rows with their index in each example, by which train.jsonl restores them."""
    numbered = []
    for index, row in enumerate(rows):
        numbered.append([replace(example, row=index) for example in row])
    return numbered


def group_rows(examples: Iterable[Example]) -> list[list[Example]]:
    """The rows of numbered examples, such as the lines of train.jsonl."""
    return [list(row) for _, row in groupby(examples, key=attrgetter("row"))]


# ---- the optimizer steps of an epoch -------------------------------------------------------------
FILLER = -1  # `row` of an example that only keeps the ranks in step


class StepPlan(NamedTuple):
    """An optimizer step: this rank's micro-batches of examples, and all ranks' completions."""

    micro_batches: list[list[Example]]
    completions: int


def plan_steps(
    rows: Sequence[Sequence[Example]],
    batch_size: int,
    micro_batch_size: int,
    at_rank: int | None = None,
    of_ranks: int | None = None,
) -> list[StepPlan]:
    """The optimizer steps of an epoch over `rows`, in order, as one rank has them.

    batch_size: completions per step, over all ranks. micro_batch_size: completions per forward
    pass; rows of similar length are together. All ranks have equally many micro-batches in a step,
    because FSDP2 gathers weights together: a rank without rows left gets a filler with reward 0,
    from which nothing is learned. at_rank, of_ranks: default is this process.

    >>> steps = plan_steps([[Example([1], [2], 1.0, i)] for i in range(3)], 2, 1)
    >>> [(len(step.micro_batches), step.completions) for step in steps]
    [(2, 2), (1, 1)]
    """
    at_rank = rank() if at_rank is None else at_rank
    of_ranks = of_ranks or ranks()
    per_row = max(len(row) for row in rows)
    rows_per_step = max(batch_size // per_row, 1)
    rows_per_pass = max(micro_batch_size // per_row, 1)
    steps = []
    for start in range(0, len(rows), rows_per_step):
        step_rows = sorted(rows[start : start + rows_per_step], key=_count_tokens)
        own_rows = step_rows[at_rank::of_ranks]
        most_rows = len(step_rows[::of_ranks])  # of the first rank
        passes = -(-most_rows // rows_per_pass)
        micro_batches = []
        for first in range(0, passes * rows_per_pass, rows_per_pass):
            some_rows = own_rows[first : first + rows_per_pass] or [_filler(step_rows[0])]
            micro_batches.append(list(chain.from_iterable(some_rows)))
        steps.append(StepPlan(micro_batches, sum(len(row) for row in step_rows)))
    return steps


def _count_tokens(row: Sequence[Example]) -> int:
    return sum(len(example.prompt_ids) + len(example.completion_ids) for example in row)


def _filler(row: Sequence[Example]) -> list[Example]:
    return [replace(example, reward=0.0, row=FILLER) for example in row]


# ---- log mu --------------------------------------------------------------------------------------
@torch.no_grad()
def score_rows(
    rows: Sequence[Sequence[Example]], steps: Sequence[StepPlan], model: torch.nn.Module
) -> list[list[Example]]:
    """The rows with log mu of each token, by `model`, in the batches of `steps`.

    It is over the whole vocabulary; top-k and top-p are ignored. Every rank calls this.
    """
    token_logmu = {}  # (row, sample) -> values; a sample may be in several pairs
    for micro_batches, _ in progress_bar(steps, "scoring", "step"):
        for examples in micro_batches:
            token_logp = topr.token_logprobs(model, collate(examples))  # (B, T)
            values = token_logp.float().cpu().numpy()
            for example, line in zip(examples, values, strict=True):
                completion = line[: len(example.completion_ids)]
                # The shortest decimals of these float32 values: train.jsonl is half as large.
                token_logmu[example.row, example.sample] = [
                    float(str(value)) for value in completion
                ]
    for part in gather(token_logmu):
        token_logmu |= part
    scored = []
    for row in rows:
        values = [token_logmu[example.row, example.sample] for example in row]
        scored.append([replace(e, token_logmu=v) for e, v in zip(row, values, strict=True)])
    return scored


# ---- tensors -------------------------------------------------------------------------------------
def to_tensors(steps: Iterable[StepPlan]) -> Iterator[tuple[list[Batch], int]]:
    """The steps as `topr.train` takes them; the tensors of a step are made when it begins."""
    for step in steps:
        yield [collate(examples) for examples in step.micro_batches], step.completions


def collate(examples: Sequence[Example], device: torch.device | None = None) -> Batch:
    """A micro-batch in tensors: [ padding | prompt | completion | padding ] in each row.

    Without log mu its tensor is 0. device: default is where this process computes.

    >>> first = Example([5, 6], [7, 1], 1.0, 0)
    >>> batch = collate([first, Example([5], [8, 9, 1], -1.0, 1, 0, [-0.5, -1.0, -2.0])])
    >>> batch.input_ids.tolist(), batch.mask.tolist()
    ([[5, 6, 7, 1, 0], [0, 5, 8, 9, 1]], [[1, 1, 0], [1, 1, 1]])
    """
    left = max(len(example.prompt_ids) for example in examples)
    right = max(len(example.completion_ids) for example in examples)
    shape = (len(examples), left + right)
    input_ids = torch.zeros(shape, dtype=torch.long)  # (B, L)
    attention_mask = torch.zeros(shape, dtype=torch.long)  # (B, L)
    mask = torch.zeros(len(examples), right, dtype=torch.long)  # (B, T)
    token_logmu = torch.zeros(len(examples), right)  # (B, T)
    for row, example in enumerate(examples):
        ids = example.prompt_ids + example.completion_ids
        start = left - len(example.prompt_ids)
        length = len(example.completion_ids)
        input_ids[row, start : start + len(ids)] = torch.tensor(ids)
        attention_mask[row, start : start + len(ids)] = 1
        mask[row, :length] = 1
        if example.token_logmu is not None:
            token_logmu[row, :length] = torch.tensor(example.token_logmu)
    reward = torch.tensor([example.reward for example in examples])  # (B,)
    tensors = (input_ids, attention_mask, mask, token_logmu, reward)
    return Batch(*[tensor.to(device or own_device()) for tensor in tensors])
