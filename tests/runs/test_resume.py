"""Runs that are killed, stopped or damaged: the same command resumes them, or says what to fix.

A run that was interrupted ends with the same files as one that was not, bit for bit. `make faults`
kills more often than `make test-all`.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_helpers import (
    ROOT,
    SMALL,
    TWO_ITERATIONS,
    checksums,
    command_line,
    count_lines,
    error_lines,
    exit_status,
    finish,
    input_error,
    run_small,
    running,
    wait_until,
)

import train_gsm8k as gsm8k
from toprlib.files import remove

KILLS = int(os.environ.get("FAULT_KILLS", "4"))
CHUNK_LINES = 2 * 8  # samples of a chunk: 2 problems, 8 samples each


@pytest.fixture(scope="module")
def undisturbed(run):
    """The files of the run of TWO_ITERATIONS."""
    return checksums(run(**TWO_ITERATIONS))


class Command:
    """The command of a run of TWO_ITERATIONS in a folder of its own."""

    def __init__(self, folder, **changes):
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.arguments = command_line(folder, **TWO_ITERATIONS | changes)

    def start(self, **options):
        return running(self.arguments, self.log, **options)

    def finish(self):
        finish(self.arguments, self.log)
        return checksums(self.folder)

    def refusal(self):
        """The line that the command ends with, of status 1."""
        with self.start() as process:
            assert exit_status(process) == 1
        return error_lines(self.log)[-1]


@pytest.fixture
def command(tmp_path):
    return Command(tmp_path / "run")


# ---- kills and signals ---------------------------------------------------------------------------
def test_run_killed_while_sampling_scoring_and_training_ends_with_the_same_files(
    undisturbed, command
):
    folder = command.folder / "iteration-1"

    def is_sampling():
        return count_lines(folder / "samples.jsonl.part-0") >= CHUNK_LINES

    def is_training():
        has_checkpoint = (folder / "checkpoint-2").exists()
        return has_checkpoint and count_lines(folder / "metrics.jsonl") >= 3

    moments = [  # when to kill, and a file of a later stage
        (is_sampling, "samples.jsonl"),
        ((folder / "samples.jsonl").exists, "train.jsonl"),
        (is_training, "test-3.jsonl"),
    ]
    for is_reached, later_file in moments:
        with command.start() as process:
            wait_until(is_reached, process)
        assert not (folder / later_file).exists()
    assert command.finish() == undisturbed


def progress(folder):
    """Numbers that only grow: chunks of samples, and steps of the last checkpoint, by iteration."""
    numbers = {}
    for iteration in folder.glob("iteration-*"):
        parts = [iteration / "samples.jsonl", iteration / "samples.jsonl.part-0"]
        lines = max(count_lines(part) for part in parts)
        numbers[iteration.name, "chunks"] = lines // CHUNK_LINES
        steps = [int(path.name[11:]) for path in iteration.glob("checkpoint-*[0-9]")]
        is_trained = (iteration / "model").exists()
        numbers[iteration.name, "steps"] = 10**6 if is_trained else max(steps, default=0)
    return numbers


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_with_the_same_files(undisturbed, tmp_path):
    start = time.monotonic()
    assert Command(tmp_path / "alone").finish() == undisturbed
    seconds = time.monotonic() - start
    rng = random.Random(0)
    kills = 0
    finished = 0
    while kills < KILLS or finished == 0:
        command = Command(tmp_path / f"run {finished}")
        before = {}
        is_finished = False
        while not is_finished:
            with command.start() as process:
                process.join(rng.uniform(0.02, 0.5) * seconds if kills < KILLS else None)
            is_finished = process.exitcode == 0
            assert is_finished or process.exitcode == -signal.SIGKILL, command.log.read_text()
            kills += not is_finished
            after = progress(command.folder)
            for name, number in before.items():  # nothing is done twice
                assert after.get(name, 0) >= number
            before = after
        assert checksums(command.folder) == undisturbed
        finished += 1
    print(f"{kills} kills of {finished} runs; all ended with the same {len(undisturbed)} files")


@pytest.mark.parametrize(
    ("stage", "number"), [("sampling", signal.SIGINT), ("training", signal.SIGTERM)]
)
def test_signal_stops_a_run_at_once_with_one_line(undisturbed, command, number, stage):
    folder = command.folder / "iteration-1"
    file = folder / {"sampling": "samples.jsonl.part-0", "training": "metrics.jsonl"}[stage]
    with command.start() as process:
        wait_until(lambda: count_lines(file) >= 1, process)
        os.kill(process.pid, number)
        assert exit_status(process) == 128 + number
    assert len(error_lines(command.log)) == 1
    assert "Traceback" not in command.log.read_text()
    later_file = {"sampling": "samples.jsonl", "training": "model"}[stage]
    assert not (folder / later_file).exists()
    assert command.finish() == undisturbed


@pytest.mark.slow
def test_full_disk_is_one_line_and_loses_nothing(undisturbed, command):
    """No file may be larger than a megabyte, and the model is."""
    with command.start(max_file_bytes=1 << 20) as process:
        assert exit_status(process) == 1
    [line] = error_lines(command.log)
    assert "checkpoint-2" in line
    assert command.finish() == undisturbed


@pytest.mark.slow
def test_full_disk_while_sampling_leaves_whole_chunks(undisturbed, command):
    with command.start(max_file_bytes=30_000) as process:
        assert exit_status(process) == 1
    [line] = error_lines(command.log)
    assert str(command.folder / "iteration-1") in line
    assert command.finish() == undisturbed


@pytest.mark.slow
def test_run_with_adapters_killed_after_a_checkpoint_ends_with_the_same_files(run, tmp_path):
    changes = {"lora": 4, "lr": 1e-3, "iterations": 2, "problems": 4, "batch_size": 4}
    changes |= {"save_every": 2, "evals_per_epoch": 1}
    folder = tmp_path / "run"
    log = tmp_path / "log"
    arguments = command_line(folder, **changes)
    with running(arguments, log) as process:
        wait_until((folder / "iteration-2" / "checkpoint-2").exists, process)
    finish(arguments, log)
    actual = checksums(folder)
    expected = checksums(run(**changes))
    assert actual.keys() == expected.keys()
    different = {Path(name).name for name in actual if actual[name] != expected[name]}
    # peft writes a set, in any order, and the path of the base model.
    assert different <= {"adapter_config.json", "README.md"}


# ---- two commands at once ------------------------------------------------------------------------
def test_second_command_in_the_folder_is_refused_while_the_first_one_runs(command):
    part = command.folder / "iteration-1" / "samples.jsonl.part-0"
    with command.start() as process:
        wait_until(part.exists, process)
        error = input_error(run_small, command.folder, **TWO_ITERATIONS)
        assert (error.option, error.file) == ("--out", str(command.folder))
        assert process.is_alive()


# ---- truncated and damaged files -----------------------------------------------------------------
def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture(scope="module")
def interrupted_run(tmp_path_factory):
    """A run that was killed in its second iteration after step 3, with a checkpoint of step 2."""
    command = Command(tmp_path_factory.mktemp("interrupted") / "run")
    folder = command.folder / "iteration-2"

    def is_reached():
        has_checkpoint = (folder / "checkpoint-2").exists()
        return has_checkpoint and count_lines(folder / "metrics.jsonl") >= 3

    with command.start() as process:
        wait_until(is_reached, process)
    return command.folder


@pytest.fixture
def interrupted(interrupted_run, tmp_path):
    """The command that resumes a copy of this run in another place."""
    return Command(shutil.copytree(interrupted_run, tmp_path / "moved" / "run"))


def test_last_line_of_metrics_that_is_cut_is_written_again(undisturbed, interrupted):
    with (interrupted.folder / "iteration-2" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss"')
    assert interrupted.finish() == undisturbed


def test_last_line_of_a_part_that_is_cut_is_sampled_again(undisturbed, interrupted):
    folder = interrupted.folder / "iteration-2"
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    remove(*folder.glob("*"))
    part = folder / "samples.jsonl.part-0"
    part.write_text("".join(lines[: CHUNK_LINES + 5]) + lines[CHUNK_LINES + 5][:40])
    assert interrupted.finish() == undisturbed


@pytest.mark.parametrize("name", ["checkpoint-4.unfinished", "model.unfinished"])
def test_folder_that_was_being_written_is_written_again(undisturbed, interrupted, name):
    unfinished = interrupted.folder / "iteration-2" / name
    unfinished.mkdir()
    (unfinished / "rank-0.pt").write_text("half")
    assert interrupted.finish() == undisturbed


def test_run_killed_after_its_last_model_removes_its_checkpoints(run, undisturbed, tmp_path):
    """The kill comes before the checkpoints of the epoch are removed."""
    command = Command(shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run"))
    (command.folder / "results.json").unlink()
    checkpoint = command.folder / "iteration-2" / "checkpoint-4"
    checkpoint.mkdir()
    (checkpoint / "rank-0.pt").write_text("whole")
    assert command.finish() == undisturbed


DAMAGES = [  # a file of the second iteration, and what is in its third line
    *((name, b"}{") for name in ("samples", "train", "test-6", "metrics", "part")),
    *((name, b"\xff") for name in ("samples", "part")),
    *((name, b'{"a": "?"}') for name in ("samples", "metrics")),
    ("samples", b""),
]
REPAIRS = {  # what the error says to remove from the folder of the iteration
    "metrics": ["metrics.jsonl", "train.jsonl", "model"],
    "samples": ["samples.jsonl"],
    "test-6": ["test-6.jsonl"],
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_damaged_line_is_refused_by_file_and_line(run, tmp_path, name, damage):
    folder = shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run")
    last = folder / "iteration-2"
    remove(folder / "results.json")
    file = last / f"{name}.jsonl"
    if name == "train":
        remove(last / "model")  # it is read again only for training
    if name == "part":
        file = last / "samples.jsonl.part-0"
        (last / "samples.jsonl").rename(file)
    lines = file.read_bytes().split(b"\n")
    lines[2] = damage
    file.write_bytes(b"\n".join(lines))
    error = input_error(run_small, folder, **TWO_ITERATIONS)
    assert error.file == str(file)
    if damage != b"\xff":  # text that cannot be decoded has no lines
        assert error.line == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", REPAIRS)
def test_what_an_error_says_to_remove_is_made_again(run, undisturbed, tmp_path, name):
    command = Command(shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run"))
    last = command.folder / "iteration-2"
    remove(command.folder / "results.json")
    (last / f"{name}.jsonl").write_bytes(b"\xff")
    error = input_error(run_small, command.folder, **TWO_ITERATIONS)
    for file in REPAIRS[name]:
        assert file in str(error)
        remove(last / file)
    assert command.finish() == undisturbed


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("config.json", "{"),
        ("config.json", "[]"),
        ("results.json", "{"),
        ("results.json", "{}"),
        ("results.json", "[]"),
    ],
)
def test_damaged_json_is_refused_by_its_file_or_folder(run, tmp_path, name, damage):
    folder = shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run")
    (folder / name).write_text(damage)
    error = input_error(run_small, folder, **TWO_ITERATIONS)
    is_of_another_run = (name, damage) == ("config.json", "[]")
    assert error.file == str(folder if is_of_another_run else folder / name)


def test_damaged_model_is_refused(run, tmp_path):
    folder = shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run")
    for path in (folder / "results.json", folder / "iteration-2" / "test-6.jsonl"):
        path.unlink()
    cut(folder / "iteration-2" / "model" / "model.safetensors")
    error = input_error(run_small, folder, **TWO_ITERATIONS)
    assert (error.option, error.file) == ("--model", str(folder / "iteration-2" / "model"))


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_damaged_checkpoint_is_refused(interrupted, damage):
    checkpoint = max((interrupted.folder / "iteration-2").glob("checkpoint-*[0-9]"))
    damage(checkpoint / "rank-0.pt")
    error = input_error(run_small, interrupted.folder, **TWO_ITERATIONS)
    assert error.file == str(checkpoint / "rank-0.pt")


@pytest.mark.slow
def test_removed_checkpoint_is_made_again(undisturbed, interrupted):
    remove(*(interrupted.folder / "iteration-2").glob("checkpoint-*"))
    assert interrupted.finish() == undisturbed


def test_removed_model_is_made_again_though_there_is_a_later_checkpoint(run, undisturbed, tmp_path):
    command = Command(shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run"))
    folder = command.folder / "iteration-2"
    remove(command.folder / "results.json", folder / "test-3.jsonl", folder / "model")
    checkpoint = folder / "checkpoint-4"  # which cannot give the model after step 3
    checkpoint.mkdir()
    (checkpoint / "rank-0.pt").write_text("not to be read")
    assert command.finish() == undisturbed


@pytest.mark.slow
def test_removed_files_are_made_again(run, undisturbed, tmp_path):
    """A point of the curve needs the model of its step, so the first model is trained again."""
    command = Command(shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run"))
    for names in (
        ["iteration-1/test-3.jsonl"],
        ["iteration-1/model", "iteration-2/samples.jsonl"],
        ["iteration-2/train.jsonl", "iteration-2/metrics.jsonl", "iteration-2/model"],
    ):
        remove(command.folder / "results.json", *(command.folder / name for name in names))
        assert command.finish() == undisturbed


# ---- other folders -------------------------------------------------------------------------------
@pytest.mark.slow
def test_nothing_is_written_outside_the_run_folder(tmp_path):
    """Except the caches of libraries, which keep them where these variables say."""
    here = tmp_path / "here"
    caches = tmp_path / "caches"
    here.mkdir()
    caches.mkdir()
    before = checksums(Path(SMALL.data))
    names = ["HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "HF_HOME", "PYTHONPYCACHEPREFIX"]
    places = dict.fromkeys(names, str(caches))
    command = [sys.executable, gsm8k.__file__, *command_line(Path("run"))]
    subprocess.run(command, cwd=here, env=os.environ | places, check=True, capture_output=True)
    assert [file.name for file in here.iterdir()] == ["run"]
    assert {file.name for file in tmp_path.iterdir()} == {"here", "caches"}
    assert checksums(ROOT / "tiny") == before
    cached = checksums(caches)
    assert not [name for name in cached if name.endswith((".jsonl", ".safetensors"))]


def test_results_of_a_finished_run_are_printed_again(run, undisturbed, tmp_path):
    command = Command(shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run"))
    assert command.finish() == undisturbed
    results = json.loads((command.folder / "results.json").read_text())
    assert f"{100 * results['before']['correct']:.1f}" in command.log.read_text()
