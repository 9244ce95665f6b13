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

from pipeline.compose import BASELINES, COMPOSITIONS, choose
from pipeline.methods import METHODS
from pipeline.models import chunked_head
from pipeline.models.chat import asked_by
from pipeline.models.language_model import META, LanguageModel, collate, load_model
from pipeline.own_samples import digest_of, read_samples
from pipeline.records import Example, InputError, Sample, Task
from pipeline.runtime import processes
from pipeline.runtime.preflight import Size
from pipeline.runtime.processes import from_all_ranks, progress_bar
from pipeline.runtime.run_folder import read_checked, read_json, refuse_others
from pipeline.sampling import SamplingParameters, check_lengths
from pipeline.settings import OF_DRAWING, OF_SCORING, Settings
from topr import Step, baseline_for_proportion

Row = list[Example]  # examples of one prompt, which are computed together and learnt from in the same step


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
        task = asked_by(meta, task)
    tokens_at_most = check_lengths(task, meta, settings.max_new_tokens)
    lengths = tokens_at_most - settings.max_new_tokens, settings.max_new_tokens
    given, composed, held_out, digests = None, None, None, {}
    if settings.samples:
        given = read_samples(settings.samples, settings.columns, meta.chat and meta.chat.ask)
        digests["samples_sha256"] = digest_of(settings.samples, given)
        composed = compose(settings, given, meta, task.stop)
        lengths = longest(composed[0])
        tokens_at_most = tokens_at_most or sum(lengths)
    if settings.held_out:
        others = read_samples(settings.held_out, settings.columns, meta.chat and meta.chat.ask)
        digests["held_out_sha256"] = digest_of(settings.held_out, others)
        held_out = rows_held_out(settings, others, meta, task.stop)
        prompts, trained = ({sample.prompt for sample in samples} for samples in (others, given))
        if (shared := len(prompts & trained)) and processes.rank() == 0:
            print(f"{settings.held_out}: {shared} of {len(prompts)} prompts are trained on too", flush=True)
    parameters = sum(weight.numel() for weight in meta.model.parameters())
    per_problem = COMPOSITIONS[settings.composition].drawn(settings)
    drawn = len(task.train) * per_problem if given is None else len(given)
    size = Size(parameters, drawn, len(task.test) * settings.test_samples, tokens_at_most)
    limits = settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens, task.stop
    record = settings.record(**digests)
    if settings.reuse is not None:
        here = {name: record[name] for name in OF_DRAWING}
        refuse_others(settings.reuse, here, "has drawn otherwise", "give a --reuse that has drawn the same")
    return Inputs(task, meta, size, lengths, SamplingParameters(*limits), given, composed, held_out, record)


def compose(
    settings: Settings, samples: Sequence[Sample], lm: LanguageModel, stop: Sequence[str], number: int = 1
) -> tuple[list[Row], dict]:
    """What iteration `number` trains on, in the order of training, and the counts of it for dataset.json.

    Every chosen sample comes once an epoch, or DPO's pairs, less the baseline. InputError where nothing can be learnt.
    """
    rng = random.Random(settings.seed_of(f"order {number}"))
    is_all = settings.composition == "uniform" and settings.examples is None
    chosen = list(range(len(samples))) if is_all else choose(settings, samples, number)
    if not chosen:
        raise InputError(f"--composition {settings.composition}: none of the {len(samples)} samples fits; draw more")
    source = str(settings.samples or "samples.jsonl")
    examples = encode(samples, lm, stop, source, chosen, settings.trust_logmu)
    taken = [samples[i] for i in chosen]
    baselines = baselines_of(settings, taken)
    examples = [replace(example, reward=example.reward - c) for example, c in zip(examples, baselines, strict=True)]
    if settings.bounds and settings.bounds.b_neg == 0 and all(example.reward <= 0 for example in examples):
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


def baselines_of(settings: Settings, chosen: Sequence[Sample]) -> list[float]:
    """Each chosen sample's baseline: the one that is set, or that which gives an effective share of positives."""
    c = settings.baseline or 0.0
    if settings.effective_proportion is not None:
        positives = sum(sample.reward >= 0 for sample in chosen) / len(chosen)
        if not 0 < positives < 1 or {abs(sample.reward) for sample in chosen} != {1.0}:
            raise InputError("--effective-proportion: needs rewards -1 and +1, and samples of both signs")
        c = baseline_for_proportion(positives, settings.effective_proportion)
    return [origin + c for origin in BASELINES[settings.baseline_from](chosen)]


