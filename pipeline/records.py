"""The records that flow through the pipeline, their files, and the problems and worked examples that tasks read."""

import importlib.util
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

Outcome = Literal["correct", "incorrect", "invalid"]  # of the paper's tasks
OUTCOMES: tuple[str, ...] = get_args(Outcome)
Record = TypeVar("Record")  # a pydantic model or a dataclass


class InputError(ValueError):
    """What the user gave cannot be used; the message is one line: what, where, and what to do."""


@dataclass(frozen=True)
class Problem:
    """A question and, where there is one, its gold answer, as the task's own parser returns it."""

    id: str
    question: str
    gold: Hashable = None


class Drawn(BaseModel, extra="forbid", strict=True):
    """A completion of a prompt, before it is graded."""

    problem_id: str | None = None
    prompt: str
    completion: str
    token_ids: list[int] | None = Field(default=None, min_length=1)
    token_logmu: list[FiniteFloat] | None = None
    token_logmu_engine: list[FiniteFloat] | None = None
    finish_reason: Literal["stop", "length"] = "stop"


class Sample(Drawn):
    """A completion of a prompt with its reward: a line of samples.jsonl.

    prompt, completion and reward suffice on input; reward is that before the baseline. token_ids are the completion's,
    up to and including the end of sequence or the stop string. token_logmu are their log-probabilities, in nats, which
    --trust-logmu takes for log mu; token_logmu_engine are those that the sampling engine computed.

    >>> Sample(prompt="Q: 1 + 1?\\nA:", completion=" The answer is 2.", reward=1.0).finish_reason
    'stop'
    """

    reward: FiniteFloat
    outcome: str | None = None


@dataclass(frozen=True)
class Encoded:
    """A sample that was chosen to train on, or held out, as token ids."""

    prompt_ids: list[int]
    completion_ids: list[int]
    reward: float  # after the baseline
    sample: int  # its index in samples.jsonl, or in the file of --samples or --held-out
    token_logmu: list[float] | None = None  # the sample's own, with --trust-logmu
    logmu_engine: float | None = (
        None  # log mu(y|x) by the sampling engine, in nats, where it computed one
    )


@dataclass(frozen=True)
class Example:
    """A completion to train on: a line of train.jsonl."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logmu: float  # log mu(y|x), in nats: the sum of token_logmu
    reward: float  # after the baseline
    sample: int  # the index of its sample in samples.jsonl
    row: int  # the index of its row in the order of training: a completion, or DPO's pair
    token_logmu: list[float]


class Grade(NamedTuple):
    """How good a completion is: its reward, any finite number, and the name of its outcome."""

    reward: float
    outcome: str


@dataclass(frozen=True)
class Task:
    """What a pipeline must know of a task: its problems, how they are asked, and how answers are judged.

    Judged is the text before the stop string, by one of three functions. reward: completion, problem -> a number, or a
    Grade. batch_reward: the same for lists of completions and their problems. grade: completion, gold -> outcome, for
    the paper's reward of +1 if correct and -1 if not (Section 4.2). outcomes: their names, of which the first counts as
    right in pass@k and maj@k; a number without a name has the first if it is positive, else the second.

    prompt: problem -> text. parse: completion -> the answer that maj@k votes on, or None; without it there is no maj@k.
    stop: strings that end one. same: whether two parsed answers vote together. InputError where it does not fit.
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
        if (
            sum(function is not None for function in (self.grade, self.reward, self.batch_reward))
            != 1
        ):
            raise InputError(f"task {self.name}: give one of reward, batch_reward and grade")
        if len(set(self.outcomes)) < max(len(self.outcomes), 2):
            raise InputError(
                f"task {self.name}: outcomes {self.outcomes}: give two different names at least"
            )
        for problems in (self.train, self.test):
            for name, count in Counter(problem.id for problem in problems).most_common(1):
                if count > 1:
                    raise InputError(
                        f"task {self.name}: {count} problems have the id {name!r}; give each its own"
                    )

    def visible(self, completion: str) -> str:
        """The part of a completion that is graded: what precedes the first stop string.

        >>> task = Task("sums", [], [], grade=str, stop=("Q:",))
        >>> task.visible("4. Q: 3 + 3?")
        '4. '
        """
        return completion[
            : min(at for at in (len(completion), *map(completion.find, self.stop)) if at >= 0)
        ]


def read_records(
    path: Path, kind: type[Record], form: Literal["lines", "growing", "whole"] = "lines"
) -> list[Record]:
    """The lines of a JSON-lines file as records of `kind`; InputError names file, line and field of the first fault.

    form: "growing" for a file that is appended to, and may be missing or end with part of a line, which is left out;
    "whole" for one that is one record. A newline alone ends a line: U+2028 belongs to the text.
    """
    if form == "growing":
        content = path.read_bytes() if path.exists() else b""
        lines = content[: content.rfind(b"\n") + 1].decode("utf-8").split("\n")[:-1]
    else:
        text = read_text(path)
        lines = [text] if form == "whole" else text.rstrip().split("\n")
        if lines == [""]:
            raise InputError(f"{path}: is empty")
    adapter, rows = TypeAdapter(kind), []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(adapter.validate_json(line))
        except ValidationError as error:
            where = path if form == "whole" else f"{path}:{number}"
            raise InputError(
                f"{where}: {fault_in(error) if line.strip() else 'is a blank line; remove it'}"
            ) from None
    return rows


