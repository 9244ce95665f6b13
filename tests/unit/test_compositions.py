"""Compositions and baselines: counts by hand, which samples may be chosen, and how often."""

import random
from collections import Counter
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


# ---- counts, and which samples may be chosen -----------------------------------------------------
class Drawn(NamedTuple):
    """Numbers of samples, and of problems with a positive one."""

    positives: int
    negatives: int
    solved: int


def counts_of_proportion(drawn, size, share):
    """The most samples for which neither sign lacks any."""
    fitting = []
    for count in range(size + 1):
        if share * count <= drawn.positives and (1 - share) * count <= drawn.negatives:
            fitting.append(count)
    return max(fitting), round(share * max(fitting))


# Drawn, size, share -> how many samples are chosen, and how many of them are positive
COUNTS = {
    "uniform": lambda drawn, size, _: (min(size, drawn.positives + drawn.negatives), None),
    "positives_only": lambda drawn, size, _: (min(size, drawn.positives),) * 2,
    "anna_karenina": lambda drawn, size, _: (
        min(size, drawn.solved + drawn.negatives),
        min(size, drawn.solved),
    ),
    "proportion": counts_of_proportion,
}
rewards_of_problems = st.lists(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0]), max_size=9), max_size=5
)
eighths = st.integers(1, 7).map(lambda number: number / 8)  # exact numbers, also as 1 - share


@pytest.mark.parametrize("name", COMPOSITIONS)
@given(rewards_of_problems, st.integers(1, 30), eighths, st.integers(0, 99))
def test_a_composition_chooses_as_many_as_its_rule_says(name, problems, size, share, seed):
    samples = to_samples(*problems)
    is_positive = [sample.reward >= 0 for sample in samples]
    solved = sum(max(rewards, default=-1) >= 0 for rewards in problems)
    drawn = Drawn(sum(is_positive), len(samples) - sum(is_positive), solved)
    count, positives = COUNTS[name](drawn, size, share)
    chosen = choose(name, samples, size, seed, share)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    assert positives in (None, sum(is_positive[i] for i in chosen))


# Positives: samples 1, 2 (whose reward is 0) and 3. Negatives: the four others.
SAMPLES = to_samples([-1.0, 1.0, 0.0], [0.5, -1.0], [-1.0, -2.0])
ALL = {0, 1, 2, 3, 4, 5, 6}
CASES = [  # name, size and share -> the samples that may be chosen
    (("uniform", 4, None), ALL),
    (("positives_only", 2, None), {1, 2, 3}),
    (("anna_karenina", 3, None), ALL - {2}),  # the first positive of a problem
    (("anna_karenina", 1, None), {1, 3}),
    (("proportion", 4, 0.25), ALL),
]


@pytest.mark.parametrize(("composition", "may"), CASES)
def test_every_sample_that_fits_may_be_chosen_and_no_other(composition, may):
    name, size, share = composition
    seen = set()
    for seed in range(40):
        seen |= set(choose(name, SAMPLES, size, seed, share))
    assert seen == may


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
