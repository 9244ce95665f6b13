"""The dataset: from graded samples to the batches of an epoch.

samples -> choice -> examples (token ids) -> baseline -> rows -> log mu: train.jsonl -> steps -> batches
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.compose import COMPOSITIONS, baselines_of, choose
from pipeline.methods import METHODS
from pipeline.models import chunked_head
from pipeline.models.language_model import META, LanguageModel, collate, load_model
from pipeline.records import Example, InputError, Sample, Task
from pipeline.runtime import processes
from pipeline.runtime.preflight import Size
from pipeline.runtime.processes import from_all_ranks, progress_bar
from pipeline.runtime.run_folder import read_checked, read_json, refuse_others
from pipeline.sampling import SamplingParameters, check_lengths
from pipeline.settings import OF_DRAWING, OF_SCORING, Settings
from topr import Step

Row = list[Example]  # examples of one prompt, which are computed together and learnt from in the same step


# ---- what a run is given: read and checked before it begins ------------------------------------------------------


class Inputs(NamedTuple):
    """The task with the prompts that the model gets, the model without weights, and what was read of the files."""

    task: Task
    meta: LanguageModel
    size: Size
    lengths: tuple[int, int]  # tokens of a prompt and of a completion that is trained on, at most
    sampling: SamplingParameters  # of training and test samples alike
    given: list[Sample] | None  # --samples
    composed: tuple[list[Row], dict[str, Any]] | None  # what is trained on of these
    held_out: list[Row] | None  # --held-out
    record: dict[str, Any]  # what the run is, for config.json


def read_inputs(settings: Settings, task: Task) -> Inputs:
    """The inputs of a run; InputError where model, problems and samples do not fit together."""
    is_drawn = bool(settings.iterations and not settings.samples)
    is_tested = settings.test_source is not None
    task = task if is_tested else replace(task, test=())
    for problems, name, is_needed in ((task.train, "training", is_drawn), (task.test, "test", is_tested)):
        if is_needed and not problems:
            raise InputError(f"task {task.name}: has no {name} problems")
    meta = load_model(settings.model, META, settings)
    if settings.sliced_head:
        chunked_head.check_head(meta.model)
    if settings.chat:
        from pipeline.models.chat import asked_by

        task = asked_by(meta, task)
    tokens_at_most = check_lengths(task, meta, settings.max_new_tokens)
    lengths = tokens_at_most - settings.max_new_tokens, settings.max_new_tokens
    given, composed, held_out, digests = None, None, None, {}
    if settings.samples:
        given, digests["samples_sha256"] = given_samples(settings, settings.samples, meta)
        composed = compose(settings, given, meta, task.stop)
        lengths = longest(composed[0])
        tokens_at_most = tokens_at_most or sum(lengths)
    if settings.held_out:
        others, digests["held_out_sha256"] = given_samples(settings, settings.held_out, meta)
        held_out = rows_held_out(settings, others, meta, task.stop)
        prompts, trained = ({sample.prompt for sample in samples} for samples in (others, given))
        if (shared := len(prompts & trained)) and processes.rank() == 0:
            print(f"{settings.held_out}: {shared} of {len(prompts)} prompts are trained on too", flush=True)
    parameters = sum(weight.numel() for weight in meta.model.parameters())
    per_problem = COMPOSITIONS[settings.composition].drawn(settings)
    drawn = len(task.train) * per_problem if given is None else len(given)
    size = Size(parameters, drawn, len(task.test) * settings.test_samples, tokens_at_most)
    limits = settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens
    sampling = SamplingParameters(*limits, task.stop)
    record = settings.record(**digests)
    if settings.reuse is not None:
        here = {name: record[name] for name in OF_DRAWING}
        refuse_others(settings.reuse, here, "has drawn otherwise", "give a --reuse that has drawn the same")
    return Inputs(task, meta, size, lengths, sampling, given, composed, held_out, record)


# ---- what is trained on --------------------------------------------------------------------------------------------


def compose(
    settings: Settings, samples: Sequence[Sample], lm: LanguageModel, stop: Sequence[str], number: int = 1
) -> tuple[list[Row], dict]:
    """What iteration `number` trains on, in the order of training, and the counts of it for dataset.json.

    Every chosen sample comes once an epoch, or DPO's pairs, less the baseline. log mu is that of the samples, or NaN.
    The order depends on the seed and on the samples alone. InputError where nothing can be learnt.
    """
    rng = random.Random(settings.seed_of(f"order {number}"))
    is_all = settings.composition == "uniform" and settings.examples is None
    chosen = list(range(len(samples))) if is_all else choose(settings, samples, number)
    if not chosen:
        raise InputError(f"--composition {settings.composition}: none of the {len(samples)} samples fits; draw more")
    examples = encode(samples, lm, stop, str(settings.samples or "samples.jsonl"), chosen)
    taken = [samples[i] for i in chosen]
    has_baseline = (settings.baseline_from, settings.baseline, settings.effective_proportion) != ("zero", None, None)
    baselines = baselines_of(settings, taken) if has_baseline else [0.0] * len(taken)
    examples = [replace(example, reward=example.reward - c) for example, c in zip(examples, baselines, strict=True)]
    learns_negatives = settings.bounds is None or settings.bounds.b_neg > 0
    if not learns_negatives and all(example.reward <= 0 for example in examples):
        raise InputError(f"--method {settings.method}: no positive sample, and it learns from nothing else; draw more")
    arrange, size = rows_of_prompt, settings.completions_per_row
    if METHODS[settings.method].of_pairs:
        arrange, size = pairs_of_prompt, settings.pairs
    rows = [row for _ in range(settings.epochs) for row in arrange(examples, size, rng)]
    if not rows:
        raise InputError(f"--method {settings.method}: no problem has both a positive and a negative sample to pair")
    counts = {"composition": settings.composition, "seed": settings.seed_of(f"composition {number}")}
    for name, some in (("drawn", samples), ("trained", taken)):
        counts[name] = {"samples": len(some), "positive": sum(sample.reward >= 0 for sample in some)}
        counts[name]["problems"] = len({sample.prompt for sample in some})
    counts["baseline"] = sum(baselines) / len(baselines)  # the mean, where they differ
    return [[replace(example, row=i) for example in row] for i, row in enumerate(rows)], counts


def given_samples(settings: Settings, source: str, lm: LanguageModel) -> tuple[list[Sample], str]:
    """The samples of --samples or --held-out, and their SHA-256; InputError also where log mu to trust is missing."""
    from pipeline.own_samples import digest_of, read_samples

    samples = read_samples(source, settings.columns, lm.chat.ask_messages if lm.chat else None)
    for line, sample in enumerate(samples, start=1):
        if settings.trust_logmu and sample.token_logmu is None:
            raise InputError(f"{source}:{line}: field token_logmu: is missing, there is no log mu to trust")
    return samples, digest_of(source, samples)


def rows_held_out(settings: Settings, samples: Sequence[Sample], lm: LanguageModel, stop: Sequence[str]) -> list[Row]:
    """The held-out samples as token ids, a row each, log mu NaN unless it is to be trusted; InputError as of `encode`.

    The baseline is counted from them, without that of an effective proportion, which changes no sign.
    """
    examples = encode(samples, lm, stop, str(settings.held_out))
    baselines = baselines_of(replace(settings, effective_proportion=None), samples)
    unknown = {} if settings.trust_logmu else {"logmu": math.nan, "token_logmu": None}
    pairs = zip(examples, baselines, strict=True)
    return [[replace(example, reward=example.reward - c, row=i, **unknown)] for i, (example, c) in enumerate(pairs)]


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
    finished (finish_reason "stop") and has neither one nor a `stop` string, or the model would never learn to stop.
    InputError names the line of `source` that does not fit.
    """
    tokenizer = lm.tokenizer
    # It may be larger than the tokenizer's. A token without text can be sampled, and has a log mu like any other.
    vocabulary = lm.model.get_input_embeddings().num_embeddings
    chosen = {i: samples[i] for i in (range(len(samples)) if numbers is None else numbers)}
    prompts = dict.fromkeys(sample.prompt for sample in chosen.values())
    prompt_ids = dict(zip(prompts, lm.prompt_ids(prompts), strict=True))
    examples = []
    for number, sample in chosen.items():
        where = f"{source}:{number + 1}: field"
        ids = sample.token_ids
        if ids is None:
            ids = tokenizer(sample.completion, add_special_tokens=False)["input_ids"]
            is_ended = lm.ends.intersection(ids[-1:]) or any(string in sample.completion for string in stop)
            if sample.finish_reason == "stop" and not is_ended:
                ids.append(lm.end)
            if not sample.completion:  # a model may end at once, but then there is a token id to learn
                raise InputError(f"{where} completion: is empty")
        size = len(prompt_ids[sample.prompt]) + len(ids)
        if size > lm.context:
            raise InputError(f"{where} completion: {size} tokens with its prompt, the model's context is {lm.context}")
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise InputError(f"{where} token_ids: outside the model's vocabulary of {vocabulary} tokens")
        if sample.token_ids is not None and lm.text(ids) != sample.completion:
            raise InputError(f"{where} token_ids: are not the completion's in this model's vocabulary; leave them out")
        if not prompt_ids[sample.prompt]:
            raise InputError(f"{where} prompt: is empty")
        if lm.chat and not lm.chat.marks <= set(prompt_ids[sample.prompt]):
            fault = "lacks tokens of the chat template; with --chat it is all that the template writes"
            raise InputError(f"{where} prompt: {fault}")
        if sample.token_logmu is not None and len(sample.token_logmu) != len(ids):
            raise InputError(f"{where} token_logmu: {len(sample.token_logmu)} of them, {len(ids)} tokens")
        logmu = float(np.sum(sample.token_logmu or [np.nan], dtype=np.float32))
        examples.append(Example(prompt_ids[sample.prompt], ids, logmu, sample.reward, number, -1, sample.token_logmu))
    return examples


