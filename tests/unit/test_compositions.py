"""Compositions and baselines: counts by hand, which samples may be chosen, and how often."""

import random
from collections import Counter

import pytest

from toprlib.compositions import BASELINES, COMPOSITIONS, rewards_by_prompt
from toprlib.records import Sample


def to_samples(*rewards):
    """Samples of one prompt after another; rewards: a list for each prompt."""
    samples = []
    for number, rewards_of_prompt in enumerate(rewards):
        for reward in rewards_of_prompt:
            samples.append(Sample(prompt=f"Q{number}", completion="!", reward=reward))
    return samples


def choose(name, samples, size, seed=0, share=None):
    return COMPOSITIONS[name](samples, size, random.Random(seed), share)


# Positives: samples 1, 2 (whose reward is 0) and 3. Negatives: the four others.
SAMPLES = to_samples([-1.0, 1.0, 0.0], [0.5, -1.0], [-1.0, -2.0])

# name, size and share -> the samples that may be chosen, and those that must be; how many of them
# are chosen, and how many positives, if that does not depend on the seed
ALL = {0, 1, 2, 3, 4, 5, 6}
FIRST_POSITIVES = {1, 3}
CASES = [
    (("uniform", 9, None), ALL, ALL, 7, 3),
    (("uniform", 4, None), ALL, set(), 4, None),
    (("positives_only", 9, None), {1, 2, 3}, {1, 2, 3}, 3, 3),
    (("positives_only", 2, None), {1, 2, 3}, set(), 2, 2),
    (("anna_karenina", 9, None), ALL - {2}, ALL - {2}, 6, 2),
    (("anna_karenina", 3, None), ALL - {2}, FIRST_POSITIVES, 3, 2),
    (("anna_karenina", 1, None), FIRST_POSITIVES, set(), 1, 1),
    (("proportion", 7, 0.5), ALL, {1, 2, 3}, 6, 3),
    (("proportion", 4, 0.25), ALL, set(), 4, 1),
    (("proportion", 7, 0.9), {1, 2, 3}, {1, 2, 3}, 3, 3),  # a fourth sample would be a positive
]


@pytest.mark.parametrize(("composition", "may", "must", "count", "positives"), CASES)
def test_a_composition_chooses_by_its_rule(composition, may, must, count, positives):
    name, size, share = composition
    seen = set()
    for seed in range(40):
        chosen = choose(name, SAMPLES, size, seed, share)
        assert chosen == sorted(set(chosen))
        assert must <= set(chosen) <= may
        assert len(chosen) == count
        if positives is not None:
            assert sum(SAMPLES[i].reward >= 0 for i in chosen) == positives
        seen |= set(chosen)
    assert seen == may


@pytest.mark.parametrize(("positives", "negatives", "share"), [(6, 2, 0.75), (2, 6, 0.25)])
def test_a_proportion_that_fits_takes_all_samples(positives, negatives, share):
    """With the two shares swapped, the scarce sign would leave two samples."""
    samples = to_samples([1.0] * positives + [-1.0] * negatives)
    assert choose("proportion", samples, 8, share=share) == list(range(8))


@pytest.mark.parametrize(
    ("positives", "negatives", "expected"),
    [(3, 40, (3, 12)), (40, 4, (1, 4)), (40, 40, (8, 32))],
)
def test_the_scarce_sign_limits_a_proportion(positives, negatives, expected):
    samples = to_samples([1.0] * positives + [-1.0] * negatives)
    chosen = choose("proportion", samples, 40, share=0.2)
    chosen_positives = sum(i < positives for i in chosen)
    assert (chosen_positives, len(chosen) - chosen_positives) == expected


def test_anna_karenina_takes_the_first_positive_of_each_problem():
    samples = to_samples([-1.0, 1.0, 2.0], [-1.0, -1.0], [0.0, 1.0])
    chosen = choose("anna_karenina", samples, 100)
    assert [i for i in chosen if samples[i].reward >= 0] == [1, 5]


def test_negatives_are_chosen_uniformly():
    """Two of six; the tolerance is five standard errors of a share over 600 seeds."""
    samples = to_samples([1.0] + [-1.0] * 6)
    counts = Counter()
    for seed in range(600):
        counts.update(choose("anna_karenina", samples, 3, seed))
    shares = [counts[i] / 600 for i in range(7)]
    assert shares == pytest.approx([1] + [1 / 3] * 6, abs=5 * (2 / 9 / 600) ** 0.5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uniform", [0, 1, 2, 8]),
        ("positives_only", [0, 3, 5, 8]),
        ("anna_karenina", [0, 4, 5, 8]),
        ("proportion", [0, 1, 4, 9]),
    ],
)
def test_a_seed_chooses_what_it_chose_for_the_published_results(name, expected):
    samples = to_samples([1.0, -1.0, -1.0, 0.0], [-1.0, 1.0, -0.5, -1.0], [1.0, -1.0])
    assert choose(name, samples, 4, seed=2, share=0.25) == expected


# ---- baselines -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("zero", [0, 0, 0, 0, 0]),
        ("mean", [-0.4, -0.4, -0.4, -0.4, -0.4]),
        ("group", [1, -1, 1, -2, -1]),
    ],
)
def test_a_baseline_belongs_to_each_sample(name, expected):
    """The prompts alternate, and one of them has more samples than the others."""
    rewards = {"a": [3.0, -1.0], "b": [0.0, -2.0], "c": [-2.0]}
    order = ["a", "b", "a", "c", "b"]
    samples = [Sample(prompt=p, completion="!", reward=rewards[p].pop(0)) for p in order]
    assert BASELINES[name](samples) == pytest.approx(expected)


def test_rewards_are_grouped_by_prompt():
    samples = to_samples([1.0, -1.0], [0.5])
    assert rewards_by_prompt(samples[::-1]) == {"Q1": [0.5], "Q0": [-1.0, 1.0]}
