"""Jobs, the runs that they make, and what is read from a run's files."""

import json
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from run_helpers import SMALL
from unit_helpers import random_examples, tiny_llama

import figures.runs
import topr
from figures.common import VARIANTS as VARIANT_ARMS
from figures.rates import best_rates, rate_arms
from figures.run import FIGURES, ON_MATH, load_figure, total_cost
from figures.runs import (
    Job,
    Run,
    check_job,
    folder_name,
    in_seeds,
    make_run,
    make_runs,
    measurements,
    parallel_map,
    settings_in,
    with_shared_samples,
)
from figures.scales import LAPTOP, PAPER, PAPER_MATH, QUICK, held_out_task
from tasks.math import math_task
from tasks.verifier import WEIGHTED
from topr_conformance import VARIANTS
from toprlib.batches import collate
from toprlib.records import InputError
from toprlib.settings import read_settings
from train_gsm8k import PRESETS, gsm8k_task

JOB = Job({"method": "topr"}, "topr", SMALL, gsm8k_task)


def arms_of(name, scale, seeds):
    """All runs of a figure, with the learning rates that it takes if none was tried."""
    figure = load_figure(name)
    return figure.arms(scale, best_rates(scale, figure.tuned(scale), {}), seeds)


# ---- jobs ----


def test_folders_differ_with_everything_that_a_run_depends_on():
    jobs = [
        JOB,
        replace(JOB, task=held_out_task),
        replace(JOB, variant="per-token"),
        replace(JOB, settings=replace(SMALL, lr=1.0)),
        replace(JOB, settings=replace(SMALL, seed=1)),
    ]
    assert len({folder_name(job) for job in jobs}) == len(jobs)


def test_folders_do_not_differ_with_figures_and_places():
    settings = replace(SMALL, out=Path("here"))
    same = replace(JOB, columns={}, settings=settings, samples_from=JOB)
    assert folder_name(same) == folder_name(JOB)


def test_runs_of_a_seed_train_on_the_samples_of_its_first_run(tmp_path):
    other = replace(JOB, label="other", settings=replace(SMALL, lr=1.0))
    first, second, again = with_shared_samples([JOB, other, JOB])
    assert first.samples_from is None
    assert second.samples_from == JOB
    assert again.samples_from is None  # it is the first run, which another arm has too
    seven, eight = in_seeds([second], [7, 8])
    assert [job.settings.seed for job in (seven, eight)] == [7, 8]
    assert [job.samples_from.settings.seed for job in (seven, eight)] == [7, 8]
    first_run = settings_in(tmp_path, eight.samples_from).out
    expected = first_run / "iteration-1" / "samples.jsonl"
    assert settings_in(tmp_path, eight).samples == str(expected)


@pytest.mark.parametrize("scale", [LAPTOP, PAPER])
@pytest.mark.parametrize("name", FIGURES)
def test_samples_are_those_of_a_run_of_the_same_figure(name, scale):
    jobs = arms_of(name, scale, range(2))
    folders = {folder_name(job) for job in jobs}
    for job in jobs:
        if job.samples_from is not None:
            assert folder_name(job.samples_from) in folders
            assert job.samples_from.samples_from is None
            assert job.samples_from.settings.seed == job.settings.seed


@pytest.mark.parametrize("name", FIGURES)
def test_every_run_can_be_made_where_its_samples_lie(name, tmp_path):
    figure = load_figure(name)
    rate_jobs = rate_arms(LAPTOP, figure.tuned(LAPTOP), range(1))
    distinct_tasks = {}
    for job in [*rate_jobs, *arms_of(name, LAPTOP, range(1))]:
        settings = settings_in(tmp_path, job)
        check_job(replace(job, settings=settings), 1, name)  # raises if it cannot
        distinct_tasks[job.task, settings.samples is None] = settings
    for (task, _), settings in distinct_tasks.items():
        assert len(task(settings).test) > 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("fig1", 5),
        ("fig3", 5),
        ("fig4", 5),
        ("fig5", 5),
        ("fig8", 5),
        ("robustness", 5),
        ("fig7", 3),
        ("fig9", 3),
    ],
)
def test_runs_that_decide_a_claim_have_more_seeds(name, count):
    assert {job.settings.seed for job in arms_of(name, LAPTOP, range(3))} == set(range(count))
    assert {job.settings.seed for job in arms_of(name, LAPTOP, range(2, 11))} == set(range(2, 11))
    assert {job.settings.seed for job in arms_of(name, QUICK, range(1))} == {0}


def test_only_runs_that_decide_have_more_seeds():
    seeds = {}
    for job in arms_of("fig6", LAPTOP, range(3)):
        arm = (job.columns["method"], job.columns["p_tilde"])
        seeds.setdefault(arm, []).append(job.settings.seed)
    counts = {0.01: 13, 0.1: 8, 0.2: 3, 0.5: 3, 0.8: 3, 1.0: 3}
    for (method, p_tilde), of_arm in seeds.items():
        assert of_arm == list(range(counts[p_tilde])), (method, p_tilde)
    assert len(seeds) == 2 * len(counts)
    late = [job for job in arms_of("robustness", LAPTOP, range(3)) if "late" in job.label]
    assert {job.settings.seed for job in late} == {0, 1, 2}


