"""Trackers: a run's settings, steps, evaluations, completions and picture in TensorBoard, wandb, trackio or MLflow.

A library is imported only if --track names it. A step is one of the optimiser's, counted over all iterations. A run
that goes on after a stop goes on under its old name; what it does again it tells again.
"""

import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pipeline.records import InputError, write_file
from pipeline.runtime.processes import rank
from pipeline.settings import TrackerName

Row = Sequence[str | float | None]
PROJECT = "topr"


class Backend(Protocol):
    """What a tracker's library does."""

    def numbers(self, values: dict[str, float], step: int) -> None:
        """Points of as many curves."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Row], step: int) -> None:
        """A table of text and numbers."""

    def picture(self, name: str, file: Path, step: int) -> None:
        """A PNG file."""

    def close(self, is_done: bool) -> None:
        """Write what is not written yet; the run is done, or was stopped."""


class Tracker(NamedTuple):
    """What a run tells its tracker; without a backend, nobody. InputError where the library fails."""

    name: TrackerName | None = None
    backend: Backend | None = None

    def numbers(self, values: Mapping[str, Any], step: int) -> None:
        """The numbers among the values, those of a mapping as OUTER/INNER."""
        self._tell(lambda backend: backend.numbers(_flat(values), step))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Row], step: int) -> None:
        """Rows of text and numbers."""
        self._tell(lambda backend: backend.table(name, columns, rows, step))

    def picture(self, name: str, file: Path, step: int) -> None:
        """A PNG file."""
        self._tell(lambda backend: backend.picture(name, file, step))

    def _tell(self, call: Callable[[Backend], None]) -> None:
        if self.backend is not None:
            with _named(self.name, "what is done is kept, and the same command goes on, with --track or without"):
                call(self.backend)


@contextmanager
def tracker(name: TrackerName | None, folder: Path, settings: Mapping[str, Any]) -> Iterator[Tracker]:
    """The tracker of the run in `folder`, of rank zero; one that tells nobody without a name and on other ranks.

    settings: what is shown as the run's settings. InputError where the library cannot start, as without an account.
    """
    if name is None or rank() > 0:
        yield Tracker()
        return
    libraries = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}
    with _named(name, "WANDB_MODE=offline needs no account" if name == "wandb" else "see docs/runs.md"):
        backend = libraries[name](folder, settings)
    try:
        yield Tracker(name, backend)
    finally:
        backend.close(is_done=(folder / "results.json").exists())


@contextmanager
def _named(name: str, advice: str) -> Iterator[None]:
    """InputError for whatever a library raises: each has its own errors."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"--track {name}: {reason} ({advice})") from error


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested mappings.

    >>> _flat({"test": {"correct": 0.5, "maj@4": {"mean": 0.75, "se": None}}})
    {'test/correct': 0.5, 'test/maj@4/mean': 0.75}
    """
    found = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            found[f"{prefix}{name}"] = value
    return found


def _kept(file: Path, new: Callable[[], str]) -> str:
    """The run's name in its tracker, which a file keeps for the case that it goes on after a stop."""
    if not file.exists():
        write_file(file, new())
    return file.read_text(encoding="utf-8")


# ---- the libraries ----------------------------------------------------------------------------------------------


class TensorBoard:
    """Event files in the run's own folder. A table is text in Markdown."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("settings", f"```json\n{json.dumps(settings, indent=2, default=str)}\n```")

    def numbers(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a run that is killed has told all its steps

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Row], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    def picture(self, name: str, file: Path, step: int) -> None:
        import numpy as np
        from PIL import Image

        with Image.open(file) as image:
            self._writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self, is_done: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of wandb; offline, with WANDB_MODE=offline, its files are in the run's own folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        import wandb as library

        self._library, name = library, _kept(folder / "wandb.id", lambda: uuid.uuid4().hex)
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = library.init(
            project=project, name=folder.name, id=name, resume="allow", dir=str(folder), config=dict(settings)
        )
        # wandb's own steps must grow; an evaluation comes after later steps.
        self._run.define_metric("*", step_metric="step")

    def numbers(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log({**values, "step": step})

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Row], step: int) -> None:
        self.numbers({name: self._library.Table(columns=list(columns), data=[list(row) for row in rows])}, step)

    def picture(self, name: str, file: Path, step: int) -> None:
        self.numbers({name: self._library.Image(str(file))}, step)

    def close(self, is_done: bool) -> None:
        self._run.finish(exit_code=0 if is_done else 1)


class Trackio(Wandb):
    """A run of trackio, whose interface is wandb's; by default in the user's own cache, with TRACKIO_DIR elsewhere."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        import trackio as library

        self._library, name = library, _kept(folder / "trackio.id", lambda: f"{folder.name}-{uuid.uuid4().hex[:8]}")
        self._run = library.init(project=PROJECT, name=name, resume="allow", config=dict(settings))

    def numbers(self, values: Mapping[str, Any], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self, is_done: bool) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says or in the folder where the command was given."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        import mlflow

        self._library, file = mlflow, folder / "mlflow.id"
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        run = mlflow.start_run(run_id=_kept(file, str) if file.exists() else None, run_name=folder.name)
        _kept(file, lambda: run.info.run_id)
        mlflow.log_params(dict(settings))

    def numbers(self, values: dict[str, float], step: int) -> None:
        self._library.log_metrics({name.replace("@", "-at-"): value for name, value in values.items()}, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Row], step: int) -> None:
        by_column = {column: list(cells) for column, cells in zip(columns, zip(*rows, strict=True), strict=True)}
        with warnings.catch_warnings(category=DeprecationWarning, action="ignore"):  # of pandas 3, which it calls
            self._library.log_table(by_column, f"{name}.json")

    def picture(self, name: str, file: Path, step: int) -> None:
        self._library.log_artifact(str(file))

    def close(self, is_done: bool) -> None:
        self._library.end_run("FINISHED" if is_done else "KILLED")
