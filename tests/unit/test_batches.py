"""From samples to batches: token ids, order, optimizer steps of several ranks, log mu, tensors."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from unit_helpers import VOCABULARY, plain_batch, random_examples, tiny_llama, unpadded_logprobs

import topr
from toprlib import batches
from toprlib.batches import FILLER, MAX_PAIRS, collate, plan_steps, score_rows, tokenize_samples
from toprlib.records import Example, InputError, Sample, Task
from toprlib.settings import Settings
from train_gsm8k import choose

counts = st.integers(1, 6)


def numbered_rows(examples):
    return batches.number_rows([[example] for example in examples])


def make_rows(examples, is_paired):
    rng = random.Random(0)
    order = batches.pair_examples if is_paired else batches.shuffle_examples
    return batches.number_rows(order(examples, rng))


# ---- token ids -----------------------------------------------------------------------------------
def sample_of(lm, prompt="Q: 1 + 1?\nA:", completion=" The answer is 2.", **changes):
    """With token ids as an engine returns them, unless `changes` say otherwise."""
    ids = lm.tokenizer(completion, add_special_tokens=False)["input_ids"]
    fields = {"token_ids": [*ids, lm.tokenizer.eos_token_id], "reward": 1.0, **changes}
    return Sample(prompt=prompt, completion=completion, **fields)


def test_samples_at_indices_become_examples(lm):
    samples = [sample_of(lm, prompt=text, reward=float(i)) for i, text in enumerate("ABA")]
    samples[2] = samples[2].model_copy(update={"token_logmu": [-1.0] * 99})  # not asked for
    first, second = tokenize_samples(samples, [2, 1], lm)
    ids_of_a = lm.tokenizer("A")["input_ids"]
    ids_of_b = lm.tokenizer("B")["input_ids"]
    assert first == Example(ids_of_a, samples[2].token_ids, 2.0, sample=2)
    assert second == Example(ids_of_b, samples[1].token_ids, 1.0, sample=1)


def test_no_indices_no_examples(lm):
    assert tokenize_samples([sample_of(lm)], [], lm) == []


def test_own_log_mu_is_kept(lm):
    ids = sample_of(lm).token_ids
    values = [-float(place) for place in range(len(ids))]
    sample = sample_of(lm, token_logmu=values)
    [example] = tokenize_samples([sample], [0], lm, keep_logmu=True)
    assert example.token_logmu == values


@pytest.mark.parametrize("token_logmu", [None, [], [-1.0]])
def test_own_log_mu_must_fit(lm, token_logmu):
    samples = [sample_of(lm), sample_of(lm, token_logmu=token_logmu)]
    with pytest.raises(InputError) as caught:
        tokenize_samples(samples, [1], lm, source="own.jsonl", keep_logmu=True)
    error = caught.value
    assert (error.file, error.line, error.field) == ("own.jsonl", 2, "token_logmu")


ENDS = {  # completion, finish_reason, stop strings -> the text that is trained on
    "finished": (" 2", "stop", (), " 2<eos>"),
    "cut off": (" 2", "length", (), " 2"),
    "ends with it": (" 2<eos>", "stop", (), " 2<eos>"),
    "ends with it, said to be cut off": (" 2<eos>", "length", (), " 2<eos>"),
    "has a stop string": (" 2\nQ:", "stop", ("\nQ:",), " 2\nQ:"),
    "has text after a stop string": (" 2\nQ: 3", "stop", ("\nQ:",), " 2\nQ: 3"),
    "has another string": (" 2\nQ:", "stop", ("\nP:",), " 2\nQ:<eos>"),
    "white space after the end": (" 2<eos>\n \t", "stop", (), " 2<eos>"),
    "two ends": (" 2<eos><eos>", "stop", (), " 2<eos>"),
    "padding after the end": (" 2<eos><pad><pad>", "stop", (), " 2<eos>"),
    "padding and no end": (" 2<pad><pad>", "stop", (), " 2<eos>"),
    "padding after it was cut off": (" 2<pad><pad>", "length", (), " 2"),
    "an end alone": ("<eos>", "stop", (), "<eos>"),
    "white space before the end": (" 2 \n<eos>", "stop", (), " 2 \n<eos>"),
}


@pytest.mark.parametrize("case", ENDS)
def test_end_of_a_text(lm, case):
    completion, finish_reason, stop, expected = ENDS[case]
    sample = sample_of(lm, completion=completion, token_ids=None, finish_reason=finish_reason)
    [example] = tokenize_samples([sample], [0], lm, stop)
    assert lm.tokenizer.decode(example.completion_ids) == expected
    parts = expected.partition("<eos>")
    text_ids = lm.tokenizer(parts[0], add_special_tokens=False)["input_ids"]
    end = [lm.tokenizer.eos_token_id] if parts[1] else []
    assert example.completion_ids == text_ids + end


@pytest.fixture(scope="module", params=["first", "always"])
def sentence_piece(lm, request):
    """The tiny model with a tokenizer as Llama 2 has one: a space is part of the next word."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme=request.param)
    spaces = [Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)]
    tokenizer.decoder = DecoderSequence(spaces)
    names = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = BpeTrainer(vocab_size=400, special_tokens=names + bytes_)
    texts = ["Q: What is 31 + 45?\nA: The answer is 76.", "31 + 45 = 76 + 0 = 76. 31 + 4 = 35."]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    return lm._replace(tokenizer=fast, ends=frozenset({2}))


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("What is 31 + 45?\n", "31 + 45 = 76."),
        ("What is 31 + 45?", " The answer is 76."),
        ("What is 31 + 45?\nA: ", "The answer is 76."),
        ("What is 31 + 45?\n", "\nThe answer is 76."),
        ("<s>What is 31 + 45?\n", "31 + 45 = 76."),
        ("What is 3", "1 + 45?"),
    ],
)
def test_a_completion_gets_no_space_that_it_does_not_have(sentence_piece, prompt, completion):
    tokenizer = sentence_piece.tokenizer
    alone = tokenizer(["7\n", "3"], add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(alone[0] + alone[1]) == "7\n 3"  # what is to be avoided
    sample = Sample(prompt=prompt, completion=completion, reward=1.0)
    [example] = tokenize_samples([sample], [0], sentence_piece)
    assert example.prompt_ids.count(tokenizer.bos_token_id) == 1
    assert example.completion_ids[-1] == tokenizer.eos_token_id
    ids = example.prompt_ids + example.completion_ids
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == prompt.removeprefix("<s>") + completion


def test_tokens_of_a_completion_depend_on_the_end_of_its_prompt(lm):
    """Of other starts the line break would become a part, and the text alone would get a space."""
    vocabulary = {"▁": 0, "7": 1, "\n": 2, "\n\n": 3}
    tokenizer = Tokenizer(BPE(vocabulary, [("\n", "\n")]))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
    model = lm._replace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    prompt = "7" * 99 + "\n" + "7" * 100
    assert model.completion_ids(prompt, "\n7") == [2, 1]


def test_completion_may_just_fill_the_context(lm):
    prompt_ids = lm.tokenizer("Q")["input_ids"]
    room = lm.context - len(prompt_ids)
    text = lm.tokenizer.decode([5] * room, clean_up_tokenization_spaces=False)
    fitting = sample_of(lm, prompt="Q", completion=text, token_ids=[5] * room)
    [example] = tokenize_samples([fitting], [0], lm)
    assert len(example.completion_ids) == room
    longer = fitting.model_copy(update={"token_ids": [5] * (room + 1)})
    with pytest.raises(InputError) as caught:
        tokenize_samples([longer], [0], lm)
    assert caught.value.field == "completion"


def bad_samples(lm):
    """Field -> samples that a model cannot be trained on."""
    vocabulary = lm.model.get_input_embeddings().num_embeddings
    return {
        "prompt": [sample_of(lm, prompt="")],
        "completion": [
            sample_of(lm, completion=text, token_ids=None)
            for text in ("", "<pad><pad>", " 2<eos> 3", " 2<eos>\n.", "<eos> 2<eos>")
        ],
        "token_ids": [
            sample_of(lm, token_ids=[vocabulary]),
            sample_of(lm, token_ids=[-1]),
            sample_of(lm, completion=" 3", token_ids=sample_of(lm).token_ids),
            sample_of(lm, completion="$<eos>$", token_ids=[5, 1, 5]),
            sample_of(lm, completion="$<eos>", token_ids=[5, 1, 1]),
        ],
    }


@given(
    st.sampled_from(["prompt", "completion", "token_ids"]),
    st.lists(st.integers(0, 9), unique=True),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_bad_sample_is_named_by_its_line(lm, field, before, bad_index, after):
    """Its line in the file, not its place among the chosen samples, in whatever order."""
    for bad in bad_samples(lm)[field]:
        samples = [sample_of(lm)] * 10
        samples[bad_index] = bad
        chosen = [index for index in before if index != bad_index]
        assert len(tokenize_samples(samples, chosen, lm)) == len(chosen)
        with pytest.raises(InputError) as caught:
            tokenize_samples(samples, [*chosen, bad_index, after], lm, source="own.jsonl")
        error = caught.value
        assert (error.file, error.line, error.field) == ("own.jsonl", bad_index + 1, field)


def test_empty_text_may_be_an_end_of_sequence(lm):
    end = lm.tokenizer.eos_token_id
    [example] = tokenize_samples([sample_of(lm, completion="", token_ids=[end])], [0], lm)
    assert example.completion_ids == [end]


def test_vocabulary_is_the_model_s(lm):
    """Qwen 2.5, for one, has more embeddings than its tokenizer has tokens."""
    size = len(lm.tokenizer)
    config = LlamaConfig(**lm.model.config.to_dict() | {"vocab_size": size + 1})
    larger = lm._replace(model=LlamaForCausalLM(config))
    text = lm.text([size])
    [example] = tokenize_samples([sample_of(lm, completion=text, token_ids=[size])], [0], larger)
    assert example.completion_ids == [size]
    too_large = sample_of(lm, completion=text, token_ids=[size + 1])
    with pytest.raises(InputError) as caught:
        tokenize_samples([too_large], [0], larger)
    assert caught.value.field == "token_ids"


# ---- the order of training -----------------------------------------------------------------------
# Of eight completions of three prompts, the even ones positive, with random.Random(5).
EIGHT = [Example([p], [2], (-1.0) ** i, sample=i) for i, p in enumerate((7, 8, 7, 9, 8, 7, 9, 9))]


def test_order_is_that_of_the_published_results():
    """By the code of commit 4e628b9."""
    rows = batches.shuffle_examples(EIGHT, random.Random(5))
    assert [example.sample for [example] in rows] == [7, 3, 0, 1, 2, 6, 4, 5]
    pairs = batches.pair_examples(EIGHT, random.Random(5))
    actual = [(positive.sample, negative.sample) for positive, negative in pairs]
    assert actual == [(4, 1), (6, 7), (6, 3), (0, 5), (2, 5)]


@given(counts, st.integers(1, 12), st.integers(0, 99))
def test_pairs_are_distinct_and_of_both_signs(prompts, per_prompt, seed):
    examples = random_examples(prompts, per_prompt, seed)
    examples[0] = replace(examples[0], reward=0.0)  # counts as positive
    pairs = batches.pair_examples(examples, random.Random(seed))
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


@pytest.mark.parametrize("per_prompt", [1, 3, 8, 40])  # up to some 400 pairs of a prompt
def test_pairs_are_those_drawn_from_a_list_of_all_pairs(per_prompt):
    examples = random_examples(3, per_prompt, seed=per_prompt)
    rng = random.Random(7)
    expected = []
    for group in batches.group_by_prompt(examples):
        positives = [example for example in group if example.reward >= 0]
        negatives = [example for example in group if example.reward < 0]
        pairs = [[positive, negative] for positive in positives for negative in negatives]
        expected += rng.sample(pairs, min(16, len(pairs)))
    rng.shuffle(expected)
    assert batches.pair_examples(examples, random.Random(7)) == expected


def test_pairs_of_a_prompt_are_drawn_without_listing_all():
    """Of 400 million pairs, a list of which would fill the memory."""
    examples = [Example([7], [2], (-1.0) ** number, number) for number in range(40_000)]
    pairs = batches.pair_examples(examples, random.Random(0))
    assert len(pairs) == MAX_PAIRS
    assert max(pair[1].sample for pair in pairs) > 20_000


@given(counts, counts, st.integers(0, 99))
def test_every_example_is_in_one_row(prompts, per_prompt, seed):
    examples = random_examples(prompts, per_prompt, seed)
    rng = random.Random(seed)
    first = batches.shuffle_examples(examples, rng)
    second = batches.shuffle_examples(examples, rng)
    for rows in (first, second):
        assert sorted(example.sample for [example] in rows) == list(range(len(examples)))
    assert len(examples) < 12 or first != second


def test_each_epoch_has_an_order_of_its_own(lm):
    samples = [sample_of(lm, prompt=f"{number} =") for number in range(6)]
    rows = choose(1, samples, lm, Task("sums", [], [], grade=str), Settings(epochs=3))
    numbers = [example.sample for [example] in rows]
    epochs = [tuple(numbers[start : start + 6]) for start in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 3
    assert len(set(epochs)) == 3
    assert [example.row for [example] in rows] == list(range(18))


@pytest.mark.parametrize("is_paired", [False, True])
def test_prompts_are_mixed(is_paired):
    rows = make_rows(random_examples(prompts=8, per_prompt=8), is_paired)
    changes = 0
    for row, following in pairwise(rows):
        changes += row[0].prompt_ids != following[0].prompt_ids
    assert changes > len(rows) / 2


# ---- the optimizer steps of an epoch -------------------------------------------------------------
def plans_of_ranks(rows, batch_size, micro_batch_size, of_ranks):
    """One list of steps per rank, as steps with one plan per rank."""
    plans = []
    for at_rank in range(of_ranks):
        plans.append(plan_steps(rows, batch_size, micro_batch_size, at_rank, of_ranks))
    return list(zip(*plans, strict=True))


def is_filler(example):
    return example.row == FILLER


batch_sizes = st.sampled_from([1, 3, 4, 8])
micro_batch_sizes = st.sampled_from([1, 2, 8])


@given(counts, counts, st.booleans(), batch_sizes, micro_batch_sizes, counts)
def test_steps_of_all_ranks_have_every_row_once(
    prompts, per_prompt, is_paired, batch_size, micro_batch_size, of_ranks
):
    rows = make_rows(random_examples(prompts, per_prompt), is_paired)
    if not rows:
        return
    rows_per_step = max(batch_size // len(rows[0]), 1)
    steps = plans_of_ranks(rows, batch_size, micro_batch_size, of_ranks)
    assert len(steps) == math.ceil(len(rows) / rows_per_step)
    for number, plans in enumerate(steps):
        expected = rows[number * rows_per_step : (number + 1) * rows_per_step]
        micro_batches = list(chain.from_iterable(plan.micro_batches for plan in plans))
        examples = [e for e in chain.from_iterable(micro_batches) if not is_filler(e)]
        # The examples of a pair stay next to each other, the positive first.
        assert Counter(e.row for e in examples) == {row[0].row: len(row) for row in expected}
        actual = sorted(examples, key=lambda example: example.row)
        assert actual == list(chain.from_iterable(expected))
        assert {plan.completions for plan in plans} == {len(examples)}


@given(counts, counts, st.booleans(), batch_sizes, micro_batch_sizes, counts)
def test_ranks_have_equally_many_micro_batches(
    prompts, per_prompt, is_paired, batch_size, micro_batch_size, of_ranks
):
    rows = make_rows(random_examples(prompts, per_prompt), is_paired)
    if not rows:
        return
    per_row = len(rows[0])
    rows_per_pass = max(micro_batch_size // per_row, 1)
    for plans in plans_of_ranks(rows, batch_size, micro_batch_size, of_ranks):
        rows_of_first = math.ceil(plans[0].completions / per_row / of_ranks)
        expected = math.ceil(rows_of_first / rows_per_pass)
        assert {len(plan.micro_batches) for plan in plans} == {expected}
        for micro_batch in chain.from_iterable(plan.micro_batches for plan in plans):
            assert 1 <= len(micro_batch) <= max(micro_batch_size, per_row)
            assert len({is_filler(example) for example in micro_batch}) == 1


@pytest.mark.parametrize("is_paired", [False, True])
def test_filler_has_reward_zero(is_paired):
    rows = make_rows(random_examples(prompts=2, per_prompt=4), is_paired)[:3]
    [(first, second)] = plans_of_ranks(rows, 8, micro_batch_size=1, of_ranks=2)
    assert not any(is_filler(example) for example in chain.from_iterable(first.micro_batches))
    last = second.micro_batches[-1]
    assert [example.reward for example in last] == [0.0] * len(rows[0])
    assert all(is_filler(example) for example in last)
    assert len(first.micro_batches) == len(second.micro_batches) == 2


def test_one_rank_has_no_filler_and_rows_by_length():
    rows = make_rows(random_examples(prompts=5, per_prompt=4), is_paired=False)
    for plan in plan_steps(rows, 8, 4, at_rank=0, of_ranks=1):
        examples = list(chain.from_iterable(plan.micro_batches))
        assert not any(is_filler(example) for example in examples)
        lengths = [len(e.prompt_ids) + len(e.completion_ids) for e in examples]
        assert lengths == sorted(lengths)


def test_rank_is_that_of_this_process(monkeypatch):
    rows = make_rows(random_examples(prompts=3, per_prompt=3), is_paired=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    actual = plan_steps(rows, 4, 2)
    assert actual == plan_steps(rows, 4, 2, at_rank=1, of_ranks=3)
    assert actual != plan_steps(rows, 4, 2, at_rank=0, of_ranks=3)


# ---- log mu --------------------------------------------------------------------------------------
def test_log_mu_is_the_model_s():
    model = tiny_llama(dtype=torch.float32)
    examples = random_examples(prompts=3, per_prompt=3)
    rows = numbered_rows([replace(example, token_logmu=None) for example in examples])
    scored = score_rows(rows, plan_steps(rows, 4, 2), model)
    assert [len(row) for row in scored] == [1] * 9
    for [example], [before] in zip(scored, rows, strict=True):
        expected = unpadded_logprobs(model, example).tolist()
        assert example.token_logmu == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert replace(example, token_logmu=None) == before


def test_training_in_the_same_batches_starts_at_mu():
    """Exactly: log mu keeps its float32 value on its way through the examples."""
    model = tiny_llama(dtype=torch.float32)
    rows = numbered_rows(random_examples(prompts=3, per_prompt=3))
    scored = score_rows(rows, plan_steps(rows, 4, 2), model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    steps = batches.to_tensors(plan_steps(scored, 4, 2))
    for stats in topr.train(model, sgd, steps):
        assert (stats.log_ratio == 0).all()


def test_log_mu_of_a_sample_in_two_pairs():
    """It has the value of the batch that trains it, for each pair."""
    first = Example([1], [2, 3], 1.0, sample=0)
    pairs = [[first, Example([1], [2, 4], -1.0, sample=1)]]
    pairs.append([first, Example([1], [2, 5, 6, 7], -1.0, sample=2)])
    rows = batches.number_rows(pairs)
    model = tiny_llama()
    scored = score_rows(rows, plan_steps(rows, 2, 2), model)
    actual = [(e.row, e.sample) for e in chain.from_iterable(scored)]
    assert actual == [(0, 0), (0, 1), (1, 0), (1, 2)]
    for example in chain.from_iterable(scored):
        expected = unpadded_logprobs(model, example).tolist()
        assert example.token_logmu == pytest.approx(expected, rel=1e-5, abs=1e-5)


# ---- tensors -------------------------------------------------------------------------------------
@given(counts, counts, st.integers(0, 99))
def test_batch_is_padded_on_both_sides(prompts, per_prompt, seed):
    examples = random_examples(prompts, per_prompt, seed)
    actual = collate(examples)
    expected = plain_batch(examples)
    for name in topr.Batch._fields:
        values = getattr(actual, name)
        torch.testing.assert_close(values.double(), getattr(expected, name).double())
    assert actual.input_ids.dtype == torch.long
    assert actual.token_logmu.dtype == actual.reward.dtype == torch.float32
    assert actual.input_ids.max() < VOCABULARY


def test_batch_without_log_mu_has_zeros():
    examples = [replace(e, token_logmu=None) for e in random_examples(prompts=2, per_prompt=2)]
    assert (collate(examples).token_logmu == 0).all()


def test_steps_become_tensors_one_by_one(monkeypatch):
    rows = numbered_rows(random_examples(prompts=3, per_prompt=2))
    plans = plan_steps(rows, 4, 2)
    collated = []

    def counting(examples):
        collated.append(examples)
        return collate(examples)

    monkeypatch.setattr(batches, "collate", counting)
    steps = batches.to_tensors(plans)
    micro_batches, completions = next(steps)
    assert (len(micro_batches), completions) == (2, 4)
    assert collated == plans[0].micro_batches
    micro_batches, completions = next(steps)
    assert (len(micro_batches), completions) == (1, 2)