OWN_RATES = [
    ("fig4", {"topr": "topr", "positives_only": "positives_only", "sft": "sft"}),
    (
        "fig8",
        {
            "uniform": "topr",
            "anna_karenina": "topr",
            "its_positives": "sft",
            "positives_only": "positives_only",
        },
    ),
]


@pytest.mark.parametrize(("name", "method_of"), OWN_RATES)
def test_each_arm_has_a_run_at_topr_s_two_best_rates_and_at_its_own(name, method_of):
    rates = {"topr": [3e-5, 1e-4, 1e-5], "sft": [1e-4, 3e-5], "positives_only": [3e-4, 1e-4]}
    jobs = load_figure(name).arms(LAPTOP, rates, range(1))
    jobs = [job for job in jobs if job.settings.seed == 0]
    actual = {}
    for job in jobs:
        actual[job.columns["rate"], job.columns["arm"]] = job.settings.lr
        assert job.columns["lr"] == job.settings.lr
    expected = {}
    for arm, method in method_of.items():
        expected["best rate", arm] = 3e-5
        expected["second best rate", arm] = 1e-4
        expected["own rate", arm] = rates[method][0]
    assert actual == expected
    assert len(jobs) == len(expected)
    # Only `positives only` has a rate that TOPR has not: all other runs of its column are shared.
    assert len({folder_name(job) for job in jobs}) == 2 * len(method_of) + 1


