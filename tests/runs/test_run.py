"""Which files a run writes, and how its settings reach training; test_audit.py has its numbers."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import count_lines, run_small, write_rows

import topr
import train_gsm8k as gsm8k
from toprlib.methods import dpo_loss, ppo_loss
from toprlib.records import Example
from toprlib.settings import Settings

SAMPLES = "iteration-1/samples.jsonl"
TRAIN = "iteration-1/train.jsonl"
METRICS = "iteration-1/metrics.jsonl"
MODEL = "iteration-1/model"
ROWS = [
    {"prompt": "Q", "completion": " A", "reward": 1.0},
    {"prompt": "Q", "completion": " B", "reward": -1.0},
]


@pytest.fixture
def two_samples(tmp_path):
    """Options of a run on ROWS without evaluation."""
    return {"samples": write_rows(tmp_path / "samples.jsonl", ROWS), "test_problems": 0}


# ---- files ---------------------------------------------------------------------------------------
def test_files_of_a_run_and_a_finished_run_is_not_repeated(run, monkeypatch):
    folder = run()
    names = {str(path.relative_to(folder)) for path in folder.glob("*")}
    names |= {str(path.relative_to(folder)) for path in folder.glob("*/*")}
    in_iteration = ["metrics.jsonl", "model", "samples.jsonl", "train.jsonl"]
    for step in (0, 2, 4):
        in_iteration += [f"test-{step}.jsonl", f"test-{step}-greedy.jsonl"]
    assert names == {
        *(".lock", "config.json", "curve.png", "iteration-1", "results.json"),
        *(f"iteration-1/{name}" for name in in_iteration),
    }
    assert count_lines(folder / SAMPLES) == count_lines(folder / TRAIN) == 8 * 8
    stored = json.loads((folder / "results.json").read_text())
    monkeypatch.setattr("toprlib.hf_sampler.sample_completions", None)
    monkeypatch.setattr("topr.train", None)
    assert run_small(folder) == stored


def test_run_without_test_problems_evaluates_nothing(two_samples, tmp_path):
    folder = tmp_path / "run"
    results = run_small(folder, **two_samples)
    assert "before" not in results
    assert results["iterations"][0].keys() == {"dataset", "training"}
    names = {path.name for path in folder.rglob("*") if path.parent.name != "model"}
    expected = {".lock", "config.json", "results.json", "iteration-1"}
    assert names == expected | {"train.jsonl", "metrics.jsonl", "model"}


def test_run_without_iterations_evaluates_only(run, tmp_path):
    results = run_small(tmp_path / "run", iterations=0)
    before = json.loads((run() / "results.json").read_text())["before"]
    assert (results["before"], results["iterations"]) == (before, [])
    names = {path.name for path in (tmp_path / "run" / "iteration-1").iterdir()}
    assert names == {"test-0.jsonl", "test-0-greedy.jsonl"}


def test_own_samples_train_the_same_with_evaluation_and_without(run, tmp_path):
    """The samples of another run, without evaluation: training is the same, bit for bit."""
    folder = tmp_path / "run"
    run_small(folder, samples=str(run() / SAMPLES), test_problems=0)
    for name in (TRAIN, METRICS, f"{MODEL}/model.safetensors"):
        assert (folder / name).read_bytes() == (run() / name).read_bytes()


# ---- what the settings do ------------------------------------------------------------------------
def custom_loss(token_logp, token_logmu, reward, mask, denominator):
    return (token_logp * reward[:, None]).sum() / denominator


@pytest.mark.parametrize(
    ("changes", "loss", "expected"),
    [
        ({}, None, partial(topr.topr_loss, limits=topr.Limits(1, 1, 0, 1))),
        ({"method": "tis"}, None, partial(topr.topr_loss, limits=topr.Limits(0, 1, 0, 1))),
        (
            {"limits": (0.5, 2.0, 0.1, 0.9)},
            None,
            partial(topr.topr_loss, limits=topr.Limits(0.5, 2.0, 0.1, 0.9)),
        ),
        ({"method": "ppo"}, None, partial(ppo_loss, eps=0.2)),
        ({"method": "dpo"}, None, partial(dpo_loss, beta=0.1)),
        ({}, custom_loss, custom_loss),
    ],
)
def test_method_decides_the_loss_of_training(
    two_samples, tmp_path, monkeypatch, changes, loss, expected
):
    class Stop(Exception):
        pass

    calls = []

    def train(model, optimizer, steps, loss, max_grad_norm):
        calls.append((loss, max_grad_norm))
        raise Stop

    monkeypatch.setattr(topr, "train", train)
    with pytest.raises(Stop):
        run_small(tmp_path / "run", loss=loss, max_grad_norm=0.5, **two_samples, **changes)
    [(actual, max_grad_norm)] = calls
    assert max_grad_norm == 0.5

    # Ratios of 0.14, 0.41, 7.4 and 0.22; two tokens each, the second one of row 0 is padding.
    token_logp = torch.tensor([[-3.0, -9.0], [-1.0, -1.0], [-0.5, -0.5], [-2.0, -2.0]])
    token_logmu = torch.tensor([[-1.0, 0.0], [-0.6, -0.5], [-1.5, -1.5], [-1.25, -1.25]])
    reward = torch.tensor([1.0, -1.0, 1.0, -1.0])
    mask = torch.tensor([[1, 0], [1, 1], [1, 1], [1, 1]])
    gradients = []
    for function in (actual, expected):
        gradient = torch.func.grad(partial(function, denominator=6))
        gradients.append(gradient(token_logp, token_logmu, reward, mask))
    torch.testing.assert_close(*gradients)


# ---- evaluation points ---------------------------------------------------------------------------
def test_the_last_model_of_each_iteration_is_evaluated_in_full():
    """Two epochs of 5 samples are 3 steps. One epoch ends within the second step."""
    settings = Settings(
        iterations=2, epochs=2, batch_size=4, evaluate_after=(1.0,), out=Path("run")
    )
    examples = 2 * [Example([5], [6, 1], reward, i) for i, reward in enumerate((1, -1, 1, 1, 1))]
    for iteration in (1, 2):
        points = gsm8k.evaluation_points(iteration, examples, settings)
        assert [(point.step, point.samples_seen, point.is_end) for point in points] == [
            (1, 4, False),
            (3, 10, True),
        ]