def fault_in(error: ValueError) -> str:
    """What is wrong with a record, in a line: the first field that does not fit, or what the error says."""
    text = str(error)
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False)[0]
        field = ".".join(map(str, fault["loc"]))
        text = (f"field {field}: " if field else "") + fault["msg"].removeprefix("Value error, ")
        if fault["msg"].startswith("Input should"):
            text += f", not {fault['input']!r:.80}" + ": write 1 and -1" * isinstance(
                fault["input"], bool
            )
    return " ".join(text.split())


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte-order mark; InputError where there is none."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, a file was expected") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None


def to_lines(rows: Iterable[Any]) -> str:
    """Records as JSON lines.

    >>> to_lines([Sample(prompt="?", completion="!", reward=1.0)])
    '{"prompt":"?","completion":"!","finish_reason":"stop","reward":1.0}\\n'
    """
    rows = list(rows)
    dump = TypeAdapter(type(rows[0])).dump_json if rows else None
    return "".join(dump(row, exclude_none=True).decode() + "\n" for row in rows)


def write(path: Path, mode: Literal["wb", "ab"], content: str | bytes) -> None:
    """Write a new file, or behind what one has; an OSError names it, which that of a full disk does not by itself."""
    try:
        with path.open(mode) as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            if mode == "wb":
                os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, text as UTF-8, whole or not at all: under another name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    write(unfinished, "wb", content)
    unfinished.replace(path)


def read_split(
    data: str, split: str, kind: type[Record], configs: Sequence[str] | None = None
) -> list[Record]:
    """The rows of a split, from DIR/SPLIT.jsonl, DIR/SPLIT/**/*.json or the hub. A .json file holds one row.

    configs: as of `from_datasets`. InputError names what cannot be read, and the first row that `kind` does not take.
    """
    if (folder := Path(data)).is_dir():
        if files := sorted((folder / split).glob("**/*.json")):
            return [read_records(file, kind, "whole")[0] for file in files]
        return read_records(folder / f"{split}.jsonl", kind)
    if not is_hub_name(data):
        raise InputError(
            f"--data or --test-data {data}: is neither a folder nor a data set on the hub (owner/name)"
        )
    rows = []
    for line, row in enumerate(from_datasets(data, split, configs), start=1):
        try:
            rows.append(TypeAdapter(kind).validate_python(row))
        except ValidationError as error:
            raise InputError(f"{data} {split}:{line}: {fault_in(error)}") from None
    return rows


def from_datasets(
    source: str,
    split: str,
    configs: Sequence[str | None] | None = (None,),
    reader: str | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """The rows of a split as the library `datasets` reads it, here or on the hub; InputError where it cannot.

    configs: parts of the data set, None for all it has; by default the usual one. reader, options: `load_dataset`'s.
    """
    import datasets

    try:
        for part in configs or datasets.get_dataset_config_names(source):
            yield from datasets.load_dataset(reader or source, part, split=split, **options)
    except (
        OSError,
        ValueError,
        datasets.exceptions.DatasetsError,
    ) as error:  # ConnectionError is an OSError
        way = "read" if Path(source).exists() else "loaded from the hub"
        raise InputError(
            f"{source}: cannot be {way}: {' '.join(str(error).split())[:300]}"
        ) from error


def read_shots(
    count: int, file: Path | None, first: str, packaged: str, parse: Callable[[str], list[str]]
) -> list[str]:
    """The first `count` worked examples as text: those of `file`, or those that `parse` finds in a file of lm-eval.

    first: what an example begins with; in `file`, a blank line precedes it.
    """
    if count == 0 and file is None:
        return []
    if file is not None:
        head, *rest = read_text(file).strip().split(f"\n\n{first}")
        shots = [head, *(first + shot for shot in rest)]
    elif package := importlib.util.find_spec("lm_eval"):
        file = Path(package.submodule_search_locations[0]) / packaged
        shots = parse(read_text(file))
    else:
        raise InputError(
            "--shots: needs `pip install --no-deps lm-eval==0.4.13`, or a --shots-file"
        )
    if not 1 <= count <= len(shots):
        raise InputError(f"--shots {count}: {file} has {len(shots)}")
    return shots[:count]


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form of a model or data set on the hub, owner/name.

    >>> is_hub_name("openai/gsm8k"), is_hub_name("./gsm8k"), is_hub_name("gsm8k")
    (True, False, False)
    """
    return re.fullmatch(r"\w[\w-]*/[\w.-]+", name) is not None
