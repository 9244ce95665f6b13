"""The folder of a run: what is done, what an interrupted run goes on from, and what is published.

A stage leaves one file, which appears under its name when it is whole and which no later stage changes. A stage whose
file is there is not run again, so the same command, given after whatever ended a run, goes on where it was. SHA256SUMS
beside the files has their checksums, in the form that `sha256sum -c SHA256SUMS` checks; a damaged file is never read.

Every rank calls what is `by_rank_zero`, `held_folder` and `appearing`; rank zero alone looks and writes.
"""

import fcntl
import hashlib
import json
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.records import InputError, Record, read_records, to_lines, write_file
from pipeline.runtime.processes import by_rank_zero, on_all_ranks, ranks

FORMAT = 4  # of a run's files; 1 had log mu in samples.jsonl, 2 and 3 other options and paths in config.json
BEFORE_CONFIG = (
    ".lock",
    "config.json.unfinished",
)  # what a run that ended before it wrote config.json has left
SUMS = "SHA256SUMS"


@by_rank_zero
def is_there(file: Path) -> bool:
    """Whether a file or folder is there, as rank zero sees it."""
    return file.exists()


publish_file = by_rank_zero(write_file)  # of no stage: without a checksum


@by_rank_zero
def publish_records(file: Path, rows: Iterable[Any]) -> None:
    """Write rows to the file of a stage, and note its checksum.

    Crash-safe: a file that is there always matches a checksum that is noted.
    """
    content, sums = to_lines(rows).encode(), file.with_name(SUMS)
    line = f"{hashlib.sha256(content).hexdigest()}  {file.name}\n"
    lines = sums.read_text(encoding="utf-8").splitlines(keepends=True) if sums.exists() else []
    write_file(sums, "".join([*lines, line]))  # the file as it is, and as it will be
    write_file(file, content)
    kept = [old for old in lines if old[66:] != line[66:]]
    write_file(
        sums, "".join(sorted([*kept, line], key=itemgetter(slice(66, None))))
    )  # whatever the stages' order


@by_rank_zero
def remove(*paths: Path) -> None:
    """Remove files, and folders with all that is in them; those that are not there are left out."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def held_folder(path: Path, config: dict[str, Any]) -> Iterator[None]:
    """Make the folder of a run, and keep other processes out until the block ends: InputError if one is at work there.

    config: the run's settings, for config.json. InputError, with nothing changed, where the folder holds anything but a
    run with these settings. The system releases the lock when the process ends, however it ends.
    """
    with ExitStack() as stack:
        _hold(path, config, stack)
        if ranks() > 1:
            on_all_ranks(partial(_check_shared, path))
        yield


@by_rank_zero
def _hold(path: Path, config: dict[str, Any], stack: ExitStack) -> None:
    """Lock the folder until the stack closes, and write config.json."""
    _check_content(path, config)
    path.mkdir(parents=True, exist_ok=True)
    lock = stack.enter_context((path / ".lock").open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{path}: another process is at work there; let it end") from None
    except OSError as error:
        fault = f"its file system takes no locks ({error.strerror}), which keep two runs apart"
        raise InputError(f"{path}: {fault}: choose an --out on one that does") from None
    _check_content(
        path, config
    )  # once more: another process may have written config.json before it was locked
    if not (path / "config.json").exists():
        write_file(
            path / "config.json",
            json.dumps(config | {"format": FORMAT}, indent=2, default=str) + "\n",
        )


def _check_content(path: Path, config: dict[str, Any]) -> None:
    """InputError where the folder holds anything but a run with these settings."""
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file; choose another --out")
    if (path / "config.json").exists():
        refuse_others(path, config, "holds a run with other settings", "choose another --out")
    elif path.is_dir() and any(file.name not in BEFORE_CONFIG for file in path.iterdir()):
        raise InputError(f"{path}: is not empty and no run of this script; choose another --out")


def _check_shared(path: Path) -> None:
    """InputError where this rank does not see what rank zero has written into the run's folder."""
    if not (path / "config.json").exists():
        raise InputError(
            f"{path}: {socket.gethostname()} sees another one; choose an --out that all nodes share"
        )


