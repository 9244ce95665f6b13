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

FIXABLE = (InputError, ArithmeticError, KeyboardInterrupt, OSError)  # one line, no traceback
TORCHRUN_SECONDS = 3.0  # after which torchrun has stopped the ranks next to one that has failed


@contextmanager
def command(name: str) -> Iterator[None]:
    """The block is a program: errors end it with one line that begins with `name`.

    Ctrl-C and SIGTERM stop it at once, with exit status 130 and 143; repeating the command resumes
    the run. With several ranks, torchrun stops the others when one has ended.
    """
    # Read when torch is imported. Threads that wait spin briefly, then sleep: next to another busy
    # process, threads that keep spinning make a training step twenty times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "8")  # seconds; the library tries six times
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        is_fixable = isinstance(error, FIXABLE) or type(error).__name__ == "OutOfMemoryError"
        # A note is that of `grading.describe_errors`: the author of a task needs the traceback.
        is_of_task = hasattr(error, "__notes__") and not isinstance(error, InputError)
        if is_fixable and not is_of_task:
            _exit_with_line(name, error)
        if ranks() == 1:
            raise
        traceback.print_exc()
        os._exit(1)  # a normal exit would wait for collectives that other ranks never join


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt(number)


def _exit_with_line(name: str, error: BaseException) -> NoReturn:
    """Print the error and exit. An error of all ranks is printed by the first one only."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(TORCHRUN_SECONDS)  # if the first rank fails too, torchrun ends this one here
        name = f"{name}: rank {rank()}"
    status = 1
    if isinstance(error, KeyboardInterrupt):
        number = error.args[0] if error.args else signal.SIGINT
        status = 128 + number  # as shells report a signal: 130 or 143
    print(f"{name}: {error_message(error)}", file=sys.stderr, flush=True)
    if ranks() > 1:
        os._exit(status)
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
