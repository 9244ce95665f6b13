"""How a command ends: what it prints, its exit status, and which of several ranks reports."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from run_helpers import ROOT

from toprlib import command as command_module
from toprlib.command import command
from toprlib.records import InputError


@pytest.fixture(autouse=True)
def signal_handlers():
    """The handlers of the tests' own process, which a command replaces."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def end_with(error):
    with command("run"):
        raise error


FIXABLE = [
    InputError("must be at least 1", option="--k"),
    OSError(28, "No space left on device"),
    FloatingPointError("loss is nan"),
    torch.OutOfMemoryError("CUDA out of memory.\nSee the manual."),
]


@pytest.mark.parametrize("error", FIXABLE, ids=lambda error: type(error).__name__)
def test_error_that_the_user_can_fix_is_one_line(error, capsys):
    with pytest.raises(SystemExit) as raised:
        end_with(error)
    assert raised.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("run: ")


def error_of_a_reward():
    error = FileNotFoundError(2, "No such file")
    error.add_note("problem train-7, completion ' 8'")
    return error


@pytest.mark.parametrize("error", [ZeroDivisionError(), error_of_a_reward(), KeyError("train-7")])
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error)) as raised:
        end_with(error)
    assert raised.value is error


def test_exit_of_the_block_is_that_of_the_command(capsys):
    with pytest.raises(SystemExit) as raised:
        end_with(SystemExit(2))
    assert raised.value.code == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_command_with_its_status_and_one_line(number, capsys):
    def be_interrupted():
        with command("run"):
            os.kill(os.getpid(), number)
            time.sleep(10)  # the signal ends it

    with pytest.raises(SystemExit) as raised:
        be_interrupted()
    assert raised.value.code == 128 + number
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_signal_while_an_error_ends_the_command_is_an_interruption(monkeypatch, capsys):
    def interrupt(name, error):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(command_module, "_end_with_error", interrupt)
    with pytest.raises(SystemExit) as raised:
        end_with(RuntimeError("Connection closed by peer"))
    assert raised.value.code == 143
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_signal_within_a_destructor_ends_the_command_at_the_next_error(capsys):
    class Interrupted:
        def __del__(self):
            with contextlib.suppress(KeyboardInterrupt):  # as Python does within __del__
                os.kill(os.getpid(), signal.SIGTERM)

    def lose_a_rank():
        with command("run"):
            Interrupted()
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(SystemExit) as raised:
        lose_a_rank()
    assert raised.value.code == 143
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_signal_that_the_shell_ignores_stays_ignored():
    """A shell starts `command &` so, lest Ctrl-C end what is in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with command("run"):
        os.kill(os.getpid(), signal.SIGINT)


PROGRAM = """
from toprlib.command import command
with command("run"):
    print("a line", flush={flush})
    {then}
"""


def run_with_output(output, **options):
    """Exit status and error lines of a program that prints, with its output sent elsewhere."""
    program = PROGRAM.format(**{"flush": False, "then": ""} | options)
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize("flush", [True, False])
def test_output_that_nobody_reads_ends_the_command_without_a_word(flush):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as output:
        assert run_with_output(output, flush=flush) == (141, [])


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("then", ["", "raise SystemExit(2)"])
def test_output_on_a_full_disk_is_an_error_of_its_own(flush, then):
    with open("/dev/full", "wb") as output:
        status, [line] = run_with_output(output, flush=flush, then=then)
    assert status == 1
    assert "output" in line


def test_error_of_a_file_is_not_one_of_the_output(tmp_path):
    with (tmp_path / "output").open("wb") as output:
        status, [line] = run_with_output(output, then="open('/dev/full', 'w').write('x' * 10**6)")
    assert status == 1
    assert "output" not in line
    assert "a line" in (tmp_path / "output").read_text()


class Exited(BaseException):
    """In place of os._exit, which would end the tests."""


BUG = RuntimeError("Connection closed by peer")
RANKS = [  # local rank, error, seconds for torchrun to stop this rank, exit status
    (0, FIXABLE[0], 0, 1),
    (1, FIXABLE[0], 3, 1),
    (0, BUG, 3, 1),
    (1, BUG, 6, 1),
    (0, KeyboardInterrupt(signal.SIGTERM), 0, 143),
    (1, KeyboardInterrupt(signal.SIGTERM), 0, 143),
]


@pytest.mark.parametrize(("local_rank", "error", "seconds", "status"), RANKS)
def test_a_rank_leaves_the_report_to_the_first_one(
    local_rank, error, seconds, status, monkeypatch, capsys
):
    """torchrun stops a rank while it waits, if another one has to report the error."""
    variables = {"LOCAL_RANK": local_rank, "RANK": 4 + local_rank, "WORLD_SIZE": 8}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    pauses = []

    def exit_at_once(code):
        raise Exited(code)

    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(os, "_exit", exit_at_once)
    with pytest.raises(Exited) as raised:
        end_with(error)
    assert raised.value.args == (status,)
    assert sum(pauses) == seconds
    printed = capsys.readouterr().err
    if isinstance(error, KeyboardInterrupt):
        assert len(printed.splitlines()) == 1 - local_rank
    elif error is BUG:
        assert "Traceback" in printed
    else:
        [line] = printed.splitlines()
        assert ("rank 5" in line) == (local_rank == 1)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the next signal ends it silently
