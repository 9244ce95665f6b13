"""--track: what each tracker holds after a run that was stopped and went on, read back by the tracker's own library.

TensorBoard and wandb are among the requirements; trackio and MLflow are tested where they are installed.
"""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

import train_gsm8k as gsm8k
from pipeline.metrics import append_json
from pipeline.records import InputError, Sample, read_rows
from pipeline.settings import TrackerName
from pipeline.track import Tracker, tracker

SMALL = gsm8k.Settings(
    problems=2, n=4, max_new_tokens=40, test_problems=2, test_samples=4, k=2, curve_points=2, curve_samples=2
)
SMALL = replace(SMALL, iterations=2, batch=4, save_every=1)


class Told(NamedTuple):
    """What a tracker holds."""

    curves: dict[str, list[tuple[int, float]]]  # steps and values
    settings: dict
    tables: list[str]  # as text
    pictures: int


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    tags = events.Tags()
    texts = {
        tag: [make_ndarray(e.tensor_proto).item().decode() for e in events.Tensors(tag)] for tag in tags["tensors"]
    }
    settings = json.loads(texts["settings/text_summary"][0].removeprefix("```json").removesuffix("```"))
    curves = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    return Told(curves, settings, texts["completions/text_summary"], len(events.Images("curve")))


def wandb_records(file):
    """The records of an offline run: a log in LevelDB's form, blocks of 32 KiB, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, parts = file.read_bytes(), 7, b""
    while at < len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
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
    curves, settings, pictures = defaultdict(list), {}, 0
    for record in (record for file in files for record in wandb_records(file)):
        settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        pictures += "curve" in row
        for name, value in row.items():
            if isinstance(value, (int, float)):
                curves[name].append((row["step"], value))
    tables = [file.read_text() for file in folder.glob("wandb/offline-run-*/files/media/table/*.json")]
    return Told(curves, settings, tables, pictures)


def read_trackio(folder):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    name = (folder / "trackio.id").read_text()
    [run] = [run for run in trackio.Api().runs("topr") if run.name == name]
    curves, tables, pictures = defaultdict(list), [], 0
    for row in SQLiteStorage.get_logs("topr", name):
        pictures += "curve" in row
        tables += [json.dumps(row[name]) for name in ("completions",) if name in row]
        for key, value in row.items():
            if "/" in key:
                curves[key].append((row["step"], value))
    return Told(curves, run.config, tables, pictures)


def read_mlflow(folder):
    import mlflow

    client, name = mlflow.MlflowClient(), (folder / "mlflow.id").read_text()
    run = client.get_run(name)
    assert run.info.status == "FINISHED"
    curves = {
        metric.replace("-at-", "@"): [(point.step, point.value) for point in client.get_metric_history(name, metric)]
        for metric in run.data.metrics
    }
    table = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/completions.json")
    return Told(curves, run.data.params, [table], sum(f.path == "curve.png" for f in client.list_artifacts(name)))


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "trackio": read_trackio, "mlflow": read_mlflow}
INSTALLED = [name for name in READERS if find_spec(name)]


@pytest.fixture(autouse=True)
def _at_home(monkeypatch, tmp_path):
    """Without an account, and with everything that is written below a folder of the test's own."""
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    changes = {"HOME": tmp_path, "TRACKIO_DIR": tmp_path / "trackio", "MLFLOW_ALLOW_FILE_STORE": "true"}
    changes |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns"}
    for name, value in changes.items():
        monkeypatch.setenv(name, str(value))


def run(folder, **changes):
    settings = replace(SMALL, out=folder, **changes)
    gsm8k.check(settings)
    return gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))


