"""What is refused before anything is loaded or written: a machine or a folder that a run would fail on later."""

import errno
import fcntl
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from huggingface_hub import constants
from killing import arguments, by_itself, statuses
from pipeline.models import language_model
from pipeline.records import InputError
from pipeline.runtime import preflight, run_folder
from pipeline.runtime.processes import process_group
from runs import experiment

import train_gsm8k as gsm8k
from tasks import verifier

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
ROOT, PAPER, LLAMA_8B = Path(gsm8k.__file__).parent, gsm8k.SETTINGS["paper"], 8_030_261_248


@NO_GPU
@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (lambda: gsm8k.main("train_gsm8k", "", gsm8k.gsm8k_task), []),
        (verifier.main, ["--generator-gpus", "1"]),
    ],
)
def test_presets_for_gpus_are_refused_without_one_in_a_line(main, arguments, tmp_path, monkeypatch):
    """With no driver at all; one that is too old is found by the same call, torch.cuda.init."""
    monkeypatch.setattr(
        sys, "argv", ["", "paper", "--engine", "hf", *arguments, "--out", str(tmp_path / "run")]
    )
    with pytest.raises(SystemExit, match=r"^[a-z8_.]+: paper: is for GPUs.*driver 580 or newer.*$"):
        main()
    assert not (tmp_path / "run").exists()


@NO_GPU
def test_a_rehearsal_on_processors_says_so_in_its_results(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPR_ON_CPU", "1")
    assert experiment(tmp_path / "run", preset="single-gpu")["device"] == "cpu, a rehearsal"
    preflight.check_machine(replace(PAPER, engine="hf"))


def test_driver_and_compiler_are_told_together(monkeypatch):
    """As on a node whose driver is too old, in torch's words for it, and whose Python lacks its headers."""
    told = "The NVIDIA driver on your system is too old (found version 12020).\nPlease update it."
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", mock.Mock(side_effect=RuntimeError(told)))
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(
        InputError,
        match=r"found version 12020.*driver 580 or newer.*\n.*/nowhere/cc: cannot be run",
    ):
        preflight.check_machine(PAPER)


def test_fewer_gpus_than_processes_are_refused_by_all_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "8",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        InputError, match="8 processes need a GPU each, and torch sees 4: give --nproc-per-node 4"
    ):
        process_group().__enter__()


def test_compiler_and_headers_are_tried_as_triton_uses_them(monkeypatch, tmp_path):
    """The compilers are scripts: a real one, and real headers, need not be there."""
    python, compiler, include = (tmp_path / name for name in ("python", "gcc", "include"))
    python.write_text(f"#!/bin/sh\necho {include}\n")
    compiler.write_text('#!/bin/sh\ncat > /dev/null\n[ "$2" = -I ] && [ -f "$3/Python.h" ]\n')
    for file in (python, compiler):
        file.chmod(0o755)
    include.mkdir()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert f"no Python.h in {include}" in preflight._compiler_fault(str(python))
    (include / "Python.h").touch()
    assert preflight._compiler_fault(str(python)) is None
    monkeypatch.setenv("PATH", str(include))
    assert preflight._compiler_fault(str(python)).startswith("no C compiler")


def test_disk_and_memory_are_told_together_and_what_a_run_has_written_counts_as_room(
    monkeypatch, tmp_path, run
):
    folder = shutil.copytree(run(), tmp_path / "run")
    (folder / "results.json").unlink()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr("pipeline.stages.LARGE", 0)
    monkeypatch.setattr(preflight, "free_memory", lambda: 1000)
    with pytest.raises(
        InputError,
        match=rf"{folder}: .*disk has 0.0 GB free: make room.*\n.*fewer than 64 training",
    ):
        experiment(folder)
    monkeypatch.setattr(preflight, "free_memory", lambda: 10**10)
    (folder / "vllm-0.log").write_bytes(bytes(10**8))
    experiment(folder)


def test_a_file_system_that_has_no_locks_or_is_one_node_s_is_refused(monkeypatch, tmp_path):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        InputError, match=r"run: its file system takes no locks \(No locks available\)"
    ):
        experiment(tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
    with pytest.raises(InputError, match="choose an --out that all nodes share"):
        run_folder._check_shared(tmp_path)


def test_the_room_of_the_paper_s_run_is_what_its_stages_leave(monkeypatch):
    """Five models of 32 GB and a checkpoint; while the last epoch is trained, four and two checkpoints."""
    size = preflight.Size(LLAMA_8B, 7_473 * 16, 1_319 * 64, 1_100 + 512)
    samples = 30 * 1_612 * (5 * size.drawn + 6 * size.tested)
    for optimizer, weights in (("adafactor", 1), ("adamw", 3)):
        needed = preflight.disk_needed(replace(PAPER, optimizer=optimizer), size)
        assert needed == (4 + 2 * weights) * 4 * LLAMA_8B + samples
    assert (
        preflight.disk_needed(replace(PAPER, iterations=0), size._replace(drawn=0, tested=0)) == 0
    )
    monkeypatch.setenv(
        "LOCAL_WORLD_SIZE", "8"
    )  # on a node's processors: two copies, a checkpoint, samples eight times
    for has_gpu, weights in ((False, 3), (True, 1)):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpu=has_gpu: has_gpu)
        of_each = 30 * 1_612 * (size.drawn + 50_000) + has_gpu * 6 * 10**9
        assert preflight.memory_needed(PAPER, size) == weights * 4 * LLAMA_8B + 8 * of_each


