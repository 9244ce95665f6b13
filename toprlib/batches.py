"""The dataset: what a run reads before it starts, and the way from graded samples to the batches of an epoch.

samples -> choice -> token ids and rewards less the baseline -> rows -> log mu: train.jsonl -> steps -> batches
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from toprlib.compositions import BASELINES, COMPOSITIONS
from toprlib.methods import METHODS
from toprlib.language_model import META, LanguageModel, collate, load_model
from toprlib.external_samples import digest_of, read_samples
from toprlib.records import Encoded, Example, InputError, Sample, Task
from toprlib.preflight import Size
from toprlib.distributed import by_rank_zero, from_all_ranks, progress_bar, rank, ranks
from toprlib.files import read_checked, read_json, refuse_others
from toprlib.sampling import Prompt, SamplingParameters, prompts_of
from toprlib.settings import OF_DRAWING, OF_SCORING, Settings
from topr import Step, baseline_for_proportion, token_logprobs

Row = (
    Sequence[Encoded] | Sequence[Example]
)  # learnt from in the same step: a completion, or DPO's pair of a prompt


class Composed(NamedTuple):
    """What an iteration trains on, without log mu."""

    rows: list[list[Encoded]]  # in the order of training
    counts: dict[str, Any]  # for dataset.json


class Inputs(NamedTuple):
    """Everything that a run reads before it starts."""

    task: Task
    lm: LanguageModel  # without weights
    size: Size
    lengths: tuple[int, int]  # tokens of a prompt and of a completion that is trained on, at most
    sampling: SamplingParameters  # of training and test samples alike
    train: list[Prompt]
    test: list[Prompt]
    given: list[Sample] | None  # --samples
    composed: Composed | None  # what is trained on of these
    held_out: list[list[Encoded]] | None  # --held-out
    record: dict[str, Any]  # what the run is, for config.json


# ---- what a run reads before it starts ---------------------------------------------------------------------------
def read_inputs(settings: Settings, task: Task) -> Inputs:
    """The inputs of a run; InputError where model, problems and samples do not fit together."""
    if settings.test_source is None:
        task = replace(task, test=())
    elif not task.test:
        raise InputError(f"task {task.name}: has no test problems")
    if settings.iterations and not settings.samples and not task.train:
        raise InputError(f"task {task.name}: has no training problems")
    lm = load_model(settings.model, META, settings)
    if settings.lora and settings.lora > (width := lm.model.config.hidden_size):
        raise InputError(f"--lora {settings.lora}: must be at most {width}, the model's width")
    if lm.chat:
        task = lm.chat.asking(task)
    train, test = (
        prompts_of(task, problems, lm, settings.max_new_tokens)
        for problems in (task.train, task.test)
    )
    prompt_tokens, new_tokens = (
        max((len(prompt.ids) for prompt in [*train, *test]), default=0),
        settings.max_new_tokens,
    )
    longest_pair = prompt_tokens + new_tokens if train or test else 0
    drawn = len(task.train) * getattr(settings, COMPOSITIONS[settings.composition].draws)
    given, composed, held_out, digests = None, None, None, {}
    if settings.samples:
        given = read_samples(settings.samples, settings.columns, lm.chat and lm.chat.ask)
        digests["samples_sha256"] = digest_of(settings.samples, given)
        composed = compose(settings, given, lm, task.stop)
        prompt_tokens, new_tokens = longest(composed.rows)
        longest_pair, drawn = longest_pair or prompt_tokens + new_tokens, len(given)
    if settings.held_out:
        samples = read_samples(settings.held_out, settings.columns, lm.chat and lm.chat.ask)
        digests["held_out_sha256"] = digest_of(settings.held_out, samples)
        held_out = rows_held_out(settings, samples, lm, task.stop)
        prompts = {one.prompt for one in samples}
        if (shared := prompts & {one.prompt for one in given}) and rank() == 0:
            print(
                f"{settings.held_out}: {len(shared)} of {len(prompts)} prompts are trained on too",
                flush=True,
            )
    parameters = sum(weight.numel() for weight in lm.model.parameters())
    size = Size(parameters, drawn, len(task.test) * settings.test_samples, longest_pair)
    limits = (
        settings.temperature,
        settings.top_p,
        settings.top_k,
        settings.max_new_tokens,
        task.stop,
    )
    sampling, record = SamplingParameters(*limits), settings.record(**digests)
    if settings.reuse is not None:
        drawing = {name: record[name] for name in OF_DRAWING}
        refuse_others(
            settings.reuse, drawing, "has drawn otherwise", "give a --reuse that has drawn the same"
        )
    lengths = prompt_tokens, new_tokens
    return Inputs(task, lm, size, lengths, sampling, train, test, given, composed, held_out, record)


# ---- what an iteration trains on ---------------------------------------------------------------------------------
def compose(
    settings: Settings,
    samples: Sequence[Sample],
    lm: LanguageModel,
    stop: Sequence[str],
    prompts: Sequence[Prompt] = (),
    iteration: int = 1,
) -> Composed:
    """What an iteration trains on, in the order of training, and the counts of it for dataset.json.

    Every chosen sample comes once an epoch, or DPO's pairs, less the baseline. InputError where nothing can be learnt.
    """
    rng = random.Random(settings.seed_of(f"order {iteration}"))
    is_all = settings.composition == "uniform" and settings.examples is None
    chosen = list(range(len(samples))) if is_all else choose(settings, samples, iteration)
    if not chosen:
        raise InputError(
            f"--composition {settings.composition}: none of the {len(samples)} samples fits; draw more"
        )
    source = str(settings.samples or "samples.jsonl")
    encoded = encode(samples, chosen, lm, prompts, stop, source, settings.trust_logmu)
    taken = [samples[i] for i in chosen]
    baselines = baselines_of(settings, taken)
    encoded = [
        replace(one, reward=one.reward - c) for one, c in zip(encoded, baselines, strict=True)
    ]
    if settings.bounds and settings.bounds.b_neg == 0 and all(one.reward <= 0 for one in encoded):
        raise InputError(
            f"--method {settings.method}: no positive sample, and it learns from nothing else; draw more"
        )
    rows: list[list[Encoded]] = []
    for _ in range(settings.epochs):
        if METHODS[settings.method].of_pairs:
            rows += pairs_of_prompt(encoded, settings.pairs, rng)
        else:
            rows += shuffled(encoded, rng)
    if not rows:
        raise InputError(
            f"--method {settings.method}: no problem has both a positive and a negative sample to pair"
        )
    counts = {
        "composition": settings.composition,
        "seed": settings.seed_of(f"composition {iteration}"),
    }
    for name, some in (("drawn", samples), ("trained", taken)):
        counts[name] = {
            "samples": len(some),
            "positive": sum(sample.reward >= 0 for sample in some),
        }
        counts[name]["problems"] = len({sample.prompt for sample in some})
    counts["baseline"] = sum(baselines) / len(baselines)  # the mean, where they differ
    return Composed(rows, counts)


def choose(settings: Settings, samples: Sequence[Sample], iteration: int = 1) -> list[int]:
    """The indices of the samples that an iteration trains on, in order, by the setting `composition`.

    Where a composition asks for more samples of a kind than were drawn, it takes those there are.

    >>> samples = [Sample(prompt="?", completion="!", reward=r) for r in (-1, 1, -1, 1, -1)]
    >>> choose(Settings(composition="positives_only"), samples)
    [1, 3]
    """
    rng, size = (
        random.Random(settings.seed_of(f"composition {iteration}")),
        settings.examples or len(samples),
    )
    return COMPOSITIONS[settings.composition].choose(samples, size, rng, settings.proportion)


def baselines_of(settings: Settings, chosen: Sequence[Sample]) -> list[float]:
    """Each chosen sample's baseline: the one that is set, or that of an effective share where both signs occur."""
    c = settings.baseline or 0.0
    if settings.effective_proportion is not None:
        positives = sum(sample.reward >= 0 for sample in chosen) / len(chosen)
        if others := {sample.reward for sample in chosen} - {-1.0, 1.0}:
            raise InputError(
                f"--effective-proportion: needs rewards -1 and +1, not {min(others):g}"
            )
        if 0 < positives < 1:
            c = baseline_for_proportion(positives, settings.effective_proportion)
    if settings.baseline_from == "zero":
        return [c] * len(chosen)
    return [origin + c for origin in BASELINES[settings.baseline_from](chosen)]


