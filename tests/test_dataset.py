"""The dataset: every sample once, prompts together, pairs of both signs, log mu over the full vocabulary."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import plain_batch, random_examples
from hypothesis import given
from hypothesis import strategies as st

import topr
import train_gsm8k as gsm8k
from pipeline import dataset
from pipeline.models import rows
from pipeline.records import Sample
from pipeline.sampling import SamplingParameters, draw_samples, transformers_engine

counts = st.integers(1, 6)


def key(example):
    return tuple(example.prompt_ids), tuple(example.completion_ids), example.logmu, example.reward


@given(counts, counts, counts, st.integers(0, 99))
def test_rows_hold_every_example_once_and_one_prompt_each(prompts, per_prompt, per_row, seed):
    examples = random_examples(prompts, per_prompt, seed)
    found = dataset.rows_of_prompt(examples, per_row, random.Random(seed))
    assert Counter(key(e) for row in found for e in row) == Counter(map(key, examples))
    assert all(len({tuple(e.prompt_ids) for e in row}) == 1 and len(row) <= per_row for row in found)


@given(counts, counts, counts, st.integers(0, 99))
def test_pairs_are_distinct_and_of_both_signs(prompts, per_prompt, most, seed):
    examples = [replace(e, logmu=float(i)) for i, e in enumerate(random_examples(prompts, per_prompt, seed))]
    found = dataset.pairs_of_prompt(examples, most, random.Random(seed))
    by_prompt = Counter(tuple(positive.prompt_ids) for positive, _ in found)
    for positive, negative in found:
        assert positive.reward > 0 > negative.reward
        assert positive.prompt_ids == negative.prompt_ids
    assert len({(p.logmu, n.logmu) for p, n in found}) == len(found)
    for prompt, count in by_prompt.items():
        signs = Counter(e.reward for e in examples if tuple(e.prompt_ids) == prompt)
        assert count == min(most, signs[1.0] * signs[-1.0])


@given(counts, counts, st.sampled_from([1, 2, 4]), st.sampled_from([4, 8]), st.sampled_from([1, 2, 8]))
def test_steps_hold_every_row_once_in_batches(prompts, per_prompt, per_row, batch, micro_batch):
    examples = random_examples(prompts, per_prompt)
    steps = dataset.Steps(dataset.rows_of_prompt(examples, per_row, random.Random(0)), batch, micro_batch, device="cpu")
    sizes = [sum(len(micro.reward) for micro in step) for step in steps]
    assert sum(sizes) == len(examples)
    assert all(size <= batch for size in sizes)
    assert all(len(micro.reward) <= max(micro_batch, per_row) for step in steps for micro in step)
    assert steps.samples_until(len(steps)) == len(examples)
    assert steps.samples_until(1) == sizes[0]


@given(
    counts, counts, st.sampled_from([1, 2]), st.sampled_from([2, 4, 6]), st.sampled_from([1, 2, 4]), st.integers(1, 3)
)
def test_ranks_share_a_step_and_keep_step(prompts, per_prompt, per_row, batch, micro_batch, ranks):
    grouped = dataset.rows_of_prompt(random_examples(prompts, per_prompt), per_row, random.Random(0))
    alone = dataset.Steps(grouped, batch, micro_batch, "cpu")
    shared = [dataset.Steps(grouped, batch, micro_batch, "cpu", rank, ranks) for rank in range(ranks)]
    for i in range(len(alone)):
        assert len({len(steps[i]) for steps in shared}) == 1  # as many micro-batches on each rank
        assert all(len(micro.prompt_ids) > 0 for steps in shared for micro in steps[i])  # and each has rows to compute
        found = [key(e) for steps in shared for micro in steps.examples(i) for e in micro]
        assert Counter(found) == Counter(key(e) for micro in alone.examples(i) for e in micro)
        for steps in shared:
            assert [len(b.reward) for b in steps[i]] == [len(examples) for examples in steps.examples(i)]
    assert all(steps.samples_until(1) == alone.samples_until(1) for steps in shared)
    for i in range(1, len(alone)):
        assert alone[i:].examples(0) == alone.examples(i)


def test_only_what_is_to_be_trained_on_is_scored(lm):
    samples = [Sample(prompt="Q", completion=f" {i}", reward=1.0) for i in range(4)]
    examples = dataset.encode(samples, lm, numbers=[1, 3])
    scored = dataset.score(samples, lm, dataset.Steps([[e] for e in examples], 2, 2, "cpu"))
    assert [s.token_logmu is not None for s in scored] == [False, True, False, True]


def test_v10_a_baseline_is_subtracted_before_the_sign_is_taken():
    [example] = dataset.subtract_baselines([replace(random_examples(1, 1)[0], reward=0.0)], [0.2])
    assert example.reward == -0.2
    logp = torch.tensor([-5.0], requires_grad=True)
    topr.topr_loss(logp, torch.tensor([-3.0]), torch.tensor([example.reward]), torch.ones(1)).backward()
    assert logp.grad.item() == pytest.approx(0.2 * 0.135335, rel=1e-5)


@pytest.mark.parametrize("per_row", [1, 4])
def test_v18_log_mu_is_over_the_full_vocabulary_whatever_the_sampler_kept(lm, per_row):
    task = gsm8k.gsm8k_task(gsm8k.Settings(problems=4))
    law = SamplingParameters(max_new_tokens=40, top_k=2)
    samples = draw_samples(task, task.train, 4, transformers_engine(lm, 40_000), law, seed=0)
    laid_out = dataset.rows_of_prompt(dataset.encode(samples, lm), per_row, random.Random(0))
    scored = dataset.score(samples, lm, dataset.Steps(laid_out, 8, 4, "cpu"), by="the base")
    examples = dataset.encode(scored, lm)
    assert {s.logmu_by for s in scored} == {"the base"}
    logmu = topr.sequence_logprobs(lm.model, plain_batch(examples))
    assert [s.token_ids for s in scored] == [s.token_ids for s in samples]
    assert [len(s.token_logmu) for s in scored] == [len(s.token_ids) for s in samples]
    torch.testing.assert_close(torch.tensor([e.logmu for e in examples]), logmu, rtol=1e-5, atol=1e-4)


def test_encoding_keeps_tokens_as_they_are_and_ends_only_finished_text(lm):
    eos = lm.tokenizer.eos_token_id
    given = [
        Sample(prompt="Q", completion=lm.text([7, 8, 9]), token_ids=[7, 8, 9], reward=1.0),
        Sample(prompt="Q", completion=" 12", reward=1.0),
        Sample(prompt="Q", completion=" 12", finish_reason="length", reward=1.0),
        Sample(prompt="Q", completion=" 12\nQ:", reward=1.0),
    ]
    kept, finished, cut, stopped = (example.completion_ids for example in dataset.encode(given, lm, ["\nQ:"]))
    assert kept == [7, 8, 9]
    assert finished == [*cut, eos]
    assert lm.tokenizer.decode(cut) == " 12"
    assert lm.tokenizer.decode(stopped) == " 12\nQ:"


def test_the_length_of_a_row_is_that_of_its_completions(lm):
    batch = rows.collate([random_examples(1, 3)])
    assert batch.length.tolist() == batch.token_mask.sum(1).tolist()