@torch.no_grad()
def score(
    rows: Sequence[Row], steps: Sequence["EpochStep"], lm: LanguageModel, logprobs: Callable[..., Tensor]
) -> list[Row]:
    """The rows, each example with token_logmu and logmu by `lm`, the model that starts the iteration.

    The full vocabulary counts, whatever sampling cut off. `steps` are those that will train, with their padding,
    precision and share of each rank, so that training starts at a ratio of 1. logprobs: (model, batch) -> (B, C).
    """
    found: dict[tuple[int, int], list[float]] = {}
    for step, laid_out in zip(progress_bar(steps, "scoring", "step"), lay_out(steps), strict=True):
        for i, batch in enumerate(laid_out.micro_batches):
            examples = [example for row in step.micro_batches[i] for example in row] if i < step.learnt else []
            all_token_logp = logprobs(lm.model, batch).cpu().numpy()
            for example, token_logp in zip(examples, all_token_logp, strict=True):
                own = token_logp[: len(example.completion_ids)].astype(np.float32)
                # The shortest decimal that is this float32 again: files stay small, and nothing is lost in them.
                found[example.row, example.sample] = [float(str(x)) for x in own]
    found = {key: token_logmu for part in from_all_ranks(found) for key, token_logmu in part.items()}
    # In float32, as training sums log pi: at the first step the log-ratio is 0 but for rounding.
    logmu = {key: float(np.sum(token_logmu, dtype=np.float32)) for key, token_logmu in found.items()}
    return [[replace(e, token_logmu=found[e.row, e.sample], logmu=logmu[e.row, e.sample]) for e in row] for row in rows]


