"""--track: what each tracker holds after a run that was stopped and went on, read back by the tracker's own library."""

import json
import os
import re
import struct
import subprocess
import sys
from typing import get_args
from unittest import mock

import pandas
import pytest
from killing import ROOT
from runs import experiment

from pipeline import track
from pipeline.metrics import step_metrics
from pipeline.records import InputError, Sample, read_records
from pipeline.settings import TrackerName

# Two iterations of two steps, with an evaluation after each step.
CHANGES = {"problems": 2, "n": 4, "test_problems": 2, "iterations": 2, "batch": 4, "save_every": 1}

# A reader returns what its tracker holds: rows of values by name with their step, settings, tables, pictures.


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    rows = [{tag: e.value, "step": e.step} for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    completions, settings = (events.Tensors(f"{name}/text_summary") for name in ("completions", "settings"))
    texts = [make_ndarray(event.tensor_proto).item().decode() for event in [*settings, *completions]]
    return rows, json.loads(texts[0].strip("`json")), texts[1:], events.Images("curve")


def wandb_records(file):
    """The records of an offline run: a log in LevelDB's form, blocks of 32 KiB, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    while at < len(content):
        at += -at % 32768 if -at % 32768 < 7 else 0  # no room for a header: the rest of the block is empty
        size, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def read_wandb(folder):
    import wandb

    wandb.teardown()  # ends wandb's service, which may still write the file of a run that is over
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert {file.stem for file in files} == {f"run-{(folder / 'wandb.id').read_text()}"}
    settings, rows = {}, []
    for record in (record for file in files for record in wandb_records(file)):
        settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    tables = [file.read_text() for file in folder.glob("wandb/offline-run-*/files/media/table/*.json")]
    return rows, settings, tables, [row for row in rows if "curve" in row]


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb}


@pytest.fixture(autouse=True)
def _at_home(monkeypatch, tmp_path):
    """Without an account, and with everything that is written below a folder of the test's own."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for variable in f"HOME={tmp_path} WANDB_MODE=offline WANDB_SILENT=true".split():
        monkeypatch.setenv(*variable.split("="))


def expected_points(folder, results):
    """Every number of metrics.jsonl and results.json, by name and step."""
    steps, evaluations = [], [results["before"]]
    for number, iteration in enumerate(results["iterations"], start=1):
        steps += map(json.loads, (folder / f"iteration-{number}" / "metrics.jsonl").read_text().splitlines())
        evaluations += [entry | {"samples_seen": None} for entry in iteration["curve"][1:]]  # one after each step
    told = [(step, {"train": entry}) for step, entry in enumerate(steps, start=1)]
    told += [(step, {"test": entry}) for step, entry in enumerate(evaluations)]
    flat = [(step, pandas.json_normalize(entry, sep="/").iloc[0].dropna()) for step, entry in told]
    return {(name, step): value for step, values in flat for name, value in values.items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "tensorboard")) for name in get_args(TrackerName)]
)
def test_a_run_that_was_stopped_is_told_whole(tmp_path, name):
    folder, changes = tmp_path / "run", CHANGES | {"track": name}
    calls = [mock.DEFAULT] * 3 + [OSError("full")]  # at step 2 of iteration 2, after a checkpoint
    disk = mock.patch("pipeline.epoch.step_metrics", wraps=step_metrics, side_effect=calls)
    with disk, pytest.raises(OSError, match="full"):
        experiment(folder, **changes)
    results = experiment(folder, **changes)
    (rows, settings, tables, pictures), expected = READERS[name](folder), expected_points(folder, results)
    told = [((curve, row["step"]), row[curve]) for row in rows for curve in row if re.match("train/|test/", curve)]
    for point, value in told:  # some of them told again, with the same value
        assert value == pytest.approx(expected.get(point), rel=1e-6), point
    assert {point for point, _ in told} == set(expected)
    config = json.loads((folder / "config.json").read_text())
    assert all(str(settings[setting]) == str(config[setting]) for setting in ("method", "lr", "n", "samples"))
    assert len(pictures) == 1
    for file in ("iteration-1/test-0.jsonl", "iteration-2/test-2.jsonl"):
        for sample in read_records(folder / file, Sample)[::6]:  # the first of each problem
            text = sample.completion.strip().splitlines()[0]
            assert any(text in table for table in tables), text


@pytest.mark.parametrize(("option", "value", "package"), [("track", "wandb", "wandb"), ("lora", 4, "peft")])
def test_what_is_not_installed_is_named_before_anything_is_written(tmp_path, monkeypatch, option, value, package):
    monkeypatch.setattr("pipeline.settings.find_spec", lambda name: None)
    told = f"--{option} {value}: needs {package}, which is not installed: .* -m pip install {package}"
    with pytest.raises(InputError, match=told):
        experiment(tmp_path / "run", **{option: value})
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_nothing_is_imported_unless_asked_and_a_missing_account_is_told_before_anything_is_sampled(
    tmp_path, monkeypatch
):
    code = f"import train_gsm8k as gsm8k, pipeline.stages, sys; print([n for n in {[*READERS]} if n in sys.modules]); "
    code += "gsm8k.main('train_gsm8k', '', gsm8k.gsm8k_task)"
    command = [sys.executable, "-c", code, "--track", "wandb", "--problems", "1", "--out", str(tmp_path / "run")]
    monkeypatch.delenv("WANDB_MODE")
    done = subprocess.run(command, cwd=ROOT, input="", capture_output=True, text=True, check=False)
    told = r"train_gsm8k: --track wandb: .*API key.*\(WANDB_MODE=offline needs no account\)$"
    assert (done.returncode, done.stdout.strip()) == (1, "[]")
    assert re.match(told, done.stderr.strip().splitlines()[-1])
    assert not list((tmp_path / "run").glob("iteration-*"))


def test_one_rank_tells_and_a_library_that_fails_is_told_in_a_line(tmp_path, monkeypatch):
    add = mock.Mock(side_effect=RuntimeError("the server is away\nand more"))
    monkeypatch.setitem(track.LIBRARIES, "tensorboard", lambda folder, settings: (add, lambda is_done: None))
    told = r"^--track tensorboard: the server is away \(what is done is kept.*\)$"
    with track.tracker("tensorboard", tmp_path, {}) as tell, pytest.raises(InputError, match=told):
        tell({"loss": 1.0}, 1)
    monkeypatch.setenv("RANK", "1")
    with track.tracker("tensorboard", tmp_path, {}) as tell:
        tell({"loss": 1.0}, 1)
