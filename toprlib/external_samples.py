"""Samples from elsewhere: their files, the names of their columns, and what identifies them in a run's record."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from toprlib.records import (
    InputError,
    Sample,
    fault_in,
    from_datasets,
    is_hub_name,
    read_records,
    to_lines,
)
from toprlib.distributed import rank

Ask = Callable[
    [Sequence[Mapping[str, str]]], str
]  # messages, each with role and content -> the prompt
FIELDS = tuple(Sample.model_fields)
NEEDED = tuple(name for name, field in Sample.model_fields.items() if field.is_required())
TABLES = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
}  # suffix -> the reader of `datasets`
# What other trainers call a field: verl's rollouts (verl/trainer/ppo/ray_trainer.py, _write_generations) have input,
# output and score; OpenRLHF's (openrlhf/cli/batch_inference.py, up to version 0.9.2) input, output and reward.
OTHER_NAMES = {"prompt": "input", "completion": "output", "reward": "score"}


def read_samples(
    source: str | Path, columns: Sequence[str] = (), ask: Ask | None = None
) -> list[Sample]:
    """The samples of a file, a folder or a data set on the hub, whose split "train" counts.

    columns: as of `columns_of`. ask: what makes a prompt of messages. A line tells of columns with other names and of
    those that are ignored. InputError names file, row, counted from 1, and field or column of the first fault.
    """
    column_of, source = columns_of(columns), str(source)
    samples: list[Sample] = []
    taken: dict[str, str] = {}  # field -> column, in any of the rows
    ignored: set[str] = set()
    for number, row in enumerate(_rows(source), start=1):
        try:
            parts_of = _columns(row, column_of)
            samples.append(
                Sample(
                    **{field: _value(field, row, names, ask) for field, names in parts_of.items()}
                )
            )
        except ValueError as error:
            files = sorted(
                str(file.relative_to(source)) for file in Path(source).rglob("*.*")
            )  # none below a file
            where = f"{source}, {' and then '.join(files)}" if files else source
            raise InputError(f"{where}:{number}: {fault_in(error)}") from None
        taken |= {field: "+".join(names) for field, names in parts_of.items()}
        ignored |= row.keys() - set().union(*parts_of.values())
    if not samples:
        raise InputError(f"{source}: is empty")
    renamed = ", ".join(
        f"{column} is the {field}" for field, column in taken.items() if field != column
    )
    unread = f"ignored: {', '.join(sorted(ignored))}" if ignored else ""
    if (parts := [part for part in (renamed, unread) if part]) and rank() == 0:
        print(f"{source}: {' '.join('; '.join(parts).split())}", flush=True)
    return samples


def columns_of(columns: Sequence[str]) -> dict[str, str]:
    """Field -> column, as --columns gives them; a column A+B is the sum of the columns A and B.

    >>> columns_of(["prompt=question", "reward=accuracy+format"])
    {'prompt': 'question', 'reward': 'accuracy+format'}
    """
    column_of = {}
    for given in columns:
        field, _, column = given.partition("=")
        if field not in FIELDS or not column or field in column_of:
            fields = ", ".join(sorted(FIELDS, key=lambda name: name not in NEEDED))
            raise InputError(
                f"--columns {given}: must be FIELD=COLUMN, each field once, and FIELD one of {fields}"
            )
        column_of[field] = column
    return column_of


def digest_of(source: str | Path, samples: Sequence[Sample] = ()) -> str:
    """SHA-256 of a file's content; of a folder or a data set on the hub that of the samples that were read from it."""
    path = Path(source)
    return hashlib.sha256(
        path.read_bytes() if path.is_file() else to_lines(samples).encode()
    ).hexdigest()


def _rows(source: str) -> Iterator[dict[str, Any]]:
    """The rows of a file, a folder or a data set; InputError where they cannot be read."""
    path, options = Path(source), {}
    if (
        not path.exists()
        and is_hub_name(source)
        and path.suffix not in (*TABLES, ".jsonl", ".json")
    ):
        return from_datasets(source, "train")
    if not path.exists() or (path.is_file() and path.suffix not in TABLES):
        return iter(read_records(path, dict[str, Any]))
    if path.is_file():
        options = {"reader": TABLES[path.suffix], "data_files": source}
        if path.suffix == ".parquet":
            options["batch_size"] = 1024  # else it wants one row at least
    elif (path / "state.json").exists():  # a folder that the library has saved
        options = {"reader": "arrow", "data_files": f"{source}/*.arrow"}
    return from_datasets(
        source, "train", streaming=True, **options
    )  # streams leave but empty locks in its cache


def _columns(row: Mapping[str, Any], column_of: Mapping[str, str]) -> dict[str, list[str]]:
    """Field -> the columns of a row that it is the sum of, mostly one: those the user named, or with a usual name."""
    parts_of: dict[str, list[str]] = {}
    for field in FIELDS:
        column = column_of.get(field) or next(
            (name for name in (field, OTHER_NAMES.get(field)) if name in row), None
        )
        if column is None and field == "reward":
            column = _reward_of_trl(row)
        if column is not None:
            parts_of[field] = [column] if column in row else column.split("+")
            for part in parts_of[field]:
                if part not in row:
                    raise InputError(
                        f"--columns {field}={column}: no {part} among the columns {', '.join(row)}"
                    )
        elif field in NEEDED:
            raise InputError(
                f"no {field} among the columns {', '.join(row)}; name it with --columns {field}=NAME"
            )
    return parts_of


def _reward_of_trl(row: Mapping[str, Any]) -> str | None:
    """The column with the rewards in TRL's log of completions; InputError where several could be it.

    grpo_trainer.py, log: step, prompt, completion, a column for each reward function, advantage, and the user's own.
    """
    if not {"completion", "advantage"} <= row.keys():
        return None
    names = list(row)
    between = names[names.index("completion") + 1 : names.index("advantage")]
    numbers = [name for name in between if row[name] is None or isinstance(row[name], Real)]
    if len(numbers) > 1:
        advice = f"name one or their sum, as in --columns reward={'+'.join(numbers)}"
        raise InputError(f"no reward among the columns, but {', '.join(numbers)}: {advice}")
    return numbers[0] if numbers else None


def _value(field: str, row: Mapping[str, Any], names: Sequence[str], ask: Ask | None) -> Any:
    """A field of a sample: a column of the row, or the sum of several; of messages, the prompt or the answer's text."""
    for name in names if len(names) > 1 else ():
        if not isinstance(row[name], Real):
            raise InputError(
                f"column {name}: {row[name]!r:.80} is no number, and {'+'.join(names)} is a sum"
            )
    value = row[names[0]] if len(names) == 1 else sum(float(row[name]) for name in names)
    if value is None and field in NEEDED:
        raise InputError(f"column {names[0]}: is empty")
    if field not in ("prompt", "completion") or not isinstance(value, list):
        return value
    try:
        messages = [(message["role"], message["content"]) for message in value]
    except (KeyError, TypeError):
        messages = []
    if not messages or not all(isinstance(text, str) for message in messages for text in message):
        raise InputError(
            f"field {field}: a list must be one of messages, each with role and content as text"
        )
    if field == "completion":
        if [role for role, _ in messages] != ["assistant"]:
            raise InputError(
                "field completion: a list of messages must be a single one, the assistant's"
            )
        return messages[0][1]
    if ask is None:
        raise InputError(
            "field prompt: is a list of messages, which need a chat template: give --chat"
        )
    return ask([{"role": role, "content": content} for role, content in messages])
