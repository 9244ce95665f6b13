"""Compares two mathematical answers with math-verify, in a process of its own.

An expression such as 9^{9^{9^9}} takes unlimited time and memory: the process is then killed, and
the answer is incorrect. Python's own process pools would import torch into each new process.
"""

import subprocess
import sys
import weakref
from contextlib import suppress
from functools import lru_cache
from multiprocessing import Pipe
from pathlib import Path

from toprlib.records import InputError

WORKER = Path(__file__).with_name("judge_worker.py")
LONGEST = 500  # characters of an answer that math-verify reads; ours
START_SECONDS = 120.0  # until math-verify is imported; ours


class Judge:
    r"""Compares answers in LaTeX or plain text.

    seconds: the limit for reading an answer, and for comparing two (ours).

    >>> judge = Judge()
    >>> judge.equal(r"\frac{1}{2}", "0.5"), judge.equal("3", "4")
    (True, False)
    """

    def __init__(self, seconds: int = 3):
        self._seconds = seconds
        # Two are read and compared; a process that takes longer is killed.
        self._patience = 4.0 * seconds
        self._process = None
        self._end = lambda: None
        self._ask_once = lru_cache(maxsize=100_000)(self._ask)  # a prompt's samples often agree

    def equal(self, gold: str, answer: str) -> bool:
        """Whether `answer` is the same text as `gold`, or equal by math-verify's strict comparison.

        A text of more than LONGEST characters equals itself only.
        """
        gold = " ".join(gold.split())  # in math-verify, $...$ ends with the line
        answer = " ".join(answer.split())
        if gold == answer:
            return True
        return max(len(gold), len(answer)) <= LONGEST and self._ask_once(gold, answer)

    def _ask(self, gold: str, answer: str) -> bool:
        is_equal = None
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            with suppress(BrokenPipeError):  # a process that has just ended gives no answer
                self._pipe.send((gold, answer))
            is_equal = self._receive(self._patience)
        finally:
            # After an interrupt too: a late answer would be taken for that to the next question.
            if is_equal is None:
                self._end()
        return bool(is_equal)

    def _start(self) -> None:
        self._end()
        self._pipe, worker_pipe = Pipe()
        # -P leaves the worker's folder out of sys.path, where math.py would hide Python's own.
        number = worker_pipe.fileno()
        command = [sys.executable, "-P", str(WORKER), str(self._seconds), str(number)]
        self._process = subprocess.Popen(
            command, pass_fds=[number], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        worker_pipe.close()
        # The process ends with the judge, too.
        self._end = weakref.finalize(self, _kill, self._process)
        if self._receive(START_SECONDS) is None:
            raise InputError("math-verify does not start; pip install -r requirements.txt")

    def _receive(self, seconds: float) -> bool | None:
        """The process's next answer; None if it has ended, or if none comes in time."""
        with suppress(EOFError, ConnectionResetError):
            return self._pipe.recv() if self._pipe.poll(seconds) else None


def _kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
