"""The processes of a run as torchrun starts them, and what they exchange.

Without torchrun the only process is rank 0, and every function works as well.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from toprlib.records import InputError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")
_is_alone = ContextVar("_is_alone", default=False)  # whether rank zero works alone now


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_ranks(without_torchrun: int = 1) -> int:
    """The number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", without_torchrun))


def device() -> "torch.device":
    """Where this process computes: its own GPU, or the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group(is_needed: bool = False) -> Iterator[None]:
    """Join the processes that torchrun started.

    is_needed: without torchrun, form a group of this one process, which FSDP2 requires. Within a
    group this does nothing: all runs of a command share one.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized() or not (is_needed or "RANK" in os.environ):
        yield
        return
    if torch.cuda.is_available():
        _check_gpus(torch.cuda.device_count())
        torch.cuda.set_device(device())
    options = {}
    if "RANK" not in os.environ:
        options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, **options)
        dist.all_reduce(torch.zeros(1, device=device()))  # NCCL connects at its first collective
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        fix = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to this machine's network interface"
        raise InputError(f"the processes cannot reach each other: {reason}; {fix}") from None
    yield
    # Not in a `finally`: after an error NCCL would wait here for ranks that never come. The process
    # exits instead, and torchrun stops the others.
    _slow_group.cache_clear()
    dist.destroy_process_group()


def _check_gpus(gpus: int) -> None:
    processes = local_ranks()
    if gpus < processes:
        message = f"{processes} processes need a GPU each, and torch sees {gpus}"
        raise InputError(f"{message}; start torchrun with --nproc-per-node {gpus}")


@cache
def _slow_group(world: "dist.ProcessGroup") -> "dist.ProcessGroup":
    """A group of all ranks with a timeout of days: one rank may sample hours longer than others.

    Training's own collectives keep torch's timeout, after which a rank that hangs is reported.
    """
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def gather(value: T) -> list[T]:
    """The values of all ranks, in order. Every rank calls this."""
    if ranks() == 1:
        return [value]
    import torch.distributed as dist

    values = [value] * ranks()
    dist.all_gather_object(values, value, _slow_group(dist.group.WORLD))
    return values


def rank_zero_only(work: Callable[..., T]) -> Callable[..., T]:
    """A decorator: rank zero does the work; all ranks call it, wait, and return the same.

    An InputError or OSError of rank zero is raised on all ranks, so that they end together. Within
    such work, rank zero calls other functions of this kind without waiting for the other ranks.
    """

    @wraps(work)
    def call(*args: Any, **kwargs: Any) -> T:
        if ranks() == 1 or _is_alone.get():
            return work(*args, **kwargs)
        result = error = None
        if rank() == 0:
            token = _is_alone.set(True)  # else it would wait for ranks that are not here
            try:
                result = work(*args, **kwargs)
            except (InputError, OSError) as caught:
                error = caught
            finally:
                _is_alone.reset(token)
        result, error = gather((result, error))[0]
        if error is not None:
            raise error
        return result

    return call


class _LogLines(tqdm):
    """Progress in a log file: each state is a line."""

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.last_print_n < self.n:  # else this state is in the log already
            print(self, file=sys.stderr, flush=True)


def progress_bar(
    items: Iterable[T] | None, description: str, unit: str, total: int | None = None, done: int = 0
) -> tqdm:
    """`items` with a progress bar on rank zero; without items, a bar for `update`.

    done: how many of `total` an earlier command has done; a printed line says so. A log file gets a
    line every ten seconds.
    """
    if rank() == 0 and 0 < done < (total or 0):
        print(f"{description}: resumes after {unit} {done} of {total}", file=sys.stderr, flush=True)
    options = {"initial": done, "unit": unit, "disable": rank() > 0}
    if sys.stderr.isatty():
        return tqdm(items, description, total, delay=0.1, **options)
    seconds = 10.0
    options |= {"leave": False, "miniters": 1, "delay": seconds, "mininterval": seconds}
    return _LogLines(items, description, total, **options)
