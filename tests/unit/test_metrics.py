"""Metrics of steps and epochs against numpy, closed forms and Equation 12; checks of log mu."""

import math
import re
import warnings

import numpy as np
import pytest
import torch

from topr import effective_proportion
from toprlib import results
from toprlib.files import to_lines, write_file
from toprlib.metrics import (
    START_TOLERANCE,
    check_given_logmu,
    check_start_ratio,
    engine_mismatch,
    step_metrics,
    summarize_epoch,
)
from toprlib.records import Example, Sample
from toprlib.settings import Settings


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
    log_ratio = torch.zeros(4)
    reward = torch.tensor([1.5, 0.5, -3.0, -1.0])
    weight = torch.tensor([1.0, 0.5, 0.25, 0.0])
    actual = step_metrics(log_ratio, reward, weight)
    assert actual["gradient_mass"] == pytest.approx(1.5 + 0.25 + 0.75 + 0)
    assert actual["realised_share"] == pytest.approx(1.75 / 2.5)
    assert actual["ess"] == pytest.approx(1.75**2 / (1 + 0.25 + 0.0625))
    assert actual["weights_below_1e-6"] == 1 / 4


def test_a_weight_is_negligible_below_a_millionth():
    weight = torch.tensor([2e-6, 1.1e-6, 0.9e-6])
    actual = step_metrics(torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), weight)
    assert actual["weights_below_1e-6"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("positives", "c"), [(3, 0.0), (3, -0.5), (7, 0.4)])
def test_the_realised_share_of_equal_weights_is_equation_12(positives, c):
    size = 10
    reward = torch.where(torch.arange(size) < positives, 1.0, -1.0) - c
    actual = step_metrics(torch.zeros(size), reward, torch.ones(size))
    assert actual["realised_share"] == pytest.approx(effective_proportion(positives / size, c))
    assert actual["ess"] == pytest.approx(size)


def test_completions_with_reward_0_count_nowhere():
    """Fillers of a rank without completions; an unbounded weight of one may even be infinite."""
    log_ratio, reward, weight = random_step()
    is_learned = reward != 0
    expected = step_metrics(log_ratio[is_learned], reward[is_learned], weight[is_learned])
    weight = torch.where(is_learned, weight, math.inf)
    log_ratio = torch.where(is_learned, log_ratio, 1000.0)
    assert 0 < is_learned.sum() < len(reward)
    assert step_metrics(log_ratio, reward, weight) == pytest.approx(expected)


def test_a_loss_without_weights_has_metrics_of_log_ratios_alone():
    log_ratio, reward, weight = random_step()
    with_weights = step_metrics(log_ratio, reward, weight)
    expected = {name: v for name, v in with_weights.items() if name.startswith("log_ratio")}
    assert step_metrics(log_ratio, reward, None) == expected
    assert len(expected) == 8


def test_a_sign_without_completions_has_no_metrics():
    actual = step_metrics(torch.zeros(2), torch.tensor([0.0, -1.0]), torch.tensor([1.0, 0.5]))
    assert [name for name in actual if "pos" in name] == []
    assert actual["weight_neg_mean"] == 0.5
    assert actual["realised_share"] == 0


def test_a_step_that_learns_nothing_has_totals_of_0():
    actual = step_metrics(torch.zeros(2), torch.zeros(2), torch.ones(2))
    assert actual == {"weights_below_1e-6": 0, "ess": 0, "gradient_mass": 0}


# ---- one epoch -----------------------------------------------------------------------------------
def test_only_the_realised_share_is_weighted_by_gradient_mass():
    steps = [
        {"gradient_mass": 9.0, "realised_share": 0.2, "weight_neg_mean": 0.9},
        {"gradient_mass": 1.0, "realised_share": 0.7, "weight_neg_mean": 0.1},
    ]
    actual = summarize_epoch(steps)
    assert actual["realised_share"] == pytest.approx((9 * 0.2 + 1 * 0.7) / 10)
    assert actual["weight_neg_mean"] == pytest.approx(0.5)


def test_log_ratios_are_averaged_over_the_last_tenth():
    """21 steps have tenths of two steps, and a last one of three."""
    steps = [{"log_ratio_pos_mean": n**2, "log_ratio_neg_mean": -n} for n in range(21)]
    actual = summarize_epoch(steps)
    assert actual["log_ratio_pos_mean"] == pytest.approx((18**2 + 19**2 + 20**2) / 3, abs=5e-4)
    assert actual["log_ratio_neg_mean"] == -19
    expected = [-0.5, -2.5, -4.5, -6.5, -8.5, -10.5, -12.5, -14.5, -16.5, -19]
    assert actual["tenths"]["log_ratio_neg_mean"] == expected


def test_steps_without_a_metric_do_not_count_in_its_mean():
    steps = [{"weight_neg_mean": 0.5}, {}, {"weight_neg_mean": 0.25}, {}]
    actual = summarize_epoch(steps)
    assert actual["weight_neg_mean"] == 0.375
    assert actual["tenths"]["weight_neg_mean"] == [0.5, None, 0.25, None]
    assert actual["realised_share"] is None


def test_means_are_rounded_to_three_decimals():
    assert summarize_epoch([{"weight_neg_mean": 0.123456}])["weight_neg_mean"] == 0.123


