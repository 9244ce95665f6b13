"""Metrics of steps and epochs against numpy and closed forms; what a run prints."""

import json
import math
import re

import numpy as np
import pytest
import torch

from topr import Limits, StepStats
from toprlib import dataset, results
from toprlib.dataset import engine_mismatch, print_mismatch
from toprlib.files import to_lines, write_file
from toprlib.records import Example, Problem, Sample, Task
from toprlib.results import step_metrics, summarize_epoch
from toprlib.settings import Settings, print_plan


def random_step(size=40, seed=0):
    """Log-ratios, rewards of 0 and of both signs, and weights that belong to both."""
    generator = torch.Generator().manual_seed(seed)
    log_ratio = 4 * torch.randn(size, generator=generator, dtype=torch.float64)
    reward = torch.randint(-3, 5, (size,), generator=generator).double() / 2
    weight = log_ratio.exp().clamp(0, 1.5)
    return log_ratio, reward, weight


# ---- one step ------------------------------------------------------------------------------------
def test_distributions_are_those_of_numpy():
    log_ratio, reward, weight = random_step()
    actual = step_metrics(log_ratio, reward, weight)
    for sign, is_of_sign in (("pos", reward > 0), ("neg", reward < 0)):
        for name, values in (("log_ratio", log_ratio), ("weight", weight)):
            chosen = values[is_of_sign].numpy()
            assert actual[f"{name}_{sign}_mean"] == pytest.approx(chosen.mean())
            for level in (5, 50, 95):
                expected = np.percentile(chosen, level)
                assert actual[f"{name}_{sign}_q{level:02}"] == pytest.approx(expected)


def test_totals_by_hand():
    reward = torch.tensor([1.5, 0.5, -3.0, -1.0])
    weight = torch.tensor([1.0, 0.5, 0.25, 0.9e-6])
    actual = step_metrics(torch.zeros(4), reward, weight)
    assert actual["gradient_mass"] == pytest.approx(1.5 + 0.25 + 0.75)
    assert actual["realised_proportion"] == pytest.approx(1.75 / 2.5)
    assert actual["ess"] == pytest.approx(1.75**2 / (1 + 0.25 + 0.0625), rel=1e-5)
    assert actual["weights_below_1e-6"] == 1 / 4


def test_completions_with_reward_0_count_nowhere():
    """Fillers of a rank without completions; an unbounded weight of one may even be infinite."""
    actual = step_metrics(torch.zeros(2), torch.zeros(2), torch.ones(2))
    assert actual == {"weights_below_1e-6": 0, "ess": 0, "gradient_mass": 0}
    log_ratio, reward, weight = random_step()
    is_learned = reward != 0
    expected = step_metrics(log_ratio[is_learned], reward[is_learned], weight[is_learned])
    weight = torch.where(is_learned, weight, math.inf)
    log_ratio = torch.where(is_learned, log_ratio, 1000.0)
    assert 0 < is_learned.sum() < len(reward)
    assert step_metrics(log_ratio, reward, weight) == pytest.approx(expected)


