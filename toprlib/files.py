"""Files of a run: JSON lines, atomic writes, and the folder, which one run at a time may use.

A stage writes one file, which appears under its name once it is complete and which later stages
never modify. A stage whose file exists is not run again, so repeating a command resumes its run.

Every rank calls the functions marked `rank_zero_only`, `atomic_folder` and `locked_run_folder`;
rank zero alone looks and writes.
"""

import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from toprlib.distributed import gather, rank_zero_only, ranks
from toprlib.records import InputError

Record = TypeVar("Record")  # a pydantic model or a dataclass
FORMAT = 5  # of a run's files; a run of another format is refused, not misread
LOCK = ".lock"
REGENERATE = "remove it and repeat the command, which makes it again"


# ---- reading -------------------------------------------------------------------------------------
def read_text(path: Path, fix: str = "") -> str:
    """The text of a UTF-8 file, without a byte-order mark. InputError if it cannot be read."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(_with_fix("no such file", fix or "check the path"), file=path) from None
    except IsADirectoryError:
        raise InputError("is a folder; name a file", file=path) from None
    except UnicodeDecodeError as error:
        message = f"not UTF-8 at byte {error.start}"
        raise InputError(_with_fix(message, fix or "save it as UTF-8"), file=path) from None


def _with_fix(message: str, fix: str) -> str:
    return f"{message}; {fix}" if fix else message


def read_records(
    path: Path, kind: type[Record], is_one_record: bool = False, fix: str = ""
) -> list[Record]:
    """The lines of a JSON-lines file as records of `kind`.

    is_one_record: the whole file is one JSON object. Raises InputError with file, line and field;
    it ends with `fix`.
    """
    text = read_text(path, fix)
    # Only a newline ends a line: U+2028, for one, belongs to the text of a completion.
    lines = [text] if is_one_record else text.rstrip().split("\n")
    if lines == [""]:
        raise InputError(_with_fix("is empty", fix), file=path)
    return _parse_lines(path, lines, kind, is_one_record, fix)


def read_partial_records(path: Path, kind: type[Record], fix: str = REGENERATE) -> list[Record]:
    """The complete lines of a file that is appended to; it may be missing or end within a line."""
    content = path.read_bytes() if path.exists() else b""
    return _parse_lines(path, content.split(b"\n")[:-1], kind, False, fix)


def _parse_lines(
    path: Path, lines: Sequence[str | bytes], kind: type[Record], is_one_record: bool, fix: str
) -> list[Record]:
    adapter = TypeAdapter(kind)
    records = []
    for number, line in enumerate(lines, start=1):
        place = None if is_one_record else number
        if not line.strip():
            raise InputError("is a blank line; remove it", file=path, line=place)
        try:
            records.append(adapter.validate_json(line))
        except ValidationError as error:
            message, field = first_validation_error(error)
            is_object = field is not None or is_one_record
            fix = fix or ("" if is_object else "write one JSON object per line")
            raise InputError(_with_fix(message, fix), file=path, line=place, field=field) from None
    return records


def first_validation_error(error: ValidationError) -> tuple[str, str | None]:
    """What is wrong with a record, in one line, and the field that it is about."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or None
    message = first["msg"].removeprefix("Value error, ")
    if message.startswith("Input should"):
        message = message.replace("Input should", "must", 1)
        message += f", not {first['input']!r:.80}"
        if isinstance(first["input"], bool):
            message += ": write 1 and -1"
    return message, field


def read_json(file: Path, fix: str = REGENERATE, keys: Sequence[str] = ()) -> Any:
    """The content of a JSON file: an object with these keys, if `keys` has any.

    Raises InputError, which ends with `fix`, if it cannot be read or lacks a key.

    >>> read_json(Path("nowhere.json"))
    Traceback (most recent call last):
    toprlib.records.InputError: nowhere.json: no such file; check the path
    """
    try:
        content = json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise InputError(f"{error}; {fix}", file=file) from None
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            raise InputError(f"is missing; {fix}", file=file, field=key)
    return content


@rank_zero_only
def exists(file: Path) -> bool:
    """Whether a file or folder exists, as rank zero sees it."""
    return file.exists()


