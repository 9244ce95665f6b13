"""Samples that a user brings: six samples written by hand, and samples with tokens of their own.

tests/runs/test_inputs.py has the samples that are refused, tests/unit/test_dataset.py their tokens.
"""

import pytest
from helpers import ROOT

import train_gsm8k as gsm8k
from toprlib.settings import Settings

SIX_SAMPLES = ROOT / "examples" / "six_samples.jsonl"


def run(out, file=SIX_SAMPLES, **changes):
    settings = Settings(samples=str(file), test_problems=0, out=out, **changes)
    results = gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))
    return results["iterations"][0]


def test_six_samples_in_the_default_batch_make_one_step_that_shows_nothing(tmp_path):
    iteration = run(tmp_path)
    assert iteration["dataset"]["steps"] == 1
    assert iteration["training"]["weight_neg_mean"] == 1
    assert iteration["training"]["log_ratio_pos_mean"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_six_samples_in_twelve_steps_move_each_sign_in_its_direction(tmp_path, seed):
    iteration = run(tmp_path, batch_size=2, epochs=4, seed=seed)
    assert iteration["dataset"]["steps"] == 12
    assert iteration["training"]["log_ratio_neg_mean"] < -0.5
    assert iteration["training"]["log_ratio_pos_mean"] > 0.3
