"""The choice of learning rates."""

from dataclasses import replace

import pytest
from run_helpers import SMALL

from figures.common import METHODS
from figures.rates import SEED, best_rates, rate_arms, rate_grid, tried_rates
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
    names = ["topr", "dpo", "per-token"]
    jobs = rate_arms(LAPTOP, names)
    tried = [(job.columns["name"], job.columns["lr"]) for job in jobs]
    expected = []
    for name in names:
        expected += [(name, lr) for lr in rate_grid(LAPTOP, name)]
    assert sorted(tried) == sorted(expected)
    for job in jobs:
        assert job.task is held_out_task
        assert job.settings.seed == SEED
        assert job.settings.lr == job.columns["lr"]
        assert job.variant == ("per-token" if job.columns["name"] == "per-token" else None)


def test_rates_are_tried_on_the_samples_of_one_run():
    jobs = rate_arms(LAPTOP, ["ppo", "topr"])
    first = jobs[0]
    assert first.columns == {"name": "topr", "lr": 3e-6}
    assert all(job.samples_from == first for job in jobs[1:])


def test_a_single_rate_is_not_tried():
    assert rate_arms(PAPER, ["topr"]) == []
    assert best_rates(PAPER, ["topr"], {}) == {"topr": [5e-7]}


def finished(name, lr, correct):
    """A run on held-out problems that ends with a share of correct answers."""
    settings = replace(SMALL, seed=SEED, lr=lr)
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


def test_rates_are_chosen_on_problems_that_no_run_trains_or_tests_on():
    task = held_out_task(SMALL)
    usual = gsm8k_task(SMALL)
    assert [problem.id for problem in task.train] == [problem.id for problem in usual.train]
    held_out = {problem.question for problem in task.test}
    assert len(held_out) == HELD_OUT
    assert not held_out & {problem.question for problem in [*usual.train, *usual.test]}
    # So that this is true of the laptop's figures, too.
    assert LAPTOP.base.problems + HELD_OUT <= len(load_problems(SMALL.data, "train"))
