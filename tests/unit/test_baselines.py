"""The baseline of each sample that is trained on, and its mean in dataset.json."""

import json
from dataclasses import replace

import pytest

from toprlib.records import Example, InputError, Sample, Task
from toprlib.results import describe_dataset
from toprlib.settings import Settings
from train_gsm8k import choose, choose_baselines

REWARDS = {"a": (1.0, 1.0, -1.0), "b": (-1.0, -1.0)}


def make_samples():
    samples = []
    for prompt, rewards in REWARDS.items():
        samples += [Sample(prompt=prompt, completion="!", reward=reward) for reward in rewards]
    return samples


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 0, 0, 0, 0]),
        ({"baseline": -0.5}, [-0.5] * 5),
        ({"baseline_from": "mean"}, [-0.2] * 5),
        ({"baseline_from": "mean", "baseline": 0.5}, [0.3] * 5),
        ({"baseline_from": "group", "baseline": -0.1}, [1 / 3 - 0.1] * 3 + [-1.1] * 2),
        ({"effective_proportion": 0.5}, [-0.2] * 5),  # 2 * 1.2 of positives, 3 * 0.8 of negatives
    ],
    ids=str,
)
def test_baselines_add_up(options, expected):
    """The mean reward is -1/5; that of the first prompt is 1/3, and of the second -1."""
    assert choose_baselines(make_samples(), Settings(**options)) == pytest.approx(expected)


@pytest.mark.parametrize("chosen", [[0, 1], [2, 3, 4]])
def test_rewards_of_one_sign_have_no_effective_proportion(chosen):
    samples = [make_samples()[index] for index in chosen]
    assert choose_baselines(samples, Settings(effective_proportion=0.2)) == [0] * len(chosen)


def test_an_effective_proportion_is_for_rewards_of_plus_and_minus_one():
    samples = [*make_samples(), Sample(prompt="a", completion="!", reward=0.5)]
    with pytest.raises(InputError) as caught:
        choose_baselines(samples, Settings(effective_proportion=0.2))
    assert caught.value.option == "--effective-proportion"


def test_samples_that_are_not_chosen_have_no_part_in_the_mean(lm):
    samples = [Sample(prompt="1 + 1 =", completion=" 2", reward=r) for r in (1.0, -1.0, 0.5, -1.0)]
    settings = Settings(composition="positives_only", baseline_from="mean")
    rows = choose(1, samples, lm, Task("sums", [], [], grade=str), settings)
    assert {example.sample: example.reward for [example] in rows} == {0: 0.25, 2: -0.25}


def test_dataset_json_has_the_mean_baseline_of_the_chosen_samples(tmp_path):
    """Each chosen sample counts once, also if it is in several rows."""
    samples = make_samples()
    settings = replace(Settings(baseline_from="group"), out=tmp_path)
    baselines = {0: 1 / 3, 2: 1 / 3, 4: -1.0}  # of the chosen samples, by index
    examples = []
    for index, baseline in baselines.items():
        examples.append(Example([7], [8, 9], samples[index].reward - baseline, index))
    rows = [[example] for example in [*examples, examples[0], examples[0]]]
    describe_dataset(1, samples, rows, settings)
    content = json.loads((tmp_path / "iteration-1" / "dataset.json").read_text())
    assert content["baseline"] == pytest.approx((1 / 3 + 1 / 3 - 1) / 3)
    assert content["drawn"] == {"samples": 5, "positive": 2, "problems": 2}
    assert content["trained"] == {"samples": 3, "positive": 1, "problems": 2}
