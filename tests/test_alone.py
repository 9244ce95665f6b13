"""Ranks that fail alone, on two gloo ranks whose group ends as NCCL's does: only once all ranks end it."""

import os
import sys
import time
from unittest import mock

import killing
import pytest
import torch
import torch.distributed as dist
from runs import contents

import train_gsm8k as gsm8k
from pipeline import dataset, epoch, sampling, stages
from pipeline.runtime import run_folder

FAULTS = {
    "disk": OSError(28, "No space left on device"),
    "error": RuntimeError("it is broken"),
    "memory": torch.OutOfMemoryError("it wants 3 GiB"),
    "request": KeyboardInterrupt(),
}
SAID = {"disk": "No space left on device", "error": "it is broken", "memory": "it wants 3 GiB", "request": "stopped"}
STAGES = {  # where a rank fails, and which: only the first writes
    "sampling": (sampling, "draw", 1),
    "scoring": (dataset, "score", 1),
    "training": (epoch, "check_ratio", 1),
    "saving": (run_folder, "digests", 0),
}


def rank_of_two(rank, port, folder, stage, fault):
    """What a rank does; the agent that torchrun would be is the test."""
    file = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    end = dist.destroy_process_group
    dist.destroy_process_group = lambda: (dist.barrier(), end())  # both together
    if stage is not None:
        where, name, failing = STAGES[stage]
        if rank == failing:
            setattr(where, name, mock.Mock(side_effect=FAULTS[fault]))
        elif stage == "sampling" and fault != "disk":  # the other is with its engine, and in no collective
            stages.draw_into = lambda *_, **__: time.sleep(300)
    sys.argv = ["train_gsm8k.py", *killing.arguments(folder)]
    gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)


def statuses(folder, stage=None, fault=None):
    """How the two ranks of the command end."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    asked = (store.port, folder, stage, fault)
    started = [killing.server().Process(target=rank_of_two, args=(rank, *asked)) for rank in (0, 1)]
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(timeout=60)  # a rank that waits for another would do so for half an hour
        return [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert statuses(folder) == [0, 0]
    return contents(folder)


@pytest.mark.parametrize(
    "stage", ["sampling", "training", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("scoring", "saving"))]
)
def test_a_rank_that_fails_alone_ends_all_says_why_once_and_the_same_command_goes_on(stage, tmp_path, undisturbed):
    folder = tmp_path / "run"
    for fault in FAULTS:
        before = len(killing.told(folder)) if fault != "disk" else 0
        assert statuses(folder, stage, fault) == [1, 1], fault
        lines = killing.told(folder)[before:]
        [said] = [line for line in lines if SAID[fault] in line]
        assert fault == "error" or f"rank {STAGES[stage][2]}: " in said
    assert statuses(folder) == [0, 0]
    assert contents(folder) == undisturbed
