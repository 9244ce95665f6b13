"""Small runs: in this process, or as commands that tests kill and repeat.

As a program this file is train_gsm8k.py with small chunks, and with a failure if the environment
asks for one: torchrun starts it on each rank.
"""

import gc
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from torch.distributed import run as torchrun

import train_gsm8k as gsm8k
from toprlib import sampling
from toprlib.records import InputError, Task
from toprlib.settings import Settings

ROOT = Path(gsm8k.__file__).parent
CHUNK = 2  # prompts between two writes to the disk, in place of 256
UNLIMITED = resource.RLIM_INFINITY

# Four steps of 16 of 64 samples; all problems but one have samples of both signs.
SMALL = Settings(
    problems=8,
    n=8,
    max_new_tokens=48,
    test_problems=4,
    eval_samples=8,
    k=4,
    evals_per_epoch=2,
)
# Two iterations of 6 steps with checkpoints after 2 and 4: for tests that kill a run.
TWO_ITERATIONS = {
    "batch_size": 8,
    "save_every": 2,
    "optimizer": "adafactor",
    "lr": 1e-3,
    "iterations": 2,
    "examples": 48,
    "test_problems": 2,
}
ERRORS = {
    "disk": OSError(28, "No space left on device"),
    "memory": torch.OutOfMemoryError("CUDA out of memory"),
    "bug": RuntimeError("it is broken"),
}


# ---- runs in this process ------------------------------------------------------------------------
def run_small(
    folder: Path,
    make_task: Callable[[Settings], Task] = gsm8k.gsm8k_task,
    loss: Callable | None = None,
    **changes,
) -> dict:
    """A run of SMALL with changes, in `folder`; returns the content of results.json."""
    settings = replace(SMALL, out=folder, **changes)
    gsm8k.check(settings)
    with mock.patch.object(sampling, "CHUNK", CHUNK):
        return gsm8k.experiment(settings, make_task(settings), loss)


def input_error(work: Callable, *args, **kwargs) -> InputError:
    """The InputError that work(*args, **kwargs) raises; its message has one line."""
    with pytest.raises(InputError) as raised:
        work(*args, **kwargs)
    assert "\n" not in str(raised.value)
    return raised.value


def read_lines(file: Path) -> list[dict]:
    """The lines of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def count_lines(file: Path) -> int:
    """The complete lines of a file, 0 without one."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def checksums(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file below a folder by its relative path; logs of vLLM left out."""
    sums = {}
    for path in folder.rglob("*"):
        if path.is_dir():
            sums[f"{path.relative_to(folder)}/"] = ""
        elif path.suffix != ".log":
            sums[str(path.relative_to(folder))] = sha256(path.read_bytes()).hexdigest()
    return sums


# ---- commands in processes of their own ----------------------------------------------------------
def command_line(folder: Path, **changes) -> list[str]:
    """The arguments of a run of SMALL with changes, in `folder`."""
    defaults = asdict(Settings())
    arguments = []
    for name, value in asdict(replace(SMALL, **changes, out=folder)).items():
        option = f"--{name.replace('_', '-')}"
        if value is True and not defaults[name]:
            arguments.append(option)
        elif value != defaults[name]:
            arguments += [option, str(value)]
    return arguments


def run_command(arguments: Sequence[str]) -> None:
    """The command in this process, as a shell starts it."""
    sampling.CHUNK = CHUNK
    sys.argv = ["train_gsm8k.py", *arguments]
    gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)


@contextmanager
def running(
    arguments: Sequence[str],
    log: Path,
    ranks: int = 1,
    max_file_bytes: int = UNLIMITED,
    variables: Mapping[str, str] | None = None,
) -> Iterator[BaseProcess]:
    """A process with the command, or with torchrun for several ranks; killed after the block.

    log: the file that its output is appended to. variables: of its environment.
    """
    process = _fork_server().Process(
        target=_run_forked, args=(arguments, log, ranks, max_file_bytes, variables or {})
    )
    process.start()
    try:
        yield process
    finally:
        kill_all(process)


def finish(
    arguments: Sequence[str], log: Path, ranks: int = 1, variables: Mapping[str, str] | None = None
) -> None:
    """Run the command to its end. Fails if its exit status is not 0."""
    with running(arguments, log, ranks, variables=variables) as process:
        assert exit_status(process) == 0, log.read_text()[-3000:]


def kill_all(process: BaseProcess) -> None:
    """kill -9 a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):  # it has ended by itself
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
    process.join()


def exit_status(process: BaseProcess) -> int:
    """How a process ends: its exit status, or minus the signal that killed it."""
    process.join()
    return process.exitcode


def wait_until(condition: Callable[[], object], process: BaseProcess) -> None:
    """Wait for a condition; fails if the process ends before."""
    while not condition():
        assert process.is_alive(), "the command has ended before"
        time.sleep(0.002)


def error_lines(log: Path) -> list[str]:
    """The lines of a log in which the command says why it ends."""
    return [line for line in log.read_text().splitlines() if line.startswith("train_gsm8k: ")]


@cache
def _fork_server() -> multiprocessing.context.BaseContext:
    """Starts processes that have imported this module, and what a run imports, already."""
    context = multiprocessing.get_context("forkserver")
    model = "transformers.models.llama.modeling_llama"
    checkpoint = "torch.distributed.checkpoint.state_dict"
    context.set_forkserver_preload(["run_helpers", model, checkpoint, "toprlib.plotting"])
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return context


def _run_forked(
    arguments: Sequence[str],
    log: Path,
    ranks: int,
    max_file_bytes: int,
    variables: Mapping[str, str],
) -> None:
    """What a process of `running` does."""
    gc.freeze()  # a collection need not look through the modules
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, UNLIMITED))
    os.environ |= variables
    if ranks == 1:
        run_command(arguments)
    else:
        # "--", because torchrun would take --n for an abbreviation of an option of its own.
        os.environ["PYTHONPATH"] = str(ROOT)
        torchrun.main(["--nproc-per-node", str(ranks), "--", __file__, *arguments])


def failure(rank: int, function: str, error: str) -> dict[str, str]:
    """The environment in which a function, "module.name", raises one of ERRORS on one rank."""
    return {"FAILURE": f"{rank} {function} {error}"}


if __name__ == "__main__":
    if "FAILURE" in os.environ:
        rank, function, error = os.environ["FAILURE"].split()
        if rank == os.environ["RANK"]:
            mock.patch(function, side_effect=ERRORS[error]).start()
    run_command(sys.argv[1:])
