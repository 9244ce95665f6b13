"""The project's folder, its tracked pages, and the code on them."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]

# Groups: the language, "" if the block names none; the code.
FENCED_CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def list_tracked(*patterns: str) -> list[Path]:
    """The tracked files that match one of some patterns, such as "*.md"."""
    command = ["git", "ls-files", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines()]


def read_page(name: str) -> str:
    """The text of a page, by its path in the project."""
    return (ROOT / name).read_text(encoding="utf-8")


def code_blocks(page: str, language: str = "") -> list[str]:
    """The blocks of code of a page in some language, by default those that name none."""
    blocks = FENCED_CODE.findall(page)
    return [code for name, code in blocks if name == language]


@cache
def samples_by_run(metric: str) -> dict[tuple[str, str, str, float], np.ndarray]:
    """(base, set, arm, rate) -> a metric in rate_and_share, in per cent, (seeds, problems)."""
    text = (ROOT / "studies/rate_and_share/runs.jsonl").read_text(encoding="utf-8")
    table = {}
    for line in map(json.loads, text.splitlines()):
        key = (line["base"], line["set"], line["arm"], line["lr"])
        table.setdefault(key, np.full((5, 300), np.nan))[line["seed"]] = line[metric]
    scale = 16 if metric == "right" else 1
    return {key: 100 * counts / scale for key, counts in table.items()}


def at_rate(
    base_and_set: tuple[str, str], arm: str, lr: float, metric: str = "right"
) -> np.ndarray:
    """A method at one rate in rate_and_share, in per cent, in each seed."""
    return samples_by_run(metric)[*base_and_set, arm, lr].mean(axis=1)
