"""From samples to batches: which samples, token ids, order, steps of several ranks, tensors."""

import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import pytest
import torch
from helpers import (
    VOCABULARY,
    numbered,
    ordered_examples,
    plain_batch,
    random_examples,
    tiny_llama,
    unpadded_logprobs,
)
from hypothesis import example, given
from hypothesis import strategies as st

import topr
from toprlib import dataset
from toprlib.dataset import MAX_PAIRS, add_logmu, collate, mean_rewards, plan_steps
from toprlib.records import Example, InputError, Sample, Task
from toprlib.settings import Settings
from train_gsm8k import choose, choose_baselines

counts = st.integers(1, 6)


def to_samples(*rewards):
    """Samples of one prompt after another; rewards: a list for each prompt."""
    samples = []
    for number, rewards_of_prompt in enumerate(rewards):
        for reward in rewards_of_prompt:
            samples.append(Sample(prompt=f"Q{number}", completion="!", reward=reward))
    return samples


# ---- which samples -------------------------------------------------------------------------------
def counts_of_proportion(positives, negatives, size, share):
    """The most samples for which neither sign lacks any; with exact shares."""
    exact = Fraction(str(share))
    fitting = []
    for count in range(size + 1):
        if exact * count <= positives and (1 - exact) * count <= negatives:
            fitting.append(count)
    return max(fitting), round(share * max(fitting))


def expected_counts(composition, problems, size, share):
    """How many samples are chosen, and how many of them are positive (None: any number)."""
    rewards = list(chain.from_iterable(problems))
    positives = sum(reward >= 0 for reward in rewards)
    negatives = len(rewards) - positives
    solved = sum(max(of_problem, default=-1) >= 0 for of_problem in problems)
    if composition == "uniform":
        return min(size, len(rewards)), None
    if composition == "positives_only":
        return min(size, positives), min(size, positives)
    if composition == "anna_karenina":
        return min(size, solved + negatives), min(size, solved)
    return counts_of_proportion(positives, negatives, size, share)


rewards_of_problems = st.lists(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), max_size=9), max_size=5
)
twentieths = st.integers(1, 19).map(lambda number: number / 20)


@pytest.mark.parametrize("name", ["uniform", "positives_only", "anna_karenina", "proportion"])
@given(rewards_of_problems, st.integers(1, 30), twentieths, st.integers(0, 99))
@example([[1.0] * 7 + [-1.0] * 3], 10, 0.7, 0)  # 3 / (1 - 0.7) is 9.999999999999998
def test_a_composition_chooses_as_many_as_its_rule_says(name, problems, size, share, seed):
    samples = to_samples(*problems)
    chosen = dataset.choose_samples(name, samples, size, random.Random(seed), share)
    count, positives = expected_counts(name, problems, size, share)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    assert positives in (None, sum(samples[i].reward >= 0 for i in chosen))


# Positives: samples 1, 2 (whose reward is 0) and 3. Negatives: the four others.
SAMPLES = to_samples([-1.0, 1.0, 0.0], [0.5, -1.0], [-1.0, -2.0])
ALL = {0, 1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("name", "size", "share", "may"),
    [
        ("uniform", 4, None, ALL),
        ("positives_only", 2, None, {1, 2, 3}),
        ("anna_karenina", 3, None, ALL - {2}),  # the first positive of a problem
        ("anna_karenina", 1, None, {1, 3}),
        ("proportion", 4, 0.25, ALL),
    ],
)
def test_every_sample_that_fits_may_be_chosen_and_no_other(name, size, share, may):
    seen = set()
    for seed in range(40):
        seen |= set(dataset.choose_samples(name, SAMPLES, size, random.Random(seed), share))
    assert seen == may


# ---- baselines -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 0, 0, 0, 0]),
        ({"baseline": -0.5}, [-0.5] * 5),
        ({"baseline_from": "mean"}, [-0.2] * 5),
        ({"baseline_from": "mean", "baseline": 0.5}, [0.3] * 5),
        ({"baseline_from": "group", "baseline": -0.1}, [1 / 3 - 0.1, -1.1] * 2 + [1 / 3 - 0.1]),
        ({"effective_proportion": 0.5}, [-0.2] * 5),  # 2 * 1.2 of positives, 3 * 0.8 of negatives
    ],
    ids=str,
)
def test_baselines_add_up(options, expected):
    """The prompts alternate; the mean reward is -1/5, of prompt a 1/3, and of prompt b -1."""
    rewards = [("a", 1.0), ("b", -1.0), ("a", 1.0), ("b", -1.0), ("a", -1.0)]
    samples = [Sample(prompt=prompt, completion="!", reward=reward) for prompt, reward in rewards]
    assert choose_baselines(samples, Settings(**options)) == pytest.approx(expected)


