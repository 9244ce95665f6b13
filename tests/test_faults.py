"""What goes wrong with runs and is told in a line: damaged files, disks that refuse, and models that do harm."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from killing import CHANGES, ROOT, arguments, fault, finish, started, wait
from pipeline.records import InputError, Sample, write_file
from pipeline.runtime import run_folder
from pipeline.runtime.run_folder import (
    appearing,
    check_folder,
    publish_records,
    read_checked,
    remove,
)
from runs import contents, experiment

import train_gsm8k as gsm8k


def flip(file, where=0.5):
    content = bytearray(file.read_bytes())
    content[int(len(content) * where)] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture(scope="module")
def in_training(tmp_path_factory):
    """A run that was killed in its second iteration, with a checkpoint there."""
    folder = tmp_path_factory.mktemp("in training") / "run"
    with started(folder) as process:
        wait(process, (folder / "iteration-2" / "checkpoint-3").exists)
    return folder


@pytest.fixture
def stopped(in_training, tmp_path):
    """A copy of it in another place, for a test to damage."""
    return shutil.copytree(in_training, tmp_path / "moved" / "run")


def last_checkpoint(folder):
    return max(
        (folder / "iteration-2").glob("checkpoint-*[0-9]"), key=lambda path: int(path.name[11:])
    )


def test_a_file_is_whole_where_a_run_ends_before_its_checksums_are_in_order(tmp_path, monkeypatch):
    file, rows, writes = (
        tmp_path / "samples.jsonl",
        [Sample(prompt="Q", completion=" A", reward=1.0)],
        [write_file] * 2,
    )
    monkeypatch.setattr(run_folder, "write_file", lambda *of: writes.pop()(*of))
    with pytest.raises(IndexError):  # at the third, as if the run were killed there
        publish_records(file, rows)
    assert read_checked(file, Sample) == rows


def test_a_byte_that_has_changed_is_seen_in_a_file_and_in_a_folder(tmp_path):
    publish_records(tmp_path / "samples.jsonl", [Sample(prompt="Q", completion=" A", reward=1.0)])
    with appearing(tmp_path / "model") as unfinished:
        (unfinished / "weights").write_bytes(b"1234")
    checks = (
        partial(read_checked, tmp_path / "samples.jsonl", Sample),
        partial(check_folder, tmp_path / "model"),
    )
    for check, file in zip(checks, ("samples.jsonl", "model/weights"), strict=True):
        check()
        flip(tmp_path / file)
        with pytest.raises(InputError, match=f"{file}: is damaged"):
            check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (cut, "iteration-2/train.jsonl", "is damaged"),
        (flip, "CHECKPOINT/rank-0.pt", "is damaged"),
        (flip, "iteration-1/model/model.safetensors", "is damaged"),
        (
            Path.unlink,
            "CHECKPOINT/rank-0.pt",
            "is missing",
        ),  # elsewhere, a file that is not there is made
        (lambda file: file.write_text("{"), "results.json", ".*; remove it to make it anew$"),
    ],
)
def test_a_damaged_file_is_named(stopped, damage, name, said):
    file = stopped / name.replace("CHECKPOINT", str(last_checkpoint(stopped)))
    damage(file)
    assert re.match(f"train_gsm8k: {file}: {said}", fault(stopped))


@pytest.mark.slow
def test_what_was_damaged_is_made_anew(run, stopped):
    """As the messages say: without the file, or without the checkpoint, the same command ends with the same bits.

    Without a point of the curve too, which needs its model, and without a model, which training then saves again.
    """
    lost = iter([stopped / "iteration-1/test-6.jsonl", stopped / "iteration-1/model"])
    for file, where in (
        (last_checkpoint(stopped) / "rank-0.pt", 0.5),
        (stopped / "iteration-2/samples.jsonl", 0.3),
    ):
        flip(file, where)
        remove(next(lost))
        assert f"{file}: is damaged" in fault(stopped)
        remove(file.parent if file.suffix == ".pt" else file)
    assert finish(stopped) == contents(run(**CHANGES))


@pytest.mark.slow
def test_nothing_is_written_outside_the_run_folder(tmp_path):
    """But for caches of libraries, which are told to keep them in one place."""
    here, caches, before = tmp_path / "here", tmp_path / "caches", contents(ROOT / "tiny")
    here.mkdir()
    caches.mkdir()
    places = dict.fromkeys(
        ["HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "HF_HOME"], str(caches)
    )
    command = [sys.executable, gsm8k.__file__, *arguments(Path("run"), iterations=1)]
    environment = os.environ | places | {"PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True)
    assert [file.name for file in here.iterdir()] == ["run"]
    assert {file.name for file in tmp_path.iterdir()} == {"here", "caches"}
    assert contents(ROOT / "tiny") == before
    assert not [name for name in contents(caches) if name.endswith((".jsonl", ".safetensors"))]


def as_a_pickle(folder, mark):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (mark,))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))


def with_code(folder, mark):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "of_its_own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")


HARM = {
    as_a_pickle: "safetensors",
    with_code: "",
    lambda folder, _: cut(folder / "model.safetensors"): "",
}


@pytest.mark.parametrize(("change", "reason"), HARM.items())
def test_a_model_that_is_not_to_be_trusted_is_refused_and_its_code_not_run(
    change, reason, tmp_path
):
    folder, mark = shutil.copytree(gsm8k.Settings().model, tmp_path / "model"), tmp_path / "harm"
    change(folder, mark)
    with pytest.raises(InputError, match=rf"--model .*model: cannot be loaded: .*{reason}"):
        experiment(tmp_path / "run", model=str(folder))
    assert not mark.exists()
