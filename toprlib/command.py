"""How a command ends: an error that the user can fix is one line, and the exit status is not 0."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from toprlib.distributed import rank, ranks
from toprlib.records import InputError

TORCHRUN_SECONDS = 3.0  # after which torchrun has stopped the ranks next to one that has failed


@contextmanager
def command(name: str) -> Iterator[None]:
    """In the block, an error ends the program with one line that begins with `name`.

    Ctrl-C and SIGTERM stop it at once, with exit status 130 and 143; repeating the command resumes
    the run. With several ranks, torchrun stops the others when one has ended. If the reader of the
    output ends, as in `... | head`, the command ends, too, without a line and with status 141.
    """
    # Read when torch is imported. Threads that wait spin briefly, then sleep: next to another busy
    # process, threads that keep spinning make a training step twenty times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "8")  # seconds; the library tries six times
    received = []  # signals

    def interrupt(number: int, frame: object) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # a shell ignores SIGINT for `command &`
            signal.signal(number, interrupt)
    try:
        try:
            with _flushed_output():
                yield
        except Exception as error:
            if received:  # Python ignores exceptions, interrupts included, within a __del__
                raise KeyboardInterrupt(received[0]) from error
            if isinstance(error, OSError) and not _is_output_open():
                error = _lose_output(error)
            _end_with_error(name, error)
    except KeyboardInterrupt as interruption:  # also while the block above ends
        _end_silently_at_the_next_signal()
        if _local_rank() == 0:
            _print_line(name, interruption)
        number = interruption.args[0] if interruption.args else signal.SIGINT
        _exit(128 + number)  # as shells report a signal: 130 or 143


@contextmanager
def _flushed_output() -> Iterator[None]:
    """Raise an error of standard output in the block; otherwise Python would raise it at exit."""
    try:
        yield
    finally:
        print(end="", flush=True)


def _is_output_open() -> bool:
    """Whether a line can be written to standard output; Python drops unwritten output."""
    try:
        print(flush=True)
    except OSError:
        return False
    return True


def _lose_output(error: OSError) -> InputError:
    """The error for output that cannot be written. A closed pipe ends the command here."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # otherwise Python would fail again when it exits
    if isinstance(error, BrokenPipeError):
        _exit(128 + signal.SIGPIPE)
    return InputError(f"standard output: {error.strerror}; send it elsewhere")


def _end_with_error(name: str, error: Exception) -> NoReturn:
    is_fixable = _is_fixable(error)
    if ranks() > 1:
        _end_silently_at_the_next_signal()
        _let_torchrun_stop_this_rank(is_fixable)
    elif not is_fixable:
        raise error
    if is_fixable:
        _print_line(name, error)
    else:
        traceback.print_exc()
    _exit(1)


def _is_fixable(error: Exception) -> bool:
    """Whether the user can fix an error without its traceback."""
    if isinstance(error, InputError):
        return True
    if hasattr(error, "__notes__"):
        return False  # of a task's own function: its traceback says where
    # Both are raised on purpose; other arithmetic errors, such as a division by zero, are bugs.
    is_numerical = type(error) in (ArithmeticError, FloatingPointError)
    return is_numerical or isinstance(error, OSError) or type(error).__name__ == "OutOfMemoryError"


def _end_silently_at_the_next_signal() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _let_torchrun_stop_this_rank(is_fixable: bool) -> None:
    """Wait until torchrun has stopped this rank, if another one has to report the error.

    The first rank reports an error of all ranks. An error that the user cannot fix may come from a
    connection to a rank that has ended.
    """
    if not is_fixable:
        time.sleep(TORCHRUN_SECONDS)
    if _local_rank() > 0:
        time.sleep(TORCHRUN_SECONDS)


def _print_line(name: str, error: BaseException) -> None:
    if _local_rank() > 0:
        name = f"{name}: rank {rank()}"
    print(f"{name}: {error_message(error)}", file=sys.stderr, flush=True)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _exit(status: int) -> NoReturn:
    if ranks() > 1:
        os._exit(status)  # a normal exit would wait for collectives that other ranks never join
    sys.exit(status)


def error_message(error: BaseException) -> str:
    """An error as a line for the user.

    >>> error_message(KeyboardInterrupt())
    'interrupted; progress is saved, repeat the command to resume'
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted; progress is saved, repeat the command to resume"
    if isinstance(error, OSError):
        return f"{error}; fix this, then repeat the command to resume"
    return str(error) if isinstance(error, InputError) else str(error).partition("\n")[0]
