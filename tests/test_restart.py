"""Runs that are killed, and given the same command again: the same bits in the end, and nothing done twice."""

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import slow_save
import torch
from safetensors.torch import load_file

import train_gsm8k as gsm8k

SMALL = (
    "--problems 8 --n 16 --max-new-tokens 48 --test-problems 4 --test-samples 6 --k 4 --curve-points 2"
    " --curve-samples 2 --chunk 2 --batch 8 --save-every 3 --optimizer adafactor --lr 1e-3 --iterations 2 --examples 96"
).split()
RESULTS = ["results.json"] + [
    f"iteration-{i}/{name}"
    for i in (1, 2)
    for name in (
        "samples.jsonl",
        "train.jsonl",
        "metrics.jsonl",
        "model/model.safetensors",
        "test-6.jsonl",
        "test-12.jsonl",
    )
]


def command(folder, ranks, last, script=gsm8k.__file__):
    # "--", because torchrun would take --n for an abbreviation of an option of its own
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--"] if ranks > 1 else []
    return [sys.executable, *torchrun, script, "laptop", *SMALL, *last, "--out", str(folder)]


@contextmanager
def started(folder, ranks=1, last=(), limit=resource.RLIM_INFINITY, script=gsm8k.__file__, variables=()):
    """The command, running; ended with all its children at the end of the block. limit: bytes in a file."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(variables)
    with open(folder.with_suffix(".log"), "a") as log:
        process = subprocess.Popen(command(folder, ranks, last, script), stdout=log, stderr=log, env=environment)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait(process, is_reached):
    while not is_reached():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)


def finish(folder, ranks=1, last=()):
    with started(folder, ranks, last) as process:
        assert process.wait() == 0, folder.with_suffix(".log").read_text()[-2000:]
    return {name: (folder / name).read_bytes() for name in RESULTS if (folder / name).exists()}


def lines(file):
    return file.read_bytes().count(b"\n") if file.exists() else 0


def children(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("undisturbed") / "run")


def test_a_run_killed_while_sampling_scoring_and_training_ends_with_the_same_bits(undisturbed, tmp_path):
    folder = tmp_path / "run"
    here = folder / "iteration-1"
    part, samples, metrics = (here / name for name in ("samples.jsonl.part-0", "samples.jsonl", "metrics.jsonl"))

    with started(folder) as process:  # sampling: at least one chunk is there
        wait(process, lambda: lines(part) >= 32)
    assert not samples.exists()
    stamp = (here / "test-0.jsonl").stat().st_mtime_ns

    with started(folder) as process:  # scoring: everything is drawn, nothing is composed
        wait(process, samples.exists)
    assert not (here / "train.jsonl").exists()

    with started(folder) as process:  # training: beyond a checkpoint
        wait(process, lambda: (here / "checkpoint-3").exists() and lines(metrics) >= 4)
    assert not (here / "test-6.jsonl").exists()

    found = finish(folder)
    assert (here / "test-0.jsonl").stat().st_mtime_ns == stamp
    assert set(found) == set(undisturbed) == set(RESULTS)
    assert [name for name in RESULTS if found[name] != undisturbed[name]] == []
    left_over = [path.name for path in folder.rglob("*") if "part" in path.name or "unfinished" in path.name]
    assert left_over == []
    assert not list(folder.rglob("checkpoint*"))


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_keeps_what_is_done_and_says_how_to_go_on(undisturbed, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "run.log"
    here = folder / "iteration-1"
    part, metrics = here / "samples.jsonl.part-0", here / "metrics.jsonl"
    told = "train_gsm8k: stopped; what is done is kept, and the same command goes on"

    with started(folder) as process:
        wait(process, lambda: lines(part) >= 32)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 1
    assert log.read_text().splitlines()[-1] == told
    assert lines(part) % 32 == 0  # whole chunks: 2 problems of 16 samples

    with started(folder) as process:
        wait(process, lambda: lines(metrics) >= 1)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 1
    assert log.read_text().splitlines()[-1] == told
    assert lines(metrics) < 6  # well before the evaluation, to which it trains otherwise
    assert (here / f"checkpoint-{lines(metrics)}").exists()  # of the very step that it ended after
    assert "Traceback" not in log.read_text()
    assert finish(folder) == undisturbed


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_told_in_a_line_and_nothing_is_lost(undisturbed, tmp_path):
    """No file may exceed a megabyte, which the model's does."""
    folder, log = tmp_path / "run", tmp_path / "run.log"
    with started(folder, limit=1 << 20) as process:
        assert process.wait() == 1
    last = log.read_text().splitlines()[-1]
    assert re.fullmatch(r"train_gsm8k: .*\.unfinished: .*File too large.* same command goes on", last), last
    assert "Traceback" not in log.read_text()

    with (folder / ".lock").open("w") as lock:  # as a process at work there has it
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = subprocess.run(command(folder, 1, ()), capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert second.stderr.splitlines()[-1] == f"train_gsm8k: {folder}: another process is at work there; let it end"
    assert finish(folder) == undisturbed


@pytest.mark.slow
def test_when_a_rank_dies_the_run_ends_and_goes_on_to_the_same_bits(tmp_path):
    folder, once = tmp_path / "run", ("--iterations", "1", "--compute", "bfloat16", "--gradient-checkpointing")
    with started(folder, 2, once) as process:
        wait(process, (folder / "iteration-1" / "checkpoint-3").exists)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        assert process.wait() != 0
    assert not (folder / "results.json").exists()
    assert finish(folder, 2, once) == finish(tmp_path / "undisturbed", 2, once)


@pytest.mark.slow
def test_a_checkpoint_that_takes_half_a_minute_is_kept_when_torchrun_is_asked_to_end(tmp_path):
    """With the variable that docs/gpu.md sets; as Ctrl-C does it, and with SIGTERM to all processes as a scheduler."""
    told = (Path(gsm8k.__file__).parent / "docs" / "gpu.md").read_text()
    [(name, value)] = set(re.findall(r"^export (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)=([0-9]+)", told, re.MULTILINE))
    folder, once = tmp_path / "run", ("--iterations", "1")
    variables = {name: value, "PYTHONPATH": str(Path(gsm8k.__file__).parent)}
    with started(folder, 2, once, script=slow_save.__file__, variables=variables) as process:
        wait(process, lambda: lines(folder / "iteration-1" / "metrics.jsonl") >= 1)
        process.send_signal(signal.SIGINT)
        for pid in children(process.pid):
            os.kill(pid, signal.SIGTERM)
        assert process.wait() != 0
    [checkpoint] = (folder / "iteration-1").glob("checkpoint-*")
    assert checkpoint.name.removeprefix("checkpoint-") == str(lines(folder / "iteration-1" / "metrics.jsonl"))
    log = folder.with_suffix(".log").read_text()
    assert "train_gsm8k: stopped; what is done is kept, and the same command goes on" in log
    assert finish(folder, 2, once) == finish(tmp_path / "undisturbed", 2, once)


@pytest.mark.slow
def test_a_rank_that_cannot_sample_ends_the_sampling_of_the_others(tmp_path):
    folder, many = tmp_path / "run", ("--iterations", "1", "--problems", "80", "--test-problems", "2")
    parts = [folder / "iteration-1" / f"samples.jsonl.part-{rank}" for rank in (0, 1)]
    with started(folder, 2, many) as process:
        wait(process, lambda: all(lines(part) >= 32 for part in parts))
        process.send_signal(signal.SIGTERM)
        assert process.wait() != 0
    assert all(lines(part) < 40 * 16 for part in parts)
    parts[1].write_text("{\n" + parts[1].read_text())
    with started(folder, 2, many) as process:
        assert process.wait() != 0
    assert lines(parts[0]) < 40 * 16  # what it would draw if it did not look around
    told = [line for line in folder.with_suffix(".log").read_text().splitlines() if str(parts[1]) in line]
    assert len(told) == 1
    assert told[0].startswith(f"train_gsm8k: {parts[1]}")


@pytest.mark.slow
def test_two_ranks_train_the_model_that_one_process_trains(undisturbed, tmp_path):
    # Both score first: the forward passes must leave the optimiser its weights.
    (tmp_path / "samples.jsonl").write_bytes(undisturbed["iteration-1/samples.jsonl"])
    weights, held_out = [], []
    for ranks in (1, 2):
        folder = tmp_path / f"on {ranks}"
        file = str(tmp_path / "samples.jsonl")
        finish(folder, ranks, ("--iterations", "1", "--curve-points", "1", "--samples", file, "--held-out", file))
        weights.append(load_file(folder / "iteration-1" / "model" / "model.safetensors"))
        held_out.append(json.loads((folder / "results.json").read_text())["iterations"][0]["after"]["negative"])
    one, two = (entry["log_ratio"]["mean"] for entry in held_out)
    assert two == pytest.approx(one, abs=0.05)
    base = load_file(Path(gsm8k.Settings().model) / "model.safetensors")
    for name, one in weights[0].items():
        assert (one - base[name]).abs().max() > 1e-3, name  # 12 steps of Adafactor at 1e-3
        torch.testing.assert_close(weights[1][name], one, rtol=0, atol=2e-4)


@pytest.mark.slow
def test_a_rank_without_a_problem_waits_for_the_others(tmp_path):
    few = ("--problems", "1", "--test-problems", "1", "--iterations", "1", "--n", "8", "--lr", "1e-5")
    found = finish(tmp_path / "run", 2, few)
    assert found["iteration-1/samples.jsonl"].count(b"\n") == 8