def rows_held_out(
    settings: Settings, samples: Sequence[Sample], lm: LanguageModel, stop: Sequence[str]
) -> list[list[Encoded]]:
    """The held-out samples as token ids, a row each; InputError as of `encode`.

    The baseline is counted from them, without that of an effective proportion, which changes no sign.
    """
    encoded = encode(
        samples, range(len(samples)), lm, (), stop, str(settings.held_out), settings.trust_logmu
    )
    baselines = baselines_of(replace(settings, effective_proportion=None), samples)
    return [
        [replace(one, reward=one.reward - c)] for one, c in zip(encoded, baselines, strict=True)
    ]


def encode(
    samples: Sequence[Sample],
    chosen: Sequence[int],
    lm: LanguageModel,
    prompts: Sequence[Prompt] = (),
    stop: Sequence[str] = (),
    source: str = "samples",
    trust_logmu: bool = False,
) -> list[Encoded]:
    """The samples at the chosen indices as token ids; InputError names a line of `source`.

    prompts: those that are tokenised already. trust_logmu: token_logmu of the samples is kept, and must be there.
    """
    ids_of = {prompt.text: prompt.ids for prompt in prompts}
    texts = [
        text for text in dict.fromkeys(samples[i].prompt for i in chosen) if text not in ids_of
    ]
    if texts:
        ids_of |= zip(texts, lm.prompt_ids(texts), strict=True)
    encoded = []
    for i in chosen:
        sample, where = samples[i], f"{source}:{i + 1}: field"
        prompt_ids, completion_ids = (
            ids_of[sample.prompt],
            sample.token_ids or ids_of_text(sample, lm, stop),
        )
        check_ids(sample, prompt_ids, completion_ids, lm, where)
        if sample.token_logmu is None and trust_logmu:
            raise InputError(f"{where} token_logmu: is missing, there is no log mu to trust")
        if sample.token_logmu is not None and len(sample.token_logmu) != len(completion_ids):
            raise InputError(
                f"{where} token_logmu: {len(sample.token_logmu)} of them, {len(completion_ids)} tokens"
            )
        token_logmu = sample.token_logmu if trust_logmu else None
        logmu_engine = math.fsum(sample.token_logmu_engine) if sample.token_logmu_engine else None
        encoded.append(
            Encoded(prompt_ids, completion_ids, sample.reward, i, token_logmu, logmu_engine)
        )
    return encoded