# ---- checks of log mu ----------------------------------------------------------------------------
@pytest.mark.parametrize("value", [-0.02, 0.02, math.nan, math.inf, -math.inf])
def test_training_that_does_not_start_at_mu_is_refused(value):
    with pytest.raises(ArithmeticError):
        check_start_ratio(1, torch.tensor([0.0, value, 0.0]), "float32")


def test_each_dtype_has_its_own_tolerance():
    log_ratio = torch.tensor([0.0, -1.6])  # measured in bfloat16
    assert START_TOLERANCE["float32"] < 1.6 < START_TOLERANCE["bfloat16"]
    check_start_ratio(1, log_ratio, "bfloat16")
    with pytest.raises(ArithmeticError):
        check_start_ratio(1, log_ratio, "float32")


def test_a_model_that_has_not_moved_by_step_2_is_warned_about():
    with pytest.warns(UserWarning, match="log-ratio"):
        check_start_ratio(2, torch.zeros(3), "float32")


@pytest.mark.parametrize(
    ("step", "log_ratio"), [(1, [1e-3, -1e-3]), (2, [0.0, 1e-9]), (2, [5.0]), (3, [0.0])]
)
def test_usual_training_passes_the_checks(step, log_ratio):
    check_start_ratio(step, torch.tensor(log_ratio), "float32")


GIVEN = [  # step, log-ratios, rewards, dtype, whether there is a warning
    (1, [-1.4, -1.2], [1.0, -1.0], "float32", True),
    (1, [1.4, 1.2], [1.0, -1.0], "float32", True),
    (1, [-1.4, -1.2], [1.0, -1.0], "bfloat16", False),
    (1, [-45.0, -46.0, 45.0], [1.0, -1.0, 2.0], "bfloat16", True),
    (1, [math.nan, 0.0], [1.0, -1.0], "float32", True),
    (1, [5.0, -5.5], [1.0, -1.0], "float32", False),  # far apart, but 0.25 in the mean
    (1, [0.0, 9.0], [1.0, 0.0], "float32", False),  # the second is not trained on
    (1, [9.0], [0.0], "float32", False),
    (2, [-45.0], [1.0], "float32", False),
]


@pytest.mark.parametrize(("step", "log_ratio", "reward", "dtype", "is_warned"), GIVEN)
def test_given_logmu_that_is_not_that_of_the_model(step, log_ratio, reward, dtype, is_warned):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_given_logmu(step, torch.tensor(log_ratio), torch.tensor(reward), dtype)
    assert len(caught) == is_warned


def test_the_mismatch_is_the_engine_minus_the_trainer():
    engine = {4: -10.0, 2: -20.0, 7: -30.0}
    trainer = {7: -29.0, 2: -20.5, 4: -13.0}  # in another order
    actual = engine_mismatch(engine, trainer)
    differences = [3.0, 0.5, -1.0]
    assert actual["mean"] == pytest.approx(2.5 / 3)
    assert actual["largest"] == 3.0
    for level in (5, 50, 95):
        assert actual[f"q{level:02}"] == pytest.approx(np.percentile(differences, level))


def test_the_largest_mismatch_may_be_negative():
    assert engine_mismatch({1: -8.0, 2: 0.0}, {1: -2.0, 2: -1.0})["largest"] == 6.0


def report_lines(folder, capsys, trainer):
    """What is printed about an engine, whose log mu of the samples 0 and 2 is -3 and -7.

    trainer: index of a sample -> its log mu by the trainer. Sample 1 was not chosen.
    """
    samples = []
    for length in (3, 5, 7):
        engine = None if trainer is None else [-1.0] * length
        samples.append(
            Sample(prompt="", completion="", token_ids=[2] * length, token_logmu_engine=engine)
        )
    examples = []
    for index, logmu in (trainer or {0: 0.0}).items():
        examples.append(Example([5], [2], 1.0, index, index, [logmu - 1.0, 1.0]))
    write_file(folder / "iteration-1" / "samples.jsonl", to_lines(samples))
    write_file(folder / "iteration-1" / "train.jsonl", to_lines(examples))
    results.report_mismatch(1, Settings(out=folder))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("trainer", [{2: -7.2, 0: -2.92}, {2: -6.8, 0: -3.08}])
def test_an_engine_is_warned_about_above_a_bound_for_a_token(tmp_path, capsys, trainer):
    """The two completions have ten tokens, with 0.012 nats each, or -0.012."""
    numbers, warning = report_lines(tmp_path, capsys, trainer)
    differences = [-3 - trainer[0], -7 - trainer[2]]
    printed = [float(number) for number in re.findall(r"(?:mean|q05|q95) ([^,]+)", numbers)]
    expected = [np.mean(differences), *np.percentile(differences, [5, 95])]
    assert printed == pytest.approx(expected, abs=0.005)
    assert str(results.MISMATCH_TOLERANCE) in warning


def test_an_engine_within_the_bound_or_without_log_mu_is_not_warned_about(tmp_path, capsys):
    assert len(report_lines(tmp_path, capsys, {2: -7.28, 0: -2.8})) == 1  # 0.008 a token
    assert report_lines(tmp_path, capsys, None) == []
