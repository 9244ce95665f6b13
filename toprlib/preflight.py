"""What a run needs of its machine, checked before anything large is loaded or written."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from toprlib.distributed import rank
from toprlib.language_model import LanguageModel
from toprlib.records import InputError
from toprlib.settings import Settings

DRIVER = 580  # NVIDIA's oldest for CUDA 13, which torch 2.13 is built with
LIBRARIES = 3 * 10**9  # bytes of host memory of torch and CUDA in a process; ours
TOKEN_BYTES = 30  # of a token of a sample, on the disk and in each process; ours
SMALL_RUN = 10**9  # bytes; a run below it is not checked; ours
CGROUP = Path("/sys/fs/cgroup")  # the limits of a container


# ---- GPU and compiler ----------------------------------------------------------------------------
def check_machine(settings: Settings) -> None:
    """Raises InputError if GPUs or the compiler are not what the settings need."""
    if settings.preset == "laptop" and not torch.cuda.is_available():
        return
    if not torch.cuda.is_available():
        if is_rehearsal():
            return
        raise InputError(_missing_gpu(settings), option="preset")
    if settings.engine_name == "vllm":
        problem = _compiler_problem(str(settings.vllm_python or sys.executable))
        if problem is not None:
            raise InputError(problem, option="--engine")


def is_rehearsal() -> bool:
    """Whether a preset for GPUs is tried on a CPU: TOPR_ON_CPU=1 in the environment asks for it."""
    return os.environ.get("TOPR_ON_CPU") == "1"


def _missing_gpu(settings: Settings) -> str:
    reason = "no GPU"
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
    fix = f"install NVIDIA's driver {DRIVER} or newer; nvidia-smi shows the present one"
    if "802" in reason:  # cudaErrorSystemNotReady
        fix = "start NVIDIA's fabric manager: sudo systemctl start nvidia-fabricmanager"
    return f"{settings.preset} needs a GPU, and torch can use none ({reason}); {fix}"


def _compiler_problem(python: str) -> str | None:
    """Why Triton, in which vLLM's kernels are written, cannot compile; None if it can.

    It needs a C compiler and the headers of the Python that runs vLLM.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "vLLM's kernels need a C compiler; install gcc, or name one in CC"
    code = (
        "import sysconfig; scheme = sysconfig.get_default_scheme().replace('_local', '_prefix');"
        "print(sysconfig.get_paths(scheme)['include'])"
    )
    try:
        printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        include = printed.stdout.strip()
        command = [compiler, "-fsyntax-only", "-I", include, "-x", "c", "-"]
        tried = subprocess.run(command, input="#include <Python.h>", text=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{python} or {compiler} cannot be run: {error}"
    if tried.returncode == 0:
        return None
    fix = "install the headers of this Python (Debian: python3-dev), or use one that has them"
    return f"vLLM's kernels need Python.h, which is missing in {include}; {fix}"


def check_lora(settings: Settings, lm: LanguageModel) -> None:
    """Raises InputError if adapters cannot be trained. lm: may be without weights."""
    if settings.lora is None:
        return
    if find_spec("peft") is None:
        message = "needs the package peft, which is not installed; pip install peft"
        raise InputError(message, option="--lora")
    width = lm.model.config.hidden_size
    if settings.lora > width:
        message = f"{settings.lora}: must be at most {width}, the model's width"
        raise InputError(message, option="--lora")


# ---- disk and memory -----------------------------------------------------------------------------
class RunSize(NamedTuple):
    """What decides how much disk and memory a run needs."""

    parameters: int  # of the model
    num_samples: int  # of an iteration
    num_eval_samples: int  # of a full evaluation
    max_tokens: int  # of a prompt and its completion


def check_room(
    settings: Settings, lm: LanguageModel, max_tokens: int, num_samples: int, num_tests: int
) -> None:
    """Raises InputError if the disk, as rank zero sees it, or a machine's memory is too small.

    num_tests: test problems. What the run has written before counts as free. A small run is not
    checked.
    """
    size = RunSize(count_parameters(lm), num_samples, num_tests * settings.eval_samples, max_tokens)
    fewer = "or reduce --n, --problems or --eval-samples"
    needed = disk_needed(settings, size)
    if rank() == 0 and needed > SMALL_RUN:
        folders = [settings.out, *settings.out.absolute().parents]
        existing = next(folder for folder in folders if folder.is_dir())
        written = sum(file.stat().st_size for file in settings.out.rglob("*") if file.is_file())
        free = shutil.disk_usage(existing).free + written
        if free < needed:
            message = f"the run needs {_gigabytes(needed)} of disk, {_gigabytes(free)} are free"
            fix = f"free some, choose another --out, {fewer}"
            raise InputError(f"{message}; {fix}", file=settings.out, option="--out")
    needed = memory_needed(settings, size)
    free = free_memory()
    if os.environ.get("LOCAL_RANK", "0") == "0" and needed > SMALL_RUN and free < needed:
        message = f"the run needs {_gigabytes(needed)} of memory, {_gigabytes(free)} are free"
        fix = f"end other programs, raise the container's limit, {fewer}"
        raise InputError(f"{message}; {fix}", file=socket.gethostname())


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def count_parameters(lm: LanguageModel) -> int:
    """The number of weights of a model."""
    return sum(weight.numel() for weight in lm.model.parameters())


def disk_needed(settings: Settings, size: RunSize) -> int:
    """Bytes that a run has on its disk at most: models, samples and two checkpoints."""
    num_models = max(settings.iterations - 1, 0) + settings.evals_per_epoch
    num_samples = settings.iterations * size.num_samples
    num_samples += (1 + settings.iterations) * size.num_eval_samples
    samples = TOKEN_BYTES * size.max_tokens * num_samples
    if settings.iterations == 0:
        return samples
    return 4 * size.parameters * num_models + samples + 2 * checkpoint_bytes(settings, size)


def checkpoint_bytes(settings: Settings, size: RunSize) -> int:
    """Bytes of a checkpoint: float32 weights and AdamW's two moments; Adafactor's are small."""
    numbers = 3 if settings.optimizer == "adamw" else 1
    return 4 * numbers * size.parameters


def memory_needed(settings: Settings, size: RunSize) -> int:
    """Bytes of a machine's memory: the weights once; samples and libraries in each process."""
    if torch.cuda.is_available():
        libraries = 2 * LIBRARIES  # of a trainer and of an engine
        weights = 4 * size.parameters if settings.iterations else 0  # on their way to the GPU
    else:
        libraries = 0
        weights = 8 * size.parameters + checkpoint_bytes(settings, size)  # it trains here
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_examples = min(settings.examples or size.num_samples, size.num_samples)
    samples = TOKEN_BYTES * size.max_tokens * (size.num_samples + num_examples)
    return weights + processes * (samples + libraries)


def free_memory() -> int:
    """Bytes of memory that this machine, or the container's limit, has left."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # "max", if there is no limit
        limit = int((CGROUP / "memory.max").read_text())
        for line in (CGROUP / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name == "anon":  # the rest of what the container uses are caches
                free = min(free, limit - int(value))
    return free
