"""The processes of a run: ranks as torchrun starts them, progress, times, requests to stop, and how a command ends.

Without torchrun there is one process, rank 0, and what is done on all ranks is a plain call.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import psutil
from tqdm import tqdm

from pipeline.records import InputError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

T = TypeVar("T")
FAULT = "fault"  # the key of what ended a rank's work, which all ranks learn when theirs is done
FAILED, PRINTED = (
    "failed",
    "printed",
)  # keys: ranks that failed alone, and that the first of them has printed why
LEFT, PERIOD = (
    "left",
    0.5,
)  # a rank's key once nobody watches it any more; seconds between two looks at the others
REQUESTS = (signal.SIGINT, signal.SIGTERM)  # SIGINT is Ctrl-C
SAME_REQUEST = 3.0  # seconds
FAULTS = (
    InputError,
    ArithmeticError,
    KeyboardInterrupt,
    OSError,
)  # that a user can mend: a line, and no traceback


class SharedError(InputError):
    """A fault of one rank or more that all ranks end with."""


class SharedStop(KeyboardInterrupt):
    """A request to end, of one rank or more, that all ranks follow at the same step."""


def rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", 0))


def ranks() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE", 1))


def device() -> "torch.device":
    """Where this process computes: its own GPU, or the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


@contextmanager
def process_group(alone: bool = False) -> Iterator[None]:
    """Join the processes that torchrun started. Without torchrun do nothing or, if `alone`, form a group of one.

    Within a group it does nothing: all runs of a command share one.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized() or ("RANK" not in os.environ and not alone):
        yield
        return
    if torch.cuda.is_available():
        local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        if (
            gpus < local
        ):  # all processes of the machine say so, not those alone whose GPU is missing
            raise InputError(
                f"{local} processes need a GPU each, and torch sees {gpus}: give --nproc-per-node {gpus}"
            )
        torch.cuda.set_device(device())
    store = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, **store)
        dist.all_reduce(torch.zeros(1, device=device()))  # NCCL starts with its first collective
    except RuntimeError as error:
        fault = f"processes cannot reach each other: {str(error).splitlines()[0]}"
        advice = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an interface of this machine, or are not set"
        raise InputError(f"{fault}; see that {advice}") from None
    try:
        with watched() if ranks() > 1 else nullcontext():
            yield
    finally:  # NCCL's destruction waits for all ranks: a rank that fails alone must skip it
        if ranks() == 1 or isinstance(sys.exception(), SharedError | SharedStop | None):
            _waiting_group.cache_clear()
            dist.destroy_process_group()


@contextmanager
def watched() -> Iterator[None]:
    """Inside it this process ends once another one has failed alone or was killed, whatever it waits for."""
    over, machine = threading.Event(), os.environ.get("GROUP_RANK")  # torchrun's number of it
    places = from_all_ranks((machine, os.getpid()))
    pids = {number: pid for number, (there, pid) in enumerate(places) if there and there == machine}
    watcher = threading.Thread(
        target=_end_if_one_ends, args=(_store().clone(), pids, over), daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        if not isinstance(sys.exception(), SharedError | SharedStop | None):
            with requests_are_noted():  # torchrun's too, when it sees that a rank has ended
                watcher.join(4 * PERIOD)  # where the error comes of that, it is what is told
        _store().set(f"{LEFT} {rank()}", "")
        over.set()
        watcher.join()  # a thread in torch's code when Python ends would abort the process


def _end_if_one_ends(store: "dist.Store", pids: Mapping[int, int], over: threading.Event) -> None:
    """End this process, whatever it waits for, once another has failed alone and said so in the store of all.

    pids: the ranks of this machine. One that is gone and has said nothing was killed, as the kernel does for memory.
    """
    with suppress(RuntimeError):  # the store is gone, and the run with it
        while not over.wait(PERIOD):
            gone = [number for number, pid in pids.items() if not psutil.pid_exists(pid)]
            if store.check([PRINTED]):
                os._exit(1)
            if killed := [number for number in gone if not store.check([f"{LEFT} {number}"])]:
                advice = "dmesg tells if it was for memory; what is done is kept, and the same command goes on"
                _end_alone(f"rank {killed[0]} was killed: {advice}", store)


@cache
def _waiting_group(world: "dist.ProcessGroup") -> "dist.ProcessGroup":
    """All ranks of `world`, which may wait days for each other: one may have hours of samples to draw.

    Training's own collectives keep torch's limit of half an hour, after which a rank that hangs is reported.
    """
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def from_all_ranks(value: T) -> list[T]:
    """The ranks' values, in the order of ranks; [value] where there is one process."""
    if ranks() == 1:
        return [value]
    import torch.distributed as dist

    values = [value] * ranks()
    dist.all_gather_object(values, value, _waiting_group(dist.group.WORLD))
    return values


