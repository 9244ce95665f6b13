"""Samples, files and commands for tests of tasks and examples."""

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import train_gsm8k as gsm8k
from toprlib.records import Sample

ROOT = Path(gsm8k.__file__).parent


def make_sample(completion: str, outcome: str, problem_id: str = "p") -> Sample:
    """A graded sample of a task whose rewards are +1 and -1."""
    reward = 1.0 if outcome == "correct" else -1.0
    return Sample(
        problem_id=problem_id, prompt="?", completion=completion, reward=reward, outcome=outcome
    )


def write_rows(file: Path, rows: Iterable[dict]) -> str:
    """A JSON-lines file. Returns its path as text."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def read_rows(file: Path) -> list[dict]:
    """The rows of a JSON-lines file."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def run_command(command: Sequence[object], **variables: str) -> subprocess.CompletedProcess:
    """A command, run in the project's folder to its end. variables: added to the environment."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
