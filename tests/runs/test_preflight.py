"""What is refused before anything is loaded or written: machines and folders that are too small."""

import errno
import fcntl
import os
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from run_helpers import input_error, run_small

import train_gsm8k as gsm8k
from tasks import verifier
from toprlib import files, language_model, preflight
from toprlib.distributed import process_group
from toprlib.preflight import RunSize, check_machine

PAPER = gsm8k.PRESETS["paper"]
LLAMA_8B = 8_030_261_248  # parameters
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


# ---- GPUs and the compiler -----------------------------------------------------------------------
def run_gsm8k():
    gsm8k.main("train_gsm8k", "", gsm8k.gsm8k_task)


@needs_no_gpu
@pytest.mark.parametrize(
    ("main", "arguments"), [(run_gsm8k, []), (verifier.main, ["--generator-gpus", "1"])]
)
def test_presets_for_gpus_are_refused_without_a_gpu(main, arguments, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    data = str(gsm8k.Settings().data)
    arguments = [*arguments, "--data", data, "--shots", "0", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", ["", "paper", "--engine", "hf", *arguments])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "paper" in line
    assert not folder.exists()


@needs_no_gpu
def test_rehearsal_on_a_cpu_says_so_in_its_results(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPR_ON_CPU", "1")
    check_machine(replace(PAPER, engine="hf"))
    results = run_small(tmp_path / "run", preset="single-gpu", iterations=0)
    assert results["device"] == "cpu, a rehearsal"


@pytest.mark.parametrize(
    "reason",
    [
        "The NVIDIA driver on your system is too old (found version 12020).\nPlease update it.",
        "Error 802: system not yet initialized",
    ],
)
def test_driver_that_torch_cannot_use(monkeypatch, reason):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", mock.Mock(side_effect=RuntimeError(reason)))
    error = input_error(check_machine, PAPER)
    assert error.option == "preset"
    assert reason.splitlines()[0] in str(error)


def test_compiler_that_cannot_be_run(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert input_error(check_machine, PAPER).option == "--engine"


def test_compiler_and_headers_are_tried_as_triton_uses_them(monkeypatch, tmp_path):
    """The compilers are scripts: a real one and real headers may be missing."""
    python = tmp_path / "python"
    compiler = tmp_path / "gcc"
    include = tmp_path / "include"
    python.write_text(f"#!/bin/sh\necho {include}\n")
    compiler.write_text('#!/bin/sh\ncat > /dev/null\n[ "$2" = -I ] && [ -f "$3/Python.h" ]\n')
    python.chmod(0o755)
    compiler.chmod(0o755)
    include.mkdir()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    settings = replace(PAPER, vllm_python=python)

    without_headers = input_error(check_machine, settings)
    assert without_headers.option == "--engine"
    assert str(include) in str(without_headers)
    (include / "Python.h").touch()
    check_machine(settings)
    monkeypatch.setenv("PATH", str(include))
    assert input_error(check_machine, settings).option == "--engine"  # no compiler


def test_fewer_gpus_than_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    error = input_error(process_group().__enter__)
    assert "--nproc-per-node 4" in str(error)


# ---- disk and memory -----------------------------------------------------------------------------
def test_disk_that_is_too_small_and_what_the_run_has_written_counts_as_free(
    run, monkeypatch, tmp_path
):
    folder = shutil.copytree(run(), tmp_path / "run")
    (folder / "results.json").unlink()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(preflight, "SMALL_RUN", 0)
    error = input_error(run_small, folder)
    assert (error.option, error.file) == ("--out", str(folder))
    (folder / "vllm-0.log").write_bytes(bytes(10**8))
    run_small(folder)


def test_memory_that_is_too_small(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "SMALL_RUN", 0)
    monkeypatch.setattr(preflight, "free_memory", lambda: 1000)
    assert "memory" in str(input_error(run_small, tmp_path / "run"))
    assert not (tmp_path / "run" / "iteration-1").exists()


def test_disk_of_the_paper_s_run_is_what_its_stages_leave():
    """Five models of 32 GB; while the last epoch is trained, four models and two checkpoints."""
    size = RunSize(LLAMA_8B, 7_473 * 16, 1_319 * 64, 1_100 + 512)
    sample = 30 * 1_612  # bytes
    samples = sample * (5 * size.num_samples + 6 * size.num_eval_samples)
    model = 4 * LLAMA_8B
    for optimizer, checkpoint in (("adafactor", model), ("adamw", 3 * model)):
        actual = preflight.disk_needed(replace(PAPER, optimizer=optimizer), size)
        assert actual >= 4 * model + 2 * checkpoint + samples  # while it trains
        assert actual >= 5 * model + samples  # at its end
        assert actual <= 5 * model + 2 * checkpoint + samples
    nothing = size._replace(num_samples=0, num_eval_samples=0)
    assert preflight.disk_needed(replace(PAPER, iterations=0), nothing) == 0


@pytest.mark.parametrize("has_gpu", [False, True])
def test_memory_of_the_paper_s_run(monkeypatch, has_gpu):
    """Weights once on the way to GPUs; without GPUs two copies and a checkpoint."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    size = RunSize(LLAMA_8B, 7_473 * 16, 1_319 * 64, 1_100 + 512)
    samples = 30 * 1_612 * (7_473 * 16 + 50_000)
    libraries = 6 * 10**9 if has_gpu else 0
    copies = 1 if has_gpu else 3
    expected = copies * 4 * LLAMA_8B + 8 * (samples + libraries)
    assert preflight.memory_needed(PAPER, size) == expected


def test_free_memory_is_that_of_the_machine_or_of_the_container(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1_024_000))
    monkeypatch.setattr(preflight, "CGROUP", tmp_path)
    assert preflight.free_memory() == 1_024_000
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 600000\n")
    for limit, expected in {"max\n": 1_024_000, "1000000\n": 700_000}.items():
        (tmp_path / "memory.max").write_text(limit)
        assert preflight.free_memory() == expected


# ---- the folder ----------------------------------------------------------------------------------
def test_file_system_without_locks(monkeypatch, tmp_path):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    error = input_error(run_small, tmp_path / "run")
    assert (error.option, error.file) == ("--out", str(tmp_path / "run"))
    assert not (tmp_path / "run" / "config.json").exists()


def test_folder_that_this_node_does_not_see(monkeypatch, tmp_path):
    """Rank zero, on another node, has written config.json into a folder of its own."""
    monkeypatch.setattr(files, "ranks", lambda: 2)
    monkeypatch.setattr(files, "_lock", lambda *_: None)
    error = input_error(files.locked_run_folder(tmp_path, {}).__enter__)
    assert (error.option, error.file) == ("--out", str(tmp_path))


# ---- downloads -----------------------------------------------------------------------------------
def test_model_that_the_disk_has_no_room_for(tmp_path, monkeypatch):
    to_download = [
        SimpleNamespace(file_size=5e9, will_download=True),
        SimpleNamespace(file_size=9e9, will_download=False),  # is here already
    ]
    for free, downloads in ((4e9, 1), (6e9, 2)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        fetch = mock.Mock(side_effect=[to_download, OSError("it is fetched")])
        monkeypatch.setattr(language_model, "snapshot_download", fetch)
        error = input_error(language_model.download_model, "owner/model")
        assert (error.option, error.file) == ("--model", "owner/model")
        assert fetch.call_count == downloads