# ---- the first step, and its line of metrics.jsonl -----------------------------------------------
def log(folder, log_ratio, step=1, **changes):
    """Log a step with rewards 1, -1, 1, ... and weights 0.25; returns its line."""
    log_ratio = torch.tensor(log_ratio)
    reward = torch.tensor([1.0, -1.0] * len(log_ratio))[: len(log_ratio)]
    stats = StepStats(0.5, 2.0, log_ratio, reward)
    file = folder / "metrics.jsonl"
    limits = Limits(0.25, 0.25, 0.25, 0.25)
    results.log_step(file, step, stats, limits, Settings(samples="own.jsonl", **changes))
    return json.loads(file.read_text().splitlines()[-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [-1.1, 1.1, math.nan, math.inf, -math.inf])
def test_training_that_does_not_start_at_mu_is_refused(tmp_path, dtype, factor):
    """With log mu of the samples it prints a warning, and logs the step."""
    log_ratio = [0.0, factor * results.START_TOLERANCE[dtype], 0.0]
    with pytest.raises(FloatingPointError):
        log(tmp_path, log_ratio, dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_given_log_mu_of_another_model_is_warned_about(tmp_path, capsys):
    assert log(tmp_path, [0.0, 1.4], trust_logmu=True)["step"] == 1
    assert capsys.readouterr().out.startswith("warning: ")
    log(tmp_path, [0.0, 0.009], trust_logmu=True)
    log(tmp_path, [0.0, 1.4], step=2, trust_logmu=True)
    assert capsys.readouterr().out == ""


# ---- one epoch -----------------------------------------------------------------------------------
def test_only_the_realised_proportion_is_weighted_by_gradient_mass():
    steps = [
        {"gradient_mass": 9.0, "realised_proportion": 0.2, "weight_neg_mean": 0.9},
        {"gradient_mass": 1.0, "realised_proportion": 0.7, "weight_neg_mean": 0.1},
    ]
    actual = summarize_epoch(steps)
    assert actual["realised_proportion"] == pytest.approx((9 * 0.2 + 1 * 0.7) / 10)
    assert actual["weight_neg_mean"] == pytest.approx(0.5)


def test_log_ratios_are_averaged_over_the_last_tenth():
    """Of 21 steps, the last three."""
    steps = [{"log_ratio_pos_mean": n**2, "log_ratio_neg_mean": -n} for n in range(21)]
    actual = summarize_epoch(steps)
    assert actual["log_ratio_pos_mean"] == pytest.approx((18**2 + 19**2 + 20**2) / 3, abs=5e-4)
    assert actual["log_ratio_neg_mean"] == -19


def test_steps_without_a_metric_do_not_count_in_its_mean():
    steps = [{"weight_neg_mean": 0.5}, {}, {"weight_neg_mean": 0.25}, {}]
    actual = summarize_epoch(steps)
    assert actual["weight_neg_mean"] == 0.375
    assert actual["realised_proportion"] is None


# ---- the dataset of an iteration -----------------------------------------------------------------
def write_dataset(folder):
    """Five samples of two prompts, three of them trained on, one in three rows.

    Of the engine's log mu, samples 0, 2 and 4 have -2, -2 and -3; the trainer's differ.
    """
    rewards = [("a", 1.0), ("a", 1.0), ("a", -1.0), ("b", -1.0), ("b", -1.0)]
    samples = []
    for prompt, reward in rewards:
        samples.append(Sample(prompt=prompt, completion="!", reward=reward))
    baselines = {0: 1 / 3, 2: 1 / 3, 4: -1.0}
    examples = []
    for index, baseline in baselines.items():
        reward = samples[index].reward - baseline
        ids = [8] * (2 + index // 4)
        logmu = [-1.0, -1.5] if index == 0 else [-1.0] * len(ids)
        examples.append(Example([7], ids, reward, index, 0, logmu, -float(len(ids))))
    write_file(folder / "iteration-1" / "samples.jsonl", to_lines(samples))
    rows = [*examples, examples[0], examples[0]]
    write_file(folder / "iteration-1" / "train.jsonl", to_lines(rows))


def test_a_sample_counts_once_in_the_dataset(tmp_path):
    write_dataset(tmp_path)
    content = results.describe_dataset(1, Settings(out=tmp_path))
    assert content["baseline"] == pytest.approx((1 / 3 + 1 / 3 - 1) / 3)
    assert content["drawn"] == {"samples": 5, "positive": 2, "problems": 2}
    assert content["trained"] == {"samples": 3, "positive": 1, "problems": 2}
    assert content["engine_mismatch"] == pytest.approx(0.5 / 7)  # of one of seven tokens


@pytest.mark.parametrize(
    ("difference", "is_warned"), [(0.21, True), (-0.21, True), (0.19, False), (math.nan, True)]
)
def test_an_engine_is_warned_about_above_a_bound_for_a_token(capsys, difference, is_warned):
    """Two completions with ten tokens; the engine's log mu less the trainer's is `difference`."""
    first = Example([5], [2] * 3, 1.0, 0, 0, [-1.0] * 3, -3 + 2 * difference)
    examples = [first, Example([5], [2] * 7, 1.0, 1, 1, [-1.0] * 7, -7 - difference)]
    expected = pytest.approx(difference / 10, nan_ok=True)
    assert engine_mismatch(examples) == expected
    print_mismatch(1, examples)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(warnings) == is_warned


def test_the_dataset_is_counted(capsys):
    """Of 40 rewards nine are positive and five are 0; a tenth of the samples is cut."""
    rewards = [0.5] * 9 + [-2.0] * 26 + [0.0] * 5
    examples = [Example([5], [2], reward, 0) for reward in rewards]
    fields = {"prompt": "", "completion": "", "reward": 1.0}
    reasons = ["length"] + ["stop"] * 9
    samples = [Sample(**fields, finish_reason=reason) for reason in reasons]
    dataset.print_dataset(1, samples, examples)
    line = capsys.readouterr().out
    assert re.findall(r"[0-9.]+", line) == ["1", "40", "10", "10.0", "22.5"]


# ---- the plan ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "provided", "expected"),
    [
        ({"n": 8, "iterations": 3, "examples": 500}, 0, [800, 32, 10 * (17 + 3 * (3 * 5 + 17))]),
        ({"n": 8, "epochs": 2, "evaluate_after": ()}, 0, [800, 100, 10 * 2 * 17]),
        ({"samples": "own.jsonl", "examples": 5000}, 1000, [1000, 63, 10 * (2 * 17 + 3 * 5)]),
        ({"iterations": 0, "batch_size": 7, "n": 1}, 0, [100, 15, 10 * 17]),
    ],
)
def test_the_plan_counts_what_a_run_samples_and_trains(capsys, changes, provided, expected):
    problems = [Problem("?")] * 100
    task = Task("sums", problems, problems[:10], grade=zip)
    print_plan(Settings(**changes), task, provided)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[-1].replace(",", "")) for line in lines] == expected