def ids_of_text(sample: Sample, lm: LanguageModel, stop: Sequence[str]) -> list[int]:
    """The token ids of a completion that is text, from elsewhere.

    An end of sequence is added where it was finished (finish_reason "stop") and has neither one nor a `stop` string.
    """
    ids = lm.tokenizer(sample.completion, add_special_tokens=False)["input_ids"]
    is_ended = lm.ends.intersection(ids[-1:]) or any(string in sample.completion for string in stop)
    if sample.finish_reason == "stop" and not is_ended:
        ids.append(lm.chat.end if lm.chat else lm.tokenizer.eos_token_id)
    return ids


def check_ids(
    sample: Sample,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    lm: LanguageModel,
    where: str,
) -> None:
    """InputError, beginning with `where`, for token ids that the model cannot learn from."""
    if (
        sample.token_ids is None and not sample.completion
    ):  # a model may end at once, but then there is a token id
        raise InputError(f"{where} completion: is empty")
    size = len(prompt_ids) + len(completion_ids)
    if size > lm.context:
        raise InputError(
            f"{where} completion: {size} tokens with its prompt, the model's context is {lm.context}"
        )
    # The vocabulary may be larger than the tokenizer's: a token without text can be sampled, and has a log mu.
    vocabulary = lm.model.get_input_embeddings().num_embeddings
    if not 0 <= min(completion_ids) <= max(completion_ids) < vocabulary:
        raise InputError(
            f"{where} token_ids: outside the model's vocabulary of {vocabulary} tokens"
        )
    if sample.token_ids is not None and lm.text(completion_ids) != sample.completion:
        raise InputError(
            f"{where} token_ids: are not the completion's in this model's vocabulary; leave them out"
        )
    if not prompt_ids:
        raise InputError(f"{where} prompt: is empty")
    if lm.chat and not lm.chat.marks <= set(prompt_ids):
        fault = "lacks tokens of the chat template; with --chat it is all that the template writes"
        raise InputError(f"{where} prompt: {fault}")


