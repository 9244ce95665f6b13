"""What an iteration trains on: a row for each composition and each baseline, by hand and with what must always hold."""

from collections import Counter
from dataclasses import replace

import pytest
from runs import experiment

from pipeline.dataset import choose, compose
from pipeline.records import Sample, read_records
from pipeline.settings import Settings


def to_samples(*rewards):
    """Samples of one prompt after another, by their rewards."""
    return [
        Sample(prompt=f"Q{p}", completion="!", reward=r)
        for p, of_one in enumerate(rewards)
        for r in of_one
    ]


SAMPLES = to_samples([-1.0, 1.0, 0.0], [1.0, -1.0], [-1.0])
# Options; those that may be chosen, and those of them that must be; how many are taken, and how many of these are right
ROWS = [
    ({"composition": "uniform", "examples": 9}, [0, 1, 2, 3, 4, 5], [], 6, 3),
    ({"composition": "uniform", "examples": 4}, [0, 1, 2, 3, 4, 5], [], 4, None),
    ({"composition": "positives_only"}, [1, 2, 3], [], 3, 3),
    ({"composition": "positives_only", "examples": 2}, [1, 2, 3], [], 2, 2),
    ({"composition": "anna_karenina"}, [0, 1, 3, 4, 5], [], 5, 2),
    ({"composition": "anna_karenina", "examples": 3}, [0, 1, 3, 4, 5], [1, 3], 3, 2),
    ({"composition": "anna_karenina", "examples": 1}, [1, 3], [], 1, 1),
    ({"composition": "proportion", "proportion": 0.5}, [0, 1, 2, 3, 4, 5], [], 6, 3),
    (
        {"composition": "proportion", "proportion": 0.3},
        [0, 1, 2, 3, 4, 5],
        [0, 4, 5],
        4,
        1,
    ),  # one more has no negative
    (
        {"composition": "proportion", "proportion": 0.25, "examples": 3},
        [0, 1, 2, 3, 4, 5],
        [],
        3,
        1,
    ),
    ({"composition": "proportion", "proportion": 0.9}, [1, 2, 3], [], 3, 3),
]


@pytest.mark.parametrize(("options", "may", "must", "taken", "positive"), ROWS, ids=str)
def test_a_composition(lm, options, may, must, taken, positive):
    found = []
    for seed in range(20):
        settings = Settings(seed=seed, **options)
        chosen = choose(settings, SAMPLES)
        assert chosen == sorted(set(chosen)) == choose(settings, SAMPLES)
        assert set(must) <= set(chosen) <= set(may)
        rows, told = compose(settings, SAMPLES, lm, ())
        assert sorted(example.sample for row in rows for example in row) == chosen
        assert told["drawn"] == {"samples": 6, "positive": 3, "problems": 3}
        assert told["trained"]["samples"] == taken
        assert positive is None or told["trained"]["positive"] == positive
        assert (told["composition"], told["seed"]) == (
            options["composition"],
            settings.seed_of("composition 1"),
        )
        found += chosen
    assert set(found) == set(may)


def test_which_negatives_are_taken_is_uniform():
    samples, settings = (
        to_samples([1.0] + [-1.0] * 6),
        Settings(composition="anna_karenina", examples=3),
    )
    counts = Counter(
        i for seed in range(600) for i in choose(replace(settings, seed=seed), samples)
    )
    assert [counts[i] / 600 for i in range(7)] == pytest.approx(
        [1] + [1 / 3] * 6, abs=5 * (2 / 9 / 600) ** 0.5
    )


def test_iterations_choose_differently_and_seeds_too():
    settings, samples = (
        [Settings(examples=20, seed=seed) for seed in (0, 1)],
        to_samples([1.0] * 40),
    )
    assert len({tuple(choose(s, samples, number)) for s in settings for number in (1, 2)}) == 4


def test_iterations_draw_as_many_candidates_each_with_a_seed_of_its_own(tmp_path):
    """At a learning rate that leaves the model as it is."""
    few = {
        "problems": 2,
        "test_problems": 1,
        "curve_points": 1,
        "max_new_tokens": 32,
        "batch": 8,
        "iterations": 2,
    }
    results = experiment(
        tmp_path, composition="anna_karenina", candidates=6, examples=5, lr=1e-30, **few
    )
    assert {entry["dataset"]["drawn"]["samples"] for entry in results["iterations"]} == {2 * 6}
    one, two = (read_records(tmp_path / f"iteration-{i}" / "samples.jsonl", Sample) for i in (1, 2))
    assert [sample.prompt for sample in one] == [sample.prompt for sample in two]
    assert all(a.completion != b.completion for a, b in zip(one[:4], two, strict=False))


# Options, and the baseline of each sample: the mean reward is -1/5, that of the first prompt 1/3, of the second -1.
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
    samples = to_samples([1, 1, -1], [-1, -1])
    rows, told = compose(Settings(**options), samples, lm, ())
    found = {example.sample: example.reward for row in rows for example in row}
    assert [samples[i].reward - found[i] for i in range(5)] == pytest.approx(baselines)
    assert told["baseline"] == pytest.approx(sum(baselines) / 5)
