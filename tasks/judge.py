"""Compares two mathematical answers with math-verify, in a process of its own.

An expression such as 9^{9^{9^9}} takes unlimited time and memory. The process has a limit of CPU
time for each comparison, so that a grade does not depend on what else the machine does. Beyond the
limit it ends: the comparison is given up, and another process is started for the next. Python's own
process pools would import torch into each new process.
"""

import re
import subprocess
import sys
import unicodedata
import weakref
from contextlib import suppress
from functools import lru_cache
from multiprocessing import Pipe
from pathlib import Path

from toprlib.records import InputError

WORKER = Path(__file__).with_name("judge_worker.py")
LONGEST = 500  # characters of an answer that math-verify reads; ours
WALL_SECONDS = 600.0  # for a process that uses no CPU time, such as a stopped one; ours

# What math-verify does not read, or misreads -> what it reads, in this order.
SYMBOLS = {
    "∞": r"\infty ",
    "°": r"^\circ ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "∅": r"\emptyset ",
}
MIXED = r"(?<=[0-9])(?=[¼-¾⅐-⅞])"  # 3½
SUPERSCRIPTS = r"[⁰¹²³⁴-⁹⁺⁻ⁿ]+"
SPELLINGS = (
    (r"([0-9]+)\u2044([0-9]+)", r"\\frac{\1}{\2}"),  # of ½
    (r"√\s*(?:([0-9]+|[a-zA-Z])|\(([^()]*)\))", r"\\sqrt{\1\2}"),
    (r"^\*\*(.+)\*\*$", r"\1"),  # bold print
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    (r"\\(?:mathrm|text)\{i\}", "i"),
    (r"\{:\}", ":"),
    # Thousands: math-verify takes 9\,500 for 9 + 500.
    (r"(?<=[0-9])(?:\{,\}|,\\!|\\[,;: ]|~)(?=[0-9]{3}(?![0-9]))", ""),
    (r"^(-?[0-9]{1,3}(?: [0-9]{3})+)(?![0-9])", lambda match: match[1].replace(" ", "")),
)


class Judge:
    r"""Compares answers in LaTeX or plain text.

    seconds: the limit of CPU time for a comparison (ours).

    >>> judge = Judge()
    >>> judge.equal(r"\frac{1}{2}", "0.5"), judge.equal("3", "4")
    (True, False)
    """

    def __init__(self, seconds: int = 3):
        self._seconds = seconds
        self._process = None
        self._end = lambda: None
        # A prompt's samples often agree. An abandoned comparison is an exception and is not cached.
        self._ask_once = lru_cache(maxsize=100_000)(self._ask)

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether `answer` is the same text as `gold`, or equal by math-verify's strict comparison.

        None if the comparison was abandoned. A text of more than LONGEST characters equals itself
        only.
        """
        gold = normalize(gold)
        answer = normalize(answer)
        if gold == answer:
            return True
        if max(len(gold), len(answer)) > LONGEST:
            return False
        try:
            return self._ask_once(gold, answer)
        except TimeoutError:
            return None

    def _ask(self, gold: str, answer: str) -> bool:
        is_equal = None
        try:
            if self._process is None or self._process.poll() is not None:
                self._start()
            with suppress(BrokenPipeError):  # a process that has just ended gives no answer
                self._pipe.send((gold, answer))
            is_equal = self._receive()
        finally:
            # Also after an interrupt: a late answer would be read as the next question's.
            if is_equal is None:
                self._end()
        if is_equal is None:
            raise TimeoutError
        return is_equal

    def _start(self) -> None:
        self._end()
        self._pipe, worker_pipe = Pipe()
        # -P removes the worker's folder from sys.path, where math.py would hide Python's own.
        number = worker_pipe.fileno()
        command = [sys.executable, "-P", str(WORKER), str(self._seconds), str(number)]
        self._process = subprocess.Popen(
            command, pass_fds=[number], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        worker_pipe.close()
        # The process ends with the judge, too.
        self._end = weakref.finalize(self, _kill, self._process)
        if self._receive() is None:
            raise InputError("math-verify does not start; pip install -r requirements.txt")

    def _receive(self) -> bool | None:
        """The process's next answer; None if it has ended, or if none comes for WALL_SECONDS."""
        with suppress(EOFError, ConnectionResetError):
            return self._pipe.recv() if self._pipe.poll(WALL_SECONDS) else None


def _kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def normalize(answer: str) -> str:
    r"""The answer as math-verify reads it: Unicode's symbols and some LaTeX are rewritten.

    >>> normalize("３x² + ½"), normalize(r"9\,500")
    ('3x^{2} + \\frac{1}{2}', '9500')
    """
    for symbol, latex in SYMBOLS.items():
        answer = answer.replace(symbol, latex)
    answer = re.sub(MIXED, " ", answer)
    answer = re.sub(SUPERSCRIPTS, r"^{\g<0>}", answer)
    answer = unicodedata.normalize("NFKC", answer)  # full-width forms, kinds of spaces, ½, ²
    answer = " ".join(answer.split())  # in math-verify, $...$ ends with the line
    for pattern, replacement in SPELLINGS:
        answer = re.sub(pattern, replacement, answer)
    return answer
