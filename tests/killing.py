"""Runs of train_gsm8k.py in processes of their own, which are killed or stopped, and given the same command again.

A server imports everything once and forks a process for each run.
"""

import gc
import multiprocessing
import os
import resource
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from multiprocessing import connection, forkserver
from pathlib import Path
from unittest import mock

import matplotlib.figure  # noqa: F401, so that the server has it
import pipeline.stages  # noqa: F401, likewise
import psutil
import runs
import torch.distributed as dist
from torch.distributed import run as torchrun

import train_gsm8k as gsm8k

# Two iterations with checkpoints, and two problems in each chunk of samples.
CHANGES = {
    "n": 16,
    "chunk": 2,
    "batch": 8,
    "save_every": 3,
    "optimizer": "adafactor",
    "lr": 1e-3,
    "iterations": 2,
}
CHANGES |= {"examples": 96, "between_samples": 4, "test_problems": 2}
ROOT = Path(gsm8k.__file__).parent


@cache
def server():
    """Makes processes, forked from one that has imported this module and ranks.py."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killing", "ranks"])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "tests")])):
        forkserver.ensure_running()
    return context


def arguments(folder, usual=CHANGES, **changes):
    """The command line of a run in `folder` of `runs.SMALL` with these changes."""
    default, settings = (
        asdict(gsm8k.Settings()),
        asdict(replace(runs.SMALL, **(usual | changes), out=folder)),
    )
    differing = [name for name in settings if settings[name] != default[name]]
    return [
        word for name in differing for word in (f"--{name}", str(settings[name])) if word != "True"
    ]


def print_into(log):
    """From now on, whatever this process prints stands in a file; modules are not looked through for garbage."""
    gc.freeze()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def by_itself(arguments):
    """The command in this process, as a shell would start it."""
    sys.argv = ["train_gsm8k.py", *arguments]
    gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)


def command(log, arguments, ranks, limit, variables):
    """What such a process does: the command by itself or, for several ranks, under torchrun."""
    print_into(log)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    os.environ |= variables
    if ranks == 1:
        by_itself(arguments)
    else:  # "--", because torchrun would take --n for an abbreviation of an option of its own
        torchrun.main(["--nproc-per-node", str(ranks), "--", gsm8k.__file__, *arguments])


@contextmanager
def started(folder, ranks=1, limit=resource.RLIM_INFINITY, variables=(), asked=None, **changes):
    """A process that runs the command, `asked` or that of the changes; killed with all that it has started at the end
    of the block. limit: bytes in a file.
    """
    given = (asked or arguments(folder, **changes), ranks, limit, dict(variables))
    process = server().Process(target=command, args=(folder.with_suffix(".log"), *given))
    process.start()
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                child.kill()
        process.join()


def wait(process, is_reached):
    while not is_reached():
        assert process.is_alive(), "the run has ended before"
        time.sleep(0.002)


def status(process):
    """How a process has ended: 0, what it exits with, or minus the signal."""
    process.join()
    return process.exitcode


def finish(folder, ranks=1, **changes):
    """Let the command end in `folder`; what is there then."""
    with started(folder, ranks, **changes) as process:
        assert status(process) == 0, told(folder)[-10:]
    return runs.contents(folder)


def rank_of_two(rank, port, log, variables, work, arguments):
    """What a rank does that `statuses` starts."""
    print_into(log)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.environ |= variables
    work(*arguments)


def statuses(log, work, *arguments, is_asked=False, **variables):
    """How two ranks end, which do work(*arguments): what torchrun's agent does is done here.

    is_asked: once one has ended the other is sent SIGTERM, as torchrun does, which looks every 0.1 s.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    of_both = (store.port, log, variables, work, arguments)
    ranks = [server().Process(target=rank_of_two, args=(rank, *of_both)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        connection.wait([process.sentinel for process in ranks], timeout=60)
        time.sleep(0.1 * is_asked)
        for process in ranks:
            if is_asked and process.is_alive():
                process.terminate()
            process.join(timeout=60)  # a rank that waits for another would do so for half an hour
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def told(folder):
    """The lines that all runs in a folder have printed."""
    return folder.with_suffix(".log").read_text().splitlines()


def fault(folder, **changes):
    """The line in which the command says why it ends."""
    with started(folder, **changes) as process:
        assert status(process) == 1
    assert not any("Traceback" in line for line in told(folder))
    return told(folder)[-1]


def lines(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0
