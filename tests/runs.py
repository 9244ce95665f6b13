"""Small runs; conftest.py has those that tests share."""

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from pipeline.records import Task
from pipeline.settings import Settings

import train_gsm8k as gsm8k

# Four steps of 16 of 64 samples, of which 20 are right; all problems but one have samples of both signs.
SMALL = gsm8k.Settings(
    problems=8,
    n=8,
    max_new_tokens=48,
    test_problems=4,
    test_samples=6,
    k=4,
    curve_points=2,
    curve_samples=2,
)


def experiment(out: Path, task: Callable[[Settings], Task] = gsm8k.gsm8k_task, **changes) -> dict:
    """A run in the folder `out` with `SMALL` and changes: what its results.json holds."""
    settings = replace(SMALL, out=out, **changes)
    gsm8k.check(settings)
    return gsm8k.experiment(settings, task(settings))


def json_lines(file: Path) -> list[dict]:
    """The rows of a file that has one on each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def contents(folder: Path) -> dict[str, str]:
    """SHA-256 of each file below a folder, by its path there, and the folders themselves; of no log and no times."""
    files = [
        path for path in folder.rglob("*") if path.suffix != ".log" and path.name != "times.json"
    ]
    found = {str(path.relative_to(folder)): path for path in files}
    return {
        name: "" if path.is_dir() else sha256(path.read_bytes()).hexdigest()
        for name, path in found.items()
    }