def expected_curves(folder, results):
    """Every number of metrics.jsonl and results.json, by name and step."""
    curves, before = defaultdict(dict), 0

    def add(entry, step):
        for name, value in entry.items():
            for key, number in value.items() if isinstance(value, dict) else [(None, value)]:
                if number is not None:
                    curves[f"test/{name}/{key}" if key else f"test/{name}"][step] = number

    add(results["before"], 0)
    for number, iteration in enumerate(results["iterations"], start=1):
        here = folder / f"iteration-{number}"
        lines = [json.loads(line) for line in (here / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            for name, value in line.items():
                curves[f"train/{name}"][before + line["step"]] = value
        steps = sorted(int(file.stem.removeprefix("test-")) for file in here.glob("test-*.jsonl"))
        for step, entry in zip(steps[-2:], iteration["curve"][1:], strict=True):
            add({name: value for name, value in entry.items() if name != "samples_seen"}, before + step)
        before += len(lines)
    return curves


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "tensorboard")) for name in INSTALLED]
)
def test_a_run_that_was_stopped_is_told_whole(tmp_path, monkeypatch, name):
    folder, written = tmp_path / "run", []

    def full(file, content):
        written.append(content)
        if len(written) == 4:  # step 2 of iteration 2, after a checkpoint
            raise OSError("no space left on device")
        append_json(file, content)

    with monkeypatch.context() as patched:
        patched.setattr("pipeline.stages.append_json", full)
        with pytest.raises(OSError, match="no space left"):
            run(folder, track=name)
    results = run(folder, track=name)
    told, expected = READERS[name](folder), expected_curves(folder, results)

    assert set(expected) <= set(told.curves)
    for curve, points in expected.items():
        assert {step for step, _ in told.curves[curve]} == set(points), curve
        for step, value in told.curves[curve]:  # some of them told again, with the same value
            assert value == pytest.approx(points[step], rel=1e-6), (curve, step)
    config = json.loads((folder / "config.json").read_text())
    for setting in ("method", "lr", "n", "samples"):
        assert str(told.settings[setting]) == str(config[setting])
    assert told.pictures == 1
    first = read_rows(folder / "iteration-1" / "test-0.jsonl", Sample)[:: SMALL.test_samples]
    last = read_rows(folder / "iteration-2" / "test-2.jsonl", Sample)[:: SMALL.test_samples]
    for sample in (*first, *last):
        text = sample.completion.strip().splitlines()[0]
        assert any(text in table for table in told.tables), text


def test_two_trackers_are_tested_everywhere():
    assert INSTALLED[:2] == ["tensorboard", "wandb"]
    assert set(READERS) == set(get_args(TrackerName))


def test_a_tracker_is_no_part_of_a_run_and_a_finished_one_tells_nothing(tmp_path):
    plain = run(tmp_path / "run", iterations=0)
    assert run(tmp_path / "run", iterations=0, track="tensorboard") == plain
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_one_rank_tells(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with tracker("tensorboard", tmp_path, {}) as other:
        other.numbers({"loss": 1.0}, 1)
    assert not any(tmp_path.iterdir())


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.runtime.preflight.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"--track wandb: is not installed: .*python.* -m pip install wandb"):
        run(tmp_path / "run", track="wandb")
    assert not (tmp_path / "run").exists()


def test_nothing_is_imported_unless_asked_and_a_missing_account_is_told_before_anything_is_sampled(tmp_path):
    code = f"import train_gsm8k as gsm8k, pipeline.stages, sys; print([n for n in {[*READERS]} if n in sys.modules]); "
    code += "gsm8k.main('train_gsm8k', '', gsm8k.gsm8k_task)"
    arguments = ["--track", "wandb", "--problems", "1", "--test-problems", "1", "--out", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(gsm8k.__file__).parent,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 1
    assert done.stdout.strip() == "[]"
    last = done.stderr.strip().splitlines()[-1]
    assert re.match(r"train_gsm8k: --track wandb: .*API key.*\(WANDB_MODE=offline needs no account\)$", last)
    assert not list((tmp_path / "run").glob("iteration-*"))


def test_a_library_that_fails_is_told_in_a_line():
    class Failing:
        def numbers(self, values, step):
            raise RuntimeError("the server is away\nand more")

    with pytest.raises(InputError, match=r"^--track mlflow: the server is away \(what is done is kept.*\)$"):
        Tracker("mlflow", Failing()).numbers({"loss": 1.0}, 1)
