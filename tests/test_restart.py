"""Runs of two iterations, in one go; and killed and given the same command again: the same bits, nothing done twice.

`make faults` kills more often than `make test-all`.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from killing import CHANGES, ROOT, fault, finish, lines, started, status, told, wait
from pipeline.evaluation import to_table
from pipeline.models.language_model import collate, load_model
from pipeline.records import Example, Sample, read_records
from runs import contents
from torch.distributed.launcher.api import LaunchConfig

from topr import sequence_logprobs

KILLS = int(os.environ.get("FAULT_KILLS", "4"))
STOPPED = "train_gsm8k: stopped; what is done is kept, and the same command goes on"


@pytest.fixture(scope="module")
def undisturbed(run):
    return contents(run(**CHANGES))


def test_iterations_sample_from_the_model_that_the_one_before_has_made(run, capsys):
    folder = run(**CHANGES)
    results = json.loads((folder / "results.json").read_text())
    to_table(results).print()
    assert "after iteration 2" in capsys.readouterr().out
    first, second = results["iterations"]
    assert {"samples_seen": 0, **first["after"]} == second["curve"][0]
    each = [
        entry["samples_per_question"]
        for entry in (results["before"], first["after"], second["after"])
    ]
    assert each == [6, 4, 6]
    assert [point["samples_seen"] for point in first["curve"]] == [0, 48, 96]
    assert first["dataset"]["seed"] != second["dataset"]["seed"]
    samples = read_records(folder / "iteration-2" / "samples.jsonl", Sample)
    trained = read_records(folder / "iteration-2" / "train.jsonl", Example)
    assert (len(samples), len(trained)) == (128, 96)
    assert (
        sum(example.reward > 0 for example in trained) == second["dataset"]["trained"]["positive"]
    )
    assert all(samples[example.sample].token_ids == example.completion_ids for example in trained)
    made = load_model(str(folder / "iteration-1" / "model")).model
    logmu = [sequence_logprobs(made, collate([example])).item() for example in trained[:4]]
    assert logmu == pytest.approx([example.logmu for example in trained[:4]], abs=1e-4)


def test_a_run_killed_while_sampling_scoring_and_training_ends_with_the_same_bits(
    undisturbed, tmp_path
):
    folder = tmp_path / "run"
    here = folder / "iteration-1"
    moments = [  # each with a file that is made later
        (
            lambda: lines(here / "samples.jsonl.part-0") >= 32,
            "samples.jsonl",
        ),  # sampling, behind a chunk
        ((here / "samples.jsonl").exists, "train.jsonl"),  # scoring
        (
            lambda: (here / "checkpoint-3").exists() and lines(here / "metrics.jsonl") >= 4,
            "test-6.jsonl",
        ),  # training
    ]
    for is_reached, later in moments:
        with started(folder) as process:
            wait(process, is_reached)
        assert not (here / later).exists()
    assert finish(folder) == undisturbed


def progress(folder):
    """How far a run is, in numbers that only grow: chunks of samples, and steps that a checkpoint has, by iteration."""
    found = {}
    for here in folder.glob("iteration-*"):
        found[here.name, "chunks"] = max(
            lines(here / f"samples.jsonl{part}") // 32 for part in ("", ".part-0")
        )
        steps = [int(path.name[11:]) for path in here.glob("checkpoint-*[0-9]")]
        found[here.name, "steps"] = 10**6 if (here / "model").exists() else max(steps, default=0)
    return found


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_with_the_same_bits(undisturbed, tmp_path):
    begun = time.monotonic()
    assert finish(tmp_path / "alone") == undisturbed
    seconds, rng, kills, finished = time.monotonic() - begun, random.Random(0), 0, 0
    while kills < KILLS or finished == 0:
        folder, before, is_done = tmp_path / f"run {finished}", {}, False
        while not is_done:
            with started(folder) as process:
                process.join(rng.uniform(0.02, 0.5) * seconds if kills < KILLS else None)
            is_done = process.exitcode == 0
            assert is_done or process.exitcode == -signal.SIGKILL, told(folder)[-10:]
            kills += not is_done
            now = progress(folder)
            assert all(now.get(name, 0) >= done for name, done in before.items()), (before, now)
            before = now
        assert contents(folder) == undisturbed
        finished += 1
    print(
        f"{kills} kills of {finished} runs, all of which ended with the same {len(undisturbed)} files"
    )


@pytest.mark.slow
def test_a_run_that_is_asked_to_end_keeps_what_is_done_and_says_how_to_go_on(undisturbed, tmp_path):
    folder = tmp_path / "run"
    here = folder / "iteration-1"
    part, metrics = here / "samples.jsonl.part-0", here / "metrics.jsonl"
    for number, is_reached in (
        (signal.SIGINT, lambda: lines(part) >= 32),
        (signal.SIGTERM, lambda: lines(metrics)),
    ):
        with started(folder) as process:
            wait(process, is_reached)
            os.kill(process.pid, number)
            assert status(process) == 128 + number
        assert told(folder)[-1] == STOPPED
        assert lines(part) % 32 == 0  # whole chunks: 2 problems of 16 samples
    assert lines(metrics) < 6  # well before the evaluation, to which it trains otherwise
    assert (here / f"checkpoint-{lines(metrics)}").exists()  # of the very step that it ended after
    assert not any("Traceback" in line for line in told(folder))
    assert finish(folder) == undisturbed


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_told_in_a_line_and_nothing_is_lost(undisturbed, tmp_path):
    """No file may exceed a megabyte, which the model's does."""
    folder = tmp_path / "run"
    said = fault(folder, limit=1 << 20)
    assert re.fullmatch(
        r"train_gsm8k: .*\.unfinished: .*File too large.* same command goes on", said
    )
    assert finish(folder) == undisturbed


