"""Trackers: a run's settings, steps, evaluations, completions and picture in TensorBoard or wandb.

A library is imported only if --track names it. A step is one of the optimiser's, counted over all iterations. A run
that goes on after a stop goes on under its old name; what it does again it tells again.
"""

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.records import InputError, write_file
from pipeline.report import Table
from pipeline.runtime.processes import rank
from pipeline.settings import TrackerName

Tell = Callable[[Mapping[str, Any], int], None]
Add = Callable[[dict[str, float], dict[str, Table], dict[str, Path], int], None]
# add(numbers, tables, files of pictures, step), and close(is_done), where a run that is not done was stopped
Library = tuple[Add, Callable[[bool], None]]


@contextmanager
def tracker(name: TrackerName, folder: Path, settings: Mapping[str, Any]) -> Iterator[Tell]:
    """`tell(values, step)`, by which rank zero of the run in `folder` tells its tracker.

    Of the values it tells numbers, tables and files of pictures, those of a mapping as OUTER/INNER. InputError where
    the library cannot start, as without an account, and from `tell` where it fails later.
    """
    if rank() > 0:
        yield lambda values, step: None
        return
    from pandas import json_normalize

    with _named(name, "WANDB_MODE=offline needs no account" if name == "wandb" else "see docs/runs.md"):
        add, close = LIBRARIES[name](folder, settings)

    def tell(values: Mapping[str, Any], step: int) -> None:
        with _named(name, "what is done is kept, and the same command goes on, with --track or without"):
            flat = json_normalize(dict(values), sep="/").to_dict("records")[0]
            kinds = ((int, float), Table, Path)
            add(*({name: value for name, value in flat.items() if isinstance(value, kind)} for kind in kinds), step)

    try:
        yield tell
    finally:
        close((folder / "results.json").exists())


@contextmanager
def _named(name: str, advice: str) -> Iterator[None]:
    """InputError for whatever a library raises: each has its own errors."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"--track {name}: {reason} ({advice})") from error


def tensorboard(folder: Path, settings: Mapping[str, Any]) -> Library:
    """Event files in the run's own folder. A table is text in Markdown."""
    from matplotlib.image import imread
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("settings", f"```json\n{json.dumps(settings, indent=2, default=str)}\n```")

    def add(numbers: dict[str, float], tables: dict[str, Table], pictures: dict[str, Path], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        for name, table in tables.items():
            writer.add_text(name, table.markdown(), step)
        for name, file in pictures.items():
            writer.add_image(name, imread(file)[..., :3], step, dataformats="HWC")
        writer.flush()  # a run that is killed has told all its steps

    return add, lambda is_done: writer.close()


def wandb(folder: Path, settings: Mapping[str, Any]) -> Library:
    """A run of wandb; offline, with WANDB_MODE=offline, its files are in the run's own folder."""
    import wandb

    kept = folder / "wandb.id"
    if not kept.exists():  # else the run goes on after a stop, under its old name
        write_file(kept, uuid.uuid4().hex)
    names = {"project": os.environ.get("WANDB_PROJECT", "topr"), "name": folder.name, "id": kept.read_text("utf-8")}
    run = wandb.init(**names, resume="allow", dir=str(folder), config=dict(settings))
    # wandb's own steps must grow; an evaluation comes after later steps.
    run.define_metric("*", step_metric="step")

    def add(numbers: dict[str, float], tables: dict[str, Table], pictures: dict[str, Path], step: int) -> None:
        shown = {name: wandb.Table(columns=[*table.head], data=[*table.rows]) for name, table in tables.items()}
        run.log(numbers | shown | {name: wandb.Image(str(file)) for name, file in pictures.items()} | {"step": step})

    return add, lambda is_done: run.finish(exit_code=0 if is_done else 1)


LIBRARIES = {"tensorboard": tensorboard, "wandb": wandb}
