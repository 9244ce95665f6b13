"""What happens to real runs: killed at any moment, files damaged, folders moved. `make faults` kills more often."""

import errno
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import forking
import pytest

import train_gsm8k as gsm8k
from pipeline.records import InputError
from pipeline.runtime.run_folder import checkpoints

KILLS = int(os.environ.get("FAULT_KILLS", "4"))
SMALL = (
    "--problems 8 --n 16 --max-new-tokens 48 --test-problems 4 --test-samples 6 --k 4 --curve-points 2"
    " --curve-samples 2 --chunk 2 --batch 8 --save-every 3 --optimizer adafactor --lr 1e-3 --iterations 2 --examples 96"
).split()


class Forking:
    """Runs of the command, in processes forked from one that has imported everything."""

    def __init__(self):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(Path(gsm8k.__file__).parent),
        }
        self.process = subprocess.Popen(
            [sys.executable, forking.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout.readline() == "ready\n"

    def run(self, folder, kill_after=None):
        """The exit status of a run in `folder`, which is killed after so many seconds; negative: the signal."""
        request = [str(folder.with_suffix(".log")), *SMALL, "--out", str(folder)]
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        pid = int(self.process.stdout.readline())
        timer = threading.Timer(kill_after or 10**6, os.kill, (pid, signal.SIGKILL))
        timer.start()
        try:
            return int(self.process.stdout.readline())
        finally:
            timer.cancel()
            timer.join()


@pytest.fixture(scope="module")
def runs():
    forked = Forking()
    yield forked
    forked.process.stdin.close()
    forked.process.wait()
    forked.process.stdout.close()


def contents(folder):
    """What a finished run is: all its files but logs of what happened."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def undisturbed(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    started = time.monotonic()
    assert runs.run(folder) == 0
    return contents(folder), time.monotonic() - started


def progress(folder):
    """How far a run is, in numbers that only grow: samples drawn, and steps that a checkpoint has, by iteration."""
    found = {}
    for number in (1, 2):
        here = folder / f"iteration-{number}"
        for file in here.glob("*.jsonl*"):
            if "unfinished" not in file.name and file.name != "metrics.jsonl":
                name = f"{number} {file.name.partition('.part')[0]}"
                lines = file.read_bytes().count(b"\n")
                size = 2 * (16 if "samples" in name else 2)  # a chunk, at least: two problems
                found[name] = max(found.get(name, 0), lines // size * size)
        steps = checkpoints(here)
        found[f"{number} steps"] = 10**6 if (here / "model").exists() else max(steps, default=0)
    return found


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_with_the_same_bits(runs, undisturbed, tmp_path):
    expected, seconds = undisturbed
    rng, kills, finished = random.Random(0), 0, 0
    while kills < KILLS or finished == 0:
        folder, before = tmp_path / f"run {finished}", {}
        while True:
            is_left_alone = kills >= KILLS
            status = runs.run(folder, None if is_left_alone else rng.uniform(0.02, 0.5) * seconds)
            if status == 0:
                break
            assert status == -signal.SIGKILL, folder.with_suffix(".log").read_text()[-1000:]
            kills += 1
            now = progress(folder)
            assert all(now.get(name, 0) >= done for name, done in before.items()), (before, now)
            before = now
        found = contents(folder)
        assert [name for name in {*expected, *found} if found.get(name) != expected.get(name)] == []
        finished += 1
    print(f"{kills} kills of {finished} runs, all of which ended with the same {len(expected)} files")


# ---- files that are damaged, between two starts of a run ---------------------------------------------------------

IN_A_CHECKPOINT = ("model.safetensors", "rank-0.pt", "config.json", "tokenizer.json")


def flip(file, where=0.5):
    content = bytearray(file.read_bytes())
    content[int(len(content) * where)] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@contextmanager
def stopped(runs, undisturbed, folder, is_reached):
    """A run that was killed when `is_reached`."""
    for _ in range(200):
        killer = threading.Event()

        def watch(killer=killer):
            while not killer.is_set() and not is_reached():
                time.sleep(0.002)
            pids = Path(f"/proc/{runs.process.pid}/task/{runs.process.pid}/children").read_text().split()
            for pid in pids if not killer.is_set() else ():
                os.kill(int(pid), signal.SIGKILL)

        watcher = threading.Thread(target=watch)
        watcher.start()
        status = runs.run(folder)
        killer.set()
        watcher.join()
        if status == -signal.SIGKILL and is_reached():
            break
        shutil.rmtree(folder)
    yield


@pytest.fixture(scope="module")
def in_training(runs, undisturbed, tmp_path_factory):
    """A run that was killed in its second iteration, with a checkpoint there."""
    folder = tmp_path_factory.mktemp("in training") / "run"
    with stopped(runs, undisturbed, folder, lambda: bool(list(folder.glob("iteration-2/checkpoint-3")))):
        return folder


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["samples.jsonl", "train.jsonl", *IN_A_CHECKPOINT])
def test_a_damaged_file_is_named(runs, undisturbed, in_training, tmp_path, name, damage):
    if name.endswith(".jsonl") and damage is Path.unlink:
        return  # a file that is not there is made
    folder = tmp_path / "run"
    shutil.copytree(in_training, folder)
    here = folder / "iteration-2"
    [checkpoint] = here.glob("checkpoint-*[0-9]")
    file = (checkpoint if name in IN_A_CHECKPOINT else here) / name
    damage(file)
    assert runs.run(folder) == 1
    log = folder.with_suffix(".log").read_text()
    last = log.splitlines()[-1]
    fault = "is missing" if damage is Path.unlink else "is damaged"
    assert last.startswith(f"train_gsm8k: {file}: {fault}"), last
    assert "Traceback" not in log


@pytest.mark.slow
def test_what_was_damaged_is_made_anew(runs, undisturbed, in_training, tmp_path):
    """As the messages say: without the file, or without the checkpoint, the same command ends with the same bits."""
    folder = tmp_path / "moved" / "run"  # and in another place than it was begun in
    shutil.copytree(in_training, folder)
    here = folder / "iteration-2"
    [checkpoint] = here.glob("checkpoint-*[0-9]")
    flip(checkpoint / "rank-0.pt")
    assert runs.run(folder) == 1
    shutil.rmtree(checkpoint)
    flip(here / "samples.jsonl", 0.3)
    assert runs.run(folder) == 1
    assert f"{here / 'samples.jsonl'}: is damaged" in folder.with_suffix(".log").read_text()
    (here / "samples.jsonl").unlink()
    assert runs.run(folder) == 0
    found, (expected, _) = contents(folder), undisturbed
    assert [name for name in {*expected, *found} if found.get(name) != expected.get(name)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "advice"), [("config.json", "choose another --out"), ("results.json", "remove it to make it anew")]
)
def test_a_damaged_record_of_the_run_is_named(runs, undisturbed, in_training, tmp_path, name, advice):
    folder = tmp_path / "run"
    shutil.copytree(in_training, folder)
    (folder / name).write_text('{"lr": ')
    assert runs.run(folder) == 1
    last = folder.with_suffix(".log").read_text().splitlines()[-1]
    assert re.fullmatch(rf"train_gsm8k: .*{name}: .*; {advice}", last)


# ---- the disk, and what is written where --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_is_told_in_a_line(number, monkeypatch, capsys, tmp_path):
    """The operating system's answer is made up here: whoever is root may write everywhere."""

    def refuse(path, content):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("pipeline.runtime.run_folder.write_file", refuse)
    arguments = ["train_gsm8k.py", *SMALL, "--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)
    assert os.strerror(number) in ended.value.code
    assert re.fullmatch(r"train_gsm8k: .*config.json.*; what is done is kept, .* goes on", ended.value.code)
    monkeypatch.setattr("sys.argv", [*arguments, "--debug"])
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)


def test_bad_settings_show_where_in_the_code_only_if_asked(monkeypatch):
    arguments = ["train_gsm8k.py", "--lr", "-1"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit, match=r"train_gsm8k: --lr -1.0: must be positive and finite"):
        gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)
    monkeypatch.setattr("sys.argv", [*arguments, "--debug"])
    with pytest.raises(InputError):
        gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)


