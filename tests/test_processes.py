"""Ranks that wait for each other, and requests to end."""

import ctypes
import os
import signal
import time
from contextlib import nullcontext, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from killing import statuses
from pipeline.runtime import processes
from pipeline.runtime.processes import from_all_ranks, rank, requests_are_noted
from ranks import on_two_ranks
from tqdm import tqdm

LIMIT = timedelta(seconds=10)  # which two processes need to meet, too, on a loaded machine


def limit_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def late():
    from_all_ranks("both are there")
    time.sleep(2 * rank() * LIMIT.total_seconds())
    assert from_all_ranks(rank()) == [0, 1]
    assert limit_of(dist.group.WORLD) == LIMIT  # training's own
    assert limit_of(processes._waiting_group(dist.group.WORLD)) == timedelta(days=7)


@pytest.mark.slow
def test_a_rank_waits_for_samples_longer_than_training_waits_for_a_collective(tmp_path):
    on_two_ranks(late, tmp_path, timeout=LIMIT)


def be_killed(waits):
    """What a rank does: rank 1 is killed, and the other waits."""
    with processes.command("run"), processes.process_group():
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ctypes.CDLL(None).sleep(600) if waits == "in C" else from_all_ranks(0)


@pytest.mark.parametrize("waits", ["in C", "in gloo"])
def test_a_rank_that_is_killed_is_named_and_ends_the_others_wherever_they_wait(waits, tmp_path):
    assert statuses(tmp_path / "log", be_killed, waits, is_asked=True, GROUP_RANK="0") == [
        1,
        -signal.SIGKILL,
    ]
    assert "rank 1 was killed" in (tmp_path / "log").read_text().splitlines()[0]


def ask(times, apart):
    """How many requests were noted before one of them interrupted."""
    noted = 0
    try:
        with requests_are_noted() as is_asked:
            for number in times:
                os.kill(os.getpid(), number)
                noted += is_asked()
                time.sleep(apart)
    except KeyboardInterrupt:
        return noted


def test_a_request_that_comes_twice_at_once_is_one_and_a_later_one_interrupts(monkeypatch):
    assert ask([signal.SIGINT, signal.SIGTERM], 0.0) == 2  # as a scheduler and torchrun send both
    monkeypatch.setattr(processes, "SAME_REQUEST", 0.0)
    assert ask([signal.SIGINT, signal.SIGINT], 0.01) == 1


@pytest.mark.parametrize("number", processes.REQUESTS)
@pytest.mark.parametrize("noting", [nullcontext, requests_are_noted])
def test_a_command_that_is_asked_to_end_says_so_and_has_the_status_of_its_signal(
    number, noting, capsys
):
    before = signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # or a command that did not handle it would end the tests
    try:
        with pytest.raises(SystemExit) as ended, processes.command("run"), noting():
            raise signal.raise_signal(number) or processes.SharedStop
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert capsys.readouterr().err.startswith("run: stopped")


def test_a_progress_bar_that_is_interrupted_while_it_is_made_is_made_to_its_end(monkeypatch):
    """Of half a bar, the interpreter would tell a user an AttributeError when it collects it."""
    place = tqdm._get_free_pos
    monkeypatch.setattr(
        tqdm, "_get_free_pos", lambda _, bar: os.kill(os.getpid(), signal.SIGINT) or place(bar)
    )
    with pytest.raises(KeyboardInterrupt):
        processes.progress_bar([], "sampling", "sample")
    with suppress(KeyboardInterrupt), requests_are_noted() as is_asked:
        processes.progress_bar([], "training", "step")
        noted = is_asked()  # by the block around it, which goes on
    assert noted