# ---- writing -------------------------------------------------------------------------------------
def to_lines(records: Iterable[Any]) -> str:
    """Records as JSON lines.

    >>> from toprlib.records import Sample
    >>> to_lines([Sample(prompt="?", completion="!", reward=1.0)])
    '{"prompt":"?","completion":"!","finish_reason":"stop","reward":1.0}\\n'
    """
    records = list(records)
    if not records:
        return ""
    adapter = TypeAdapter(type(records[0]))
    lines = [adapter.dump_json(record, exclude_none=True).decode() for record in records]
    return "\n".join(lines) + "\n"


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: first under another name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.unlink(missing_ok=True)  # of a killed run; or a link, which must not be followed
    _write(unfinished, "xb", content)
    unfinished.replace(path)


def append_to_file(path: Path, content: str) -> None:
    """Append text to a file; a reader of the file ignores a last line that is not complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, "ab", content)


def _write(path: Path, mode: str, content: str | bytes) -> None:
    try:
        with path.open(mode) as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # "disk full" does not name the file itself
        raise


@rank_zero_only
def write_json(file: Path, content: Any) -> None:
    """Write a JSON file atomically; values that JSON lacks are written as text."""
    write_file(file, json.dumps(content, indent=2, default=str) + "\n")


@rank_zero_only
def write_records(file: Path, records: Iterable[Any]) -> None:
    """Write a JSON-lines file atomically."""
    write_file(file, to_lines(records))


@rank_zero_only
def remove(*paths: Path) -> None:
    """Remove files, and folders with everything in them. Missing ones are ignored."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    remove(unfinished)  # of a run that was killed while it wrote
    _make_folder(unfinished)
    yield unfinished
    gather(None)  # all ranks have written
    _rename(unfinished, folder)


@rank_zero_only
def _make_folder(folder: Path) -> None:
    folder.mkdir(parents=True)


@rank_zero_only
def _rename(old: Path, new: Path) -> None:
    old.rename(new)


# ---- the folder of a run -------------------------------------------------------------------------
@contextmanager
def locked_run_folder(folder: Path, config: dict[str, Any]) -> Iterator[None]:
    """Make the folder of a run and its config.json; no other process may use it in the block.

    Raises InputError, and changes nothing, if the folder is in use or holds anything but a run with
    this config. The system releases the lock when the process ends, however it ends.
    """
    with ExitStack() as stack:
        _lock(folder, config, stack)
        if ranks() > 1 and not (folder / "config.json").exists():
            host = socket.gethostname()
            message = f"{host} does not see this folder; choose an --out that all nodes share"
            raise InputError(message, file=folder, option="--out")
        yield


@rank_zero_only
def _lock(folder: Path, config: dict[str, Any], stack: ExitStack) -> None:
    _check_content(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        stack.enter_context(FileLock(folder / LOCK, blocking=False))
    except Timeout:
        message = "another process works in this folder; wait until it has ended"
        raise InputError(message, option="--out", file=folder) from None
    except (NotImplementedError, OSError) as error:
        message = f"cannot be locked ({error}); choose an --out on a file system that has locks"
        raise InputError(message, option="--out", file=folder) from None
    _check_content(folder, config)  # again: another process may have written before the lock
    if not (folder / "config.json").exists():
        content = json.dumps(config | {"format": FORMAT}, indent=2, default=str)
        write_file(folder / "config.json", content + "\n")


def _check_content(folder: Path, config: dict[str, Any]) -> None:
    """Raises InputError if the folder holds anything but a run with this config."""
    if folder.exists() and not folder.is_dir():
        raise InputError("is a file; choose another folder", option="--out", file=folder)
    if (folder / "config.json").exists():
        _check_same_config(folder, config)
    elif folder.is_dir():
        leftovers = {LOCK, "config.json.unfinished"}  # of a run that was killed at its start
        if {path.name for path in folder.iterdir()} - leftovers:
            message = "holds files that no run has written; choose another --out"
            raise InputError(message, option="--out", file=folder)


def _check_same_config(folder: Path, config: dict[str, Any]) -> None:
    file = folder / "config.json"
    stored = read_json(file, fix="choose another --out")
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        message = "holds a run of another version of this project; choose another --out"
        raise InputError(message, option="--out", file=folder)
    wanted = json.loads(json.dumps(config, default=str))
    differences = []
    for name, value in wanted.items():
        if stored.get(name) != value:
            differences.append(f"{name} = {stored.get(name)!r} in the folder, now {value!r}")
    if differences:
        message = f"holds a run with other settings ({'; '.join(differences)})"
        raise InputError(f"{message}; choose another --out", option="--out", file=folder)
