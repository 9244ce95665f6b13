"""Runs that are killed or stopped: the same command resumes them.

A run that was interrupted ends with the same files as one that was not, bit for bit, and does not
repeat the work before its last checkpoint.
"""

import os
import random
import shutil
import signal
import time

import pytest
from helpers import TWO_ITERATIONS, Command, checksums, count_lines, run_small, wait_until

from toprlib.files import remove
from toprlib.records import InputError

KILLS = 4
CHUNK_LINES = 2 * 8  # samples of a chunk: 2 problems, 8 samples each
OPTIMIZERS = {  # AdaFactor is in TWO_ITERATIONS
    "sgd": {"optimizer": "sgd", "lr": 0.5},
    "adamw": {"optimizer": "adamw", "lr": 1e-3},
}


@pytest.fixture(scope="module")
def undisturbed(run):
    """The files of the run of TWO_ITERATIONS."""
    return checksums(run(**TWO_ITERATIONS))


@pytest.fixture
def command(tmp_path):
    return Command(tmp_path / "run", **TWO_ITERATIONS)


@pytest.fixture
def copy(run, tmp_path):
    """The command of a finished run without its results, in a copy of its folder."""
    folder = shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "moved" / "run")
    remove(folder / "results.json")
    return Command(folder, **TWO_ITERATIONS)


def has_checkpoint(folder, step):
    """Whether the run has trained for a step more than its checkpoint of `step` has."""
    is_written = (folder / f"checkpoint-{step}").exists()
    return is_written and count_lines(folder / "metrics.jsonl") > step


def resumed(command):
    """The stages that the log says it resumes, and the counts of their done work."""
    lines = command.log.read_text().splitlines()
    found = {}
    for line in lines:
        stage, is_resumed, rest = line.partition(": resumes after ")
        if is_resumed:
            found[stage.rpartition("\r")[2]] = int(rest.split()[1])
    return found


# ---- kills and signals ---------------------------------------------------------------------------
def test_run_stopped_in_each_stage_ends_with_the_same_files(undisturbed, command):
    """Killed in sampling and in scoring; interrupted in training, which ends it with one line."""
    folder = command.folder / "iteration-1"
    command.run_until(lambda: count_lines(folder / "samples.jsonl.part-0") >= CHUNK_LINES)
    assert not (folder / "samples.jsonl").exists()
    command.run_until((folder / "samples.jsonl").exists)
    assert resumed(command)["iteration-1/samples.jsonl"] % CHUNK_LINES == 0
    assert not (folder / "train.jsonl").exists()
    command.log.unlink()
    with command.start() as process:
        wait_until(lambda: has_checkpoint(folder, 2), process)
        os.kill(process.pid, signal.SIGINT)
        process.join()
    assert process.exitcode == 1
    log = command.log.read_text()
    assert len([line for line in log.splitlines() if line.startswith("train_gsm8k: ")]) == 1
    assert "Traceback" not in log
    assert not (folder / "test-3.jsonl").exists()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss"')  # as a kill may leave it
    assert command.finish() == undisturbed
    assert resumed(command)["training"] in (2, 4)  # the signal may come a checkpoint later


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_resumes_with_the_state_of_its_optimizer(run, tmp_path, name):
    samples = run(**TWO_ITERATIONS) / "iteration-1" / "samples.jsonl"
    changes = {"samples": str(samples), "test_problems": 0, "batch_size": 4, "save_every": 2}
    changes |= OPTIMIZERS[name]
    command = Command(tmp_path / "run", **changes)
    command.run_until(lambda: has_checkpoint(command.folder / "iteration-1", 4))
    assert not (command.folder / "iteration-1" / "model").exists()
    command.log.unlink()
    actual = command.finish()
    assert resumed(command)["training"] in (4, 6)
    assert actual == checksums(run(**changes))


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_with_the_same_files(undisturbed, tmp_path):
    start = time.monotonic()
    assert Command(tmp_path / "alone", **TWO_ITERATIONS).finish() == undisturbed
    seconds = time.monotonic() - start
    rng = random.Random(0)
    for number in range(KILLS):
        command = Command(tmp_path / f"run {number}", **TWO_ITERATIONS)
        for _ in range(2):
            with command.start() as process:
                process.join(rng.uniform(0.05, 0.5) * seconds)
        assert command.finish() == undisturbed


def test_second_command_in_the_folder_is_refused_while_the_first_one_runs(command):
    part = command.folder / "iteration-1" / "samples.jsonl.part-0"
    with command.start() as process:
        wait_until(part.exists, process)
        with pytest.raises(InputError, match="another process"):
            run_small(command.folder, **TWO_ITERATIONS)
        assert process.is_alive()


# ---- what a kill leaves --------------------------------------------------------------------------
def test_what_was_being_written_is_written_again(undisturbed, copy):
    """Half a line of samples, half a checkpoint and half a model."""
    folder = copy.folder / "iteration-2"
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    remove(*folder.glob("*"))
    part = folder / "samples.jsonl.part-0"
    part.write_text("".join(lines[: CHUNK_LINES + 5]) + lines[CHUNK_LINES + 5][:40])
    for name in ("checkpoint-4.unfinished", "model.unfinished"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_text("half")
    assert copy.finish() == undisturbed
    assert resumed(copy) == {"iteration-2/samples.jsonl": CHUNK_LINES}


def test_damaged_file_is_refused_by_its_name_and_line(run, tmp_path):
    folder = shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run")
    file = folder / "iteration-2" / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[2] = b'{"step": "?"}'
    file.write_bytes(b"\n".join(lines))
    with pytest.raises(InputError, match=f"{file}:3: "):
        run_small(folder, **TWO_ITERATIONS)
