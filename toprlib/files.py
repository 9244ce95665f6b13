"""Files of a run: JSON lines, atomic writes, and the folder, which one run at a time may use.

A stage writes one file, which appears under its name once it is complete and which later stages
never modify. A stage whose file exists is not run again, so repeating a command resumes its run.
"""

import codecs
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from toprlib.distributed import gather, on_rank_zero, rank
from toprlib.records import InputError

Record = TypeVar("Record")  # a pydantic model or a dataclass


# ---- reading -------------------------------------------------------------------------------------
def read_records(path: Path | str, kind: type[Record], is_partial: bool = False) -> list[Record]:
    """The lines of a JSON-lines file as records of `kind`.

    is_partial: a killed run may have been writing the last line; without a newline, it is left out.
    Raises InputError, which names the line, for the first one that does not fit.
    """
    content = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    # Only a newline ends a line: U+2028, for one, belongs to the text of a completion.
    lines = content.split(b"\n")[:-1] if is_partial else content.rstrip().split(b"\n")
    return _to_records(path, lines, TypeAdapter(kind).validate_json)


def load_rows(source: str, split: str, kind: type[Record], part: str | None = None) -> list[Record]:
    """The rows of a split as records of `kind`, from files or from the hub.

    source: a file of JSON lines or Parquet; a folder with one for each split; or another folder or
    name on the hub that the library `datasets` reads. part: of the data set, if it has parts.
    Raises InputError, which names the row, for the first one that does not fit.
    """
    path = Path(source)
    files = [path, path / f"{split}.jsonl", path / f"{split}.parquet"]
    file = next((file for file in files if file.is_file()), path)
    if file.suffix == ".jsonl":
        return read_records(file, kind)
    import datasets
    import pyarrow.parquet

    try:
        if file.suffix == ".parquet":
            rows = pyarrow.parquet.read_table(file).to_pylist()
        else:
            rows = datasets.load_dataset(source, part, split=split)
    except ValueError as error:
        raise InputError(f"{source}: {error}") from None
    return _to_records(source, rows, TypeAdapter(kind).validate_python)


def _to_records(place: Path | str, rows: Iterable[Any], validate: Any) -> list[Any]:
    records = []
    for number, row in enumerate(rows, start=1):
        try:
            records.append(validate(row))
        except ValidationError as error:
            [first, *_] = error.errors(include_url=False)
            field = ".".join(str(part) for part in first["loc"])
            raise InputError(f"{place}:{number}: {field}: {first['msg']}") from None
    return records


# ---- writing -------------------------------------------------------------------------------------
def to_lines(records: Sequence[Any]) -> str:
    """Records of one kind as JSON lines, without the fields that are None.

    >>> from toprlib.records import Sample
    >>> to_lines([Sample(prompt="?", completion="!", reward=1.0)])
    '{"prompt":"?","completion":"!","finish_reason":"stop","reward":1.0}\\n'
    """
    adapter = TypeAdapter(type(records[0])) if records else None
    lines = [adapter.dump_json(record, exclude_none=True).decode() + "\n" for record in records]
    return "".join(lines)


def write_file(path: Path, content: str) -> None:
    """Write a file atomically: first under another name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(path)


def append_to_file(path: Path, content: str) -> None:
    """Append text to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(content)


def exists(path: Path) -> bool:
    """Whether a file or folder exists, as rank zero sees it. Every rank calls this."""
    return on_rank_zero(path.exists)


def remove(*paths: Path) -> None:
    """Rank zero removes files, and folders with everything in them. Missing ones are ignored."""
    if rank() > 0:
        return
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends. Every rank calls this."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    remove(unfinished)  # of a run that was killed while it wrote
    yield unfinished
    gather(None)  # all ranks have written
    if rank() == 0:
        unfinished.rename(folder)
    gather(None)


# ---- the folder of a run -------------------------------------------------------------------------
@contextmanager
def run_folder(folder: Path, config: dict[str, Any]) -> Iterator[None]:
    """Make the folder of a run and its config.json; no other process may use it in the block.

    Raises InputError if the folder is in use, or holds a run with another config.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", blocking=False) if rank() == 0 else nullcontext()
    try:
        with lock:
            on_rank_zero(_check_config, folder / "config.json", config)
            yield
    except Timeout:
        raise InputError(f"--out {folder}: another process uses it; wait for its end") from None


def _check_config(file: Path, config: dict[str, Any]) -> None:
    wanted = json.loads(json.dumps(config, default=str))
    if not file.exists():
        write_file(file, json.dumps(wanted, indent=2) + "\n")
    stored = json.loads(file.read_text())
    differences = []
    for name, value in wanted.items():
        if stored.get(name) != value:
            differences.append(f"{name} {stored.get(name)} (now {value})")
    if differences:
        message = f"holds a run with {', '.join(differences)}; choose another folder"
        raise InputError(f"--out {file.parent}: {message}")
