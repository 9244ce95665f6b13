"""The folder of a run: its settings, its stages' files, and the checksums of these.

A stage leaves one file, which appears under its name when it is whole and which no later stage changes. A stage whose
file is there is not run again, so the same command, given after whatever ended a run, goes on where it was. SHA256SUMS
beside the files has their checksums, in the form that `sha256sum -c SHA256SUMS` checks; a damaged file is never read.
"""

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipeline.records import InputError, Record, read_rows, to_lines, write_file
from pipeline.runtime.processes import on_rank_zero

FORMAT = 2  # of a run's files; 1 had log mu in samples.jsonl
BEFORE_CONFIG = (".lock", "config.json.unfinished")  # what a run that ended before it wrote config.json has left
SUMS = "SHA256SUMS"


def stage(file: Path, make: Callable[[], Iterable[Any]]) -> None:
    """Write the rows that `make` returns on rank zero to `file`, unless it is there. Every rank calls it."""
    if not on_rank_zero(file.exists):
        rows = make()
        on_rank_zero(lambda: write_checked(file, to_lines(rows).encode()))


@contextmanager
def held_folder(path: Path, config: dict[str, Any]) -> Iterator[None]:
    """Make the folder of a run, and keep other processes out until the block ends: InputError if one is at work there.

    config: the run's settings, for config.json. InputError, with nothing changed, where the folder holds anything but a
    run with these settings. The system releases the lock when the process ends, however it ends.
    """
    with ExitStack() as stack:
        for is_locked in (False, True):  # another process may have written config.json since the first look
            if path.exists() and not path.is_dir():
                raise InputError(f"{path}: is a file; choose another --out")
            if (path / "config.json").exists():
                refuse_others(path, config, "holds a run with other settings", "choose another --out")
            elif path.is_dir() and any(file.name not in BEFORE_CONFIG for file in path.iterdir()):
                raise InputError(f"{path}: is not empty and no run of this script; choose another --out")
            if not is_locked:
                path.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((path / ".lock").open("w"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise InputError(f"{path}: another process is at work there; let it end") from None
        if not (path / "config.json").exists():
            write_file(path / "config.json", json.dumps(config | {"format": FORMAT}, indent=2, default=str) + "\n")
        yield


def refuse_others(folder: Path, config: dict[str, Any], fault: str, advice: str) -> None:
    """InputError unless folder/config.json has the settings of `config` and the present form of files."""
    known, config = read_json(folder / "config.json", advice), json.loads(json.dumps(config, default=str))
    if known.get("format") != FORMAT:
        raise InputError(f"{folder}: holds a run of another version of this project, with other files; {advice}")
    differing = [name for name in config if known.get(name) != config[name]]
    if differing:
        told = ", ".join(f"{name} = {known.get(name)!r} there and {config[name]!r} here" for name in differing)
        raise InputError(f"{folder}: {fault} ({told}); {advice}")


def read_json(file: Path, advice: str = "remove it to make it anew") -> Any:
    """The content of a JSON file; InputError, with the advice, where it cannot be read.

    >>> read_json(Path("nowhere.json"))
    Traceback (most recent call last):
    pipeline.records.InputError: nowhere.json: no such file
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
    except ValueError as error:
        raise InputError(f"{file}: {error}; {advice}") from None


# ---- checksums --------------------------------------------------------------------------------------------------


def write_checked(file: Path, content: bytes) -> None:
    """Write a file and note its checksum. Crash-safe: a file that is there always matches a checksum that is noted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checked(Path(folder) / "note", b"whole")
    ...     (Path(folder) / "SHA256SUMS").read_text().split()[1]
    'note'
    """
    sums, line = file.with_name(SUMS), f"{hashlib.sha256(content).hexdigest()}  {file.name}\n"
    known = sums.read_text(encoding="utf-8").splitlines(keepends=True) if sums.exists() else []
    write_file(sums, "".join([*known, line]))  # the file as it is, and as it will be
    write_file(file, content)
    kept = [old for old in known if old[66:] != line[66:]]
    write_file(sums, "".join(sorted([*kept, line], key=lambda line: line[66:])))  # whatever the order of the stages


def read_checked(file: Path, kind: type[Record]) -> list[Record]:
    """The rows of a file that `write_checked` wrote; InputError if it has changed, or as `read_rows` raises it."""
    sums = file.with_name(SUMS)
    known = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
    if file.exists() and f"{digest(file)}  {file.name}" not in known:
        raise InputError(
            f"{file}: is damaged, it is not what was written there; remove it, and the same command makes it anew"
        )
    return read_rows(file, kind)


def seal_folder(folder: Path) -> None:
    """Note the checksums of all files in `folder` and below it."""
    names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and f != folder / SUMS)
    found = digests([folder / name for name in names])
    write_file(folder / SUMS, "".join(f"{d}  {name}\n" for name, d in zip(names, found, strict=True)))


def check_folder(folder: Path) -> None:
    """InputError if a file of a sealed folder is missing or has changed; folders that are not sealed pass.

    >>> check_folder(Path("nowhere"))
    """
    sums = folder / SUMS
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
    known = {folder / line[66:]: line[:64] for line in lines}
    there = [file for file in known if file.is_file()]
    found = dict(zip(there, digests(there), strict=True))
    for file in known:
        if found.get(file) != known[file]:
            fault = "is damaged" if file in found else "is missing"
            raise InputError(f"{file}: {fault}; remove {folder}, and the same command goes on before it")


def digests(files: Sequence[Path]) -> list[str]:
    """The digest of each file, several at a time: hashing 32 GB one by one takes half a minute.

    >>> digests([])
    []
    """
    with ThreadPoolExecutor() as threads:
        return list(threads.map(digest, files))


def digest(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal, read piece by piece."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# ---- checkpoints ------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[int]:
    """The steps after which there are checkpoints in folder/checkpoint-STEP, in order.

    >>> checkpoints(Path("nowhere"))
    []
    """
    names = (path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*"))
    return sorted(int(name) for name in names if name.isdecimal())