@pytest.mark.parametrize("of", ["mean", "group"])
def test_the_mean_of_equal_rewards_is_that_reward_exactly(of):
    """Else the rounding error, 1e-17, is a reward whose sign chooses the weight."""
    samples = to_samples([0.1, 0.1, 0.1])
    assert sum([0.1] * 3) / 3 != 0.1
    assert mean_rewards(samples, of) == [0.1] * 3


@pytest.mark.parametrize("rewards", [[1.0, 1.0], [-1.0]])
def test_rewards_of_one_sign_have_no_effective_proportion(rewards):
    settings = Settings(effective_proportion=0.2)
    assert choose_baselines(to_samples(rewards), settings) == [0] * len(rewards)


def test_an_effective_proportion_is_for_rewards_of_plus_and_minus_one():
    with pytest.raises(InputError, match="--effective-proportion"):
        choose_baselines(to_samples([1.0, -1.0, 0.5]), Settings(effective_proportion=0.2))


# ---- token ids -----------------------------------------------------------------------------------
def sample_of(lm, prompt="Q: 1 + 1?\nA:", completion=" The answer is 2.", **changes):
    """With token ids as an engine returns them, unless `changes` say otherwise."""
    ids = lm.tokenizer(completion, add_special_tokens=False)["input_ids"]
    fields = {"token_ids": [*ids, lm.ends[0]], "reward": 1.0, **changes}
    return Sample(prompt=prompt, completion=completion, **fields)


def test_samples_at_indices_become_examples(lm):
    samples = [sample_of(lm, prompt=text, reward=float(i)) for i, text in enumerate("ABA")]
    logmu = {"token_logmu": [-1.0] * 99, "token_logmu_engine": [-2.0, -0.5]}
    samples[2] = samples[2].model_copy(update=logmu)  # token_logmu is not asked for
    first, second = dataset.tokenize_samples(samples, [2, 1], lm)
    ids_of_a = lm.tokenizer("A")["input_ids"]
    ids_of_b = lm.tokenizer("B")["input_ids"]
    assert first == Example(ids_of_a, samples[2].token_ids, 2.0, sample=2, logmu_engine=-2.5)
    assert second == Example(ids_of_b, samples[1].token_ids, 1.0, sample=1)


@pytest.mark.parametrize(
    ("completion", "finish_reason", "stop", "expected"),
    [
        (" 2", "stop", (), " 2<eos>"),
        (" 2", "length", (), " 2"),
        (" 2<eos>", "stop", (), " 2<eos>"),
        (" 2<eos>", "length", (), " 2<eos>"),
        (" 2\nQ:", "stop", ("\nQ:",), " 2\nQ:"),
        (" 2\nQ:", "stop", ("\nP:",), " 2\nQ:<eos>"),
        ("<eos>", "stop", (), "<eos>"),
        (" 2 \n<eos>", "stop", (), " 2 \n<eos>"),
    ],
)
def test_end_of_a_text(lm, completion, finish_reason, stop, expected):
    sample = sample_of(lm, completion=completion, token_ids=None, finish_reason=finish_reason)
    [example] = dataset.tokenize_samples([sample], [0], lm, stop)
    text, end, _ = expected.partition("<eos>")
    text_ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert example.completion_ids == text_ids + lm.ends[:1] * bool(end)


def test_token_ids_get_an_end_if_the_completion_is_finished(lm):
    samples = [sample_of(lm, token_ids=[5, 6], finish_reason=each) for each in ("stop", "length")]
    examples = dataset.tokenize_samples(samples, [0, 1], lm)
    assert [example.completion_ids for example in examples] == [[5, 6, lm.ends[0]], [5, 6]]


def test_any_end_is_an_end_and_text_gets_the_first(lm):
    [seven] = lm.tokenizer("7", add_special_tokens=False)["input_ids"]
    two_ends = lm._replace(ends=[seven, *lm.ends])
    samples = [sample_of(lm, completion=text, token_ids=None) for text in (" 2", " 2<eos>", "7")]
    examples = dataset.tokenize_samples(samples, [0, 1, 2], two_ends)
    assert [example.completion_ids[-1] for example in examples] == [seven, lm.ends[0], seven]
    assert len(examples[2].completion_ids) == 1


def test_log_mu_of_the_samples_is_kept(lm):
    logmu = [-float(place) for place in range(len(sample_of(lm).token_ids))]
    samples = [sample_of(lm, token_logmu=logmu), sample_of(lm)]
    [example] = dataset.tokenize_samples(samples, [0], lm, keep_logmu=True)
    assert example.token_logmu == logmu
    for changes in ({}, {"token_logmu": logmu[:-1]}, {"token_logmu": [*logmu, -1.0]}):
        samples[1] = sample_of(lm, **changes)
        with pytest.raises(InputError, match=r"sample 2.*token_logmu"):
            dataset.tokenize_samples(samples, [0, 1], lm, keep_logmu=True)


