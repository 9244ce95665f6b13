"""The records of a run, Problem -> Prompt -> Sample -> Example, and what a task is."""

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, Field, FiniteFloat

Outcome = Literal["correct", "incorrect", "invalid"]  # of the paper's tasks
OUTCOMES: tuple[str, ...] = get_args(Outcome)


class InputError(ValueError):
    """Input that cannot be used. The message says what is wrong, then how to fix it.

    option, file, line, field: what the error is about, where that is known. They begin the message.

    >>> print(InputError("is empty; give at least one sample", file="a.jsonl", line=3))
    a.jsonl:3: is empty; give at least one sample
    >>> InputError("must be at least 1", option="--k").option
    '--k'
    """

    def __init__(
        self,
        message: str,
        *,
        option: str | None = None,
        file: Path | str | None = None,
        line: int | None = None,
        field: str | None = None,
    ) -> None:
        self.message = message
        self.option = option
        self.file = None if file is None else str(file)
        self.line = line
        self.field = field
        place = self.file if line is None else f"{file}:{line}"
        parts = [option, place, f"field {field}" if field else None, message]
        super().__init__(to_line(": ".join(part for part in parts if part is not None)))


def to_line(text: str) -> str:
    """Text for a terminal: on one line, with escapes for what a terminal would act on.

    >>> print(to_line("no column\\n\\x1b[2J"))
    no column \\x1b[2J
    """
    characters = []
    for character in " ".join(text.split()):
        characters.append(character if character.isprintable() else ascii(character)[1:-1])
    return "".join(characters)


def first_line(error: BaseException) -> str:
    """What an error of a library says, in one line, with its type where that may explain more.

    >>> first_line(ValueError("no such shape\\nsee there")), first_line(KeyError("model"))
    ('no such shape', "KeyError: 'model'")
    """
    lines = str(error).strip().splitlines()
    if lines and lines[0].endswith(":"):  # the second line says which
        lines = [" ".join(lines[:2])]
    if lines and isinstance(error, OSError | ValueError):
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


@dataclass(frozen=True)
class Problem:
    """A question and, if it has one, its gold answer, as the task's own parser returns it."""

    id: str
    question: str
    gold: Hashable = None


class Prompt(NamedTuple):
    """A problem as the model reads it."""

    problem: Problem
    text: str
    ids: list[int]


class Sample(BaseModel, extra="forbid", strict=True):
    """A completion of a prompt and its grade: a line of samples.jsonl.

    A sampling engine returns it without a grade. Samples from elsewhere need only prompt,
    completion and reward. token_ids: those of the completion, including its end of sequence or stop
    string. token_logmu: log mu of these tokens, in nats, for --trust-logmu. token_logmu_engine: the
    same, computed by the sampling engine. reward: before the baseline; None until it is graded.

    >>> Sample(prompt="Q: 1 + 1?\\nA:", completion=" The answer is 2.", reward=1.0).finish_reason
    'stop'
    """

    problem_id: str | None = None
    prompt: str
    completion: str
    token_ids: list[int] | None = Field(default=None, min_length=1)
    token_logmu: list[FiniteFloat] | None = None
    token_logmu_engine: list[FiniteFloat] | None = None
    finish_reason: Literal["stop", "length"] = "stop"
    reward: FiniteFloat | None = None
    outcome: str | None = None


@dataclass(frozen=True)
class Example:
    """A completion to train on: a line of train.jsonl.

    Examples of the same `row` are trained on in the same micro-batch: one completion, or the two
    of a pair for DPO.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    reward: float  # after the baseline
    sample: int  # index of its sample in samples.jsonl, or in the file of --samples
    row: int = 0  # index of its row in the order of training
    token_logmu: list[float] | None = None  # log mu of each token, in nats; None until scored


class Grade(NamedTuple):
    """How good a completion is: its reward, any finite number, and the name of its outcome."""

    reward: float
    outcome: str


@dataclass(frozen=True)
class Task:
    """Problems, the prompt that asks them, and how completions are graded.

    A completion is graded up to the first stop string, by exactly one of three functions:
    reward: completion, problem -> a number, or a Grade;
    batch_reward: the same for a list of completions and the list of their problems;
    grade: completion, gold answer -> outcome, with a reward of +1 for the first outcome and -1 for
    the others (Section 4.2).

    prompt: problem -> text. stop: strings that end a completion. parse: completion -> the answer
    that maj@k votes on, or None; without `parse` there is no maj@k. same: whether two answers vote
    together. outcomes: names; the first counts as correct in pass@k and maj@k. A number without a
    name has the first outcome if it is positive, else the second. Raises InputError.
    """

    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    prompt: Callable[[Problem], str] = operator.attrgetter("question")
    parse: Callable[[str], Hashable | None] | None = None
    grade: Callable[[str, Any], str] | None = None
    stop: tuple[str, ...] = ()
    same: Callable[[Any, Any], bool] = operator.eq
    reward: Callable[[str, Problem], float | Grade] | None = None
    batch_reward: Callable[[Sequence[str], Sequence[Problem]], Sequence[float | Grade]] | None = (
        None
    )
    outcomes: tuple[str, ...] = ("correct", "incorrect")

    def __post_init__(self) -> None:
        graders = [self.grade, self.reward, self.batch_reward]
        if sum(function is not None for function in graders) != 1:
            raise InputError(
                f"task {self.name}: give exactly one of reward, batch_reward and grade",
                field="reward",
            )
        if len(set(self.outcomes)) < max(len(self.outcomes), 2):
            raise InputError(
                f"task {self.name}: outcomes {self.outcomes}: give at least two different names",
                field="outcomes",
            )
        for problems in (self.train, self.test):
            counts = Counter(problem.id for problem in problems)
            for name, count in counts.most_common(1):
                if count > 1:
                    raise InputError(
                        f"task {self.name}: {count} problems have the id {name!r}; make ids unique",
                        field="id",
                    )

    def graded_text(self, completion: str) -> str:
        """The part of a completion that is graded: everything before the first stop string.

        >>> task = Task("sums", [], [], grade=str, stop=("Q:",))
        >>> task.graded_text("4. Q: 3 + 3?")
        '4. '
        """
        for stop in self.stop:
            completion = completion.partition(stop)[0]
        return completion
