"""Samples from elsewhere: reading them, and which column is which field of a Sample.

A sample needs a prompt, a completion and a reward. Other trainers name these columns differently;
docs/own_task.md has the options that map the columns of three of them.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from toprlib.distributed import local_ranks, progress_bar, rank
from toprlib.files import first_validation_error, read_records, to_lines
from toprlib.problems import is_hub_name, list_split_files, load_rows
from toprlib.records import InputError, Sample, to_line

Messages = list[dict[str, Any]]  # each with role and content
REQUIRED = ("prompt", "completion", "reward")
FIELDS = (*REQUIRED, *(name for name in Sample.model_fields if name not in REQUIRED))
READERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}  # of the library `datasets`
NUMBER = TypeAdapter(FiniteFloat, config={"strict": True})  # like Sample.reward
# Bytes of a sample and its example in memory, besides its text, and per character of its text;
# measured with 10 to 400 words per sample.
ROW_BYTES = 6_000
CHARACTER_BYTES = 16
LOGMU_SLACK = 1e-3  # nats by which rounding may lift a log-probability above 0; ours


def read_samples(
    source: str | Path,
    columns: Sequence[str] = (),
    ask: Callable[[Messages], str] | None = None,
    free_memory: float = math.inf,
) -> list[Sample]:
    """The samples of a file, of a folder, or of the split "train" of a data set on the hub.

    columns: as `parse_columns` reads them. ask: turns a prompt that is a list of messages into
    text; None: such prompts are refused. A completion may be one message of the assistant.
    free_memory: bytes that the processes of this machine may fill. Rank zero prints a line if
    columns are renamed or ignored. Raises InputError, with file, line and field, for the first row
    that is no sample. Lines count from 1, in a folder through all files.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "own.jsonl")
    >>> _ = file.write_text('{"q": "1 + 1?", "completion": " 2", "right": 1.0, "form": 0.5}')
    >>> samples = read_samples(file, ["prompt=q", "reward=right+form"])  # doctest: +ELLIPSIS
    /...own.jsonl: columns renamed: q to prompt, right+form to reward
    >>> samples[0].prompt, samples[0].reward
    ('1 + 1?', 1.5)
    """
    source = str(source)
    column_of = parse_columns(columns)
    samples = []
    ignored: set[str] = set()
    room = free_memory / local_ranks()  # each process reads all samples
    for line, row in enumerate(progress_bar(_read_rows(source), "reading", "row"), start=1):
        place = {"file": source, "line": line}
        columns_of_fields = _find_columns(row, column_of, place)
        values = {}
        for field, names in columns_of_fields.items():
            values[field] = _value(field, row, names, place)
        if isinstance(values["prompt"], list):
            values["prompt"] = _prompt_text(values["prompt"], ask, place)
        if isinstance(values["completion"], list):
            values["completion"] = _completion_text(values["completion"], place)
        sample = _to_sample(values, place)
        room -= ROW_BYTES + CHARACTER_BYTES * len(sample.prompt + sample.completion)
        if room < 0:
            message = f"the rows up to here need all free memory, {free_memory / 1e9:.1f} GB"
            raise InputError(f"{message}; give fewer samples", **place)
        samples.append(sample)
        ignored |= row.keys() - set(chain.from_iterable(columns_of_fields.values()))
    if not samples:
        raise InputError("is empty; give at least one sample", file=source)
    if rank() == 0:
        _print_columns(source, column_of, ignored)
    return samples


def parse_columns(columns: Sequence[str]) -> dict[str, str]:
    """Field -> column, from the words FIELD=COLUMN of --columns. Raises InputError.

    >>> parse_columns(["prompt=question", "reward=accuracy+format"])
    {'prompt': 'question', 'reward': 'accuracy+format'}
    """
    column_of = {}
    for word in columns:
        field, _, column = word.partition("=")
        if field not in FIELDS or not column:
            message = f"{word}: must be FIELD=COLUMN; the fields are {', '.join(FIELDS)}"
            raise InputError(message, option="--columns")
        if field in column_of:
            message = f"{word}: is a second column for this field; give each field once"
            raise InputError(message, option="--columns", field=field)
        column_of[field] = column
    return column_of


def fingerprint(source: str | Path, samples: Sequence[Sample]) -> str:
    """SHA-256, in hex, of what a run trains on: of a file's bytes, otherwise of the samples.

    >>> fingerprint("owner/name", [Sample(prompt="?", completion="!", reward=1.0)])[:8]
    'a2486f99'
    """
    if Path(source).is_file():
        with Path(source).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(to_lines(samples).encode()).hexdigest()


# ---- rows and their columns ----------------------------------------------------------------------
def _read_rows(source: str) -> Iterator[Mapping[str, Any]]:
    path = Path(source)
    if path.is_dir():
        if (path / "state.json").exists():  # written by Dataset.save_to_disk
            files = sorted(path.glob("*.arrow"))
        else:
            files = list_split_files(path, "train")
        # One by one: types differ by file, such as integer rewards in one, fractions in another.
        return chain.from_iterable(_read_file(file) for file in files)
    is_file_name = path.exists() or path.suffix in (*READERS, ".jsonl", ".json")
    if is_hub_name(source) and not is_file_name:
        return load_rows(source, "train")
    return _read_file(path)


def _read_file(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix not in READERS or not path.is_file():
        return iter(read_records(path, dict[str, Any]))
    # Streaming reads a file where it is; otherwise `datasets` first copies it into its cache.
    options = {"reader": READERS[path.suffix], "data_files": str(path), "streaming": True}
    if path.suffix == ".parquet":
        options["batch_size"] = 1024  # the default is the file's own, which may be 0: an error
    return load_rows(str(path), "train", **options)


def _find_columns(
    row: Mapping[str, Any], column_of: Mapping[str, str], place: dict[str, Any]
) -> dict[str, list[str]]:
    """Field -> its column in this row; for a reward that is a sum, its columns."""
    names_of = {}
    for field in FIELDS:
        column = column_of.get(field, field)
        names = [column]
        if column not in row and field == "reward":  # a column may have a + in its own name
            names = column.split("+")
        missing = [name for name in names if name not in row]
        if not missing:
            names_of[field] = names
            continue
        message = f"no column {missing[0]!r}; the columns are {', '.join(row)}"
        if field in column_of:
            raise InputError(message, option="--columns", **place, field=field)
        if field in REQUIRED:
            fix = f"name the right one with --columns {field}=COLUMN"
            if {"chosen", "rejected"} <= row.keys():
                fix = "write a pair as two rows, the chosen one with reward 1, the other with -1"
            raise InputError(f"{message}; {fix}", **place, field=field)
    return names_of


def _value(field: str, row: Mapping[str, Any], names: list[str], place: dict[str, Any]) -> Any:
    """A field of a row: the value of its column, or the sum of its columns."""
    if len(names) == 1:
        value = row[names[0]]
        if value is None and field in REQUIRED:
            message = f"column {names[0]!r} is empty{_csv_fix(place) or '; remove the row'}"
            raise InputError(message, **place, field=field)
        return value
    total = 0.0
    for name in names:
        try:
            total += NUMBER.validate_python(row[name])
        except ValidationError as error:
            message, _ = first_validation_error(error)
            raise InputError(f"column {name!r}: {message}", **place, field=field) from None
    return total


def _to_sample(values: dict[str, Any], place: dict[str, Any]) -> Sample:
    try:
        sample = Sample(**values)
    except ValidationError as error:
        message, field = first_validation_error(error)
        if field in ("prompt", "completion"):
            message += _csv_fix(place)
        raise InputError(message, **place, field=field) from None
    largest = max(sample.token_logmu or [0.0])
    if largest > LOGMU_SLACK:
        message = f"{largest:g} is above 0; give logarithms of probabilities"
        raise InputError(message, **place, field="token_logmu")
    return sample


def _csv_fix(place: dict[str, Any]) -> str:
    is_csv = place["file"].endswith(".csv")
    return "; a .csv file cannot hold digits or NA as text: write JSON lines" if is_csv else ""


def _print_columns(source: str, column_of: Mapping[str, str], ignored: set[str]) -> None:
    renamed = [f"{column} to {field}" for field, column in column_of.items() if column != field]
    parts = []
    if renamed:
        parts.append(f"columns renamed: {', '.join(renamed)}")
    if ignored:
        parts.append(f"columns ignored: {', '.join(sorted(ignored))}")
    if parts:
        print(to_line(f"{source}: {'; '.join(parts)}"), flush=True)


# ---- messages in place of text -------------------------------------------------------------------
def _prompt_text(
    value: list[Any], ask: Callable[[Messages], str] | None, place: dict[str, Any]
) -> str:
    messages = _check_messages("prompt", value, place)
    if ask is None:
        message = "is a list of messages, which needs a chat template; add --chat"
        raise InputError(message, **place, field="prompt")
    try:
        return ask(messages)
    except InputError as error:
        raise InputError(str(error), **place, field="prompt") from error


def _completion_text(value: list[Any], place: dict[str, Any]) -> str:
    messages = _check_messages("completion", value, place)
    if [message["role"] for message in messages] != ["assistant"]:
        message = "must be one message, by the assistant; put earlier ones into the prompt"
        raise InputError(message, **place, field="completion")
    others = [key for key, part in messages[0].items() if part and key not in ("role", "content")]
    if others:
        message = f"has a message with {others[0]!r}, which would not be trained on"
        fix = "write the model's whole text instead of the message"
        raise InputError(f"{message}; {fix}", **place, field="completion")
    return messages[0]["content"]


def _check_messages(field: str, value: list[Any], place: dict[str, Any]) -> Messages:
    """The messages of a list. Raises InputError if it holds anything else."""
    messages = []
    for entry in value:
        if isinstance(entry, str):
            fix = "is a list of texts; write a row for each completion"
            raise InputError(fix, **place, field=field)
        message = entry if isinstance(entry, dict) else {}
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            fix = "a list must hold messages, each with role and content as text"
            raise InputError(fix, **place, field=field)
        # In a table every message has every key; a chat template may ask which keys exist.
        messages.append({key: part for key, part in message.items() if part is not None})
    if not messages:
        raise InputError("is an empty list; give text or messages", **place, field=field)
    return messages
