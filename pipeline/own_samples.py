"""Samples from elsewhere: their files, the names of their columns, and what identifies them in a run's record.

JSON lines are read here; parquet, csv and arrow files, folders and the hub are read by the `datasets` library.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeline.records import InputError, Sample, is_hub_name, read_rows, read_text, to_lines, told
from pipeline.runtime.processes import rank

Ask = Callable[[Sequence[Mapping[str, str]]], str]
"""Messages, each with role and content -> the prompt that a chat template makes of them"""

FIELDS = tuple(Sample.model_fields)
NEEDED = tuple(name for name, field in Sample.model_fields.items() if field.is_required())
TABLES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}  # suffix -> the reader of `datasets`
# What other trainers call a field: verl's rollouts (verl/trainer/ppo/ray_trainer.py, _write_generations) have input,
# output and score; OpenRLHF's (openrlhf/cli/batch_inference.py, up to version 0.9.2) input, output and reward.
OTHER_NAMES = MappingProxyType({"prompt": "input", "completion": "output", "reward": "score"})


def read_samples(source: str | Path, columns: Sequence[str] = (), ask: Ask | None = None) -> list[Sample]:
    """The samples of a file, a folder or a data set on the hub, whose split "train" counts.

    columns: FIELD=COLUMN for columns with names of their own, see `columns_of`. ask: what makes a prompt of a list of
    messages. A line tells of columns with other names and of those that are ignored. InputError names file, row,
    counted from 1, and field or column of the first fault.
    """
    own, source = columns_of(columns), str(source)
    rows = read_rows(Path(source), dict[str, Any]) if _is_json_lines(source) else _rows(source)
    samples: list[Sample] = []
    taken: dict[str, str] = {}  # field -> column, in any of the rows
    ignored: set[str] = set()
    for number, row in enumerate(rows, start=1):
        try:
            of_row = _columns(row, own)
            samples.append(Sample(**_fields(row, of_row, ask)))
        except ValueError as error:
            raise InputError(f"{source}:{number}: {told(error)}") from None
        taken |= {field: "+".join(names) for field, names in of_row.items()}
        ignored |= row.keys() - set().union(*of_row.values())
    if not samples:
        raise InputError(f"{source}: is empty")
    if (summary := _summary(taken, ignored)) and rank() == 0:
        print(f"{source}: {summary}", flush=True)
    return samples


def columns_of(columns: Sequence[str]) -> dict[str, str]:
    """Field -> column, as --columns gives them; a column A+B is the sum of the columns A and B.

    >>> columns_of(["prompt=question", "reward=accuracy+format"])
    {'prompt': 'question', 'reward': 'accuracy+format'}
    >>> columns_of(["rewrad=score"])
    Traceback (most recent call last):
    pipeline.records.InputError: --columns rewrad=score: must be FIELD=COLUMN, each field once, and FIELD one of ...
    """
    found = {}
    for given in columns:
        field, _, column = given.partition("=")
        if field not in FIELDS or not column or field in found:
            fields = ", ".join(sorted(FIELDS, key=lambda name: name not in NEEDED))
            raise InputError(f"--columns {given}: must be FIELD=COLUMN, each field once, and FIELD one of {fields}")
        found[field] = column
    return found


def digest_of(source: str | Path, samples: Sequence[Sample]) -> str:
    """SHA-256 of a file's content; of a folder or a data set on the hub that of the samples that were read from it."""
    path = Path(source)
    return hashlib.sha256(path.read_bytes() if path.is_file() else to_lines(samples).encode()).hexdigest()


# ---- rows -------------------------------------------------------------------------------------------------------


def _is_json_lines(source: str) -> bool:
    path = Path(source)
    is_file = path.is_file() or not (path.is_dir() or is_hub_name(source))
    return path.suffix not in TABLES and (is_file or path.suffix in (".jsonl", ".json"))


