"""The processes of a run as torchrun starts them, and what they exchange.

Without torchrun the only process is rank 0, and every function works as well.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from tqdm import tqdm

T = TypeVar("T")
TIMEOUT = timedelta(days=1)  # of a collective: one rank may sample hours longer than others


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> torch.device:
    """Where this process computes: its own GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that torchrun started, if they are several and no outer block has."""
    if dist.is_initialized() or ranks() == 1:
        yield
        return
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    yield
    # Not in a `finally`: after an error NCCL would wait here for ranks that never come. The process
    # exits instead, and torchrun stops the others.
    dist.destroy_process_group()


def gather(value: T) -> list[T]:
    """The values of all ranks, in order. Every rank calls this."""
    if ranks() == 1:
        return [value]
    values = [value] * ranks()
    dist.all_gather_object(values, value)
    return values


def on_rank_zero(work: Callable[..., T], *arguments: object) -> T:
    """What `work` returns on rank zero, which alone calls it. Every rank calls this and waits."""
    result = work(*arguments) if rank() == 0 else None
    return gather(result)[0]


def progress_bar(
    items: Iterable[T] | None, description: str, unit: str, total: int | None = None, done: int = 0
) -> tqdm:
    """`items` with a progress bar on rank zero; without items, a bar for `update`.

    done: how many of `total` an earlier command has done; a printed line says so. A log file gets
    few lines.
    """
    if rank() == 0 and 0 < done < (total or 0):
        print(f"{description}: resumes after {unit} {done} of {total}", file=sys.stderr, flush=True)
    seconds = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(
        items,
        description,
        total,
        initial=done,
        unit=unit,
        disable=rank() > 0,
        delay=seconds,
        mininterval=seconds,
    )