def refuse_others(folder: Path, config: dict[str, Any], fault: str, advice: str) -> None:
    """InputError unless folder/config.json has the settings of `config` and the present form of files."""
    there, config = (
        read_json(folder / "config.json", advice),
        json.loads(json.dumps(config, default=str)),
    )
    if there.get("format") != FORMAT:
        raise InputError(
            f"{folder}: holds a run of another version of this project, with other files; {advice}"
        )
    differing = [name for name in config if there.get(name) != config[name]]
    if differing:
        values = ", ".join(
            f"{name} = {there.get(name)!r} there and {config[name]!r} here" for name in differing
        )
        raise InputError(f"{folder}: {fault} ({values}); {advice}")


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


def read_checked(file: Path, kind: type[Record]) -> list[Record]:
    """The rows of a file that `publish_records` wrote; InputError if it has changed, or as `read_records` raises it."""
    sums = file.with_name(SUMS)
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
    if (
        file.exists()
        and f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" not in lines
    ):
        advice = "remove it, and the same command makes it anew"
        raise InputError(f"{file}: is damaged, it is not what was written there; {advice}")
    return read_records(file, kind)


@by_rank_zero
def check_folder(folder: Path) -> None:
    """InputError if a file of a folder with checksums is missing or has changed."""
    digest_of = digests(folder)
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        name = line[66:]
        if digest_of.get(name) != line[:64]:
            fault = "is damaged" if name in digest_of else "is missing"
            raise InputError(
                f"{folder / name}: {fault}; remove {folder}, and the same command goes on before it"
            )


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in `folder` and below it, by name; several at a time: 32 GB would take half a minute."""
    files = [file for file in folder.rglob("*") if file.is_file() and file != folder / SUMS]
    with ThreadPoolExecutor() as threads:
        digest_at = dict(zip(files, threads.map(_digest, files), strict=True))
    return {
        name: digest_at[folder / name]
        for name in sorted(str(file.relative_to(folder)) for file in files)
    }


def _digest(file: Path) -> str:
    with file.open("rb") as content:  # read piece by piece
        return hashlib.file_digest(content, "sha256").hexdigest()


class Point(NamedTuple):
    """A model to be evaluated: after how many steps of the epoch and samples trained on, and its folder or hub name."""

    step: int
    seen: int
    model: str


@by_rank_zero
def resume_step(here: Path, points: Sequence[Point]) -> int | None:
    """The step of the checkpoint that training goes on from, 0 to begin anew; None where all its models are there.

    points: the models that training leaves, in order, of which the last is the iteration's. An intermediate model is
    deleted after its evaluation; the evaluation's file then marks it as done. Models and lines of metrics.jsonl behind
    the step are removed, to be made again.
    """
    *along, last = points
    missing = [
        p.step
        for p in along
        if not Path(p.model).exists() and not (here / f"test-{p.step}.jsonl").exists()
    ]
    if not missing and Path(last.model).exists():
        return None
    names = [path.name.removeprefix("checkpoint-") for path in here.glob("checkpoint-*")]
    whole = [int(name) for name in names if name.isdecimal()]  # not checkpoint-256.unfinished
    done = max((step for step in whole if not missing or step < missing[0]), default=0)
    for point in along:
        if point.step > done:
            shutil.rmtree(point.model, ignore_errors=True)
    log = here / "metrics.jsonl"
    if done == 0:
        log.unlink(missing_ok=True)
    else:
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
        write_file(log, "".join(lines[:done]))
    return done


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into that has another name until the block ends, and its checksums inside from then on."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    remove(unfinished)
    by_rank_zero(unfinished.mkdir)(parents=True)
    yield unfinished
    _publish_folder(unfinished, folder)


@by_rank_zero
def _publish_folder(unfinished: Path, folder: Path) -> None:
    write_file(
        unfinished / SUMS,
        "".join(f"{digest}  {name}\n" for name, digest in digests(unfinished).items()),
    )
    unfinished.rename(folder)
