"""What an iteration trains on: a row for each composition and each baseline, by hand and with what must always hold."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import experiment

from pipeline.compose import BASELINES, COMPOSITIONS, choose
from pipeline.dataset import compose
from pipeline.records import Sample, read_rows
from pipeline.settings import Settings


def to_samples(drawn):
    """Samples of (problem, whether it is right)."""
    return [Sample(prompt=f"Q{p}", completion="!", reward=1.0 if is_positive else -1.0) for p, is_positive in drawn]


# ---- compositions: samples, those chosen and how many were asked for -> whether they are as they should be ------


def is_full(samples, chosen, size):
    return len(chosen) == min(size, len(samples))


def are_positives(samples, chosen, size):
    positives = sum(sample.reward > 0 for sample in samples)
    return all(samples[i].reward > 0 for i in chosen) and len(chosen) == min(size, positives)


def are_first_positives_and_negatives(samples, chosen, size):
    firsts = {sample.prompt: i for i, sample in reversed([*enumerate(samples)]) if sample.reward > 0}
    positives = {i for i in chosen if samples[i].reward > 0}
    negatives = sum(sample.reward < 0 for sample in samples)
    return (
        positives <= set(firsts.values())
        and len(positives) == min(size, len(firsts))
        and len(chosen) == min(size, len(firsts) + negatives)
    )


def are_in_proportion(share):
    def holds(samples, chosen, size):
        of_sign = Counter(sample.reward for sample in samples)
        positives, more = sum(samples[i].reward > 0 for i in chosen), len(chosen) + 1
        # One more would be more than asked, or want a sample that is not there.
        is_full = more > size or share * more > of_sign[1.0] or (1 - share) * more > of_sign[-1.0]
        return is_full and abs(positives - share * len(chosen)) <= 0.5

    return holds


# Options, how many of 20 samples of each of 4 problems are taken, of which one in four is right, and how many are right
ROWS = [
    ({"composition": "uniform"}, 80, 20, is_full),
    ({"composition": "positives_only"}, 20, 20, are_positives),
    ({"composition": "anna_karenina"}, 64, 4, are_first_positives_and_negatives),
    ({"composition": "anna_karenina", "examples": 10}, 10, 4, are_first_positives_and_negatives),
    ({"composition": "proportion", "proportion": 0.5}, 40, 20, are_in_proportion(0.5)),
    ({"composition": "proportion", "proportion": 0.1, "examples": 50}, 50, 5, are_in_proportion(0.1)),
    ({"composition": "proportion", "proportion": 0.9}, 22, 20, are_in_proportion(0.9)),
]


@pytest.mark.parametrize(
    ("options", "taken", "positive", "holds"), ROWS, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_composition(lm, options, taken, positive, holds):
    samples, settings = to_samples([(problem, i % 4 == 0) for problem in range(4) for i in range(20)]), Settings()
    rows, told = compose(replace(settings, **options), samples, lm, ())
    assert sum(map(len, rows)) == taken
    assert told["drawn"] == {"samples": 80, "positive": 20, "problems": 4}
    assert (told["trained"]["samples"], told["trained"]["positive"]) == (taken, positive)
    assert told["composition"] == options["composition"]
    assert told["seed"] == settings.seed_of("composition 1")

    @given(
        st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=60),
        st.integers(1, 70),
        st.integers(0, 99),
    )
    def always(drawn, size, seed):
        samples, asked = to_samples(drawn), Settings(**options | {"examples": size, "seed": seed})
        chosen = choose(asked, samples)
        assert chosen == sorted(set(chosen)) == choose(asked, samples)
        assert set(chosen) <= set(range(len(samples)))
        assert len(chosen) <= size
        assert holds(samples, chosen, size)

    always()


def test_every_composition_and_baseline_has_a_row():
    assert {options["composition"] for options, *_ in ROWS} == set(COMPOSITIONS)
    assert {options.get("baseline_from", "zero") for options, _ in COUNTED} == set(BASELINES)


def test_which_negatives_are_taken_is_uniform():
    samples, settings = to_samples([(0, True)] + [(0, False)] * 6), Settings(composition="anna_karenina", examples=3)
    counts = Counter(i for seed in range(600) for i in choose(replace(settings, seed=seed), samples))
    assert counts[0] == 600
    for i in range(1, 7):
        assert counts[i] / 600 == pytest.approx(1 / 3, abs=5 * (2 / 9 / 600) ** 0.5)


def test_iterations_choose_differently_and_seeds_too():
    samples = to_samples([(0, True)] * 40)
    settings, other = Settings(examples=20), Settings(examples=20, seed=1)
    chosen = {tuple(choose(s, samples, number)) for s in (settings, other) for number in (1, 2)}
    assert len(chosen) == 4


def test_iterations_draw_as_many_candidates_each_with_a_seed_of_its_own(tmp_path):
    """At a learning rate that leaves the model as it is."""
    few = {"problems": 2, "test_problems": 1, "curve_points": 1, "max_new_tokens": 32, "batch": 8, "iterations": 2}
    results = experiment(tmp_path, composition="anna_karenina", candidates=6, examples=5, lr=1e-30, **few)
    assert {entry["dataset"]["drawn"]["samples"] for entry in results["iterations"]} == {2 * 6}
    one, two = (read_rows(tmp_path / f"iteration-{i}" / "samples.jsonl", Sample) for i in (1, 2))
    assert [sample.prompt for sample in one] == [sample.prompt for sample in two]
    assert all(a.completion != b.completion for a, b in zip(one[:4], two, strict=False))


# ---- baselines --------------------------------------------------------------------------------------------------

# Options, and the baseline of each sample: the mean reward is -1/5, that of prompt a 1/3, that of prompt b -1.
COUNTED = [
    ({}, [0, 0, 0, 0, 0]),
    ({"baseline": -0.5}, [-0.5] * 5),
    ({"baseline_from": "mean"}, [-0.2] * 5),
    ({"baseline_from": "mean", "baseline": 0.5}, [0.3] * 5),
    ({"baseline_from": "group", "baseline": -0.1}, [1 / 3 - 0.1] * 3 + [-1.1] * 2),
    ({"effective_proportion": 0.5}, [-0.2] * 5),  # 2 * 1.2 = 3 * 0.8
]


@pytest.mark.parametrize(("options", "baselines"), COUNTED, ids=str)
def test_a_baseline_is_subtracted_from_the_rewards(lm, options, baselines):
    rewards = {"a": [1, 1, -1], "b": [-1, -1]}
    samples = [Sample(prompt=p, completion=f" {i}", reward=r) for p in rewards for i, r in enumerate(rewards[p])]
    rows, told = compose(Settings(**options), samples, lm, ())
    found = {example.sample: example.reward for row in rows for example in row}
    assert [samples[i].reward - found[i] for i in range(5)] == pytest.approx(baselines)
    assert told["baseline"] == pytest.approx(sum(baselines) / 5)
