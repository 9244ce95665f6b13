"""SHA-256 of what a run has written, so that no stage goes on from a file that has been damaged since.

They are in SHA256SUMS beside the files, as the program sha256sum writes them: `sha256sum -c SHA256SUMS` checks them.
"""

import hashlib
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from pipeline.records import InputError, Row, read_rows, write_bytes, write_text

SUMS = "SHA256SUMS"
Line = tuple[str, str]  # digest, name


def write_checked(file: Path, content: bytes) -> None:
    """Write a file and note its checksum. Whatever ends this and when: the file that is there is one that is noted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_checked(Path(folder) / "note", b"whole")
    ...     check_file(Path(folder) / "note")
    ...     (Path(folder) / "SHA256SUMS").read_text().split()[1]
    'note'
    """
    known, line = _read(file.parent), (hashlib.sha256(content).hexdigest(), file.name)
    _write(file.parent, [*known, line])  # the file as it is, and as it will be
    write_bytes(file, content)
    _write(file.parent, [*(old for old in known if old[1] != file.name), line])


def check_file(file: Path) -> None:
    """InputError if `file` is not what `write_checked` wrote."""
    if (_digest(file), file.name) not in _read(file.parent):
        raise InputError(
            f"{file}: is damaged, it is not what was written there; remove it, and the same command makes it anew"
        )


def read_checked(file: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file that `write_checked` wrote; InputError as `check_file` and `read_rows` raise it."""
    check_file(file)
    return read_rows(file, kind)


def seal_folder(folder: Path) -> None:
    """Note the checksums of all files in `folder`."""
    files = sorted(file for file in folder.iterdir() if file.name != SUMS)
    _write(folder, [(_digest(file), file.name) for file in files])


def unseal_files(folder: Path, pattern: str) -> None:
    """Forget the files in a sealed folder whose name fits the pattern: they are about to be removed."""
    _write(folder, [line for line in _read(folder) if not fnmatch(line[1], pattern)])


def check_folder(folder: Path) -> None:
    """InputError if a file of a sealed folder is missing or not what it was; of other folders nothing is known.

    >>> check_folder(Path("nowhere"))
    """
    for digest, name in _read(folder):
        fault = "is damaged" if (folder / name).is_file() else "is missing"
        if fault == "is missing" or _digest(folder / name) != digest:
            raise InputError(f"{folder / name}: {fault}; remove {folder}, and the same command goes on before it")


def _read(folder: Path) -> list[Line]:
    file = folder / SUMS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [(line[:64], line[66:]) for line in lines]


def _write(folder: Path, lines: Sequence[Line]) -> None:
    write_text(folder / SUMS, "".join(f"{digest}  {name}\n" for digest, name in lines))


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
