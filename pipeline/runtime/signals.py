"""Ending a run on request, by SIGTERM or SIGINT, which is Ctrl-C: a KeyboardInterrupt; in training between steps."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

REQUESTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def requests_go_to(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Inside it, `handler` is called on a request to end; nothing changes outside the main thread, which gets none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in REQUESTS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interrupt(number: int, frame: Any) -> None:
    """Obey a request at once."""
    raise KeyboardInterrupt


@contextmanager
def requests_are_noted() -> Iterator[Callable[[], bool]]:
    """Inside it a request is noted, and the function that it gives tells whether there was one; a second is obeyed.

    >>> with requests_are_noted() as is_asked:
    ...     is_asked()
    False
    """
    noted: list[int] = []

    def note(number: int, frame: Any) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    with requests_go_to(note):
        yield lambda: bool(noted)
    if noted:
        raise KeyboardInterrupt
