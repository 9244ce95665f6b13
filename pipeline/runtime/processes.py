"""Many processes, as torchrun starts them: which one this is, and what all of them do together.

Without torchrun there is one process, and everything here is a plain call.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from pipeline.records import InputError
from topr import from_all_ranks

T = TypeVar("T")


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def is_first_process() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one; known before they join."""
    return os.environ.get("RANK", "0") == "0"


def ranks() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    """Where this process computes: its own GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


@contextmanager
def process_group(alone: bool = False) -> Iterator[None]:
    """Join the processes that torchrun started; without torchrun do nothing or, if `alone`, form a group of one.

    Within a group it does nothing: there is one for all runs of a command.
    """
    if dist.is_initialized() or ("RANK" not in os.environ and not alone):
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    store = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    # Some wait for the others' samples: the time limit of a collective is there for networks, not for that.
    dist.init_process_group(backend, timeout=timedelta(days=7), **store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_all_ranks(work: Callable[[], T]) -> T:
    """What this rank's `work` returns, once all ranks are done with theirs; an InputError of one is raised by all.

    >>> on_all_ranks(rank)
    0
    """
    result, fault = None, None
    try:
        result = work()
    except InputError as error:
        fault = str(error)
    if faults := [fault for fault in from_all_ranks(fault) if fault is not None]:
        raise InputError(faults[0])
    return result


def on_rank_zero(work: Callable[[], T]) -> T:
    """What `work` returns on the first rank, which alone does it; the others wait and get it too.

    >>> on_rank_zero(lambda: "done")
    'done'
    """
    return from_all_ranks(on_all_ranks(lambda: work() if rank() == 0 else None))[0]


def say(text: str) -> None:
    """Print once, whatever the number of ranks."""
    if rank() == 0:
        print(text, flush=True)


def share(items: list[T]) -> tuple[int, list[T]]:
    """This rank's part of the items, a consecutive one, and where it begins.

    >>> share(["a", "b", "c"])
    (0, ['a', 'b', 'c'])
    """
    start, stop = (len(items) * r // ranks() for r in (rank(), rank() + 1))
    return start, items[start:stop]
