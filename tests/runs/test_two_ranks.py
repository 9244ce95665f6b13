"""Runs on two ranks that torchrun starts: a rank that fails ends the others, and nothing is lost.

The ranks train with FSDP2 and exchange tensors through gloo. A run that was interrupted ends with
the same files as one that was not.
"""

import os
import random
import signal
import time

import psutil
import pytest
from run_helpers import (
    TWO_ITERATIONS,
    checksums,
    command_line,
    count_lines,
    error_lines,
    exit_status,
    failure,
    finish,
    input_error,
    kill_all,
    read_lines,
    run_small,
    running,
    wait_until,
)

KILLS = int(os.environ.get("FAULT_KILLS", "2"))
CHANGES = TWO_ITERATIONS | {"iterations": 1, "gradient_checkpointing": True}
PART = "iteration-1/samples.jsonl.part-1"
METRICS = "iteration-1/metrics.jsonl"


class Command:
    """The command of a run on two ranks in a folder of its own."""

    def __init__(self, folder, **changes):
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self.arguments = command_line(folder, **CHANGES | changes)

    def start(self, **variables):
        return running(self.arguments, self.log, ranks=2, variables=variables)

    def finish(self):
        finish(self.arguments, self.log, ranks=2)
        return checksums(self.folder)

    def fail(self, **variables):
        """Run the command, which fails; the lines in which it says why."""
        self.log.unlink(missing_ok=True)
        with self.start(**variables) as process:
            assert exit_status(process) != 0
        return error_lines(self.log)


@pytest.fixture
def command(tmp_path):
    return Command(tmp_path / "run")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that was not interrupted."""
    command = Command(tmp_path_factory.mktemp("finished") / "run")
    command.finish()
    return command.folder


@pytest.fixture(scope="module")
def undisturbed(finished):
    return checksums(finished)


def ranks_of(process):
    """The processes that torchrun has started."""
    return psutil.Process(process.pid).children()


# ---- what two ranks compute ----------------------------------------------------------------------
@pytest.mark.slow
def test_samples_and_steps_are_those_of_one_process(run, finished):
    alone = run(**CHANGES)
    for name in ("samples.jsonl", "test-0.jsonl"):
        actual = [line["token_ids"] for line in read_lines(finished / "iteration-1" / name)]
        expected = [line["token_ids"] for line in read_lines(alone / "iteration-1" / name)]
        assert actual == expected
    steps = read_lines(finished / METRICS)
    for actual, expected in zip(steps, read_lines(alone / METRICS), strict=True):
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_another_number_of_ranks_is_refused(finished):
    error = input_error(run_small, finished, **CHANGES)
    assert (error.option, error.file) == ("--out", str(finished))


@pytest.mark.slow
def test_rank_without_a_problem_waits_for_the_other(tmp_path):
    command = Command(tmp_path / "run", problems=1, test_problems=1, examples=8)
    command.finish()
    assert count_lines(command.folder / "iteration-1" / "samples.jsonl") == 8


# ---- ranks that end ------------------------------------------------------------------------------
@pytest.mark.slow
def test_killed_rank_ends_the_other_and_the_run_ends_with_the_same_files(undisturbed, command):
    for file in (PART, METRICS):
        with command.start() as process:
            wait_until(lambda file=command.folder / file: count_lines(file) >= 1, process)
            ranks_of(process)[-1].kill()
            assert exit_status(process) != 0
        assert not (command.folder / "iteration-1" / "model").exists()
    assert command.finish() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("file", [PART, METRICS])
@pytest.mark.parametrize("is_ctrl_c", [True, False])
def test_signal_stops_all_ranks_with_one_line(undisturbed, command, file, is_ctrl_c):
    """A terminal sends SIGINT to all processes, a scheduler SIGTERM to torchrun."""
    with command.start() as process:
        wait_until(lambda: count_lines(command.folder / file) >= 1, process)
        if is_ctrl_c:
            for each in [*ranks_of(process), psutil.Process(process.pid)]:
                each.send_signal(signal.SIGINT)
        else:
            os.kill(process.pid, signal.SIGTERM)
        assert exit_status(process) != 0
    assert len(error_lines(command.log)) == 1
    assert command.finish() == undisturbed


FAILURES = [  # rank, what raises, a key of run_helpers.ERRORS; in the order of the stages
    (1, "toprlib.sampling.sample_completions", "disk"),
    (1, "toprlib.sampling.grade_samples", "bug"),
    (0, "toprlib.batches.score_rows", "bug"),
    (1, "toprlib.results.log_step", "memory"),
    (1, "toprlib.results.log_step", "bug"),
    (0, "toprlib.results.append_to_file", "disk"),
    (0, "toprlib.checkpoints._write_model", "disk"),
]


@pytest.mark.slow
def test_rank_that_fails_alone_says_why_once_and_ends_the_other(undisturbed, command):
    for rank, function, name in FAILURES:
        lines = command.fail(**failure(rank, function, name))
        log = command.log.read_text()
        if name == "bug":  # a traceback, of this rank alone
            assert log.count("RuntimeError: it is broken") == 1
            assert "gloo" not in log
        else:
            text = {"disk": "No space left on device", "memory": "CUDA out of memory"}[name]
            [line] = [line for line in lines if text in line]
            assert ("rank 1: " in line) == (rank == 1)
        assert len(lines) <= 2  # the other rank may say that it was interrupted
        assert not (command.folder / "iteration-1" / "model").exists()
    assert command.finish() == undisturbed


@pytest.mark.slow
def test_damaged_part_of_one_rank_is_refused_by_file_and_line(command):
    with command.start() as process:
        wait_until(lambda: count_lines(command.folder / PART) >= 1, process)
    part = command.folder / PART
    part.write_text("{\n" + part.read_text())
    [line] = [line for line in command.fail() if str(part) in line]
    assert f"{part}:1" in line


@pytest.mark.slow
def test_network_interface_that_is_not_there_is_refused_before_anything_is_written(command):
    lines = command.fail(GLOO_SOCKET_IFNAME="nowhere0")
    assert any("GLOO_SOCKET_IFNAME" in line for line in lines)
    assert not command.folder.exists()


@pytest.mark.slow
def test_runs_killed_at_random_moments_end_with_the_same_files(undisturbed, tmp_path):
    """All processes at once, as when a machine stops, or one rank."""
    start = time.monotonic()
    assert Command(tmp_path / "alone").finish() == undisturbed
    seconds = time.monotonic() - start
    rng = random.Random(0)
    kills = 0
    finished = 0
    while kills < KILLS or finished == 0:
        command = Command(tmp_path / f"run {finished}")
        is_finished = False
        while not is_finished:
            is_last = kills >= KILLS
            with command.start() as process:
                process.join(None if is_last else rng.uniform(0.2, 1) * seconds)
                is_killed = process.is_alive()
                if is_killed:
                    kill_some(process, rng)
                assert is_killed or process.exitcode == 0, command.log.read_text()
                is_finished = process.exitcode == 0  # also if it had just ended
                kills += not is_finished
        assert checksums(command.folder) == undisturbed
        finished += 1
    print(f"{kills} kills of {finished} runs; all ended with the same {len(undisturbed)} files")


def kill_some(process, rng):
    ranks = ranks_of(process)
    if ranks and rng.random() < 0.5:
        rng.choice(ranks).kill()
        process.join()
    else:
        kill_all(process)
