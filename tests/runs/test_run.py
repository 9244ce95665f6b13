"""Which files a run writes, and how its settings reach training; test_audit.py has its numbers."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import (
    SMALL,
    TWO_ITERATIONS,
    count_lines,
    input_error,
    read_lines,
    run_small,
)
from safetensors.torch import load_file

import topr
from toprlib import settings
from toprlib.evaluation import to_table
from toprlib.files import read_records
from toprlib.methods import dpo_loss, ppo_loss
from toprlib.records import Example, InputError, Sample
from toprlib.settings import Settings

SAMPLES = "iteration-1/samples.jsonl"
TRAIN = "iteration-1/train.jsonl"
METRICS = "iteration-1/metrics.jsonl"
MODEL = "iteration-1/model"
ROWS = [
    {"prompt": "Q", "completion": " A", "reward": 1.0},
    {"prompt": "Q", "completion": " B", "reward": -1.0},
]


def write_samples(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


# ---- files ---------------------------------------------------------------------------------------
def test_files_of_a_run(run):
    folder = run()
    names = {str(path.relative_to(folder)) for path in folder.glob("*")}
    names |= {str(path.relative_to(folder)) for path in folder.glob("*/*")}
    in_iteration = ["dataset.json", "metrics.jsonl", "model", "samples.jsonl", "train.jsonl"]
    in_iteration += ["test-0.jsonl", "test-2.jsonl", "test-4.jsonl"]
    assert names == {
        *(".lock", "config.json", "curve.png", "iteration-1", "results.json"),
        *(f"iteration-1/{name}" for name in in_iteration),
    }
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "config.json").read_text())["method"] == "topr"
    metrics = read_lines(folder / METRICS)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert count_lines(folder / SAMPLES) == count_lines(folder / TRAIN) == 8 * 8


def test_second_iteration_samples_from_the_model_of_the_first(run, capsys):
    folder = run(**TWO_ITERATIONS)
    results = json.loads((folder / "results.json").read_text())
    to_table(results).print()
    assert "after iteration 2" in capsys.readouterr().out
    first, second = results["iterations"]
    assert second["curve"][0] == {"samples_seen": 0, **first["after"]}
    assert first["dataset"]["seed"] != second["dataset"]["seed"]
    for number in (1, 2):
        samples = read_records(folder / f"iteration-{number}" / "samples.jsonl", Sample)
        examples = read_records(folder / f"iteration-{number}" / "train.jsonl", Example)
        assert len(samples) == 8 * 8
        assert len({example.sample for example in examples}) == len(examples) == 48
        for example in examples:
            assert example.completion_ids == samples[example.sample].token_ids
            assert example.reward == samples[example.sample].reward


PLACE = "/data/" + "long/" * 30
CHANGES = {  # values that differ from the defaults
    "method": st.sampled_from(["tis", "dpo"]),
    "lr": st.sampled_from([1e-4, 1e-5, 1.5e-5]),
    "n": st.integers(1, 9),
    "k": st.integers(1, 9),
    "baseline": st.floats(-2, 2),
    "limits": st.sampled_from([(1.0, 1.0, 0.0, 1.0), (1.0, 1.0, 0.0, 1.5)]),
    "chat": st.just(True),
    "samples": st.sampled_from(["own.jsonl", f"{PLACE}a.jsonl", f"{PLACE}b.jsonl"]),
}
changes_of_settings = st.fixed_dictionaries({}, optional=CHANGES)


@given(changes_of_settings, changes_of_settings)
def test_default_folders_differ_as_the_settings_do(first, second):
    folders = []
    for changes in (first, second):
        folder = Settings(**changes).default_out(Settings())
        assert folder.parent == Path("runs")
        assert len(folder.name.encode()) < 200  # a file system allows 255
        folders.append(folder)
    assert (folders[0] == folders[1]) == (first == second)
    unseen = {"out": Path("out"), "dry_run": True, "vllm_python": Path("python")}
    assert Settings(**first, **unseen).default_out(Settings()) == folders[0]


def test_run_without_test_problems_evaluates_nothing(tmp_path):
    file = write_samples(tmp_path / "samples.jsonl", ROWS)
    folder = tmp_path / "run"
    results = run_small(folder, samples=file, test_problems=0)
    assert "before" not in results
    assert results["iterations"][0].keys() == {"dataset", "training"}
    names = {path.name for path in folder.rglob("*") if path.parent.name != "model"}
    expected = {".lock", "config.json", "results.json", "iteration-1"}
    assert names == expected | {"dataset.json", "train.jsonl", "metrics.jsonl", "model"}


def test_run_without_iterations_evaluates_only(run, tmp_path):
    results = run_small(tmp_path / "run", iterations=0)
    before = json.loads((run() / "results.json").read_text())["before"]
    assert (results["before"], results["iterations"]) == (before, [])
    assert [path.name for path in (tmp_path / "run" / "iteration-1").iterdir()] == ["test-0.jsonl"]


# ---- a finished run ------------------------------------------------------------------------------
def test_finished_run_is_returned_without_any_work(run, monkeypatch):
    folder = run()
    monkeypatch.setattr("toprlib.sampling.sample_to_file", None)
    monkeypatch.setattr("topr.train", None)
    assert run_small(folder) == json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("changes", [{"seed": 1}, {"method": "tis"}, {"limits": (1, 1, 0, 0.5)}])
def test_folder_of_a_run_with_other_settings_is_refused(run, changes):
    folder = run()
    error = input_error(run_small, folder, **changes)
    assert (error.option, error.file) == ("--out", str(folder))
    assert next(iter(changes)) in str(error)


def test_copy_of_the_project_resumes_its_runs(run, tmp_path, monkeypatch):
    copy = tmp_path / "project"
    shutil.copytree(settings.TINY, copy / "tiny")
    shutil.copytree(run(), copy / "runs" / "run")
    monkeypatch.setattr(settings, "PROJECT", copy)
    monkeypatch.setattr("topr.train", None)
    model = str(copy / "tiny" / "two_thirds")
    results = run_small(copy / "runs" / "run", model=model, data=str(copy / "tiny"))
    assert len(results["iterations"]) == 1


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
def test_method_decides_the_loss_of_training(tmp_path, monkeypatch, changes, loss, expected):
    class Stop(Exception):
        pass

    calls = []

    def train(model, optimizer, steps, loss, limits, max_grad_norm):
        calls.append((loss, limits, max_grad_norm))
        raise Stop

    monkeypatch.setattr(topr, "train", train)
    file = write_samples(tmp_path / "samples.jsonl", ROWS)
    options = {"samples": file, "test_problems": 0, "max_grad_norm": 0.5} | changes
    with pytest.raises(Stop):
        run_small(tmp_path / "run", loss=loss, **options)
    [(actual, limits, max_grad_norm)] = calls
    assert max_grad_norm == 0.5
    assert limits == getattr(expected, "keywords", {}).get("limits")

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


def test_gradient_is_clipped_to_the_norm(run, tmp_path):
    """A step of plain gradient descent with rate 1 is then no longer than that."""
    options = {"optimizer": "sgd", "lr": 1.0, "max_grad_norm": 1e-3, "test_problems": 0}
    folder = tmp_path / "run"
    run_small(folder, samples=str(run() / SAMPLES), **options)
    before = load_file(Path(SMALL.model) / "model.safetensors")
    after = load_file(folder / MODEL / "model.safetensors")
    change = torch.cat([(after[name] - before[name]).flatten() for name in before])
    metrics = read_lines(folder / METRICS)
    assert min(step["grad_norm"] for step in metrics) > 1e-3
    assert 0 < change.norm() <= 1.01e-3 * len(metrics)


def test_effective_proportion_leaves_rewards_of_one_sign_and_warns(tmp_path, capsys):
    file = write_samples(tmp_path / "samples.jsonl", [ROWS[1], ROWS[1]])
    run_small(tmp_path / "run", samples=file, test_problems=0, effective_proportion=0.7)
    assert "--effective-proportion" in capsys.readouterr().out
    assert [line["reward"] for line in read_lines(tmp_path / "run" / TRAIN)] == [-1, -1]


# ---- steps that fail -----------------------------------------------------------------------------
def exhaust_memory(*_, denominator):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the manual.")


def return_nan(token_logp, *_, denominator):
    return token_logp.sum() * torch.nan


@pytest.mark.parametrize(
    ("loss", "error"), [(exhaust_memory, InputError), (return_nan, FloatingPointError)]
)
def test_failing_step_ends_the_run_before_anything_is_saved(tmp_path, loss, error):
    file = write_samples(tmp_path / "samples.jsonl", ROWS)
    with pytest.raises(error) as raised:
        run_small(tmp_path / "run", loss=loss, samples=file, test_problems=0)
    assert "step 1" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run" / MODEL).exists()
    assert not (tmp_path / "run" / METRICS).exists()


def test_log_mu_of_another_model_ends_the_run_at_its_first_step(run, tmp_path):
    """train.jsonl of a run that was interrupted after scoring; log mu is lower by 0.01 a token."""
    folder = shutil.copytree(run(), tmp_path / "run")
    for path in (folder / "results.json", folder / METRICS):
        path.unlink()
    shutil.rmtree(folder / MODEL)
    examples = read_lines(folder / TRAIN)
    for example in examples:
        example["token_logmu"] = [value - 0.01 for value in example["token_logmu"]]
    write_samples(folder / TRAIN, examples)
    with pytest.raises(ArithmeticError):
        run_small(folder)
    assert not (folder / MODEL).exists()
    assert not (folder / METRICS).exists()
