"""examples/track.py: what each tracker has of a run, read back from the tracker's own files."""

import json
import sys

import pytest
from task_helpers import input_error, run_command, write_rows

from examples import track

STEPS = 4  # of each iteration
LOSSES = [0.5, 0.25, -0.125, 0.0, 1.0, 2.0, -3.0, 0.75]
ACCURACY = {0: 0.5, 2: 0.25, 4: 0.625, 6: 0.75, 8: 0.875}  # by step, over all iterations


def run_tracker(folder, tracker, **variables):
    """The command, with no account in its environment."""
    command = [sys.executable, "-m", "examples.track", folder, tracker]
    home = str(folder.parent)
    return run_command(command, without="WANDB_", HOME=home, **variables)


def make_point(step):
    return {"correct": ACCURACY[step], "pass@1": {"mean": ACCURACY[step], "se": None}}


@pytest.fixture
def finished_run(tmp_path):
    """A folder with what a run of two iterations writes, as far as trackers read it."""
    folder = tmp_path / "run"
    iterations = []
    for number in (1, 2):
        start = STEPS * (number - 1)
        rows = []
        for step in range(1, STEPS + 1):
            rows.append({"step": step, "loss": LOSSES[start + step - 1], "weight": {"mean": 0.5}})
        files = folder / f"iteration-{number}"
        write_rows(files / "metrics.jsonl", rows)
        for step in (0, 2, 4) if number == 1 else (2, 4):
            write_rows(files / f"test-{step}.jsonl", [{}])
        curve = [make_point(start + step) for step in (0, 2, 4)]
        iterations.append({"dataset": {"steps": STEPS}, "curve": curve})
    results = {"before": make_point(0), "iterations": iterations}
    (folder / "config.json").write_text(json.dumps({"iterations": 2, "seed": 7}))
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def test_tensorboard_has_every_step_and_every_evaluation_at_its_step(finished_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = run_tracker(finished_run, "tensorboard")
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(finished_run / "tensorboard")).Reload()
    actual = {}
    for name in ("train/loss", "train/weight/mean", "test/correct", "test/pass@1/mean"):
        actual[name] = [(event.step, event.value) for event in events.Scalars(name)]
    numbered = list(enumerate(LOSSES, start=1))
    assert actual["train/loss"] == numbered  # powers of two have no rounding errors
    assert actual["train/weight/mean"] == [(step, 0.5) for step, _ in numbered]
    assert actual["test/correct"] == list(ACCURACY.items())
    assert actual["test/pass@1/mean"] == list(ACCURACY.items())


@pytest.mark.slow
def test_wandb_has_a_run_without_an_account_if_it_is_offline(finished_run):
    done = run_tracker(finished_run, "wandb")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("track: tracker: ")
    done = run_tracker(finished_run, "wandb", WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    [file] = finished_run.glob("wandb/offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"test/correct" in content


def test_a_run_is_followed_while_it_is_interrupted_and_resumed(finished_run, monkeypatch):
    log = finished_run / "iteration-2" / "metrics.jsonl"
    results = finished_run / "results.json"
    finished_results = results.rename(finished_run / "results.later")
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]) + lines[3][:9])  # the last line is not complete
    changes = [
        lambda: log.write_text(lines[0]),  # resumed from a checkpoint
        lambda: log.write_text("".join(lines)),
        lambda: finished_results.rename(results),
    ]
    monkeypatch.setattr(track.time, "sleep", lambda seconds: changes.pop(0)())
    values = list(track.read_values(finished_run, iterations=2))
    steps = [step for value, step in values if "train" in value]
    assert steps == list(range(1, 2 * STEPS + 1))
    assert [value["train"]["loss"] for value, _ in values if "train" in value] == LOSSES
    assert [step for value, step in values if "test" in value] == list(ACCURACY)


def test_a_run_without_evaluation_has_its_steps_alone(finished_run):
    for file in finished_run.glob("iteration-*/test-*.jsonl"):
        file.unlink()
    entry = {"dataset": {"steps": STEPS}}
    (finished_run / "results.json").write_text(json.dumps({"iterations": [entry, entry]}))
    values = list(track.read_values(finished_run, iterations=2))
    assert [step for _, step in values] == list(range(1, 2 * STEPS + 1))


def test_a_folder_without_a_run_is_an_input_error(tmp_path):
    error = input_error(track.show, tmp_path, "tensorboard")
    assert error.file == str(tmp_path / "config.json")
