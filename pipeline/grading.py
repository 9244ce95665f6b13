"""Grading: the only place that calls a task's own functions on completions. It names what is wrong with them."""

import inspect
import math
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

from pipeline.records import Drawn, Grade, InputError, Problem, Sample, Task

REWARD_SECONDS = 300.0  # for a completion, ours: a function that hangs by mistake ends the run with a line


def graded(
    task: Task, drawn: Sequence[Drawn], problems: Sequence[Problem], seconds: float = REWARD_SECONDS
) -> list[Sample]:
    """Each completion with its grade in place of any that it had; the other arguments are those of `grades`."""
    found = grades(task, [one.completion for one in drawn], problems, seconds)
    return [Sample(**dict(one) | grade._asdict()) for one, grade in zip(drawn, found, strict=True)]


def grades(
    task: Task, completions: Sequence[str], problems: Sequence[Problem], seconds: float = REWARD_SECONDS
) -> list[Grade]:
    """The grade of each completion, by its text before the stop string. problems: that of each completion.

    seconds: how long the task's function may take for a completion; a batch has that many for each of its own.
    InputError names the problem, the completion and the line of the task's code that raised, hung, or returned what is
    no grade.

    >>> task = Task("short", [], [], reward=lambda completion, problem: 1 - len(completion))
    >>> grades(task, ["", "four"], [Problem("1", "?"), Problem("2", "?")])
    [Grade(reward=1.0, outcome='correct'), Grade(reward=-3.0, outcome='incorrect')]
    """
    texts = [task.visible(completion) for completion in completions]
    found: list[Any] = []
    if task.batch_reward is not None and texts:
        with named(task.batch_reward, problems[0].id, texts[0], seconds * len(texts)):
            found = list(task.batch_reward(texts, problems))
        if len(found) != len(texts):
            fault = f"returned {len(found)} grades for {len(texts)} completions, of which this is the first"
            raise _fault(problems[0].id, texts[0], _place(task.batch_reward), fault)
    elif task.batch_reward is None:
        for text, problem in zip(texts, problems, strict=True):
            with named(task.reward or task.grade, problem.id, text, seconds):
                found.append(task.reward(text, problem) if task.reward else task.grade(text, problem.gold))
    return [_grade(task, *of_one) for of_one in zip(found, texts, problems, strict=True)]


def _grade(task: Task, value: Any, text: str, problem: Problem) -> Grade:
    """What the task's function returned, as a grade."""
    if task.grade:
        value = Grade(1.0 if value == task.outcomes[0] else -1.0, value)
    elif not isinstance(value, Grade):
        is_right = isinstance(value, Real) and value > 0
        value = Grade(value, task.outcomes[not is_right])
    fault = None
    if not _is_finite(value.reward):
        fault = f"returned {value.reward!r:.80}, where a finite number or a Grade should be"
    elif value.outcome not in task.outcomes:
        fault = f"returned the outcome {value.outcome!r:.80}, which is none of the task's outcomes {task.outcomes}"
    if fault:
        place = _place(task.batch_reward or task.reward or task.grade)
        raise _fault(problem.id, text, place, " ".join(fault.split()))
    return Grade(float(value.reward), value.outcome)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int that no float can be
        return False


@contextmanager
def named(function: Callable, problem_id: str | None, text: str, seconds: float = math.inf) -> Iterator[None]:
    """Inside it a task's `function` is called on a text; InputError tells where it raised or ran out of time."""
    try:
        with _time_limit(seconds):
            yield
    except InputError:
        raise
    except (_OutOfTime, Exception) as error:
        [*_, told] = traceback.format_exception_only(error)
        limit = f"took more than {seconds:g} s, see REWARD_SECONDS in pipeline/grading.py"
        fault = limit if isinstance(error, _OutOfTime) else told.strip()
        raise _fault(problem_id, text, _place(function, error), fault.partition("\n")[0]) from error


def _fault(problem_id: str | None, text: str, place: str, fault: str) -> InputError:
    end = "mend it, and the same command goes on with what was drawn"
    return InputError(f"problem {problem_id}, completion {text[:80]!r}: {place}: {fault}; {end}")


def _place(function: Callable, error: BaseException | None = None) -> str:
    """FILE:LINE of the function; with an error that came out of it, of the last line of its file that was at work."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:  # written in C
        return repr(function)
    frames = traceback.extract_tb(error.__traceback__) if error else []
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{[code.co_firstlineno, *lines][-1]}"


# ---- the time limit ---------------------------------------------------------------------------------------------


class _OutOfTime(BaseException):
    """No Exception, since code that expects some of its own catches these all too often."""


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """_OutOfTime after so many seconds, by the alarm that the main thread alone gets; elsewhere there is no limit.

    An alarm that was set before rings later by as long as the block took. Code in C that does not look at signals goes
    on to its end.
    """

    def ring(number: int, frame: Any) -> None:
        raise _OutOfTime

    if seconds == math.inf or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, ring)
    delay, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, delay, interval)
        signal.signal(signal.SIGALRM, handler)