def shuffled(encoded: Sequence[Encoded], rng: random.Random) -> list[list[Encoded]]:
    """Each completion once, in random order, a row each.

    >>> encoded = [Encoded([prompt], [2], 1.0, i) for i, prompt in enumerate((7, 7, 8))]
    >>> sorted(one.sample for [one] in shuffled(encoded, random.Random(0)))
    [0, 1, 2]
    """
    by_prompt: dict[tuple[int, ...], list[list[Encoded]]] = {}
    for one in rng.sample(encoded, len(encoded)):
        by_prompt.setdefault(tuple(one.prompt_ids), []).append([one])
    rows = [row for group in by_prompt.values() for row in group]
    rng.shuffle(rows)
    return rows


def pairs_of_prompt(
    encoded: Sequence[Encoded], most: int, rng: random.Random
) -> list[list[Encoded]]:
    """Up to `most` random pairs (positive, negative) of each prompt, a row each: what DPO learns from. Shuffled.

    >>> encoded = [Encoded([7], [2], reward, 0) for reward in (1.0, -1.0, -1.0)]
    >>> [[one.reward for one in row] for row in pairs_of_prompt(encoded, 16, random.Random(0))]
    [[1.0, -1.0], [1.0, -1.0]]
    """
    signs: dict[
        tuple[int, ...], tuple[list[Encoded], list[Encoded]]
    ] = {}  # prompt -> its positives and its negatives
    for one in encoded:
        signs.setdefault(tuple(one.prompt_ids), ([], []))[one.reward < 0].append(one)
    rows = []
    for positives, negatives in signs.values():
        pairs = list(product(positives, negatives))
        rows += [list(pair) for pair in rng.sample(pairs, min(most, len(pairs)))]
    rng.shuffle(rows)
    return rows


# ---- log mu ------------------------------------------------------------------------------------------------------
@torch.no_grad()
def score(
    rows: Sequence[Row], steps: Sequence["EpochStep"], model: torch.nn.Module
) -> list[list[list[float]]]:
    """log mu(y_i | x, y_<i), in nats, by the model that starts the iteration: for each row, completion and token.

    Probabilities are over the whole vocabulary; top-k and top-p are ignored. `steps` are those that will train, so that
    padding and precision are the same and training starts at a ratio of 1.
    """
    scored: dict[int, list[list[float]]] = {}  # by this rank
    for step in progress_bar(steps, "scoring", "step"):
        for place, numbers in enumerate(step.micro_batches):
            completions = [one for number in numbers for one in rows[number]]
            token_logp = (
                token_logprobs(model, collate(completions, is_learnt=False)).float().cpu().numpy()
            )
            if place < step.learnt:
                lines = iter(token_logp)
                for number in numbers:
                    values = [next(lines)[: len(one.completion_ids)] for one in rows[number]]
                    # The shortest decimals that are these float32 again: files stay small, and lose nothing.
                    scored[number] = [[float(str(value)) for value in row] for row in values]
    by_number = {
        number: values for part in from_all_ranks(scored) for number, values in part.items()
    }
    return [by_number[number] for number in range(len(rows))]


def to_examples(
    rows: Sequence[Sequence[Encoded]], token_logmu: Sequence[Sequence[list[float]]]
) -> list[list[Example]]:
    """The rows with log mu, that of each row, completion and token."""
    examples = []
    for number, (row, values) in enumerate(zip(rows, token_logmu, strict=True)):
        examples.append([])
        for one, logmu in zip(row, values, strict=True):
            # In float32, as training sums log pi: at the first step the log-ratio is 0 but for rounding.
            total = float(np.sum(logmu, dtype=np.float32))
            example = Example(
                one.prompt_ids, one.completion_ids, total, one.reward, one.sample, number, logmu
            )
            examples[-1].append(example)
    return examples


