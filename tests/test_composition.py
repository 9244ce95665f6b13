"""What an iteration trains on: counts by hand, properties on random samples, and that a run says what it took."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import train_gsm8k as gsm8k
from pipeline import compose as composition
from pipeline.compose import choose
from pipeline.dataset import compose
from pipeline.records import Sample

signs = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=60)
sizes = st.integers(1, 70)


def to_samples(drawn):
    return [Sample(prompt=f"Q{p}", completion="!", reward=1.0 if is_positive else -1.0) for p, is_positive in drawn]


@given(signs, sizes, st.integers(0, 99))
def test_every_rule_takes_each_sample_once_and_no_more_than_asked(drawn, size, seed):
    samples = to_samples(drawn)
    rules = [composition.uniform, composition.positives_only, composition.anna_karenina]
    rules.append(lambda samples, size, rng: composition.proportion(samples, size, rng, 0.3))
    for rule in rules:
        chosen = rule(samples, size, random.Random(seed))
        assert chosen == sorted(set(chosen)) == rule(samples, size, random.Random(seed))
        assert len(chosen) <= size
        assert all(0 <= i < len(samples) for i in chosen)


@given(signs, sizes, st.integers(0, 99))
def test_uniform_and_positives_fill_up(drawn, size, seed):
    samples = to_samples(drawn)
    positives = [i for i, sample in enumerate(samples) if sample.reward > 0]
    assert len(composition.uniform(samples, size, random.Random(seed))) == min(size, len(samples))
    chosen = composition.positives_only(samples, size, random.Random(seed))
    assert set(chosen) <= set(positives)
    assert len(chosen) == min(size, len(positives))


@given(signs, sizes, st.integers(0, 99))
def test_anna_karenina_keeps_first_positives_and_fills_with_negatives(drawn, size, seed):
    samples = to_samples(drawn)
    firsts = {}
    for i, sample in enumerate(samples):
        if sample.reward > 0 and sample.prompt not in firsts:
            firsts[sample.prompt] = i
    chosen = composition.anna_karenina(samples, size, random.Random(seed))
    positives = {i for i in chosen if samples[i].reward > 0}
    assert positives <= set(firsts.values())
    assert len(positives) == min(size, len(firsts))
    negatives = sum(sample.reward < 0 for sample in samples)
    assert len(chosen) == min(size, len(firsts) + negatives)


@given(signs, sizes, st.sampled_from([0.1, 0.25, 0.5, 0.9]), st.integers(0, 99))
def test_a_proportion_is_met_to_a_sample(drawn, size, share, seed):
    samples = to_samples(drawn)
    chosen = composition.proportion(samples, size, random.Random(seed), share)
    positives = sum(samples[i].reward > 0 for i in chosen)
    assert abs(positives - share * len(chosen)) <= 0.5
    # One more would be more than asked, or want a sample that is not there.
    of_sign = Counter(sample.reward for sample in samples)
    more = len(chosen) + 1
    assert more > size or share * more > of_sign[1.0] or (1 - share) * more > of_sign[-1.0]


def test_which_negatives_are_taken_is_uniform():
    samples = to_samples([(0, True)] + [(0, False)] * 6)
    counts = Counter(i for seed in range(600) for i in composition.anna_karenina(samples, 3, random.Random(seed)))
    assert counts[0] == 600
    for i in range(1, 7):
        assert counts[i] / 600 == pytest.approx(1 / 3, abs=5 * (2 / 9 / 600) ** 0.5)


@pytest.mark.parametrize(
    ("settings", "taken", "positive"),
    [
        ({}, 80, 20),
        ({"examples": 30}, 30, None),
        ({"composition": "positives_only"}, 20, 20),
        ({"composition": "proportion", "proportion": 0.5}, 40, 20),
        ({"composition": "proportion", "proportion": 0.1, "examples": 50}, 50, 5),
        ({"composition": "anna_karenina"}, 64, 4),  # one positive a problem, and all negatives
        ({"composition": "anna_karenina", "examples": 10}, 10, 4),
    ],
    ids=str,
)
def test_the_settings_reach_their_rule_and_the_counts_are_told(lm, settings, taken, positive):
    samples = to_samples([(problem, i % 4 == 0) for problem in range(4) for i in range(20)])
    settings = gsm8k.Settings(**settings)
    rows, told = compose(settings, samples, lm, ())
    assert sum(map(len, rows)) == taken
    assert told["drawn"] == {"samples": 80, "positive": 20, "problems": 4}
    assert told["trained"]["samples"] == taken == len(choose(settings, samples))
    assert positive in (None, told["trained"]["positive"])
    assert told["composition"] == settings.composition
    assert told["seed"] == settings.seed_of("composition 1")


def test_iterations_choose_differently_and_seeds_too():
    samples = to_samples([(0, True)] * 40)
    settings, other = gsm8k.Settings(examples=20), gsm8k.Settings(examples=20, seed=1)
    chosen = {tuple(choose(s, samples, number)) for s in (settings, other) for number in (1, 2)}
    assert len(chosen) == 4
    assert choose(settings, samples, 2) == choose(settings, samples, 2)