def rows_held_out(settings: Settings, samples: Sequence[Sample], lm: LanguageModel, stop: Sequence[str]) -> list[Row]:
    """The held-out samples as token ids, a row each; InputError as of `encode`.

    The baseline is counted from them, without that of an effective proportion, which changes no sign.
    """
    examples = encode(samples, lm, stop, str(settings.held_out), trust_logmu=settings.trust_logmu)
    baselines = baselines_of(replace(settings, effective_proportion=None), samples)
    pairs = zip(examples, baselines, strict=True)
    return [[replace(example, reward=example.reward - c, row=i)] for i, (example, c) in enumerate(pairs)]


def encode(
    samples: Sequence[Sample],
    lm: LanguageModel,
    stop: Sequence[str] = (),
    source: str = "samples",
    numbers: Sequence[int] | None = None,
    trust_logmu: bool = False,
) -> list[Example]:
    """Samples, or those at the given indices, as token ids; log mu is the sum of token_logmu, NaN unless it is trusted.

    A sample without token_ids is text from elsewhere: its completion is encoded. An end of sequence is added if it was
    finished (finish_reason "stop") and has neither one nor a `stop` string. InputError names a line of `source`.
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
                ids.append(lm.chat.end if lm.chat else tokenizer.eos_token_id)
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
        token_logmu = sample.token_logmu
        if token_logmu is None and trust_logmu:
            raise InputError(f"{where} token_logmu: is missing, there is no log mu to trust")
        if token_logmu is not None and len(token_logmu) != len(ids):
            raise InputError(f"{where} token_logmu: {len(token_logmu)} of them, {len(ids)} tokens")
        token_logmu = token_logmu if trust_logmu else None
        logmu = float(np.sum(token_logmu or [np.nan], dtype=np.float32))
        examples.append(Example(prompt_ids[sample.prompt], ids, logmu, sample.reward, number, -1, token_logmu))
    return examples


@torch.no_grad()
def score(
    rows: Sequence[Row], steps: Sequence["EpochStep"], lm: LanguageModel, logprobs: Callable[..., Tensor]
) -> list[Row]:
    """The rows, each example with token_logmu and logmu by `lm`, the model that starts the iteration.

    The full vocabulary counts, whatever sampling cut off. `steps` are those that will train, so that padding and
    precision are the same and training starts at a ratio of 1. logprobs: (model, batch) -> (B, C).
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for step, laid_out in zip(progress_bar(steps, "scoring", "step"), lay_out(steps), strict=True):
        for i, batch in enumerate(laid_out.micro_batches):
            examples = [example for row in step.micro_batches[i] for example in row] if i < step.learnt else []
            for example, token_logp in zip(examples, logprobs(lm.model, batch).cpu().numpy(), strict=True):
                # The shortest decimals that are these float32 again: files stay small, and nothing is lost in them.
                own = [float(str(x)) for x in token_logp[: len(example.completion_ids)].astype(np.float32)]
                # In float32, as training sums log pi: at the first step the log-ratio is 0 but for rounding.
                logmu = float(np.sum(own, dtype=np.float32))
                found[example.row, example.sample] = {"token_logmu": own, "logmu": logmu}
    found = {key: known for part in from_all_ranks(found) for key, known in part.items()}
    return [[replace(example, **found[example.row, example.sample]) for example in row] for row in rows]


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
    """log mu by the engine less that by the trainer, of sequences, in nats; None where no engine computed it."""
    trained = {example.sample: example.token_logmu for row in rows for example in row}
    pairs = [(samples[i].token_logmu_engine, token_logmu) for i, token_logmu in sorted(trained.items())]
    difference = np.array([math.fsum(engine) - math.fsum(trainer) for engine, trainer in pairs if engine])
    if not len(difference):
        return None
    quantiles = {f"q{q:02}": float(np.quantile(difference, q / 100)) for q in (5, 50, 95)}
    return {"mean": float(difference.mean()), "largest": float(np.abs(difference).max()), **quantiles}


def rows_of_prompt(examples: Sequence[Example], per_row: int, rng: random.Random) -> list[Row]:
    """All examples once, in random order, up to `per_row` of the same prompt in a row.

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

    batch: completions a step, over all ranks; micro_batch: completions a forward pass. All ranks have equally many
    micro-batches in a step; one that has no rows left gets empty ones.

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
    """The steps as `topr.train` takes them, each laid out in tensors when it is asked for."""
    device = processes.device() if device is None else device
    for step in steps:
        micro = enumerate(step.micro_batches)
        yield Step([collate(rows, device, step.shares, i >= step.learnt) for i, rows in micro], step.sequences)