def known_logmu(settings: Settings, record: Mapping[str, Any], file: Path, rows: Sequence[Row]) -> list[Row]:
    """The rows with log mu of the train.jsonl of --reuse that is the counterpart of `file`; rewards may differ.

    record: what this run is. Empty where the other run has computed other batches, completions or another order.
    """
    source, there = settings.reuse / file.relative_to(settings.out), read_json(settings.reuse / "config.json")
    if not source.exists() or any(there[name] != record[name] for name in OF_SCORING):
        return []
    known, own = read_checked(source, Example), [example for row in rows for example in row]
    mine, theirs = ([(e.prompt_ids, e.completion_ids, e.sample, e.row) for e in some] for some in (own, known))
    others = iter(known)
    return [[replace(next(others), reward=e.reward) for e in row] for row in rows] if mine == theirs else []


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


def rows_of_prompt(examples: Sequence[Example], per_row: int, rng: random.Random) -> list[Row]:
    """All examples once, in random order, up to `per_row` of the same prompt together in a row.

    >>> examples = [Example([prompt], [2], -3.0, 1.0) for prompt in (7, 7, 7, 8)]
    >>> sorted(len(row) for row in rows_of_prompt(examples, 2, random.Random(0)))
    [1, 1, 2]
    """
    by_prompt: dict[tuple[int, ...], Row] = {}
    for example in rng.sample(examples, len(examples)):
        by_prompt.setdefault(tuple(example.prompt_ids), []).append(example)
    rows = [group[i : i + per_row] for group in by_prompt.values() for i in range(0, len(group), per_row)]
    rng.shuffle(rows)
    return rows


