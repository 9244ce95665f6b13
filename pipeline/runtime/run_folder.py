"""The folder of a run: its settings, its stages' files, and the checksums of these.

A stage leaves one file, which appears under its name when it is whole and is never rewritten. A stage whose file is
there is not run again, so the same command, given after whatever ended a run, goes on where it was. SHA256SUMS beside
the files has their checksums, in the form that `sha256sum -c SHA256SUMS` checks; a damaged file is never read.
"""

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.records import InputError, Record, read_rows, to_lines, write_bytes, write_text
from pipeline.runtime.processes import on_rank_zero

FORMAT = 2  # of a run's files; 1 had log mu in samples.jsonl
BEFORE_CONFIG = (".lock", "config.json.unfinished")  # what a run that ended before it wrote config.json has left
SUMS = "SHA256SUMS"
Line = tuple[str, str]  # digest, name


def stage(file: Path, make: Callable[[], Iterable[Any]]) -> None:
    """Write the rows that `make` returns on rank zero to `file`, unless it is there. Every rank calls it."""
    if not on_rank_zero(file.exists):
        rows = make()
        on_rank_zero(lambda: write_checked(file, to_lines(rows).encode()))


class RunFolder:
    """`path` with a config.json that says which settings made what lies in it.

    Opening it again with the same settings goes on with it; with other settings it raises InputError and changes
    nothing. Opening writes nothing either: `held` does.
    """

    def __init__(self, path: Path, config: dict[str, Any]):
        self.path = Path(path)
        self._config = json.loads(json.dumps(config | {"format": FORMAT}, default=str))
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path}: is a file; choose another --out")
        if self.path.is_dir() and any(file.name not in BEFORE_CONFIG for file in self.path.iterdir()):
            self._check()

    def _check(self) -> None:
        if not (self.path / "config.json").exists():
            raise InputError(f"{self.path}: is not empty and no run of this script; choose another --out")
        _refuse_others(self.path, self._config, "holds a run with other settings", "choose another --out")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, and keep other processes out until the block ends: InputError where one is at work there.

        The system releases the lock when the process ends, however it ends.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{self.path}: another process is at work there; let it end") from None
            if (self.path / "config.json").exists():
                self._check()  # another process may have written it since this one looked
            else:
                self.write_json("config.json", self._config)
            yield

    def agree(self, other: Path, names: Sequence[str]) -> None:
        """InputError unless folder `other` holds a run with the same settings of these names."""
        if not (Path(other) / "config.json").exists():
            raise InputError(f"{other}: holds no run, there is no config.json")
        here = {name: self._config[name] for name in (*names, "format")}
        _refuse_others(Path(other), here, "has drawn otherwise", "give a --reuse that has drawn the same")

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_text(self.path / name, json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str) -> Any:
        """The content of a JSON file, None where there is no such file; InputError where it cannot be read."""
        return _read_json(self.path / name)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    except ValueError as error:
        raise InputError(f"{file}: {error}; remove it to make it anew") from None


def _refuse_others(folder: Path, config: dict[str, Any], fault: str, advice: str) -> None:
    known = _read_json(folder / "config.json")
    if known.get("format") != FORMAT:
        raise InputError(
            f"{folder}: was made by another version of this script, whose files have another form; {advice}"
        )
    differing = [name for name in config if known.get(name) != config[name]]
    if differing:
        told = ", ".join(f"{name} = {known.get(name)!r} there and {config[name]!r} here" for name in differing)
        raise InputError(f"{folder}: {fault} ({told}); {advice}")


# ---- checksums --------------------------------------------------------------------------------------------------


def write_checked(file: Path, content: bytes) -> None:
    """Write a file and note its checksum. Crash-safe: a file that is there always matches a checksum that is noted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checked(Path(folder) / "note", b"whole")
    ...     check_file(Path(folder) / "note")
    ...     (Path(folder) / "SHA256SUMS").read_text().split()[1]
    'note'
    """
    known, line = _read_sums(file.parent), (hashlib.sha256(content).hexdigest(), file.name)
    _write_sums(file.parent, [*known, line])  # the file as it is, and as it will be
    write_bytes(file, content)
    _write_sums(file.parent, [*(old for old in known if old[1] != file.name), line])


def check_file(file: Path) -> None:
    """InputError if `file` is not what `write_checked` wrote."""
    if (_digest(file), file.name) not in _read_sums(file.parent):
        raise InputError(
            f"{file}: is damaged, it is not what was written there; remove it, and the same command makes it anew"
        )


def read_checked(file: Path, kind: type[Record]) -> list[Record]:
    """The rows of a file that `write_checked` wrote; InputError as `check_file` and `read_rows` raise it."""
    check_file(file)
    return read_rows(file, kind)


def seal_folder(folder: Path) -> None:
    """Note the checksums of all files in `folder`."""
    files = sorted(file for file in folder.iterdir() if file.name != SUMS)
    _write_sums(folder, [(_digest(file), file.name) for file in files])


def check_folder(folder: Path) -> None:
    """InputError if a file of a sealed folder is missing or has changed; folders that are not sealed pass.

    >>> check_folder(Path("nowhere"))
    """
    for digest, name in _read_sums(folder):
        fault = "is damaged" if (folder / name).is_file() else "is missing"
        if fault == "is missing" or _digest(folder / name) != digest:
            raise InputError(f"{folder / name}: {fault}; remove {folder}, and the same command goes on before it")


def _read_sums(folder: Path) -> list[Line]:
    file = folder / SUMS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [(line[:64], line[66:]) for line in lines]


def _write_sums(folder: Path, lines: Sequence[Line]) -> None:
    write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for digest, name in lines))


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
