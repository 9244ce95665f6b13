"""Ranks that fail alone, on two gloo ranks whose group ends as NCCL's does: only once all ranks end it."""

import time
from unittest import mock

import killing
import pytest
import torch
import torch.distributed as dist
from pipeline import dataset, epoch, sampling, stages
from pipeline.runtime import run_folder
from pipeline.runtime.processes import rank
from runs import contents

FAULTS = {
    "disk": OSError(28, "No space left on device"),
    "error": RuntimeError("it is broken"),
    "memory": torch.OutOfMemoryError("it wants 3 GiB"),
    "request": KeyboardInterrupt(),
}
SAID = {
    "disk": "No space left on device",
    "error": "it is broken",
    "memory": "it wants 3 GiB",
    "request": "stopped",
}
STAGES = {  # where a rank fails, and which: only the first writes
    "sampling": (sampling, "draw", 1),
    "scoring": (dataset, "score", 1),
    "training": (epoch, "check_ratio", 1),
    "saving": (run_folder, "digests", 0),
}


FEW = {
    "problems": 4,
    "test_problems": 2,
    "max_new_tokens": 32,
    "iterations": 1,
    "examples": 32,
    "curve_points": 1,
}


def fail(folder, stage, fault):
    """What a rank does."""
    end = dist.destroy_process_group
    dist.destroy_process_group = lambda: (dist.barrier(), end())  # both together
    if stage is not None:
        where, name, failing = STAGES[stage]
        if rank() == failing:
            setattr(where, name, mock.Mock(side_effect=FAULTS[fault]))
        elif (
            stage == "sampling" and fault != "disk"
        ):  # the other is with its engine, and in no collective
            stages.draw_into = lambda *_, **__: time.sleep(300)
    killing.by_itself(killing.arguments(folder, **FEW))


def statuses(folder, stage=None, fault=None):
    """How the two ranks of the command end."""
    return killing.statuses(folder.with_suffix(".log"), fail, folder, stage, fault)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert statuses(folder) == [0, 0]
    return contents(folder)


@pytest.mark.parametrize(
    ("stage", "faults"),
    [("sampling", ("error", "memory")), ("training", ("disk", "request"))]
    + [pytest.param(stage, FAULTS, marks=pytest.mark.slow) for stage in STAGES],
)
def test_a_rank_that_fails_alone_ends_all_says_why_once_and_the_same_command_goes_on(
    stage, faults, tmp_path, undisturbed
):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    for fault in faults:
        before = len(killing.told(folder)) if log.exists() else 0
        assert statuses(folder, stage, fault) == [1, 1], fault
        lines = killing.told(folder)[before:]
        [said] = [line for line in lines if SAID[fault] in line]
        assert fault == "error" or f"rank {STAGES[stage][2]}: " in said
    assert statuses(folder) == [0, 0]
    assert contents(folder) == undisturbed