def test_a_completion_may_just_fill_the_context(lm):
    room = lm.context - len(lm.tokenizer("Q")["input_ids"])
    fitting = sample_of(lm, prompt="Q", token_ids=[5] * room, finish_reason="length")
    [example] = dataset.tokenize_samples([fitting], [0], lm)
    assert len(example.completion_ids) == room
    longer = fitting.model_copy(update={"token_ids": [5] * (room + 1)})
    with pytest.raises(InputError, match="sample 1"):
        dataset.tokenize_samples([longer], [0], lm)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ""},
        {"completion": "", "token_ids": None, "finish_reason": "length"},
        {"completion": " 2<eos> 3", "token_ids": None},
        {"completion": "<eos> 2<eos>", "token_ids": None},
        {"token_ids": [5, 1, 5]},
        {"token_ids": [5, 1, 1]},
    ],
    ids=str,
)
def test_a_sample_that_cannot_be_trained_on_is_named_by_its_line(lm, changes):
    """Its place among all samples, not among the chosen ones."""
    assert lm.ends == [1]
    samples = [sample_of(lm)] * 10
    samples[6] = sample_of(lm, **changes)
    assert len(dataset.tokenize_samples(samples, [3, 8], lm)) == 2
    with pytest.raises(InputError, match="sample 7:"):
        dataset.tokenize_samples(samples, [3, 6], lm)


# ---- the order of training -----------------------------------------------------------------------
def split_pairs(examples):
    return list(zip(examples[::2], examples[1::2], strict=True))


def test_order_is_that_of_the_published_results():
    """By the code of commit 4e628b9: eight completions of three prompts, the even ones positive."""
    prompts = (7, 8, 7, 9, 8, 7, 9, 9)
    examples = [Example([p], [2], (-1.0) ** i, sample=i) for i, p in enumerate(prompts)]
    shuffled = dataset.shuffle_examples(examples, random.Random(5))
    assert [example.sample for example in shuffled] == [7, 3, 0, 1, 2, 6, 4, 5]
    pairs = split_pairs(dataset.pair_examples(examples, random.Random(5)))
    actual = [(positive.sample, negative.sample) for positive, negative in pairs]
    assert actual == [(4, 1), (6, 7), (6, 3), (0, 5), (2, 5)]


@given(counts, st.integers(1, 12), st.integers(0, 99))
def test_pairs_are_distinct_and_of_both_signs(prompts, per_prompt, seed):
    examples = random_examples(prompts, per_prompt, seed)
    examples[0] = replace(examples[0], reward=0.0)  # counts as positive
    pairs = split_pairs(dataset.pair_examples(examples, random.Random(seed)))
    for positive, negative in pairs:
        assert positive.reward >= 0 > negative.reward
        assert positive.prompt_ids == negative.prompt_ids
    assert len({(positive.sample, negative.sample) for positive, negative in pairs}) == len(pairs)

    positives = Counter(tuple(e.prompt_ids) for e in examples if e.reward >= 0)
    negatives = Counter(tuple(e.prompt_ids) for e in examples if e.reward < 0)
    expected = {}
    for prompt in positives.keys() & negatives.keys():
        expected[prompt] = min(MAX_PAIRS, positives[prompt] * negatives[prompt])
    assert Counter(tuple(positive.prompt_ids) for positive, _ in pairs) == expected


def test_positives_alone_are_repeated_to_as_many_steps_as_all_samples_make(lm):
    """Two of five samples are right. The last repetition is cut off."""
    samples = []
    for number, reward in enumerate((-1.0, 1.0, -1.0, -1.0, 1.0)):
        samples.append(sample_of(lm, prompt=f"{number} =", reward=reward))
    settings = Settings(composition="positives_only", epochs=3)
    examples = choose(1, samples, lm, Task("sums", [], [], grade=zip), settings)
    assert Counter(example.sample for example in examples[:14]) == {1: 7, 4: 7}
    assert len(examples) == 15
    assert {example.sample for example in examples[6:14:2]} == {1, 4}  # orders differ
    few = choose(1, samples, lm, Task("sums", [], [], grade=zip), replace(settings, examples=1))
    assert len(few) == 3


