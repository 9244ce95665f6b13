"""The records of a run, Problem -> Prompt -> Sample -> Example, and what a task is."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from annotated_types import Le
from pydantic import BaseModel, Field, FiniteFloat

Outcome = Literal["correct", "incorrect", "invalid"]  # of the paper's tasks
OUTCOMES: tuple[str, ...] = get_args(Outcome)


class InputError(ValueError):
    """Input that cannot be used. A command ends with its message, without a traceback."""


@dataclass(frozen=True)
class Problem:
    """A question and, if it has one, its gold answer, as the task's own parser returns it.

    id: a name for `problem_id` of its samples, if they need one.
    """

    question: str
    gold: Hashable = None
    id: str | None = None


class Prompt(NamedTuple):
    """A problem as the model reads it."""

    problem: Problem
    text: str
    ids: list[int]


# A log-probability in nats; rounding may lift it slightly above 0.
LogProbability = Annotated[FiniteFloat, Le(1e-3)]


class Sample(BaseModel, extra="forbid", strict=True):
    """A completion of a prompt and its grade: a line of samples.jsonl, or of the file of --samples.

    Samples from elsewhere need prompt, completion and reward. token_ids: those of the completion,
    including its end of sequence or stop string. token_logmu: log mu of these tokens, in nats, for
    --trust-logmu. token_logmu_engine: the same, computed by the sampling engine. reward: before
    the baseline.

    >>> Sample(prompt="Q: 1 + 1?\\nA:", completion=" The answer is 2.", reward=1.0).finish_reason
    'stop'
    """

    problem_id: str | None = None
    prompt: str
    completion: str
    token_ids: list[int] | None = Field(default=None, min_length=1)
    token_logmu: list[LogProbability] | None = None
    token_logmu_engine: list[FiniteFloat] | None = None
    finish_reason: Literal["stop", "length"] = "stop"
    reward: FiniteFloat
    outcome: str | None = None


# The index of a prompt, and fields of a Sample: completion, token_ids, finish_reason, and from vLLM
# also token_logmu_engine.
Completion = tuple[int, dict[str, Any]]


class Engine(NamedTuple):
    """What samples completions.

    generate: (prompts, n, seed) -> n completions of each prompt, in lists of those that are
    finished together. It may use the seeds from `seed` to `seed + n * len(prompts) - 1`. With
    temperature=T this temperature is in place of the run's; 0 chooses the most probable token.
    gpus: the ranks whose GPUs it spans.
    """

    generate: Callable[..., Iterator[list[Completion]]]
    gpus: int = 1


@dataclass(frozen=True)
class Example:
    """A completion to train on: a line of train.jsonl."""

    prompt_ids: list[int]
    completion_ids: list[int]
    reward: float  # after the baseline
    sample: int  # index of its sample in samples.jsonl, or in the file of --samples
    line: int = 0  # its line in train.jsonl, from 0: its place in the order of training
    token_logmu: list[float] | None = None  # log mu of each token, in nats; None until scored
    logmu_engine: float | None = None  # log mu of the completion, by an engine that computes it


class Grade(NamedTuple):
    """How good a completion is: its reward, any finite number, and the name of its outcome."""

    reward: float
    outcome: str


class EvalPoint(NamedTuple):
    """A model to evaluate, and the files for its completions of the test problems."""

    iteration: int
    step: int  # optimizer steps of the iteration
    samples_seen: int  # completions of the iteration that were trained on
    model: str  # folder or hub name
    file: Path
    is_end: bool  # the last of an iteration, or the first of all: evaluated with all samples

    @property
    def greedy_file(self) -> Path:
        """The file for one completion of each test problem at temperature 0."""
        return self.file.with_stem(f"{self.file.stem}-greedy")


@dataclass(frozen=True)
class Task:
    """Problems, the prompt that asks them, and how completions are graded.

    grade: completions, each as `sampling.graded_text` cuts it, the problem of each -> their grades.
    prompt: problem -> text. stop: strings that end a completion. parse: completion ->
    the answer that maj@k votes on, or None; without `parse` there is no maj@k. outcomes: names;
    the first counts as correct in pass@k and maj@k.
    """

    name: str
    train: Sequence[Problem]
    test: Sequence[Problem]
    grade: Callable[[Sequence[str], Sequence[Problem]], Sequence[Grade]]
    prompt: Callable[[Problem], str] = attrgetter("question")
    parse: Callable[[str], Hashable | None] | None = None
    stop: tuple[str, ...] = ()
    outcomes: tuple[str, ...] = OUTCOMES