# Runs of a seed at the paper's scale, counted from the docstrings: Figure 1 has eight methods, and
# one learning rate for all; Figures 5 and 6 eight p~ on two sets or of two methods; Figure 9
# measures difficulty twice.
RUNS_OF_THE_PAPER = {
    "fig1": 8,
    "fig2": 0,
    "fig3": 4,
    "fig4": 3,
    "fig5": 2 * 8,
    "fig6": 2 * 8,
    "fig7": 2 * 2,
    "fig8": 4 + 2,
    "fig9": 8 + 2,
    "table2": 1,
    "robustness": 3 * 7,
    "variants": 4,
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_paper_s_figures_have_all_runs_and_eight_processes_can_make_them(name):
    jobs = {folder_name(job): job for job in arms_of(name, PAPER, range(3))}
    count = RUNS_OF_THE_PAPER[name]
    expected = dict.fromkeys(range(3), count) if count else {}
    assert Counter(job.settings.seed for job in jobs.values()) == expected
    for job in jobs.values():
        check_job(job, 8, name)  # raises if they cannot


@pytest.mark.parametrize("name", ON_MATH)
def test_figures_on_math_have_its_task_data_and_prompt(name):
    for job in arms_of(name, PAPER_MATH, range(1)):
        assert job.task is math_task
        assert job.settings.data == "EleutherAI/hendrycks_math"
        assert job.settings.shots == 4


def test_the_paper_s_epoch_over_all_samples_is_a_command():
    changes = "--iterations 1 --examples None --evals-per-epoch 5"
    settings = read_settings(f"paper {changes}".split(), PRESETS)
    assert replace(settings, out=None) == PAPER.base


# ---- reading runs ----


def results(curve, estimates):
    """results.json of two iterations; estimates: before and after each."""
    before, first, second = [{"maj@4": {"mean": value, "se": 0.01}} for value in estimates]
    shares = [{"correct": value} for value in curve]
    iteration = {"dataset": {"steps": 7}, "curve": shares, "after": first}
    return {"before": shares[0] | before, "iterations": [iteration, {"after": second}]}


def test_shares_are_read_along_the_first_iteration_and_estimates_after_each():
    run = Run(JOB, Path("none"), results([0.1, 0.2, 0.3], [0.4, 0.5, 0.6]))
    table = measurements([run], lambda run: {"more": [run.last_step]})
    assert table.query("metric == 'correct'")["value"].tolist() == [0.1, 0.2, 0.3]
    assert table.query("metric == 'maj@4'")["value"].tolist() == [0.4, 0.5, 0.6]
    assert table.query("metric == 'more'")["value"].tolist() == [7]
    assert table.query("metric == 'maj@4'")["point"].tolist() == [0, 1, 2]
    assert set(table["method"]) == {"topr"}
    assert set(table["seed"]) == {SMALL.seed}


def test_tenths_are_means_and_leave_out_steps_without_a_number(tmp_path):
    steps = [{"norm": float(step)} for step in range(20)]
    steps[3] = {}
    (tmp_path / "iteration-1").mkdir()
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    (tmp_path / "iteration-1" / "metrics.jsonl").write_text(lines)
    run = Run(JOB, tmp_path, {})
    assert run.tenths("norm") == [0.5, 2.0, *(2 * i + 0.5 for i in range(2, 10))]


def test_the_cost_of_a_run_that_did_not_write_it_is_unknown(tmp_path):
    run = Run(JOB, tmp_path, {"versions": {"torch": "2"}})
    no_times = {"start": None, "end": None, "versions": {"torch": "2"}}
    assert run.cost() == {"seconds": 0.0, "commit": "unknown", **no_times}
    # A file of an earlier version.
    (tmp_path / "made.json").write_text('{"seconds": 2.5, "commit": "abc"}')
    assert run.cost() == {"seconds": 2.5, "commit": "abc", **no_times}


def finished_run(folder, **made):
    """A finished run with these entries in its made.json."""
    folder.mkdir()
    (folder / "made.json").write_text(json.dumps({"seconds": 30.0, "commit": "abc", **made}))
    return Run(JOB, folder, {"versions": {"torch": "2"}})


def test_the_times_of_a_figure_are_those_of_its_first_and_its_last_run(tmp_path):
    night = "2026-11-25T23:59:58+00:00"
    morning = "2026-11-26T07:00:00+00:00"
    noon = "2026-11-26T12:00:00+00:00"
    first = finished_run(tmp_path / "first", start=night, end=noon)
    second = finished_run(tmp_path / "second", start=morning, end=morning)
    total = total_cost([second, first, second])
    assert (total["start"], total["end"]) == (night, noon)
    assert total["runs"] == 2
    assert total["core_minutes"] == 1.0
    without = finished_run(tmp_path / "without")
    total = total_cost([first, without])
    assert (total["start"], total["end"]) == (None, None)
    total = total_cost([])
    assert (total["start"], total["end"]) == (None, None)


def test_a_run_records_its_times_and_the_commit_at_its_start(tmp_path, monkeypatch):
    head = "before"

    def train(job, settings):
        nonlocal head
        head = "after"
        settings.out.mkdir()
        time.sleep(1.1)

    monkeypatch.setattr(figures.runs, "train", train)
    monkeypatch.setattr(figures.runs, "commit", lambda: head)
    begin = datetime.now(UTC).replace(microsecond=0)
    make_run(JOB, tmp_path)
    made = json.loads((settings_in(tmp_path, JOB).out / "made.json").read_text())
    assert made["commit"] == "before"
    start, end = (datetime.fromisoformat(made[name]) for name in ("start", "end"))
    assert start.utcoffset() == end.utcoffset() == timedelta(0)
    assert begin <= start < end <= datetime.now(UTC)
    assert 0 <= made["seconds"] < 1  # the processor's, not the clock's


# ---- making runs ----


@pytest.mark.slow
def test_two_workers_make_what_one_makes(tmp_path):
    small = replace(QUICK.verifier, problems=4, test_problems=3, n=2, eval_samples=2, iterations=1)
    jobs = arms_of("table2", replace(QUICK, verifier=small), range(2))
    with parallel_map(2) as map_jobs:
        first, second = make_runs(jobs, tmp_path / "two", map_jobs)
        wrong = replace(JOB, settings=replace(SMALL, lr=-1.0))
        with pytest.raises(InputError):
            make_runs([wrong], tmp_path / "two", map_jobs)
    [alone] = make_runs(jobs[:1], tmp_path / "one", map)
    assert alone.results["table2"] == first.results["table2"]
    assert first.results["table2"] != second.results["table2"]
    assert not list(tmp_path.rglob("model.safetensors"))  # large, and already evaluated

    findings = load_figure("table2").read([first, second], QUICK)
    gains = []
    for run in (first, second):
        gains.append(run.results["paired differences"][f"{WEIGHTED}, topr - maj@4"]["mean"])
    actual = findings.shares[f"checker, TOPR - no verifier: {WEIGHTED}"].each
    assert actual == pytest.approx(gains)


@pytest.mark.parametrize("name", VARIANT_ARMS)
def test_a_variant_is_trained_with_its_own_gradient(name):
    """The gradient that reaches the weights in one step of `topr.train`."""
    model = tiny_llama()
    mu = tiny_llama(seed=1)
    batch = collate(random_examples(3, 2, seed=1))
    with torch.no_grad():
        # Higher than those of mu, so that ratios are below 1, where the losses differ.
        batch = batch._replace(token_logmu=topr.token_logprobs(mu, batch) + 0.5)
    weights = list(model.parameters())

    def gradient(loss):
        token_logp = topr.token_logprobs(model, batch)
        inputs = (token_logp, batch.token_logmu, batch.reward, batch.mask)
        return torch.autograd.grad(loss(*inputs, denominator=6), weights)

    expected = gradient(VARIANTS[name])
    paper = gradient(topr.topr_loss)
    before = [weight.detach().clone() for weight in weights]
    sgd = torch.optim.SGD(weights, lr=1.0)
    [stats] = topr.train(model, sgd, [([batch], 6)], VARIANTS[name], None, max_grad_norm=1e9)
    assert stats.weight is None
    is_paper = []
    for weight, old, own, other in zip(weights, before, expected, paper, strict=True):
        torch.testing.assert_close(old - weight.detach(), own, rtol=1e-6, atol=1e-9)
        is_paper.append(torch.allclose(own, other, rtol=1e-2))
    assert not all(is_paper)
