"""Checkpoints: what resuming restores, what a failed write leaves, from which step to resume."""

import random
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from distributed_helpers import train_rows, train_rows_with_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import flat_weights, random_examples, tiny_llama

from toprlib import batches, checkpoints
from toprlib.checkpoints import (
    last_checkpoint,
    load_checkpoint,
    remove_checkpoints,
    save_checkpoint,
)
from toprlib.language_model import make_optimizer
from toprlib.records import InputError


def make_rows():
    examples = random_examples(prompts=5, per_prompt=3)
    return batches.number_rows(batches.shuffle_examples(examples, random.Random(0)))


def optimizer_after_a_step(name="adamw"):
    model = tiny_llama()
    optimizer = make_optimizer(name, model, 1e-2)
    flat = sum(weight.square().sum() for weight in model.parameters())
    flat.backward()
    optimizer.step()
    return model, optimizer


# ---- resuming ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["adafactor", "adamw", "sgd"])
def test_resumed_training_is_the_same(name, tmp_path):
    metrics, *expected = train_rows(make_rows(), name)
    assert len(metrics) == 5
    resumed_metrics, *actual = train_rows_with_checkpoint(make_rows(), name, tmp_path)
    assert resumed_metrics == metrics
    for values, others in zip(actual, expected, strict=True):
        assert torch.equal(values, others)


def test_checkpoint_restores_weights_and_optimizer(tmp_path):
    model, optimizer = optimizer_after_a_step()
    save_checkpoint(tmp_path, 1, optimizer)
    other = tiny_llama(seed=1)
    restored = make_optimizer("adamw", other, 1e-2)
    load_checkpoint(tmp_path / "checkpoint-1", restored)
    assert torch.equal(flat_weights(other), flat_weights(model))
    states = zip(optimizer.state.values(), restored.state.values(), strict=True)
    for expected, actual in states:
        assert actual.keys() == expected.keys() == {"step", "exp_avg", "exp_avg_sq"}
        for name, value in expected.items():
            assert torch.equal(actual[name], value)


def test_checkpoint_restores_random_numbers(tmp_path):
    _, optimizer = optimizer_after_a_step()
    torch.manual_seed(3)
    save_checkpoint(tmp_path, 1, optimizer)
    expected = torch.rand(4)
    torch.manual_seed(4)
    load_checkpoint(tmp_path / "checkpoint-1", optimizer)
    assert torch.equal(torch.rand(4), expected)


def test_frozen_weights_are_not_in_a_checkpoint(tmp_path):
    """With adapters, only these are trained."""
    model = tiny_llama()
    for weight in model.parameters():
        weight.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    optimizer = make_optimizer("sgd", model, 0.1)
    save_checkpoint(tmp_path, 1, optimizer)
    state = torch.load(tmp_path / "checkpoint-1" / "rank-0.pt", weights_only=True)
    [saved] = state["weights"]
    assert torch.equal(saved, model.lm_head.weight)


# ---- writing -------------------------------------------------------------------------------------
def folder_names(folder):
    return {path.name for path in folder.glob("checkpoint-*")}


def test_new_checkpoint_replaces_older_ones(tmp_path):
    _, optimizer = optimizer_after_a_step()
    for step in (2, 10):
        save_checkpoint(tmp_path, step, optimizer)
    assert folder_names(tmp_path) == {"checkpoint-10"}


def fail(*_):
    raise OSError("no space left")


def test_failed_write_keeps_the_older_checkpoint(tmp_path, monkeypatch):
    model, optimizer = optimizer_after_a_step()
    save_checkpoint(tmp_path, 2, optimizer)
    expected = flat_weights(model)
    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, 4, optimizer)
    assert last_checkpoint(tmp_path) == 2
    monkeypatch.undo()
    load_checkpoint(tmp_path / "checkpoint-2", optimizer)
    assert torch.equal(flat_weights(model), expected)
    save_checkpoint(tmp_path, 4, optimizer)  # the unfinished folder is no obstacle
    assert folder_names(tmp_path) == {"checkpoint-4"}


def test_full_disk_names_the_folder(tmp_path, monkeypatch):
    """The errors of the system and of torch do not."""

    @contextmanager
    def on_a_full_disk(folder):
        folder.mkdir()
        (folder / "rank-0.pt").symlink_to("/dev/full")
        yield folder

    monkeypatch.setattr(checkpoints, "atomic_folder", on_a_full_disk)
    _, optimizer = optimizer_after_a_step()
    with pytest.raises(OSError, match="checkpoint-3"):
        save_checkpoint(tmp_path, 3, optimizer)


# ---- reading -------------------------------------------------------------------------------------
@pytest.mark.parametrize("content", [None, b"", b"not a checkpoint", "half"])
def test_damaged_checkpoint_is_named(tmp_path, content):
    _, optimizer = optimizer_after_a_step()
    save_checkpoint(tmp_path, 2, optimizer)
    file = tmp_path / "checkpoint-2" / "rank-0.pt"
    whole = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(InputError) as caught:
        load_checkpoint(tmp_path / "checkpoint-2", optimizer)
    assert caught.value.file == str(file)


steps = st.integers(1, 12)


@given(st.sets(steps), st.sets(steps), st.none() | steps)
def test_step_to_resume_from(whole, unfinished, missing_step):
    """The last whole checkpoint; if a model is missing, the last one before its step."""
    names = [f"checkpoint-{step}" for step in whole]
    names += [f"checkpoint-{step}.unfinished" for step in unfinished]
    early_enough = [step for step in whole if missing_step is None or step < missing_step]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / name).mkdir()
        actual = last_checkpoint(Path(folder), missing_step)
    assert actual == max(early_enough, default=0)


@pytest.mark.parametrize("end", ["", '{"step": 4}\n', '{"st'])
def test_log_ends_at_the_checkpoint(tmp_path, end):
    """Training writes the lines after it again."""
    (tmp_path / "checkpoint-2").mkdir()
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n' + end)
    assert last_checkpoint(tmp_path) == 2
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_folder_of_a_finished_epoch_has_no_checkpoints(tmp_path):
    for name in ("checkpoint-2", "checkpoint-4.unfinished", "model-2.unfinished", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "metrics.jsonl").write_text("")
    remove_checkpoints(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "metrics.jsonl"}