def pairs_of_prompt(examples: Sequence[Example], most: int, rng: random.Random) -> list[Row]:
    """Up to `most` random pairs (positive, negative) of each prompt, a row each: what DPO learns from. Shuffled.

    >>> examples = [Example([7], [2], -3.0, reward) for reward in (1.0, -1.0, -1.0)]
    >>> [[example.reward for example in row] for row in pairs_of_prompt(examples, 16, random.Random(0))]
    [[1.0, -1.0], [1.0, -1.0]]
    """
    signs: dict[tuple[int, ...], tuple[Row, Row]] = {}  # prompt -> its positives and its negatives
    for example in examples:
        signs.setdefault(tuple(example.prompt_ids), ([], []))[example.reward < 0].append(example)
    rows = []
    for positives, negatives in signs.values():
        pairs = list(product(positives, negatives))
        rows += [list(pair) for pair in rng.sample(pairs, min(most, len(pairs)))]
    rng.shuffle(rows)
    return rows


class EpochStep(NamedTuple):
    """An optimiser step: this rank's micro-batches of rows, and the completions of all ranks."""

    micro_batches: list[list[Row]]
    learnt: int  # how many of them are learnt from; the others keep collectives aligned across ranks
    shares: bool  # whether prompts are computed apart from their completions; alike in all batches of all ranks
    sequences: int


def epoch_steps(
    rows: Sequence[Row], batch: int, micro_batch: int, rank: int | None = None, ranks: int | None = None
) -> list[EpochStep]:
    """The optimiser steps of an epoch over `rows`, in order, as a rank has them; by default this process.

    batch: completions a step, over all ranks; micro_batch: completions a forward pass, which decides memory and nothing
    else. All ranks have equally many micro-batches in a step; one that has no rows left gets empty ones.

    >>> steps = epoch_steps([[Example([1], [2], -3.0, 1.0)]] * 5, batch=2, micro_batch=1)
    >>> [(len(step.micro_batches), step.sequences) for step in steps]
    [(2, 2), (2, 2), (1, 1)]
    """
    rank, ranks = processes.rank() if rank is None else rank, ranks or processes.ranks()
    per_row = max(len(row) for row in rows)
    size, micro = max(batch // per_row, 1), max(micro_batch // per_row, 1)
    steps = []
    for of_step in (rows[i : i + size] for i in range(0, len(rows), size)):
        own = of_step[rank::ranks]
        count = -(-len(of_step[::ranks]) // micro)  # the first rank has the most
        full = [own[i : i + micro] for i in range(0, len(own), micro)]
        filled = full + [of_step[:1]] * (count - len(full))
        steps.append(EpochStep(filled, len(full), per_row > 1, sum(map(len, of_step))))
    return steps


def longest(rows: Sequence[Row]) -> tuple[int, int]:
    """The tokens of the longest prompt and of the longest completion."""
    examples = [example for row in rows for example in row]
    return max(len(e.prompt_ids) for e in examples), max(len(e.completion_ids) for e in examples)


def lay_out(steps: Iterable[EpochStep], device: torch.device | str | None = None) -> Iterator[Step]:
    """The steps as `topr.train` takes them, each laid out in tensors when it is asked for.

    >>> [step] = lay_out(epoch_steps([[Example([1], [2], -3.0, 1.0)]], batch=2, micro_batch=1), "cpu")
    >>> step.micro_batches[0].reward
    tensor([1.])
    """
    device = processes.device() if device is None else device
    for step in steps:
        micro = enumerate(step.micro_batches)
        yield Step([collate(rows, device, step.shares, i >= step.learnt) for i, rows in micro], step.sequences)
