"""The dataset: every sample once, prompts together, pairs of both signs, log mu over the full vocabulary."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise

import pytest
import torch
from helpers import plain_batch, random_examples, steps_of
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import topr
import train_gsm8k as gsm8k
from pipeline import dataset
from pipeline.records import InputError, Problem, Sample
from pipeline.sampling import (
    Prompt,
    SamplingParameters,
    draw_samples,
    prompts_of,
    transformers_engine,
)
from pipeline.settings import Settings

counts = st.integers(1, 6)


def of_rows(rows, numbers):
    return [example for number in numbers for example in rows[number]]


@given(counts, counts, counts, st.integers(0, 99))
def test_pairs_are_distinct_and_of_both_signs(prompts, per_prompt, most, seed):
    examples = [
        replace(e, logmu=float(i)) for i, e in enumerate(random_examples(prompts, per_prompt, seed))
    ]
    found = dataset.pairs_of_prompt(examples, most, random.Random(seed))
    by_prompt = Counter(tuple(positive.prompt_ids) for positive, _ in found)
    for positive, negative in found:
        assert positive.reward > 0 > negative.reward
        assert positive.prompt_ids == negative.prompt_ids
    assert len({(p.logmu, n.logmu) for p, n in found}) == len(found)
    for prompt, count in by_prompt.items():
        signs = Counter(e.reward for e in examples if tuple(e.prompt_ids) == prompt)
        assert count == min(most, signs[1.0] * signs[-1.0])


@pytest.mark.parametrize("most", [None, 2])
def test_rows_of_all_prompts_are_mixed(most):
    examples, rng = random_examples(8, 8), random.Random(0)
    rows = dataset.pairs_of_prompt(examples, most, rng) if most else dataset.shuffled(examples, rng)
    prompts = [row[0].prompt_ids for row in rows]
    assert sum(one != other for one, other in pairwise(prompts)) > len(prompts) / 2


@given(counts, counts, st.booleans(), st.sampled_from([4, 8]), st.sampled_from([1, 2, 8]), counts)
def test_steps_hold_every_row_once_and_ranks_run_the_model_equally_often(
    prompts, per_prompt, is_of_pairs, batch, micro_batch, ranks
):
    examples, rng, per_row = random_examples(prompts, per_prompt), random.Random(0), 1 + is_of_pairs
    rows = (
        dataset.pairs_of_prompt(examples, 4, rng)
        if is_of_pairs
        else dataset.shuffled(examples, rng)
    )
    if not rows:
        return
    alone = dataset.epoch_steps(rows, batch, micro_batch, 0, 1)
    of_ranks, laid_out = (
        zip(*(of_rank(rows, batch, micro_batch, rank, ranks) for rank in range(ranks)), strict=True)
        for of_rank in (dataset.epoch_steps, steps_of)
    )
    assert [number for step in alone for number in sorted(chain(*step.micro_batches))] == [
        *range(len(rows))
    ]
    tokens = [sum(len(one.prompt_ids) + len(one.completion_ids) for one in row) for row in rows]
    for step in alone:  # rows of like length are computed together
        by_length = [tokens[number] for number in chain(*step.micro_batches)]
        assert by_length == sorted(by_length)
    for whole, shares, tensors in zip(alone, of_ranks, laid_out, strict=True):
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert all(
            numbers for share in shares for numbers in share.micro_batches
        )  # rows to compute
        learnt = [number for numbers in whole.micro_batches for number in numbers]
        by_ranks = [
            n
            for share in shares
            for numbers in share.micro_batches[: share.learnt]
            for n in numbers
        ]
        assert sorted(by_ranks) == sorted(learnt)
        assert {step.sequences for step in (whole, *tensors)} == {len(of_rows(rows, learnt))}
        assert whole.sequences <= batch
        for share, step in zip(shares, tensors, strict=True):
            sizes = [len(of_rows(rows, numbers)) for numbers in share.micro_batches[: share.learnt]]
            assert max(sizes, default=0) <= max(micro_batch, per_row)
            sizes += [0] * (len(share.micro_batches) - share.learnt)
            assert [len(micro.reward) for micro in step.micro_batches] == sizes
            assert [len(micro.input_ids) > 0 for micro in step.micro_batches] == [True] * len(sizes)


def test_v18_log_mu_is_over_the_full_vocabulary_whatever_the_sampler_kept(lm):
    """Of all logits too where the model has more than its tokenizer has tokens, as with Qwen 2.5; here nearly all."""
    size = len(lm.tokenizer)
    config = LlamaConfig(**lm.model.config.to_dict() | {"vocab_size": 8 * size})
    large = lm._replace(model=LlamaForCausalLM(config).eval())
    for model, problems, top_k in ((lm, 4, 2), (large, 1, 8 * size)):
        task = gsm8k.gsm8k_task(Settings(problems=problems))
        sampling, prompts = (
            SamplingParameters(max_new_tokens=40, top_k=top_k),
            prompts_of(task, task.train, lm, 40),
        )
        samples = draw_samples(
            task, prompts, 4, partial(transformers_engine, model, 40_000), sampling, seed=0
        )
        rows = dataset.compose(Settings(), samples, model, (), prompts).rows
        logmu = dataset.score(rows, dataset.epoch_steps(rows, 8, 4), model.model)
        scored = [example for row in dataset.to_examples(rows, logmu) for example in row]
        expected = topr.sequence_logprobs(model.model, plain_batch(scored))
        torch.testing.assert_close(
            torch.tensor([e.logmu for e in scored]), expected, rtol=1e-5, atol=1e-4
        )
        assert sorted(e.completion_ids for e in scored) == sorted(s.token_ids for s in samples)
        assert [len(e.token_logmu) for e in scored] == [len(e.completion_ids) for e in scored]
    assert all(max(sample.token_ids) >= size for sample in samples)
    with pytest.raises(InputError, match=f"outside the model's vocabulary of {8 * size} tokens"):
        dataset.encode([samples[0].model_copy(update={"token_ids": [8 * size]})], [0], large)


def test_a_prompt_that_is_tokenised_is_not_tokenised_again(lm):
    prompts = [Prompt(Problem("1", "Q"), "Q", [1, 2])]  # other ids than the tokenizer's
    samples = [Sample(prompt=text, completion=" 1", reward=1.0) for text in ("Q", "R")]
    encoded = dataset.encode(samples, [0, 1], lm, prompts)
    assert [one.prompt_ids for one in encoded] == [[1, 2], lm.tokenizer("R")["input_ids"]]


def test_a_completion_may_just_fill_the_context(lm):
    sample, prompt = Sample(prompt="Q", completion=" A", reward=1.0), [5] * (lm.context - 3)
    dataset.check_ids(sample, prompt, [5] * 3, lm, "line 1: field")
    with pytest.raises(InputError, match=f"line 1: field completion: {lm.context + 1} tokens"):
        dataset.check_ids(sample, prompt, [5] * 4, lm, "line 1: field")


def test_every_epoch_has_all_samples_in_an_order_of_its_own(lm):
    samples = [Sample(prompt="Q", completion=f" {i}", reward=(-1.0) ** i) for i in range(20)]
    (once, _), (rows, counts) = (
        dataset.compose(Settings(epochs=epochs), samples, lm, ()) for epochs in (1, 3)
    )
    assert [e.sample for [e] in rows[:20]] == [e.sample for [e] in once]
    epochs = [[e.sample for [e] in rows[i : i + 20]] for i in (0, 20, 40)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert len(set(map(tuple, epochs))) == 3
    assert counts["trained"]["samples"] == 20
