"""The folder that a run writes into: its settings, and files that are whole or absent, but for a growing log."""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.records import InputError, write_text

OF_BEGINNING = (".lock", "config.json.unfinished")  # all there is where a run was ended before it had a config.json


class RunFolder:
    """`path` with a config.json that says which settings made what lies in it.

    Opening it a second time with the same settings goes on with it; with other settings it raises InputError and
    changes nothing. Opening makes nothing either: `held` does.
    """

    def __init__(self, path: Path, config: dict[str, Any]):
        self.path, self._config = Path(path), json.loads(json.dumps(config, default=str))
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path}: is a file; choose another --out")
        if self.path.is_dir() and any(file.name not in OF_BEGINNING for file in self.path.iterdir()):
            self._check()

    def _check(self) -> None:
        file = self.path / "config.json"
        if not file.exists():
            raise InputError(f"{self.path}: is not empty and no run of this script; choose another --out")
        _refuse_others(file, self._config, "holds a run with other settings", "choose another --out")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, and keep it from other processes until the block ends: InputError where one is in it.

        Until then a run that fails leaves nothing behind. The system lets go of a process's folder when it ends,
        whatever ended it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"{self.path}: another process is at work there; let it end") from None
            if (self.path / "config.json").exists():
                self._check()  # another process may have made it since
            else:
                self.write_json("config.json", self._config)
            yield

    def agree(self, other: Path, names: Sequence[str]) -> None:
        """InputError unless folder `other` holds a run with the same settings of these names."""
        file = Path(other) / "config.json"
        if not file.exists():
            raise InputError(f"{other}: holds no run, there is no config.json")
        here = {name: self._config[name] for name in names}
        _refuse_others(file, here, "has drawn otherwise", "give a --reuse that has drawn the same")

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_text(self.path / name, json.dumps(content, indent=2) + "\n")

    def read_json(self, name: str) -> Any:
        """The content of a JSON file, None where there is no such file; InputError where it cannot be read."""
        return _read(self.path / name)


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    except ValueError as error:
        raise InputError(f"{file}: {error}; remove it to make it anew") from None


def _refuse_others(file: Path, config: dict[str, Any], fault: str, advice: str) -> None:
    known = _read(file)
    differing = [name for name in config if known.get(name) != config[name]]
    if differing:
        told = ", ".join(f"{name} = {known.get(name)!r} there and {config[name]!r} here" for name in differing)
        raise InputError(f"{file.parent}: {fault} ({told}); {advice}")


def append_json(file: Path, content: dict[str, Any]) -> None:
    """Add a line to a JSON-lines file, at once readable by others."""
    with file.open("a", encoding="utf-8") as growing:
        growing.write(json.dumps(content) + "\n")
