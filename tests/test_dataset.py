"""The dataset: every sample once, prompts together, pairs of both signs, log mu over the full vocabulary."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from helpers import plain_batch, random_examples, steps_of
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import topr
import train_gsm8k as gsm8k
from pipeline import dataset
from pipeline.models.language_model import collate, token_logprobs
from pipeline.records import Example, InputError, Sample
from pipeline.sampling import SamplingParameters, draw_samples, transformers_engine
from pipeline.settings import Settings

counts = st.integers(1, 6)


def keys(examples):
    return Counter((tuple(e.prompt_ids), tuple(e.completion_ids), e.logmu, e.reward) for e in examples)


def flat(micro_batches):
    return [example for rows in micro_batches for row in rows for example in row]


@given(counts, counts, counts, st.integers(0, 99))
def test_rows_hold_every_example_once_and_one_prompt_each(prompts, per_prompt, per_row, seed):
    examples = random_examples(prompts, per_prompt, seed)
    found = dataset.rows_of_prompt(examples, per_row, random.Random(seed))
    batch = collate(found[:1])
    assert batch.length.tolist() == batch.completion_mask.sum(1).tolist()
    assert keys(e for row in found for e in row) == keys(examples)
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


@pytest.mark.parametrize("arrange", [dataset.rows_of_prompt, dataset.pairs_of_prompt])
def test_rows_of_all_prompts_are_mixed(arrange):
    prompts = [row[0].prompt_ids for row in arrange(random_examples(8, 8), 2, random.Random(0))]
    assert sum(one != other for one, other in pairwise(prompts)) > len(prompts) / 2


@given(counts, counts, st.sampled_from([1, 2, 4]), st.sampled_from([4, 8]), st.sampled_from([1, 2, 8]), counts)
def test_steps_hold_every_row_once_and_ranks_run_the_model_equally_often(
    prompts, per_prompt, per_row, batch, micro_batch, ranks
):
    grouped = dataset.rows_of_prompt(random_examples(prompts, per_prompt), per_row, random.Random(0))
    alone = dataset.epoch_steps(grouped, batch, micro_batch)
    of_ranks, laid_out = (
        zip(*(of_rank(grouped, batch, micro_batch, rank, ranks) for rank in range(ranks)), strict=True)
        for of_rank in (dataset.epoch_steps, steps_of)
    )
    assert keys(e for step in alone for e in flat(step.micro_batches)) == keys(e for row in grouped for e in row)
    for whole, shares, tensors in zip(alone, of_ranks, laid_out, strict=True):
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert all(rows for share in shares for rows in share.micro_batches)  # rows to compute
        learnt = flat(whole.micro_batches)
        assert keys(e for share in shares for e in flat(share.micro_batches[: share.learnt])) == keys(learnt)
        assert {step.sequences for step in (whole, *tensors)} == {len(learnt)}
        assert whole.sequences <= batch
        for share, step in zip(shares, tensors, strict=True):
            sizes = [len(flat([rows])) for rows in share.micro_batches[: share.learnt]]
            assert max(sizes, default=0) <= max(micro_batch, per_row)
            sizes += [0] * (len(share.micro_batches) - share.learnt)
            assert [len(micro.reward) for micro in step.micro_batches] == sizes


def test_v18_log_mu_is_over_the_full_vocabulary_whatever_the_sampler_kept(lm):
    """Of all logits too where the model has more than its tokenizer has tokens, as with Qwen 2.5; here nearly all."""
    size = len(lm.tokenizer)
    config = LlamaConfig(**lm.model.config.to_dict() | {"vocab_size": 8 * size})
    large = lm._replace(model=LlamaForCausalLM(config).eval())
    for model, problems, top_k, per_row in ((lm, 4, 2, 1), (lm, 4, 2, 4), (large, 1, 8 * size, 1)):
        task = gsm8k.gsm8k_task(Settings(problems=problems))
        sampling = SamplingParameters(max_new_tokens=40, top_k=top_k)
        samples = draw_samples(task, task.train, 4, transformers_engine(model, 40_000), sampling, seed=0)
        rows, _ = dataset.compose(Settings(completions_per_row=per_row), samples, model, ())
        rows = dataset.score(rows, dataset.epoch_steps(rows, 8, 4), model, token_logprobs)
        scored = [example for row in rows for example in row]
        logmu = topr.sequence_logprobs(model.model, plain_batch(scored))
        torch.testing.assert_close(torch.tensor([e.logmu for e in scored]), logmu, rtol=1e-5, atol=1e-4)
        assert sorted(e.completion_ids for e in scored) == sorted(s.token_ids for s in samples)
        assert [len(e.token_logmu) for e in scored] == [len(e.completion_ids) for e in scored]
    assert all(max(sample.token_ids) >= size for sample in samples)
    with pytest.raises(InputError, match=f"outside the model's vocabulary of {8 * size} tokens"):
        dataset.encode([samples[0].model_copy(update={"token_ids": [8 * size]})], large)


def test_how_far_the_engine_is_from_the_trainer_is_told_by_hand():
    samples = [Sample(prompt="?", completion="!", reward=1.0, token_logmu_engine=[-1.0, -x]) for x in (0.5, 1.5)]
    samples.append(Sample(prompt="?", completion="!", reward=1.0))
    rows = [[Example([1], [2, 3], -2.0, 1.0, sample=i, token_logmu=[-1.0, -1.0])] for i in (1, 0, 2)]
    found = dataset.engine_mismatch(samples, rows)
    assert (found["mean"], found["largest"], found["q05"]) == (0.0, 0.5, -0.45)
    assert dataset.engine_mismatch(samples[2:], [[replace(rows[0][0], sample=0)]]) is None


def test_every_epoch_has_all_samples_in_an_order_of_its_own(lm):
    samples = [Sample(prompt="Q", completion=f" {i}", reward=(-1.0) ** i) for i in range(20)]
    [once, _], [rows, counts] = (
        dataset.compose(Settings(epochs=epochs, completions_per_row=2), samples, lm, ()) for epochs in (1, 3)
    )
    assert [[e.sample for e in row] for row in rows[:10]] == [[e.sample for e in row] for row in once]
    epochs = [[e.sample for row in rows[i : i + 10] for e in row] for i in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 3
    assert len(set(map(tuple, epochs))) == 3
    assert [e.row for row in rows for e in row] == [i for i in range(30) for _ in range(2)]
    assert counts["trained"]["samples"] == 20
