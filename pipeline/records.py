"""The records that flow through the pipeline, and their files: one JSON object a line."""

import operator
import os
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator
from pydantic_core import PydanticCustomError

Outcome = Literal["correct", "incorrect", "invalid"]
Row = TypeVar("Row", bound=BaseModel)


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line: what, where, and what to do."""


@dataclass(frozen=True)
class Problem:
    """A question and its gold answer, the latter as the task's own parser returns it."""

    id: str
    question: str
    gold: Hashable


class Sample(BaseModel, extra="forbid", strict=True):
    """A completion of a prompt with its reward: a line of samples.jsonl.

    prompt, completion and reward suffice on input. token_ids are the completion's, up to and including the end of
    sequence or the stop string; token_logmu are their log-probabilities under the model that starts the iteration, as
    the trainer computes them; logmu_by tells that model and how it was run. token_logmu_engine is what the sampler saw.

    >>> Sample(prompt="Q: 1 + 1?\\nA:", completion=" The answer is 2.", reward=1.0).finish_reason
    'stop'
    """

    problem_id: str | None = None
    prompt: str
    completion: str
    token_ids: list[int] | None = Field(default=None, min_length=1)
    token_logmu: list[FiniteFloat] | None = None
    logmu_by: str | None = None
    token_logmu_engine: list[FiniteFloat] | None = None
    finish_reason: Literal["stop", "length"] = "stop"
    reward: FiniteFloat
    outcome: Outcome | None = None

    @model_validator(mode="after")
    def _has_tokens(self) -> Self:
        # A model may end at once: no text, but an end-of-sequence token to learn from.
        if not self.completion and self.token_ids is None:
            raise PydanticCustomError("empty", "field completion: is empty")
        return self


@dataclass(frozen=True)
class Task:
    """What a pipeline must know of a task: its problems, how they are asked, and how answers are judged.

    prompt: problem -> text. parse: completion -> the answer that maj@k votes on, None if there is none to read.
    grade: completion, gold -> outcome; both see the text before the stop string. stop: strings that end a completion.
    same: whether two answers that were parsed vote together.
    """

    name: str
    train: list[Problem]
    test: list[Problem]
    prompt: Callable[[Problem], str]
    parse: Callable[[str], Hashable | None]
    grade: Callable[[str, Any], Outcome]
    stop: tuple[str, ...] = ()
    same: Callable[[Any, Any], bool] = operator.eq

    def visible(self, completion: str) -> str:
        """The part of a completion that is graded: what precedes the first stop string.

        >>> task = Task("sums", [], [], prompt=str, parse=str, grade=str, stop=("Q:",))
        >>> task.visible("4. Q: 3 + 3?")
        '4. '
        """
        return completion[: min(at for at in (len(completion), *map(completion.find, self.stop)) if at >= 0)]


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The lines of a JSON-lines file as records of `kind`; InputError names file, line and field of the first fault.

    Lines end with a newline and nothing else: U+2028 and its like belong to the text.
    """
    lines = read_text(path).rstrip().split("\n")
    if lines == [""]:
        raise InputError(f"{path}: is empty")
    return [_parse(line, kind, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def read_row(path: Path, kind: type[Row]) -> Row:
    """A file that is one JSON object, as a record of `kind`; InputError as `read_rows` raises it."""
    return _parse(read_text(path), kind, str(path))


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark; InputError where there is none.

    >>> read_text(Path("nowhere"))
    Traceback (most recent call last):
    pipeline.records.InputError: nowhere: no such file
    """
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, a file was expected") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None


def read_whole_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file that is being appended to: none if there is no file, and not a last line that was cut short.

    >>> read_whole_rows(Path("nowhere"), Sample)
    []
    """
    content = path.read_bytes() if path.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].decode("utf-8").split("\n")[:-1]
    return [_parse(line, kind, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def to_lines(rows: Iterable[BaseModel]) -> str:
    """Records as JSON lines.

    >>> to_lines([Sample(prompt="?", completion="!", reward=1.0)])
    '{"prompt":"?","completion":"!","finish_reason":"stop","reward":1.0}\\n'
    """
    return "".join(row.model_dump_json(exclude_none=True) + "\n" for row in rows)


def _parse(line: str, kind: type[Row], where: str) -> Row:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        field = ".".join(map(str, fault["loc"]))
        raise InputError(f"{where}: {f'field {field}: ' if field else ''}{fault['msg']}") from None


def write_rows(path: Path, rows: Iterable[BaseModel]) -> None:
    """Write records as JSON lines; the file appears under its name only when it is whole."""
    write_text(path, to_lines(rows))


def write_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8, whole or not at all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_text(Path(folder) / "note", "whole")
    ...     (Path(folder) / "note").read_text()
    'whole'
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it, so that it is there whole or not at all.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_bytes(Path(folder) / "note", b"whole")
    ...     (Path(folder) / "note").read_bytes()
    b'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
