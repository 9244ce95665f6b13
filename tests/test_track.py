"""examples/track.py: what each tracker holds of a run, read back from the tracker's own files."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from killing import ROOT

from examples import track as example


def track(folder, tracker, **environment):
    """The command's exit status, and the last line that it printed."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    command = [sys.executable, "-m", "examples.track", str(folder), tracker]
    given = {
        "cwd": ROOT,
        "env": variables | {"HOME": str(folder.parent)} | environment,
        "stdin": subprocess.DEVNULL,
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, **given)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


def test_tensorboard_has_every_step_and_evaluation_at_its_step(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    source = run(iterations=2)
    folder = shutil.copytree(source, tmp_path / "run")
    assert track(folder, "tensorboard")[0] == 0
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    held = {
        name: [(e.step, e.value) for e in events.Scalars(name)]
        for name in ("train/loss", "test/correct")
    }
    lines = [
        line
        for i in (1, 2)
        for line in (folder / f"iteration-{i}" / "metrics.jsonl").read_text().splitlines()
    ]
    assert held["train/loss"] == [
        (i, pytest.approx(json.loads(line)["loss"])) for i, line in enumerate(lines, start=1)
    ]
    results = json.loads((folder / "results.json").read_text())
    points = [
        results["before"],
        *(point for each in results["iterations"] for point in each["curve"][1:]),
    ]
    steps = [
        0,
        *(len(lines) * i // (len(points) - 1) for i in range(1, len(points))),
    ]  # as far from one to the next
    assert held["test/correct"] == [
        (s, pytest.approx(p["correct"])) for s, p in zip(steps, points, strict=True)
    ]


@pytest.mark.slow
def test_wandb_has_a_run_without_an_account_if_it_is_offline(run, tmp_path):
    folder = shutil.copytree(run(), tmp_path / "run")
    status, line = track(folder, "wandb")
    assert (status, "API key" in line, line.endswith("(WANDB_MODE=offline needs no account)")) == (
        1,
        True,
        True,
    )
    assert track(folder, "wandb", WANDB_MODE="offline")[0] == 0
    [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert all(name.encode() in file.read_bytes() for name in ("train/loss", "test/correct"))


def test_a_run_that_goes_on_is_followed_over_a_stop(run, tmp_path, monkeypatch):
    folder = shutil.copytree(run(), tmp_path / "run")
    log, results = folder / "iteration-1" / "metrics.jsonl", folder / "results.json"
    lines, finished = (
        log.read_text().splitlines(keepends=True),
        results.rename(tmp_path / "results.json"),
    )
    log.write_text("".join(lines[:3]) + lines[3][:9])  # and part of a line
    pauses = iter(
        [
            lambda: log.write_text(lines[0]),
            lambda: log.write_text("".join(lines)),
            lambda: finished.rename(results),
        ]
    )
    monkeypatch.setattr(example.time, "sleep", lambda pause: pause and next(pauses)())
    values = list(example.values_of(folder, 1))
    assert [step for kinds, step in values if "train" in kinds] == [1, 2, 3, 4]
    assert [step for kinds, step in values if "test" in kinds] == [0, 2, 4]


def test_what_is_no_run_is_said_in_a_line(tmp_path):
    assert track(tmp_path, "tensorboard") == (1, f"track: {tmp_path}/config.json: no such file")