def test_each_epoch_has_an_order_of_its_own(lm):
    samples = [sample_of(lm, prompt=f"{number} =") for number in range(6)]
    examples = choose(1, samples, lm, Task("sums", [], [], grade=zip), Settings(epochs=3))
    numbers = [example.sample for example in examples]
    epochs = [tuple(numbers[start : start + 6]) for start in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 3
    assert len(set(epochs)) == 3
    assert [example.line for example in examples] == list(range(18))


# ---- the optimizer steps of an epoch -------------------------------------------------------------
def plans_of_ranks(of_ranks, *arguments):
    """The steps, each as a list of the ranks' plans."""
    plans = []
    for rank in range(of_ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", str(of_ranks))
            plans.append(plan_steps(*arguments))
    return list(zip(*plans, strict=True))


batch_sizes = st.sampled_from([1, 3, 4, 8])
micro_batch_sizes = st.sampled_from([1, 2, 8])


@given(counts, counts, st.booleans(), batch_sizes, micro_batch_sizes, counts)
def test_steps_of_all_ranks_have_every_example_once(
    prompts, per_prompt, uses_pairs, batch_size, micro_batch_size, of_ranks
):
    """And the ranks have equally many micro-batches, the last of which may be a filler."""
    examples = ordered_examples(prompts, per_prompt, uses_pairs)
    size = 2 if uses_pairs else 1
    per_step = max(batch_size // size, 1) * size
    per_pass = max(micro_batch_size // size, 1) * size
    steps = plans_of_ranks(of_ranks, examples, batch_size, micro_batch_size, uses_pairs)
    assert len(steps) == math.ceil(len(examples) / per_step)
    for number, plans in enumerate(steps):
        expected = examples[number * per_step : (number + 1) * per_step]
        micro_batches = list(chain.from_iterable(plan.micro_batches for plan in plans))
        trained = [example for example in chain.from_iterable(micro_batches) if example.line >= 0]
        assert sorted(trained, key=lambda example: example.line) == expected
        assert {plan.completions for plan in plans} == {len(expected)}
        of_rank = math.ceil(len(expected) / size / of_ranks) * size
        assert {len(plan.micro_batches) for plan in plans} == {math.ceil(of_rank / per_pass)}
        fillers = [example for example in chain.from_iterable(micro_batches) if example.line < 0]
        assert all(example.reward == 0 for example in fillers)
        if of_ranks == 1:
            assert not fillers
        for micro_batch in micro_batches:
            assert 1 <= len(micro_batch) <= per_pass
            assert len(micro_batch) % size == 0
            lines = [example.line for example in micro_batch if example.line >= 0]
            if uses_pairs:  # the two of a pair are next to each other, the positive first
                assert all(second == first + 1 for first, second in split_pairs(lines))


def test_examples_of_a_step_are_in_order_of_length():
    for plan in plan_steps(ordered_examples(prompts=5, per_prompt=4), 8, 4):
        examples = chain.from_iterable(plan.micro_batches)
        lengths = [len(e.prompt_ids) + len(e.completion_ids) for e in examples]
        assert lengths == sorted(lengths)


# ---- log mu --------------------------------------------------------------------------------------
def test_training_in_the_same_batches_starts_at_mu():
    """Exactly: log mu keeps its float32 value on its way through the examples."""
    model = tiny_llama(dtype=torch.float32)
    examples = numbered(random_examples(prompts=3, per_prompt=3))
    scored = add_logmu(examples, plan_steps(examples, 4, 2), model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    for stats in topr.train(model, sgd, dataset.to_tensors(plan_steps(scored, 4, 2))):
        assert (stats.log_ratio == 0).all()


def test_log_mu_is_the_model_s_also_of_a_sample_in_two_pairs():
    """It has the value of the batch that trains it, for each pair."""
    first = Example([1], [2, 3], 1.0, sample=0)
    pairs = [first, Example([1], [2, 4], -1.0, sample=1)]
    pairs += [first, Example([1], [2, 5, 6, 7], -1.0, sample=2)]
    examples = numbered(pairs)
    model = tiny_llama()
    scored = add_logmu(examples, plan_steps(examples, 2, 2, uses_pairs=True), model)
    for scored_example, before in zip(scored, examples, strict=True):
        expected = unpadded_logprobs(model, scored_example).tolist()
        assert scored_example.token_logmu == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert replace(scored_example, token_logmu=None) == before


# ---- tensors -------------------------------------------------------------------------------------
@given(counts, counts, st.integers(0, 99))
def test_batch_is_padded_on_the_right(prompts, per_prompt, seed):
    examples = random_examples(prompts, per_prompt, seed)
    actual = collate(examples)
    expected = plain_batch(examples)
    for name in topr.Batch._fields:
        values = getattr(actual, name)
        torch.testing.assert_close(values.double(), getattr(expected, name).double())
    assert actual.input_ids.dtype == torch.long
    assert actual.token_logmu.dtype == actual.reward.dtype == torch.float32
    assert actual.input_ids.max() < VOCABULARY