def on_all_ranks(work: Callable[[], T]) -> T:
    """What this rank's `work` returns, once all ranks are done with theirs.

    An InputError or OSError of one rank is raised by all, as SharedError.
    """
    if ranks() == 1:
        return work()
    result, fault, cause = None, None, None
    try:
        result = work()
    except (InputError, OSError) as error:
        fault, cause = (
            line_of(error) if isinstance(error, InputError) else f"rank {rank()}: {line_of(error)}",
            error,
        )
        _store().set(FAULT, fault)
    if faults := [fault for fault in from_all_ranks(fault) if fault is not None]:
        raise SharedError("\n".join(dict.fromkeys(faults))) from cause
    return result


def end_with_others() -> None:
    """InputError where the work of another rank has failed: for long work, between its pieces."""
    if ranks() > 1 and _store().check([FAULT]):
        raise InputError(_store().get(FAULT).decode())


def _store() -> "dist.Store":
    """What all ranks read and write: the one that they met at."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def by_rank_zero(work: Callable[..., T]) -> Callable[..., T]:
    """A decorator: rank zero alone does `work`; the other ranks, which must call it too, wait and return the same."""

    @wraps(work)
    def call(*arguments: Any, **named: Any) -> T:
        if ranks() == 1:
            return work(*arguments, **named)
        return from_all_ranks(
            on_all_ranks(lambda: work(*arguments, **named) if rank() == 0 else None)
        )[0]

    return call


@dataclass
class Times:
    """Where the time of a process goes, and how often it did what: for times.json.

    >>> times = Times()
    >>> with times("training"), times("saving"):  # the inner one counts as saving alone
    ...     times.counts["steps"] += 1
    >>> sorted(times.seconds), times.counts["steps"]
    (['saving', 'training'], 1)
    """

    begun: float = field(default_factory=time.monotonic)
    seconds: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Inside it time counts as spent on `what`, but for that of blocks inside it."""
        begun, counted = time.monotonic(), self.seconds.total()
        try:
            yield
        finally:
            inside = self.seconds.total() - counted
            self.seconds[what] += time.monotonic() - begun - inside


def progress_bar(
    items: Iterable[T] | None, description: str, unit: str, total: int | None = None
) -> tqdm:
    """`items`, with a progress bar on rank zero; where its output is no terminal, a line every ten seconds.

    Without items it is a bar that `update` moves on.
    """
    pause = 0.1 if sys.stderr.isatty() else 10.0
    with (
        requests_are_noted()
    ):  # of half a bar, the interpreter tells an AttributeError when it collects it
        return tqdm(
            items, description, total, unit=unit, disable=rank() > 0, delay=pause, mininterval=pause
        )


