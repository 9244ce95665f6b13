"""Checkpoints: what resuming restores, what a failed write leaves, from which step to resume."""

import tempfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import flat_weights, sharded_model
from hypothesis import given
from hypothesis import strategies as st

from toprlib.training import last_checkpoint, load_checkpoint, save_checkpoint


# ---- writing -------------------------------------------------------------------------------------
def test_failed_write_keeps_the_older_checkpoint_and_the_next_one_replaces_it(
    tmp_path, monkeypatch
):
    model, optimizer = sharded_model("sgd")
    save_checkpoint(tmp_path, 2, model, optimizer)
    expected = flat_weights(model)
    monkeypatch.setattr(dcp, "save", Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, 10, model, optimizer)
    monkeypatch.undo()
    other, optimizer = sharded_model("sgd", seed=1)
    load_checkpoint(tmp_path / "checkpoint-2", other, optimizer)
    assert torch.equal(flat_weights(other), expected)
    save_checkpoint(tmp_path, 10, other, optimizer)  # an unfinished folder is no obstacle
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-10"]


# ---- reading -------------------------------------------------------------------------------------
steps = st.integers(1, 12)


@given(st.sets(steps), st.sets(steps))
def test_step_to_resume_from(whole, unfinished):
    """The last whole checkpoint."""
    names = [f"checkpoint-{step}" for step in whole]
    names += [f"checkpoint-{step}.unfinished" for step in unfinished]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / name).mkdir()
        actual = last_checkpoint(Path(folder))
    assert actual == max(whole, default=0)


@pytest.mark.parametrize("end", ["", '{"step": 4}\n', '{"st'])
def test_log_ends_at_the_checkpoint(tmp_path, end):
    """Training writes the lines after it again."""
    (tmp_path / "checkpoint-2").mkdir()
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n' + end)
    assert last_checkpoint(tmp_path) == 2
    assert log.read_text() == '{"step": 1}\n{"step": 2}\n'
