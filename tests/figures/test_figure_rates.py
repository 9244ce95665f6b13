"""The choice of learning rates."""

from dataclasses import replace

import pytest
from run_helpers import SMALL

from figures.common import METHODS
from figures.rates import best_rates, rate_arms, rate_grid, tried_rates
from figures.run import FIGURES, load_figure
from figures.runs import Job, Run
from figures.scales import HELD_OUT, LAPTOP, PAPER, held_out_task
from train_gsm8k import gsm8k_task, load_problems


def test_methods_with_a_cliff_try_finer_rates():
    plain = [3e-6, 1e-5, 3e-5, 1e-4, 3e-4]
    finer = [3e-6, 1e-5, 1.8e-5, 3e-5, 5.5e-5, 1e-4, 3e-4]
    grids = {name: rate_grid(LAPTOP, name) for name in METHODS}
    assert grids == dict.fromkeys(METHODS, plain) | {"reinforce": finer, "dpo": finer}
    assert rate_grid(LAPTOP, "sgd") == pytest.approx([0.03, 0.1, 0.3, 1, 3])


def test_each_name_is_tried_once_at_each_rate_of_its_grid():
    names = ["topr", "dpo", "per-token", "positives_only"]
    jobs = rate_arms(LAPTOP, names, range(100, 101))
    tried = [(job.columns["name"], job.columns["lr"]) for job in jobs]
    expected = []
    for name in names:
        expected += [(name, lr) for lr in rate_grid(LAPTOP, name)]
    assert sorted(tried) == sorted(expected)
    for job in jobs:
        assert job.task is held_out_task
        assert job.settings.seed == 100
        assert job.settings.lr == job.columns["lr"]
        name = job.columns["name"]
        assert job.variant == ("per-token" if name == "per-token" else None)
        is_positive = job.settings.composition == "positives_only"
        assert is_positive == (name == "positives_only")


def test_rates_are_tried_on_the_samples_of_one_run():
    jobs = rate_arms(LAPTOP, ["ppo", "topr"], range(100, 102))
    assert len(jobs) == 2 * 2 * 5
    assert {job.settings.seed for job in jobs} == {100, 101}
    for job in jobs:
        is_first = job.columns == {"name": "topr", "lr": 3e-6}
        if is_first:
            assert job.samples_from is None
        else:
            assert job.samples_from.columns == {"name": "topr", "lr": 3e-6}
            assert job.samples_from.settings.seed == job.settings.seed


def test_figures_at_own_rates_choose_them_by_three_seeds():
    for name in FIGURES:
        has_own_rates = name in ("fig4", "fig8", "robustness")
        expected = [100, 101, 102] if has_own_rates else [100]
        assert list(load_figure(name).rate_seeds) == expected, name


@pytest.mark.parametrize("name", ["fig4", "fig8"])
def test_positives_only_and_as_many_steps_have_rates_of_their_own(name):
    assert set(load_figure(name).tuned(LAPTOP)) == {"topr", "sft", "positives_only"}


def test_a_single_rate_is_not_tried():
    assert rate_arms(PAPER, ["topr"], range(100, 103)) == []
    assert best_rates(PAPER, ["topr"], {}) == {"topr": [5e-7]}


def finished(name, lr, correct, seed=100):
    """A run on held-out problems that ends with a share of correct answers."""
    settings = replace(SMALL, seed=seed, lr=lr)
    job = Job({"name": name, "lr": lr}, "rate", settings, held_out_task)
    curve = [{"correct": 0.5}, {"correct": correct}]
    iteration = {"dataset": {"steps": 1}, "curve": curve, "after": curve[-1]}
    return Run(job, None, {"before": curve[0], "iterations": [iteration]})


def test_rates_are_ranked_by_accuracy_at_the_end():
    runs = [
        finished("topr", 3e-6, 0.55),  # its samples are the others'
        finished("ppo", 1e-5, 0.75),
        finished("ppo", 3e-5, 0.875),
        finished("ppo", 1e-4, 0.25),
        finished("tis", 1e-5, 0.5),
        finished("tis", 3e-5, 0.5),
    ]
    tried = tried_rates(["ppo", "tis"], runs)
    assert tried["ppo"] == {1e-5: 0.75, 3e-5: 0.875, 1e-4: 0.25}
    ranked = best_rates(LAPTOP, ["ppo", "tis"], tried)
    assert ranked["ppo"] == [3e-5, 1e-5, 1e-4]
    assert ranked["tis"][:2] == [1e-5, 3e-5]  # the smaller one of equally good rates


def test_rates_are_ranked_by_the_mean_over_seeds():
    # The seeds choose 1e-5, 3e-5 and 1e-4. The means are 0.5, 0.625 and 0.6875.
    correct = {1e-5: [0.75, 0.5, 0.25], 3e-5: [0.625, 0.75, 0.5], 1e-4: [0.6875, 0.5, 0.875]}
    runs = []
    for lr, values in correct.items():
        runs += [finished("topr", lr, value, 100 + i) for i, value in enumerate(values)]
    tried = tried_rates(["topr"], runs)
    assert tried == {"topr": {1e-5: 0.5, 3e-5: 0.625, 1e-4: 0.6875}}
    assert best_rates(LAPTOP, ["topr"], tried) == {"topr": [1e-4, 3e-5, 1e-5]}


@pytest.mark.parametrize("samples", [None, "samples.jsonl"])
def test_rates_are_chosen_on_problems_that_no_run_trains_or_tests_on(samples):
    task = held_out_task(replace(SMALL, samples=samples))
    usual = gsm8k_task(SMALL)
    assert [problem.id for problem in task.train] == [problem.id for problem in usual.train]
    held_out = {problem.question for problem in task.test}
    assert len(held_out) == HELD_OUT
    assert not held_out & {problem.question for problem in [*usual.train, *usual.test]}
    # So that this is true of the laptop's figures, too.
    assert LAPTOP.base.problems + HELD_OUT <= len(load_problems(SMALL.data, "train"))
