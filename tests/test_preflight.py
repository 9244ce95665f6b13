"""What is refused before anything is loaded or written: a machine or a folder that a run would fail on later."""

import errno
import fcntl
import http.server
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gsm8k as gsm8k
from pipeline.records import InputError
from pipeline.runtime import preflight, run_folder
from pipeline.runtime.processes import device, process_group
from tasks import math, verifier

SMALL = gsm8k.Settings(problems=2, n=2, test_problems=2, test_samples=4, k=2, curve_points=1, max_new_tokens=8)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(out, **changes):
    settings = replace(SMALL, out=out, **changes)
    preflight.check_machine(settings)
    return gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))


# ---- GPUs --------------------------------------------------------------------------------------------------------


@NO_GPU
@pytest.mark.parametrize(
    ("name", "others"),
    [("train_gsm8k", []), ("tasks.math", []), ("tasks.verifier", ["--generator-gpus", "1"])],  # paper: 4 of 8 processes
)
def test_presets_for_gpus_are_refused_without_one_in_a_line(name, others, tmp_path):
    """With no driver at all; one that is too old is found by the same call, torch.cuda.init."""
    command = [sys.executable, "-m", name, "paper", "--out", str(tmp_path / "run"), "--engine", "hf", *others]
    ended = subprocess.run(command, cwd=Path(gsm8k.__file__).parent, capture_output=True, text=True, check=False)
    [told] = ended.stderr.splitlines()
    assert ended.returncode == 1
    assert told.startswith(f"{name}: paper: is for GPUs")
    assert "driver 580 or newer" in told
    assert not (tmp_path / "run").exists()


@NO_GPU
def test_a_rehearsal_on_processors_says_so_in_its_results(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPR_ON_CPU", "1")
    results = run(tmp_path / "run", preset="single-gpu")
    assert results["device"] == "cpu, a rehearsal"
    monkeypatch.delenv("TOPR_ON_CPU")
    with pytest.raises(InputError, match="single-gpu: is for GPUs"):
        run(tmp_path / "run", preset="single-gpu")
    assert "device" not in run(tmp_path / "plain")


@pytest.mark.parametrize(
    "settings", [gsm8k.PRESETS["single-gpu"], math.PRESETS["paper"], verifier.PRESETS["paper"]], ids=lambda s: s.preset
)
def test_driver_compiler_and_network_are_told_together(settings, monkeypatch):
    """As on a node whose driver is too old, in torch's words for it, and whose Python lacks its headers."""

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\nPlease update it.")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", too_old)
    monkeypatch.setenv("CC", "/nowhere/cc")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(InputError) as refused:
        preflight.check_machine(settings)
    network, driver, compiler = str(refused.value).splitlines()
    assert "too old (found version 12020)" in driver
    assert "driver 580 or newer" in driver
    assert "/nowhere/cc: cannot be run" in compiler
    assert "127.0.1.1" in network
    assert "GLOO_SOCKET_IFNAME" in network


def test_fewer_gpus_than_processes_are_refused_by_all_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="8 processes need a GPU each, and torch sees 4: give --nproc-per-node 4"):
        process_group().__enter__()