@by_rank_zero
def logmu_there(
    settings: Settings, record: Mapping[str, Any], file: Path, rows: Sequence[Sequence[Encoded]]
) -> list[list[list[float]]]:
    """log mu as of `score` in the train.jsonl of --reuse that is the counterpart of `file`.

    record: what this run is. Empty where the other run has computed other batches, completions or another order.
    """
    source, other = (
        settings.reuse / file.relative_to(settings.out),
        read_json(settings.reuse / "config.json"),
    )
    if not source.exists() or any(other[name] != record[name] for name in OF_SCORING):
        return []
    examples = read_checked(source, Example)
    there = [(e.prompt_ids, e.completion_ids, e.sample, e.row) for e in examples]
    here = [
        (e.prompt_ids, e.completion_ids, e.sample, number)
        for number, row in enumerate(rows)
        for e in row
    ]
    lines = iter(examples)
    return [[next(lines).token_logmu for _ in row] for row in rows] if here == there else []


# ---- the steps of an epoch ---------------------------------------------------------------------------------------
class EpochStep(NamedTuple):
    """An optimiser step, by the numbers of its rows."""

    micro_batches: list[list[int]]  # this rank's
    learnt: (
        int  # how many of them are learnt from; the others keep collectives aligned across ranks
    )
    sequences: int  # the completions of all ranks


def epoch_steps(
    rows: Sequence[Row],
    batch: int,
    micro_batch: int,
    at_rank: int | None = None,
    of_ranks: int | None = None,
) -> list[EpochStep]:
    """The optimiser steps of an epoch over `rows`, in order, as a rank has them; by default this process.

    batch: completions a step, over all ranks; micro_batch: completions a forward pass, those of like length together.
    All ranks have equally many micro-batches in a step; one that has no rows left computes the step's shortest row, and
    learns nothing from it.

    >>> steps = epoch_steps([[Encoded([1], [2], 1.0, 0)]] * 5, batch=2, micro_batch=1)
    >>> [(step.micro_batches, step.sequences) for step in steps]
    [([[0], [1]], 2), ([[2], [3]], 2), ([[4]], 1)]
    """
    at_rank, of_ranks = rank() if at_rank is None else at_rank, of_ranks or ranks()
    tokens = [sum(len(one.prompt_ids) + len(one.completion_ids) for one in row) for row in rows]
    per_row = max(len(row) for row in rows)
    size, micro = max(batch // per_row, 1), max(micro_batch // per_row, 1)
    steps = []
    for start in range(0, len(rows), size):
        numbers = sorted(range(start, min(start + size, len(rows))), key=tokens.__getitem__)
        mine = numbers[at_rank::of_ranks]
        count = -(-len(numbers[::of_ranks]) // micro)  # the first rank has the most
        full = [mine[i : i + micro] for i in range(0, len(mine), micro)]
        filled = full + [numbers[:1]] * (count - len(full))
        steps.append(EpochStep(filled, len(full), sum(len(rows[number]) for number in numbers)))
    return steps


def longest(rows: Sequence[Row]) -> tuple[int, int]:
    """The tokens of the longest prompt and of the longest completion."""
    examples = [example for row in rows for example in row]
    return max(len(e.prompt_ids) for e in examples), max(len(e.completion_ids) for e in examples)


def lay_out(
    rows: Sequence[Sequence[Example]], steps: Iterable[EpochStep], device: str | None = None
) -> Iterator[Step]:
    """The steps as `topr.train` takes them, each laid out in tensors when it is asked for. device: as of `collate`."""
    for step in steps:
        batches = []
        for i, numbers in enumerate(step.micro_batches):
            examples = [example for number in numbers for example in rows[number]]
            batches.append(collate(examples, is_learnt=i < step.learnt, device=device))
        yield Step(batches, step.sequences)
