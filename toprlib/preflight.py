"""Checks that the machine suffices, before anything large is loaded or written.

It only checks that a GPU exists, not how it works: `make smoke` does that.
"""

import os
import shutil
import socket
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import PreTrainedConfig

from toprlib.distributed import local_ranks, rank
from toprlib.hf_sampler import MAX_BATCH_TOKENS, MAX_THREADS
from toprlib.language_model import LanguageModel
from toprlib.records import InputError
from toprlib.settings import Settings, intended_ranks

GPU_LIBRARIES = 3 * 10**9  # bytes of host memory of torch and CUDA in a process; ours
CPU_LIBRARIES = 430 * 10**6  # bytes of a process with the libraries and a tiny model; measured
TOKEN_BYTES = 30  # of a token of a sample, on the disk and in each process; ours
SMALL_RUN = 10**9  # bytes; a run below it is not checked; ours
GROUPS = Path("/sys/fs/cgroup")  # the limits of jobs and containers
OWN_GROUPS = Path("/proc/self/cgroup")
# (name of the limit, name of the used memory in memory.stat) of control groups of version 2 and of
# version 1. The rest of the usage is caches.
MEMORY_LIMITS = (("memory.max", "anon"), ("memory.limit_in_bytes", "total_rss"))


# ---- GPU and packages ----------------------------------------------------------------------------
def check_gpu(settings: Settings) -> None:
    """Raises InputError if a preset for GPUs finds none."""
    if not needs_gpu(settings) or torch.cuda.is_available():
        return
    reason = why_no_gpu()
    fix = "`make smoke` says what is missing"
    message = f"{settings.preset} needs a GPU, and torch can use none ({reason}); {fix}"
    raise InputError(message, option="preset")


def needs_gpu(settings: Settings) -> bool:
    """Whether a run with these settings is for GPUs."""
    return settings.preset != "laptop" and not is_rehearsal()


def is_rehearsal() -> bool:
    """Whether a preset for GPUs is tried on a CPU: TOPR_ON_CPU=1 in the environment asks for it."""
    return os.environ.get("TOPR_ON_CPU") == "1"


def why_no_gpu() -> str:
    """torch's reason, in one line."""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        return str(error).strip().splitlines()[0]
    return "no GPU"


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
    cache_bytes: int = 0  # of the keys and values of a token, in float32


def check_room(
    settings: Settings, lm: LanguageModel, max_tokens: int, num_samples: int, num_tests: int
) -> None:
    """Raises InputError if the disk, as rank zero sees it, or a machine's memory is too small.

    num_tests: test problems. What the run has written before counts as free. A small run is not
    checked.
    """
    size = measure_run(settings, lm, max_tokens, num_samples, num_tests)
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
        fix = f"end other programs, raise the limit of the job or the container, {fewer}"
        raise InputError(f"{message}; {fix}", file=socket.gethostname())


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def measure_run(
    settings: Settings, lm: LanguageModel, max_tokens: int, num_samples: int, num_tests: int
) -> RunSize:
    """The size of a run. lm: may be without weights; num_tests: test problems."""
    parameters = sum(weight.numel() for weight in lm.model.parameters())
    num_eval_samples = num_tests * settings.eval_samples
    cache = cache_bytes(lm.model.config)
    return RunSize(parameters, num_samples, num_eval_samples, max_tokens, cache)


def cache_bytes(config: PreTrainedConfig) -> int:
    """Bytes of the keys and values of a token, in float32."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * 4 * config.num_hidden_layers * kv_heads * head_size


def disk_needed(settings: Settings, size: RunSize) -> int:
    """The most bytes that a run has on its disk: models, samples and two checkpoints."""
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
    if torch.cuda.is_available() or needs_gpu(settings):
        of_process = GPU_LIBRARIES * (2 if settings.engine_name == "vllm" else 1)  # vLLM's, too
        weights = 4 * size.parameters if settings.iterations else 0  # on their way to the GPU
    else:
        threads = min(torch.get_num_threads(), MAX_THREADS)  # each samples a batch
        sampled_tokens = size.max_tokens * max(size.num_samples, size.num_eval_samples)
        cached_tokens = min(threads * MAX_BATCH_TOKENS, sampled_tokens)
        of_process = CPU_LIBRARIES + cached_tokens * size.cache_bytes
        weights = 8 * size.parameters + checkpoint_bytes(settings, size)  # it trains here
    processes = local_ranks(without_torchrun=intended_ranks(settings.preset))
    num_examples = min(settings.examples or size.num_samples, size.num_samples)
    samples = TOKEN_BYTES * size.max_tokens * (size.num_samples + num_examples)
    return weights + processes * (samples + of_process)


def free_memory() -> int:
    """Bytes of memory that are left on this machine, and in the limits of job and container."""
    free = psutil.virtual_memory().available
    for folder in group_folders("memory"):
        for limit_file, counted in MEMORY_LIMITS:
            with suppress(OSError, ValueError):  # another version; "max", if there is no limit
                limit = int((folder / limit_file).read_text())
                for line in (folder / "memory.stat").read_text().splitlines():
                    name, value = line.split()
                    if name == counted:
                        free = min(free, limit - int(value))
    return free


def group_folders(controller: str) -> list[Path]:
    """The control groups that limit this process, from its own to that of the machine.

    controller: "memory" or "cpu". Version 2 has one folder for all controllers, version
    1 one for each. In a container the outer groups may not be seen.
    """
    folders = []
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = GROUPS / controller if controllers else GROUPS
        group = root / path.strip("/")
        folders += [each for each in (group, *group.parents) if each.is_relative_to(root)]
    return folders