def _rows(source: str) -> Iterator[dict[str, Any]]:
    """The rows of what `datasets` reads; InputError where it cannot. Local files leave but empty locks in its cache."""
    path = Path(source)
    if path.suffix in TABLES and not path.exists():
        read_text(path)  # raises
    import datasets

    where = "cannot be read"
    try:
        if path.is_file():
            batches = {"batch_size": 1024} if path.suffix == ".parquet" else {}  # else it wants one row at least
            options = {"data_files": source, "streaming": True, **batches}
            yield from datasets.load_dataset(TABLES[path.suffix], split="train", **options)
        elif (path / "state.json").exists():
            yield from datasets.load_from_disk(source)
        elif path.is_dir():
            yield from datasets.load_dataset(source, split="train", streaming=True)
        else:
            where = "is no file or folder here, and cannot be read from the hub"
            yield from datasets.load_dataset(source, split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InputError(f"{source}: {where}: {' '.join(str(error).split())[:300]}") from error


def _columns(row: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, list[str]]:
    """Field -> the columns of a row that it is the sum of, mostly one: the user's `own`, or those with a known name."""
    found: dict[str, list[str]] = {}
    for field in FIELDS:
        column = own.get(field) or next((name for name in (field, OTHER_NAMES.get(field)) if name in row), None)
        if column is None and field == "reward":
            column = _reward_of_trl(row)
        if column is not None:
            found[field] = [column] if column in row else column.split("+")
            for part in found[field]:
                if part not in row:
                    raise InputError(f"--columns {field}={column}: no {part} among the columns {', '.join(row)}")
    for field in NEEDED:
        if field not in found:
            raise InputError(f"no {field} among the columns {', '.join(row)}; name it with --columns {field}=NAME")
    return found


def _reward_of_trl(row: Mapping[str, Any]) -> str | None:
    """The column with the rewards in TRL's log of completions, which is named after the function that gave them.

    trl/trainer/grpo_trainer.py, log: step, prompt, completion, a column for each reward function, advantage. Columns of
    the user's own may be among them; InputError where several could be the reward's.
    """
    names = list(row)
    if not {"completion", "advantage"} <= row.keys():
        return None
    between = names[names.index("completion") + 1 : names.index("advantage")]
    numbers = [name for name in between if row[name] is None or isinstance(row[name], Real)]
    if len(numbers) > 1:
        raise InputError(
            f"no reward among the columns, but {', '.join(numbers)}: name one or their sum, as in --columns "
            f"reward={'+'.join(numbers)}"
        )
    return numbers[0] if numbers else None


def _fields(row: Mapping[str, Any], columns: Mapping[str, Sequence[str]], ask: Ask | None) -> dict[str, Any]:
    """The fields of a sample, from the columns of a row."""
    fields = {field: row[names[0]] if len(names) == 1 else _sum(row, names) for field, names in columns.items()}
    for field in NEEDED:
        if fields[field] is None:
            raise InputError(f"column {columns[field][0]}: is empty")
    return fields | {field: _text(field, fields[field], ask) for field in ("prompt", "completion")}


def _sum(row: Mapping[str, Any], names: Sequence[str]) -> float:
    for name in names:
        if not isinstance(row[name], Real):
            raise InputError(f"column {name}: {row[name]!r:.80} is no number, and {'+'.join(names)} is a sum")
    return sum(float(row[name]) for name in names)


def _text(field: str, value: Any, ask: Ask | None) -> Any:
    """A prompt or completion as text: messages as a chat template writes them, or the one message of an answer."""
    if not isinstance(value, list):
        return value
    if not value or not all(map(_is_message, value)):
        raise InputError(f"field {field}: a list must be one of messages, each with role and content as text")
    if field == "prompt":
        if ask is None:
            raise InputError("field prompt: is a list of messages, which need a chat template: give --chat")
        return ask([{"role": message["role"], "content": message["content"]} for message in value])
    if [message["role"] for message in value] != ["assistant"]:
        raise InputError("field completion: a list of messages must be a single one, the assistant's")
    return value[0]["content"]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _summary(taken: Mapping[str, str], ignored: Set[str]) -> str:
    """Which columns have other names, and which are ignored, though perhaps misspelt; empty where there are none."""
    renamed = [f"{column} is the {field}" for field, column in taken.items() if field != column]
    missing = [field for field in FIELDS if field not in taken]
    near = {name: get_close_matches(name, missing, n=1, cutoff=0.75) for name in sorted(ignored)}
    names = [f"{name} (did you mean {match[0]}?)" if match else name for name, match in near.items()]
    parts = [", ".join(renamed)] * bool(renamed) + [f"ignored: {', '.join(names)}"] * bool(names)
    return " ".join("; ".join(parts).split())
