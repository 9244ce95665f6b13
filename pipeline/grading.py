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
    """Each completion with the grade of its text before the stop string, in place of any grade that it had.

    problems: that of each completion. seconds: how long the task's function may take for a completion; a batch has that
    many for each of its own. InputError names the problem, the completion and the line of the task's code that raised,
    hung, or returned what is no grade.

    >>> task = Task("short", [], [], reward=lambda completion, problem: 1 - len(completion))
    >>> [sample] = graded(task, [Drawn(prompt="?", completion="four")], [Problem("1", "?")])
    >>> sample.reward, sample.outcome
    (-3.0, 'incorrect')
    """
    texts = [task.visible(one.completion) for one in drawn]
    function = task.reward or task.batch_reward or task.grade
    values: list[Any] = []
    if task.batch_reward and texts:
        with named(function, problems[0].id, texts[0], seconds * len(texts)):
            values = list(function(texts, problems))
            if len(values) != len(texts):
                raise _Fault(f"returned {len(values)} grades for {len(texts)} completions, of which this is the first")
    samples = []
    for i, (one, text, problem) in enumerate(zip(drawn, texts, problems, strict=True)):
        with named(function, problem.id, text, seconds):
            value = values[i] if values else function(text, problem.gold if task.grade else problem)
            samples.append(Sample(**dict(one) | _grade(task, value)._asdict()))
    return samples


def _grade(task: Task, value: Any) -> Grade:
    """What the task's function returned, as a grade."""
    if task.grade:
        value = Grade(1.0 if value == task.outcomes[0] else -1.0, value)
    elif not isinstance(value, Grade):
        is_right = isinstance(value, Real) and value > 0
        value = Grade(value, task.outcomes[0 if is_right else 1])
    if not (isinstance(value.reward, Real) and math.isfinite(value.reward)):
        raise _Fault(f"returned {value.reward!r:.80}, where a finite number or a Grade should be")
    if value.outcome not in task.outcomes:
        raise _Fault(
            f"returned the outcome {value.outcome!r:.80}, which is none of the task's outcomes {task.outcomes}"
        )
    return Grade(float(value.reward), value.outcome)


class _Fault(BaseException):
    """What a task's function did wrong. No Exception: code that expects some of its own catches these too often."""


@contextmanager
def named(function: Callable, problem_id: str | None, text: str, seconds: float = math.inf) -> Iterator[None]:
    """Inside it a task's `function` is called on a text; InputError tells where it raised or ran out of time."""
    try:
        with _time_limit(seconds):
            yield
    except InputError:
        raise
    except (_Fault, Exception) as error:
        [*_, told] = traceback.format_exception_only(error)
        fault = " ".join(str(error).split()) if isinstance(error, _Fault) else told.strip().partition("\n")[0]
        raise InputError(
            f"problem {problem_id}, completion {text[:80]!r}: {_place(function, error)}: {fault}; mend it, and the "
            "same command goes on with what was drawn"
        ) from error


def _place(function: Callable, error: BaseException) -> str:
    """FILE:LINE of the last line of the function's file that was at work at the error; else of the function."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:  # written in C
        return repr(function)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{[code.co_firstlineno, *lines][-1]}"


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """A fault after so many seconds, by the alarm that the main thread alone gets; elsewhere there is no limit.

    An alarm that was set before rings later by as long as the block took. Code in C that does not look at signals goes
    on to its end.
    """

    def ring(number: int, frame: Any) -> None:
        raise _Fault(f"took more than {seconds:g} s, see REWARD_SECONDS in pipeline/grading.py")

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
