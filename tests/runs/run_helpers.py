"""Small runs: in this process, or as commands that tests kill and repeat.

As a program this file is train_gsm8k.py with small chunks: torchrun starts it on each rank.
"""

import gc
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache
from hashlib import sha256
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import psutil
from torch.distributed import run as torchrun

import train_gsm8k as gsm8k
from toprlib import sampling
from toprlib.records import Task
from toprlib.settings import Settings

ROOT = Path(gsm8k.__file__).parent
CHUNK = 2  # prompts between two writes to the disk, in place of 256

# Four steps of 16 of 64 samples; all problems but one have samples of both signs.
SMALL = Settings(
    problems=8,
    n=8,
    max_new_tokens=48,
    test_problems=4,
    eval_samples=8,
    k=4,
    evaluate_after=(0.5,),
)
# Two iterations of 6 steps with checkpoints after 2 and 4: for tests that kill a run.
TWO_ITERATIONS = {
    "problems": 4,
    "batch_size": 4,
    "save_every": 2,
    "optimizer": "adafactor",
    "lr": 1e-3,
    "iterations": 2,
    "examples": 24,
    "test_problems": 2,
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
    with mock.patch.object(sampling, "CHUNK", CHUNK):
        return gsm8k.experiment(settings, make_task(settings), loss)


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
        if path.is_file() and path.suffix != ".log":
            sums[str(path.relative_to(folder))] = sha256(path.read_bytes()).hexdigest()
    return sums


# ---- commands in processes of their own ----------------------------------------------------------
class Command:
    """The command of a run of SMALL with changes, in a folder of its own."""

    def __init__(self, folder: Path, ranks: int = 1, **changes) -> None:
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.ranks = ranks
        self.arguments = []
        defaults = asdict(Settings())
        for name, value in asdict(replace(SMALL, **changes, out=folder)).items():
            if value is True:
                self.arguments.append(f"--{name.replace('_', '-')}")
            elif value != defaults[name]:
                self.arguments += [f"--{name.replace('_', '-')}", str(value)]

    @contextmanager
    def start(self) -> Iterator[BaseProcess]:
        """A process with the command, or with torchrun; killed after the block."""
        arguments = (self.arguments, self.log, self.ranks)
        process = _fork_server().Process(target=_run_forked, args=arguments)
        process.start()
        try:
            yield process
        finally:
            kill_all(process)

    def finish(self) -> dict[str, str]:
        """Run the command to its end; returns the checksums of its files."""
        with self.start() as process:
            process.join()
            assert process.exitcode == 0, self.log.read_text()[-3000:]
        return checksums(self.folder)

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        """Run the command, and kill it when the condition holds."""
        with self.start() as process:
            wait_until(is_reached, process)


def kill_all(process: BaseProcess) -> None:
    """kill -9 a process and all that it has started."""
    with suppress(psutil.NoSuchProcess):  # it has ended by itself
        for child in [*psutil.Process(process.pid).children(recursive=True), process]:
            child.kill()
    process.join()


def wait_until(condition: Callable[[], object], process: BaseProcess) -> None:
    """Wait for a condition; fails if the process ends before."""
    while not condition():
        assert process.is_alive(), "the command has ended before"
        time.sleep(0.002)


@cache
def _fork_server() -> multiprocessing.context.BaseContext:
    """Starts processes that have imported this module, and what a run imports, already."""
    context = multiprocessing.get_context("forkserver")
    modules = ["run_helpers", "transformers.models.llama.modeling_llama", "matplotlib.figure"]
    context.set_forkserver_preload(modules)
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()
    return context


def _run_forked(arguments: list[str], log: Path, ranks: int) -> None:
    """What a process of `Command.start` does."""
    gc.freeze()  # a collection need not look through the modules
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if ranks == 1:
        _run_command(arguments)
    else:
        # "--", because torchrun would take --n for an abbreviation of an option of its own.
        os.environ["PYTHONPATH"] = str(ROOT)
        torchrun.main(["--nproc-per-node", str(ranks), "--", __file__, *arguments])


def _run_command(arguments: list[str]) -> None:
    """The command in this process, as a shell starts it."""
    sampling.CHUNK = CHUNK
    sys.argv = ["train_gsm8k.py", *arguments]
    gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)


if __name__ == "__main__":
    _run_command(sys.argv[1:])