@contextmanager
def requests_are_noted() -> Iterator[Callable[[], bool]]:
    """Inside it SIGINT and SIGTERM are noted, and the function it gives tells whether one came.

    Another one interrupts if it comes SAME_REQUEST seconds later; until then it is the same request, since a scheduler
    sends SIGTERM to all processes of a job, and torchrun its own. At the end a noted one is sent again, which raises
    KeyboardInterrupt, or is noted by a block around this one.
    """
    noted: list[tuple[float, int]] = []  # when, and which

    def note(number: int, frame: Any) -> None:
        if noted and time.monotonic() > noted[0][0] + SAME_REQUEST:
            raise KeyboardInterrupt(number)
        noted.append((time.monotonic(), number))

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note) for number in REQUESTS if is_main}
    try:
        yield lambda: bool(noted)
    except SharedStop:
        raise SharedStop(*(number for _, number in noted[:1])) from None
    finally:
        for number, old in before.items():
            signal.signal(number, old)
    if noted:
        signal.raise_signal(noted[0][1])


@contextmanager
def command(name: str) -> Iterator[None]:
    """Inside it, an error that the user can mend, SIGINT or SIGTERM ends the program with a line beginning with `name`.

    With --debug among the arguments it ends with a traceback. Threads that wait spin for some microseconds and then
    sleep, unless the environment says otherwise: beside another busy process, threads that spin on make a training step
    twenty times slower; alone, threads that sleep at once make it half as slow again.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # these two are read when torch is imported
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault(
        "HF_HUB_DOWNLOAD_TIMEOUT", "8"
    )  # seconds; the hub's library tries six times
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except BaseException as error:
        is_of_memory = (
            type(error).__name__ == "OutOfMemoryError"
        )  # torch's, which a command may not have imported
        distributed = sys.modules.get("torch.distributed")
        is_joined = distributed is not None and distributed.is_initialized()  # and not destroyed
        is_for_user = (isinstance(error, FAULTS) or is_of_memory) and "--debug" not in sys.argv
        if (
            ranks() > 1
            and not isinstance(error, SharedError | SharedStop | SystemExit)
            and is_joined
        ):
            fault = (
                line_of(error) if is_for_user else f"\n{''.join(traceback.format_exception(error))}"
            )
            _end_alone(f"{name}: rank {rank()}: {fault}")
        if not is_for_user:
            raise
        # A machine's first process prints what all share; every process prints a fault of its own disk.
        is_mine = isinstance(error, OSError) or os.environ.get("LOCAL_RANK", "0") == "0"
        if (
            not is_mine
        ):  # were this one to end before the first, torchrun would end that before it has printed
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(SAME_REQUEST)
        status = (
            2 if isinstance(error.__cause__, SystemExit) else 1
        )  # 2: its options cannot be read
        if isinstance(
            error, KeyboardInterrupt
        ):  # as shells and schedulers tell a signal: 130 or 143
            status = 128 + (error.args or (signal.SIGINT,))[0]
        line = f"{name}: {line_of(error)}"
        if is_mine and status > 1:
            print(line, file=sys.stderr, flush=True)
        sys.exit(line if is_mine and status == 1 else status)


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt(number)


def line_of(error: BaseException) -> str:
    """An error as a line for the user, without the command's name.

    >>> line_of(KeyboardInterrupt())
    'stopped; what is done is kept, and the same command goes on'
    """
    if isinstance(error, KeyboardInterrupt):
        return "stopped; what is done is kept, and the same command goes on"
    return (
        f"{error}; once that is mended, the same command goes on"
        if isinstance(error, OSError)
        else str(error)
    )


def _end_alone(message: str, store: "dist.Store | None" = None) -> NoReturn:
    """End this process at once, and the others with it. Only the first that fails says why: others fail of its end.

    A usual exit would wait for collectives that the others never join.
    """
    with suppress(RuntimeError):  # the store is gone: another has ended, and printed why
        store = store or _store()
        if store.add(FAILED, 1) == 1:
            print(message, file=sys.stderr, flush=True)
            if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # what torchrun prints last
                Path(file).write_text(json.dumps({"message": message}))
            store.set(PRINTED, "")
    os._exit(1)
