"""The page of results: what the benchmarks wrote, as one Markdown file.

python benchmarks/page.py runs/bench        # reads its .json files, writes runs/bench/README.md
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measuring import Comparison, Goal, findings, summary

from pipeline.records import write_file

TITLES = {
    "train_step": "Training steps",
    "loss_memory": "Memory of the head",
    "overhead": "Overhead of TOPR",
    "sampling": "Sampling",
    "scaling": "Scaling",
    "end_to_end": "End to end",
}


def table(comparison: Comparison) -> list[str]:
    """Its sides with median, lowest and highest, as Markdown.

    >>> table(Comparison("steps", "s", {"ours": [1.0, 2.0, 4.0]}))
    ['| steps | s, median | lowest | highest |', '| --- | --- | --- | --- |', '| ours | 2 | 1 | 4 |']
    """
    lines = [f"| {comparison.what} | {comparison.unit}, median | lowest | highest |", "| --- | --- | --- | --- |"]
    for name, values in comparison.values.items():
        lines.append(f"| {name} | {' | '.join(summary(values))} |")
    return lines


def section(title: str, record: dict) -> list[str]:
    """What a benchmark found."""
    machine = ", ".join(f"{name} {value}" for name, value in record["machine"].items())
    lines = [f"## {title}", "", f"`{record['command']}`: {machine}", ""]
    for found in record["comparisons"]:
        comparison = Comparison(**found | {"goals": [Goal(**goal) for goal in found["goals"]]})
        below = findings(comparison)
        lines += [*table(comparison), "", *(f"- {line}" for line in below), *[""] * bool(below)]
    return lines


def main(folder: Path) -> None:
    """Write folder/README.md."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Sides take turns in one run; a ratio is the median of the rounds' ratios, with the",
        "lowest and the highest of them behind it. What was missed, and why, is in [benchmarks/README.md]"
        "(../../benchmarks/README.md).",
        "",
    ]
    for name, title in TITLES.items():
        file = folder / f"{name}.json"
        lines += section(title, json.loads(file.read_text())) if file.exists() else []
    write_file(folder / "README.md", "\n".join(lines))


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("page.py: give the folder that the benchmarks wrote into")
    main(Path(sys.argv[1]))