@pytest.mark.slow
def test_nothing_is_written_outside_the_run_folder(undisturbed, tmp_path):
    """But for caches of libraries, which are told to keep them in one place."""
    here, caches = tmp_path / "here", tmp_path / "caches"
    here.mkdir()
    caches.mkdir()
    root = Path(gsm8k.__file__).parent
    places = {name: str(caches) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "HF_HOME")}
    environment = os.environ | places | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    before = {file: file.stat().st_mtime_ns for file in (root / "tiny").rglob("*")}
    run = [sys.executable, gsm8k.__file__, *SMALL, "--iterations", "1", "--out", "run"]
    subprocess.run(run, cwd=here, env=environment, check=True, capture_output=True)
    assert [file.name for file in here.iterdir()] == ["run"]
    assert {file.name for file in tmp_path.iterdir()} == {"here", "caches"}
    assert {file: file.stat().st_mtime_ns for file in (root / "tiny").rglob("*")} == before
    assert not [file for file in caches.rglob("*") if file.suffix in (".jsonl", ".safetensors")]


# ---- models from others ------------------------------------------------------------------------------------------


def run(settings):
    return gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))


class Harmful:
    """Unpickling it makes a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_a_model_that_comes_as_a_pickle_is_refused_and_not_run(tmp_path):
    folder, mark = tmp_path / "model", tmp_path / "harm"
    shutil.copytree(gsm8k.Settings().model, folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(mark)))
    settings = gsm8k.Settings(model=str(folder), problems=2, n=2, test_problems=2, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"--model .*model: cannot be loaded: .*safetensors"):
        run(settings)
    assert not mark.exists()


def test_a_model_whose_weights_were_cut_is_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(gsm8k.Settings().model, folder)
    cut(folder / "model.safetensors")
    with pytest.raises(InputError, match=r"--model .*model: cannot be loaded: "):
        run(replace(gsm8k.Settings(), model=str(folder), out=tmp_path / "run"))


def test_code_of_a_model_runs_only_if_it_is_trusted(tmp_path):
    folder, mark = tmp_path / "model", tmp_path / "harm"
    shutil.copytree(gsm8k.Settings().model, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "of_its_own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig\n"
        f"Path({str(mark)!r}).touch()\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'of_its_own'\n"
    )
    with pytest.raises(InputError, match=r"--model .*model: cannot be loaded: .*"):
        run(replace(gsm8k.Settings(), model=str(folder), out=tmp_path / "run"))
    assert not mark.exists()
