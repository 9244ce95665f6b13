"""Grading: completions in, rewards out.

The task's own function does the grading. An exception that it raises keeps its traceback and gets a
note with the problem and the completion; a value that is no grade is an InputError.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

from toprlib.records import Grade, InputError, Problem, Sample, Task

FIX = "fix the function, then repeat the command: completions are saved"


def grade_samples(
    task: Task, samples: Sequence[Sample], problems: Sequence[Problem]
) -> list[Sample]:
    """The samples with reward and outcome, which replace earlier ones.

    A completion is graded up to the first stop string. problems: in order; each has equally many
    consecutive samples. Raises InputError if the task's function returns what is no grade.

    >>> task = Task("brevity", [], [], reward=lambda completion, problem: 1 - len(completion))
    >>> samples = [Sample(prompt="?", completion=text) for text in ("four", "")]
    >>> for sample in grade_samples(task, samples, [Problem("a", "?"), Problem("b", "?")]):
    ...     print(sample.reward, sample.outcome)
    -3.0 incorrect
    1.0 correct
    """
    if not samples:
        return []
    samples_per_problem = len(samples) // len(problems)
    texts = [task.graded_text(sample.completion) for sample in samples]
    problem_of = [problem for problem in problems for _ in range(samples_per_problem)]
    if task.batch_reward is not None:
        values = _call_batch_reward(task, texts, problem_of)
    else:
        values = _call_each(task, texts, problem_of)
    graded = []
    for sample, problem, value in zip(samples, problem_of, values, strict=True):
        grade = _to_grade(task, problem, value)
        update = {"reward": float(grade.reward), "outcome": grade.outcome}
        graded.append(sample.model_copy(update=update))
    return graded


@contextmanager
def describe_errors(problem_id: str | None, text: str) -> Iterator[None]:
    """In the block, an exception of a task's function gets a note with the problem and the text.

    >>> try:
    ...     with describe_errors("train-7", "one"):
    ...         int("one")
    ... except ValueError as error:
    ...     print(error.__notes__[0].partition(";")[0])
    problem train-7, completion 'one'
    """
    try:
        yield
    except Exception as error:
        error.add_note(f"problem {problem_id}, completion {text[:80]!r}; {FIX}")
        raise


def _call_each(task: Task, texts: Sequence[str], problems: Sequence[Problem]) -> list[Any]:
    """What `reward` or `grade` returns for each text."""
    values = []
    for text, problem in zip(texts, problems, strict=True):
        with describe_errors(problem.id, text):
            if task.grade is not None:
                values.append(task.grade(text, problem.gold))
            else:
                values.append(task.reward(text, problem))
    return values


def _call_batch_reward(task: Task, texts: Sequence[str], problems: Sequence[Problem]) -> list[Any]:
    """What `batch_reward` returns: a value for each text. InputError if their number differs."""
    # The function is called once: it is not known which of the completions an exception is about.
    with describe_errors(f"{problems[0].id}, the first of {len(texts)}", texts[0]):
        values = list(task.batch_reward(texts, problems))
    if len(values) != len(texts):
        message = f"returned {len(values)} values for {len(texts)} completions; return one for each"
        raise InputError(f"task {task.name}: {message}", field="batch_reward")
    return values


def _to_grade(task: Task, problem: Problem, value: Any) -> Grade:
    """The grade that a function's value means: see `Task`. Raises InputError if it means none."""
    if task.grade is not None:
        grade = Grade(1.0 if value == task.outcomes[0] else -1.0, value)
    elif isinstance(value, Grade):
        grade = value
    else:
        is_positive = isinstance(value, Real) and value > 0
        grade = Grade(value, task.outcomes[0 if is_positive else 1])
    functions = ("grade", "reward", "batch_reward")
    [function] = [name for name in functions if getattr(task, name) is not None]
    where = f"task {task.name}: problem {problem.id}: returned"
    # A NaN would make every weight NaN at the first step of training.
    if not isinstance(grade.reward, Real) or not math.isfinite(grade.reward):
        message = f"{where} {grade.reward!r:.80}; return a finite number or a Grade"
        raise InputError(message, field=function)
    if grade.outcome not in task.outcomes:
        message = f"{where} the outcome {grade.outcome!r:.80}; return one of {task.outcomes}"
        raise InputError(message, field=function)
    return grade
