"""A run in TensorBoard or wandb: its settings, steps and evaluations, from the files that it writes.

`python -m examples.track runs/laptop tensorboard`, or wandb, follows the run until results.json is there. A step is one
of the optimiser's, counted over all iterations. docs/runs.md says what is shown.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pandas import json_normalize

from pipeline.records import InputError, read_records
from pipeline.runtime.processes import command
from pipeline.runtime.run_folder import read_json
from pipeline.settings import parsed

PAUSE = 5.0  # seconds between two looks at the files


def values_of(folder: Path, iterations: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The steps and evaluations of the run in `folder`, those to come too, each with its step."""
    logs = [folder / f"iteration-{number}" / "metrics.jsonl" for number in range(1, iterations + 1)]
    shown, is_finished = 0, False
    while not is_finished:
        is_finished = (folder / "results.json").exists()  # no step comes after it
        steps = [step for log in logs for step in read_records(log, dict[str, Any], "growing")]
        yield from (
            ({"train": values}, step) for step, values in enumerate(steps[shown:], start=shown + 1)
        )
        shown = max(
            shown, len(steps)
        )  # fewer than before where a run was stopped and went on from a checkpoint
        time.sleep(0 if is_finished else PAUSE)
    results, before = read_json(folder / "results.json"), 0
    if "before" in results:
        yield {"test": results["before"]}, 0
    for log, iteration in zip(logs, results["iterations"], strict=True):
        files = [int(file.stem.removeprefix("test-")) for file in log.parent.glob("test-*.jsonl")]
        points = zip(sorted({*files} - {0}), iteration.get("curve", [])[1:], strict=True)
        yield from (({"test": values}, before + step) for step, values in points)
        before += iteration["dataset"]["steps"]


def show(folder: Path, tracker: str) -> None:
    """Show the run in `folder`; InputError where it is none, or where wandb has no account."""
    config = read_json(folder / "config.json")
    nested = values_of(folder, config["iterations"])
    values = (
        (json_normalize(each, sep="/").iloc[0].dropna().to_dict(), step) for each, step in nested
    )
    if tracker == "wandb":
        import wandb

        try:
            project = os.environ.get("WANDB_PROJECT", "topr")
            run = wandb.init(project=project, name=folder.name, dir=folder, config=config)
        except wandb.Error as error:
            raise InputError(
                f"wandb: {str(error).splitlines()[0]} (WANDB_MODE=offline needs no account)"
            ) from None
        run.define_metric("*", step_metric="step")  # wandb's own steps must grow
        for numbers, step in values:
            run.log(numbers | {"step": step})
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard")) as writer:
        writer.add_text(
            "settings", "".join(f"    {name}: {value}\n" for name, value in config.items())
        )
        for numbers, step in values:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)
            writer.flush()


def main() -> None:
    """The command line; one line and a non-zero exit status where something is missing."""
    with command("track"):
        kinds = tuple[Path, Literal["tensorboard", "wandb"]]
        folder, tracker = parsed(kinds, prog="examples.track", description=__doc__)
        try:
            show(folder, tracker)
        except ModuleNotFoundError:
            raise InputError(
                f"{tracker}: is not installed: {sys.executable} -m pip install {tracker}"
            ) from None


if __name__ == "__main__":
    main()