@pytest.mark.slow
def test_two_ranks_that_are_asked_to_end_and_then_lose_one_go_on_to_the_same_bits(
    tmp_path, monkeypatch
):
    """As Ctrl-C asks, and a scheduler with SIGTERM to all processes. torchrun waits for them as docs/gpu.md has it."""
    page = (ROOT / "docs" / "gpu.md").read_text()
    [(variable, seconds)] = set(re.findall(r"(TORCH_ELASTIC_SHUTDOWN_TIMEOUT)=([0-9]+)", page))
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 30
    monkeypatch.setenv(variable, seconds)
    assert LaunchConfig(1, 1, 1).shutdown_timeout == int(seconds)
    folder, as_usual = tmp_path / "run", {"compute": "bfloat16", "gradient_checkpointing": True}
    metrics = folder / "iteration-1" / "metrics.jsonl"
    with started(folder, 2, **as_usual) as process:
        wait(process, lambda: lines(metrics) >= 1)
        os.kill(process.pid, signal.SIGINT)
        for worker in psutil.Process(process.pid).children():
            worker.terminate()
        assert status(process) != 0
    [checkpoint] = metrics.parent.glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{lines(metrics)}"
    assert STOPPED in told(folder)
    with started(folder, 2, **as_usual) as process:
        wait(process, (folder / "iteration-2" / "checkpoint-3").exists)
        psutil.Process(process.pid).children()[-1].kill()
        assert status(process) != 0
    assert not (folder / "results.json").exists()
    assert finish(folder, 2, **as_usual) == finish(tmp_path / "undisturbed", 2, **as_usual)


@pytest.mark.slow
def test_a_rank_that_cannot_sample_ends_the_sampling_of_the_others(tmp_path):
    folder, many = tmp_path / "run", {"iterations": 1, "problems": 80, "test_problems": 2}
    first, second = (folder / "iteration-1" / f"samples.jsonl.part-{rank}" for rank in (0, 1))
    with started(folder, 2, **many) as process:
        wait(process, lambda: all(lines(part) >= 32 for part in (first, second)))
        os.kill(process.pid, signal.SIGTERM)
        assert status(process) != 0
    second.write_text("{\n" + second.read_text())
    with started(folder, 2, **many) as process:
        assert status(process) != 0
    assert lines(first) < 40 * 16  # what it would draw if it did not look around
    [line] = [line for line in told(folder) if str(second) in line]
    assert line.startswith(f"train_gsm8k: {second}")


@pytest.mark.slow
def test_a_rank_without_a_problem_waits_for_the_others_and_another_number_of_ranks_is_refused(
    tmp_path,
):
    changes = {"problems": 1, "test_problems": 1, "iterations": 1, "n": 8, "lr": 1e-5}
    finish(tmp_path / "run", 2, **changes)
    assert "(ranks = 2 there and 1 here)" in fault(tmp_path / "run", **changes)
    assert lines(tmp_path / "run" / "iteration-1" / "samples.jsonl") == 8


@pytest.mark.slow
def test_the_smoke_test_of_gpus_begins_anew_is_stopped_and_goes_on_from_its_checkpoint(tmp_path):
    """On processors, with the tiny model: on one process, and on two as where nvidia-smi lists two GPUs."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho one; echo two\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "runs" / "one-gpu").mkdir(parents=True)
    (tmp_path / "runs" / "one-gpu" / "results.json").touch()  # of a run that is finished
    smoke = f"SMOKE={ROOT / 'train_gsm8k.py'} --problems 4 --test-problems 2 --test-samples 2 --k 2"
    command = ["make", "-f", ROOT / "Makefile", "-o", ".venv/ready", "test-gpu", smoke]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^runs/.*/checkpoint-\d+$", done.stdout, re.MULTILINE)) == 2
    for name in ("one-gpu", "two-gpus"):
        assert (tmp_path / "runs" / name / "results.json").stat().st_size > 0