def test_apples_gpu_is_refused_or_said_not_to_be_used(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    with pytest.raises(InputError, match="Apple's MPS is not supported"):
        preflight.check_machine(gsm8k.PRESETS["single-gpu"])
    preflight.check_machine(SMALL)
    preflight.check_room(SMALL, tmp_path, preflight.Size(1, 1, 1, 1))
    assert "computes on the processor" in capsys.readouterr().err
    assert device().type == "cpu"


# ---- what vLLM's kernels are compiled with -----------------------------------------------------------------------


def test_compiler_and_headers_are_tried_as_triton_uses_them(monkeypatch, tmp_path):
    """The compilers are scripts: a real one, and real headers, need not be there."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}/include\n")
    compiler = tmp_path / "gcc"
    compiler.write_text('#!/bin/sh\ncat > /dev/null\n[ "$2" = -I ] && [ -f "$3/Python.h" ]\n')
    for file in (python, compiler):
        file.chmod(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert f"no Python.h in {tmp_path}/include" in preflight._compiler_fault(str(python))
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    assert preflight._compiler_fault(str(python)) is None
    monkeypatch.setenv("PATH", str(tmp_path / "include"))
    assert preflight._compiler_fault(str(python)).startswith("no C compiler")


# ---- the folder and the memory -----------------------------------------------------------------------------------


def test_disk_memory_and_locks_are_told_together_and_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(preflight, "free_memory", lambda: 1000)

    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr("pipeline.stages.LARGE", 0)
    with pytest.raises(InputError) as refused:
        run(tmp_path / "run")
    disk, locks, memory = str(refused.value).splitlines()
    assert f"{tmp_path / 'run'}: the run may take 0.0 GB, and the disk has 0.0 GB free" in disk
    assert f"{tmp_path}: its file system takes no locks (No locks available)" in locks
    assert "of the host's memory" in memory
    assert list(tmp_path.iterdir()) == []


def test_what_a_run_has_written_counts_as_room_for_it(monkeypatch, tmp_path):
    run(tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    monkeypatch.setattr("pipeline.stages.LARGE", 0)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(InputError, match="make room"):
        run(tmp_path / "run")
    (tmp_path / "run" / "vllm-0.log").write_bytes(bytes(10**8))
    run(tmp_path / "run")


def test_the_disk_of_the_paper_s_run_is_what_its_stages_leave():
    """Five models of 32 GB and a checkpoint; while the last epoch is trained, four and two checkpoints."""
    paper, parameters = gsm8k.PRESETS["paper"], 8_030_261_248
    needed = preflight.disk_needed(paper, preflight.Size(parameters, 7_473 * 16, 1_319 * 64, 1_100 + 512))
    assert 192e9 < needed < 260e9
    assert preflight.disk_needed(replace(paper, iterations=0), preflight.Size(parameters, 0, 0, 0)) == 0


def test_memory_is_the_machine_s_or_the_container_s(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 2000 kB\nMemFree: 1 kB\nMemAvailable:   1000 kB\n")
    assert preflight.free_memory(tmp_path) == 1_024_000
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text("anon 300000\nfile 600000\n")
    (group / "memory.max").write_text("max\n")
    assert preflight.free_memory(tmp_path) == 1_024_000
    (group / "memory.max").write_text("1000000\n")
    assert preflight.free_memory(tmp_path) == 700_000


def test_a_folder_that_another_node_does_not_see_is_refused(tmp_path):
    with pytest.raises(InputError, match="choose an --out that all nodes share"):
        run_folder._check_shared(tmp_path)


def test_torchrun_s_patience_is_told_where_a_checkpoint_needs_more(monkeypatch, capsys, tmp_path):
    paper, size = gsm8k.PRESETS["paper"], preflight.Size(8_030_261_248, 0, 0, 0)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10**12))
    monkeypatch.setattr(preflight, "free_memory", lambda: 10**12)
    told = []
    for variables in ({}, {"TORCHELASTIC_RUN_ID": "none"}, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        preflight.check_room(paper, tmp_path, size)
        told.append(capsys.readouterr().err)
    assert told[0] == told[2] == ""
    assert "torchrun waits 30 s before it kills, and a checkpoint may take 64 s" in told[1]


# ---- the hub -----------------------------------------------------------------------------------------------------


class Gate(http.server.BaseHTTPRequestHandler):
    """A hub's answer to whoever has not accepted a model's licence."""

    def do_GET(self):
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("is_there", "told"), [(True, "`hf auth login`"), (False, "`hf download owner/licensed`")])
def test_a_hub_that_refuses_or_is_out_of_reach_is_told_with_what_to_do(is_there, told, tmp_path):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gate) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
        offline = {} if is_there else {"HF_HUB_OFFLINE": "1"}
        command = [sys.executable, gsm8k.__file__, "--model", "owner/licensed", "--out", str(tmp_path / "run")]
        environment = os.environ | place | offline
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        server.shutdown()
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("train_gsm8k: --model owner/licensed: cannot be loaded: ")
    assert told in last
    assert not (tmp_path / "run").exists()