def test_memory_is_the_machine_s_or_the_container_s(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1_024_000))
    monkeypatch.setattr(preflight, "CGROUP", tmp_path)
    assert preflight.free_memory() == 1_024_000
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 600000\n")
    for limit, left in {"max\n": 1_024_000, "1000000\n": 700_000}.items():
        (tmp_path / "memory.max").write_text(limit)
        assert preflight.free_memory() == left


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that has one model, and another one for those who have accepted its licence. While `stops_after` says so,
    it falls silent behind so many bytes of the weights.
    """

    protocol_version, folder, commit = "HTTP/1.1", Path(gsm8k.Settings().model), "0" * 40
    stops_after: int | None = None
    released = threading.Event()

    def do_GET(self):
        if "owner/licensed" in self.path:
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        file = self.folder / self.path.split("?")[0].rpartition("/")[2]
        content = file.read_bytes() if "/resolve/" in self.path and file.exists() else b"{}"
        if self.path.startswith("/api/"):
            files = [
                {"type": "file", "path": f.name, "size": 0, "oid": "0"}
                for f in self.folder.iterdir()
            ]
            found = {
                "id": "owner/model",
                "sha": self.commit,
                "siblings": [{"rfilename": f["path"]} for f in files],
            }
            content = json.dumps(files if "/tree/" in self.path else found).encode()
        self.send_response(200 if file.exists() or self.path.startswith("/api/") else 404)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{file.name}"')
        self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file.suffix == ".safetensors" and self.stops_after is not None:
            self.wfile.write(content[: self.stops_after])
            Hub.stops_after = 0
            self.released.wait()
        else:
            self.wfile.write(content)

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def hub():
    """The address of a hub that answers here."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("is_offline", "advice"), [(False, "`hf auth login`"), (True, "`hf download owner/licensed`")]
)
def test_a_hub_that_refuses_or_is_out_of_reach_is_told_with_what_to_do(
    hub, tmp_path, monkeypatch, is_offline, advice
):
    monkeypatch.setenv("NO_PROXY", "*")
    place = {
        "ENDPOINT": hub,
        "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
    }
    for name, value in (
        place | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": is_offline}
    ).items():
        monkeypatch.setattr(constants, name, value)  # which the library has read already
    with pytest.raises(InputError, match=rf"^--model owner/licensed: cannot be loaded: .*{advice}"):
        experiment(tmp_path / "run", model="owner/licensed")
    assert not (tmp_path / "run").exists()


def test_a_model_that_the_disk_has_no_room_for_is_refused_before_it_comes(tmp_path, monkeypatch):
    files = [
        SimpleNamespace(file_size=size, will_download=will)
        for size, will in ((5e9, True), (9e9, False))
    ]
    for free, ended in (
        (4e9, "5.0 GB are to come, and the disk has 4.0 GB free.*HF_HOME"),
        (6e9, "it comes"),
    ):
        monkeypatch.setattr(
            "shutil.disk_usage", lambda folder, free=free: SimpleNamespace(free=free)
        )
        bring = mock.Mock(side_effect=[files, OSError("it comes")])
        monkeypatch.setattr(language_model, "snapshot_download", bring)
        with pytest.raises(InputError, match=ended):
            language_model.download("owner/model")


@pytest.mark.slow
def test_a_hub_that_falls_silent_is_told_and_the_same_command_goes_on(hub, tmp_path):
    run = arguments(tmp_path / "run", usual={}, model="owner/model", iterations=0)
    command = [sys.executable, "train_gsm8k.py", *run]
    place = {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path),
        "NO_PROXY": "*",
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
    }
    Hub.stops_after = 1000
    ended = subprocess.run(
        command, cwd=ROOT, env=os.environ | place, capture_output=True, text=True
    )
    Hub.released.set()
    assert ended.stderr.splitlines()[-1].startswith(
        "train_gsm8k: --model owner/model: cannot be brought here: "
    )
    assert not (tmp_path / "run").exists()
    Hub.stops_after = None
    subprocess.run(command, cwd=ROOT, env=os.environ | place, check=True)
    assert (tmp_path / "run" / "results.json").exists()


def test_an_interface_that_is_not_there_is_told_in_a_line(tmp_path):
    log, asked = tmp_path / "log", arguments(tmp_path / "run")
    assert 1 in statuses(log, by_itself, asked, GLOO_SOCKET_IFNAME="nowhere0")
    [line] = [line for line in log.read_text().splitlines() if line.startswith("train_gsm8k: ")]
    assert "nowhere0; see that GLOO_SOCKET_IFNAME" in line
    assert not (tmp_path / "run").exists()
