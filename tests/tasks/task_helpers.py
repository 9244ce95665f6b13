"""Samples, files and commands for tests of tasks and examples."""

import json
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

import train_gsm8k as gsm8k
from toprlib.records import InputError, Sample

ROOT = Path(gsm8k.__file__).parent


def input_error(work: Callable, *args) -> InputError:
    """The InputError that work(*args) raises; its message has one line."""
    with pytest.raises(InputError) as raised:
        work(*args)
    assert "\n" not in str(raised.value)
    return raised.value


def make_sample(completion: str, outcome: str, problem_id: str = "p") -> Sample:
    """A graded sample of a task whose rewards are +1 and -1."""
    reward = 1.0 if outcome == "correct" else -1.0
    return Sample(
        problem_id=problem_id, prompt="?", completion=completion, reward=reward, outcome=outcome
    )


def write_rows(file: Path, rows: Iterable[dict]) -> None:
    """A JSON-lines file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(file: Path) -> list[dict]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def run_command(
    command: Sequence[object], without: str | None = None, **variables: str
) -> subprocess.CompletedProcess:
    """A command, run in the project's folder to its end.

    without: environment variables that begin with it are removed. variables: are added.
    """
    environment = dict(os.environ)
    for name in os.environ:
        if without is not None and name.startswith(without):
            del environment[name]
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
