"""A run in TensorBoard or wandb: its settings, steps and evaluations, from its files.

`python -m examples.track runs/laptop tensorboard`, or wandb, follows the run until results.json
exists. A step is one of the optimizer, counted over all iterations; docs/runs.md has more.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from pandas import json_normalize

from toprlib.command import command
from toprlib.files import read_json, read_partial_records
from toprlib.records import InputError

PAUSE = 5.0  # seconds between two looks at the files

Values = tuple[dict[str, Any], int]  # what is shown, and at which step


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    folder: tyro.conf.Positional[Path]
    """folder of a run"""
    tracker: tyro.conf.Positional[Literal["tensorboard", "wandb"]]
    """where to show it"""


def read_values(folder: Path, iterations: int) -> Iterator[Values]:
    """The steps of a run until it is finished, as they are written, then its evaluations."""
    logs = [folder / f"iteration-{number}" / "metrics.jsonl" for number in range(1, iterations + 1)]
    shown = 0
    is_finished = False
    while not is_finished:
        is_finished = (folder / "results.json").exists()  # no step comes after it
        steps = []
        for log in logs:
            steps += read_partial_records(log, dict[str, Any], fix="")
        # Fewer than before, if the run was interrupted and resumed from a checkpoint.
        for number, step in enumerate(steps[shown:], start=shown + 1):
            yield {"train": step}, number
        shown = max(shown, len(steps))
        if not is_finished:
            time.sleep(PAUSE)
    yield from read_evaluations(folder, logs)


def read_evaluations(folder: Path, logs: list[Path]) -> Iterator[Values]:
    """The evaluations of a finished run."""
    results = read_json(folder / "results.json", keys=["iterations"])
    if "before" in results:
        yield {"test": results["before"]}, 0
    steps_before = 0
    for log, iteration in zip(logs, results["iterations"], strict=True):
        files = log.parent.glob("test-*.jsonl")
        steps = {int(file.stem.removeprefix("test-")) for file in files} - {0}
        points = iteration.get("curve", [])[1:]
        for step, point in zip(sorted(steps), points, strict=True):
            yield {"test": point}, steps_before + step
        steps_before += iteration["dataset"]["steps"]


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Nested values as one level, with names such as train/loss."""
    return json_normalize(values, sep="/").iloc[0].dropna().to_dict()


def show(folder: Path, tracker: str) -> None:
    """Show the run in `folder`. Raises InputError if it is not a run, or if wandb refuses."""
    config = read_json(folder / "config.json", fix="give the folder of a run", keys=["iterations"])
    show_in = {"tensorboard": show_in_tensorboard, "wandb": show_in_wandb}[tracker]
    show_in(folder, config, read_values(folder, config["iterations"]))


def show_in_tensorboard(folder: Path, config: dict, values: Iterator[Values]) -> None:
    """Write the events of a run into folder/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        lines = [f"    {name}: {value}\n" for name, value in config.items()]
        writer.add_text("settings", "".join(lines))
        for nested, step in values:
            for name, number in flatten(nested).items():
                writer.add_scalar(name, number, step)
            writer.flush()
    print(f"written; to see the run: tensorboard --logdir {folder / 'tensorboard'}")


def show_in_wandb(folder: Path, config: dict, values: Iterator[Values]) -> None:
    """Send a run to wandb, or into a folder with WANDB_MODE=offline."""
    import wandb

    project = os.environ.get("WANDB_PROJECT", "topr")
    try:
        run = wandb.init(project=project, name=folder.name, dir=folder, config=config)
    except wandb.Error as error:
        reason = str(error).splitlines()[0]
        message = f"wandb: {reason}; WANDB_MODE=offline needs no account"
        raise InputError(message, option="tracker") from None
    run.define_metric("*", step_metric="step")  # wandb's own steps must grow
    for nested, step in values:
        run.log(flatten(nested) | {"step": step})


def main() -> None:
    """The command line. An input error is one line."""
    with command("track"):
        options = tyro.cli(Options, prog="examples.track", description=__doc__)
        try:
            show(options.folder, options.tracker)
        except ModuleNotFoundError:
            fix = f"{sys.executable} -m pip install {options.tracker}"
            message = f"{options.tracker} is not installed; run {fix}"
            raise InputError(message, option="tracker") from None


if __name__ == "__main__":
    main()
