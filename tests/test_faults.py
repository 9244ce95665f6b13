"""What goes wrong with runs and is told in a line: damaged files, disks that refuse, and models that do harm."""

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from killing import CHANGES, ROOT, arguments, finish, started, status, told, wait
from runs import contents, experiment

import train_gsm8k as gsm8k
from pipeline.records import InputError

# ---- files that are damaged, between two starts of a run ---------------------------------------------------------


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
    return max((folder / "iteration-2").glob("checkpoint-*[0-9]"), key=lambda path: int(path.name[11:]))


def fault(folder):
    """What the same command says of the folder."""
    with started(folder) as process:
        assert status(process) == 1
    assert not any("Traceback" in line for line in told(folder))
    return told(folder)[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip, "samples.jsonl"),
        (cut, "train.jsonl"),
        (flip, "checkpoint/model.safetensors"),
        (cut, "checkpoint/rank-0.pt"),
        (flip, "checkpoint/config.json"),
        (Path.unlink, "checkpoint/tokenizer.json"),  # outside of a checkpoint, a file that is not there is made
    ],
)
def test_a_damaged_file_is_named(stopped, damage, name):
    file = stopped / "iteration-2" / name.replace("checkpoint", last_checkpoint(stopped).name)
    damage(file)
    said = "is missing" if damage is Path.unlink else "is damaged"
    assert fault(stopped).startswith(f"train_gsm8k: {file}: {said}")


@pytest.mark.slow
def test_what_was_damaged_is_made_anew(run, stopped):
    """As the messages say: without the file, or without the checkpoint, the same command ends with the same bits."""
    flip(last_checkpoint(stopped) / "rank-0.pt")
    assert "is damaged" in fault(stopped)
    shutil.rmtree(last_checkpoint(stopped))
    samples = stopped / "iteration-2" / "samples.jsonl"
    flip(samples, 0.3)
    assert f"{samples}: is damaged" in fault(stopped)
    samples.unlink()
    assert finish(stopped) == contents(run(**CHANGES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "advice"), [("config.json", "choose another --out"), ("results.json", "remove it to make it anew")]
)
def test_a_damaged_record_of_the_run_is_named(stopped, name, advice):
    (stopped / name).write_text('{"lr": ')
    assert re.fullmatch(rf"train_gsm8k: .*{name}: .*; {advice}", fault(stopped))


# ---- the disk, and what is written where --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_is_told_in_a_line(number, monkeypatch, tmp_path):
    """The operating system's answer is made up here: whoever is root may write everywhere."""

    def refuse(path, target):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr("sys.argv", ["train_gsm8k.py", *arguments(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)
    line = rf"train_gsm8k: .*{os.strerror(number)}.*config.json.*; what is done is kept, .* goes on"
    assert re.fullmatch(line, ended.value.code)


@pytest.mark.slow
def test_nothing_is_written_outside_the_run_folder(tmp_path):
    """But for caches of libraries, which are told to keep them in one place."""
    here, caches = tmp_path / "here", tmp_path / "caches"
    here.mkdir()
    caches.mkdir()
    places = {name: str(caches) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "HF_HOME")}
    before = {file: file.stat().st_mtime_ns for file in (ROOT / "tiny").rglob("*")}
    command = [sys.executable, gsm8k.__file__, *arguments(Path("run"), iterations=1)]
    environment = os.environ | places | {"PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, cwd=here, env=environment, check=True, capture_output=True)
    assert [file.name for file in here.iterdir()] == ["run"]
    assert {file.name for file in tmp_path.iterdir()} == {"here", "caches"}
    assert {file: file.stat().st_mtime_ns for file in (ROOT / "tiny").rglob("*")} == before
    assert not [file for file in caches.rglob("*") if file.suffix in (".jsonl", ".safetensors")]


# ---- models from others ------------------------------------------------------------------------------------------


class Harmful:
    """Unpickling it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def as_a_pickle(folder, mark):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(mark)))


def with_code(folder, mark):
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "of_its_own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig\n"
        f"Path({str(mark)!r}).touch()\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'of_its_own'\n"
    )


def with_cut_weights(folder, mark):
    cut(folder / "model.safetensors")


@pytest.mark.parametrize(("change", "reason"), [(as_a_pickle, "safetensors"), (with_code, ""), (with_cut_weights, "")])
def test_a_model_that_is_not_to_be_trusted_is_refused_and_its_code_not_run(change, reason, tmp_path):
    folder, mark = shutil.copytree(gsm8k.Settings().model, tmp_path / "model"), tmp_path / "harm"
    change(folder, mark)
    with pytest.raises(InputError, match=rf"--model .*model: cannot be loaded: .*{reason}"):
        experiment(tmp_path / "run", model=str(folder))
    assert not mark.exists()
