"""The folder that a run writes into: its settings, and files that are whole or absent, but for a growing log."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.records import InputError, write_text


class RunFolder:
    """`path` with a config.json that says which settings made what lies in it.

    Opening it a second time with the same settings goes on with it; with other settings it raises InputError and
    changes nothing. Opening makes nothing either: `create` does.
    """

    def __init__(self, path: Path, config: dict[str, Any]):
        self.path = Path(path)
        config = json.loads(json.dumps(config, default=str))
        file = self.path / "config.json"
        if file.exists():
            _refuse_others(file, config, "holds a run with other settings", "choose another --out")
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(f"{self.path}: is not empty and no run of this script; choose another --out")
        elif self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path}: is a file; choose another --out")
        self._config = config

    def create(self) -> None:
        """Make the folder; until then a run that fails leaves nothing behind."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_json("config.json", self._config)

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
