"""What a run needs of its machine, looked at before anything is loaded or written; each fault says what to do."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from toprlib.records import InputError
from toprlib.distributed import rank
from toprlib.settings import Settings

DRIVER = 580  # NVIDIA's oldest for CUDA 13, which torch 2.13 is built with (docs.nvidia.com/deploy/cuda-compatibility)
LIBRARIES = 3 * 10**9  # bytes of the host's memory that torch and CUDA take in a process; ours
TOKEN_BYTES = 30  # of a token of prompt or completion, on the disk, and in each process; ours
CGROUP = Path("/sys/fs/cgroup")  # the limits of a container


def check_machine(settings: Settings) -> None:
    """InputError, a line for each fault, where GPUs or compiler are not what the settings need."""
    import torch

    faults = []
    if not torch.cuda.is_available():
        if settings.preset == "laptop" or on_cpu():
            return
        reason = "no GPU"
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
        advice = f"It needs NVIDIA's driver {DRIVER} or newer, which nvidia-smi shows"
        if "802" in reason:  # cudaErrorSystemNotReady
            advice = "GPUs behind NVSwitch need NVIDIA's fabric manager: sudo systemctl start nvidia-fabricmanager"
        fault = (
            f"{settings.preset}: is for GPUs, and torch {torch.__version__} can use none ({reason})"
        )
        faults.append(f"{fault}. {advice}")
    if settings.engine != "hf" and (
        fault := _compiler_fault(str(settings.vllm_python or sys.executable))
    ):
        faults.append(fault)
    if faults:
        raise InputError("\n".join(faults))


def on_cpu() -> bool:
    """Whether a preset for GPUs is rehearsed on processors, as TOPR_ON_CPU=1 in the environment asks for."""
    return os.environ.get("TOPR_ON_CPU") == "1"


def _compiler_fault(python: str) -> str | None:
    """What keeps Triton, which vLLM's GPU kernels are written in, from compiling: it needs a compiler and Python.h."""
    compiler = (
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    )  # as Triton looks for it
    if compiler is None:
        return "no C compiler, which vLLM's kernels need: install gcc, or name one in CC"
    where = "import sysconfig as s; print(s.get_paths(s.get_default_scheme().replace('_local', '_prefix'))['include'])"
    try:
        include = subprocess.run(
            [python, "-c", where], capture_output=True, text=True, check=True
        ).stdout.strip()
        options = [compiler, "-fsyntax-only", "-I", include, "-x", "c", "-"]
        tried = subprocess.run(
            options, input="#include <Python.h>", capture_output=True, text=True, check=False
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{python}, {compiler}: cannot be run: {error}"
    if tried.returncode == 0:
        return None
    advice = "install the headers of that Python (python3.11-dev of a Linux distribution), or use a Python that has them"
    return f"{compiler} finds no Python.h in {include}, which vLLM's kernels need: {advice}"


class Size(NamedTuple):
    """What decides how much room a run takes."""

    parameters: int  # of the model
    drawn: int  # training samples in an iteration
    tested: int  # test samples at a full evaluation
    longest: int  # tokens of a prompt and its completion


def check_room(settings: Settings, folder: Path, size: Size) -> None:
    """InputError, a line for each fault, where the disk, as rank zero sees it, or a node's memory does not suffice.

    What the run has written before counts as room.
    """
    faults, fewer = (
        [],
        f"ask for fewer than {size.drawn:,} training and {size.tested:,} test samples",
    )
    if rank() == 0:
        free = shutil.disk_usage(
            next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        ).free
        taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        needed = disk_needed(settings, size)
        if free + taken < needed:
            fault = f"the run may take {needed / 1e9:,.1f} GB, and the disk has {free / 1e9:,.1f} GB free"
            faults.append(f"{folder}: {fault}: make room, choose another --out, or {fewer}")
    free, needed = free_memory(), memory_needed(settings, size)
    if os.environ.get("LOCAL_RANK", "0") == "0" and free < needed:
        fault = f"the run may take {needed / 1e9:,.1f} GB of the host's memory, of which {free / 1e9:,.1f} GB are free"
        faults.append(
            f"{socket.gethostname()}: {fault}: end what fills it, give the container more, or {fewer}"
        )
    if faults:
        raise InputError("\n".join(faults))


def disk_needed(settings: Settings, size: Size) -> int:
    """Bytes that a run has on its disk at most: a model for each iteration or point, two checkpoints, samples."""
    k = settings.iterations
    models = 4 * size.parameters * (max(k - 1, 0) + settings.curve_points - 1)
    samples = TOKEN_BYTES * size.longest * (k * size.drawn + (1 + k) * size.tested)
    return models + samples + (2 * checkpoint_bytes(settings, size.parameters) if k else 0)


def checkpoint_bytes(settings: Settings, parameters: int) -> int:
    """Bytes of a checkpoint: float32 weights, and AdamW's two moments; Adafactor's means are small."""
    return (12 if settings.optimizer == "adamw" else 4) * parameters


def memory_needed(settings: Settings, size: Size) -> int:
    """Bytes of a node's host memory: whole weights once, in each process samples; on a processor, training too."""
    import torch

    weights = (
        4 * size.parameters if settings.iterations else 0
    )  # an engine reads its own straight into the GPU
    if not torch.cuda.is_available():
        weights = 8 * size.parameters + checkpoint_bytes(settings, size.parameters)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    kept = size.drawn + min(
        settings.examples or size.drawn, size.drawn
    )  # samples, and those of them that are trained
    libraries = 2 * LIBRARIES if torch.cuda.is_available() else 0  # of a trainer and of an engine
    return weights + processes * (TOKEN_BYTES * size.longest * kept + libraries)


def free_memory() -> int:
    """Bytes of memory that this machine, or the container's limit, still has to give."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # "max" where there is no limit
        kept = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(
            free, int((CGROUP / "memory.max").read_text()) - int(kept["anon"])
        )  # the rest are caches
    return free
