"""What is refused before anything is loaded or written: a machine that a run does not suit."""

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
from filelock import FileLock
from huggingface_hub import constants
from run_helpers import SMALL, run_small

import train_gsm8k
from tasks import verifier
from toprlib import files, language_model, preflight
from toprlib.distributed import process_group
from toprlib.records import InputError
from toprlib.settings import Settings

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
ROOT = Path(train_gsm8k.__file__).parent
PAPER = train_gsm8k.PRESETS["paper"]
LLAMA_8B = 8_030_261_248  # parameters


# ---- GPU and compiler ----------------------------------------------------------------------------
@NO_GPU
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_a_preset_for_gpus_without_a_gpu(engine, monkeypatch):
    with pytest.raises(InputError) as raised:
        preflight.check_machine(replace(PAPER, engine=engine))
    assert raised.value.option == "preset"
    monkeypatch.setenv("TOPR_ON_CPU", "1")
    preflight.check_machine(replace(PAPER, engine=engine))


@NO_GPU
def test_the_verifier_s_command_checks_the_machine(tmp_path, monkeypatch):
    arguments = ["paper", "--generator-gpus", "1", "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", ["verifier", *arguments])
    with pytest.raises(SystemExit) as ended:
        verifier.main()
    assert ended.value.code == 1
    assert not (tmp_path / "run").exists()


@NO_GPU
def test_a_rehearsal_says_so_in_its_results(tmp_path, monkeypatch):
    monkeypatch.setenv("TOPR_ON_CPU", "1")
    results = run_small(tmp_path / "run", preset="single-gpu", iterations=0)
    assert results["device"] == "cpu, a rehearsal"


def test_fewer_gpus_than_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "8")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(InputError):
        process_group().__enter__()


def test_compiler_and_headers_are_tried_as_triton_uses_them(monkeypatch, tmp_path):
    """The compilers are scripts: a real one, and real headers, may be missing here."""
    python = tmp_path / "python"
    compiler = tmp_path / "gcc"
    include = tmp_path / "include"
    python.write_text(f"#!/bin/sh\necho {include}\n")
    compiler.write_text('#!/bin/sh\ncat > /dev/null\n[ "$2" = -I ] && [ -f "$3/Python.h" ]\n')
    for file in (python, compiler):
        file.chmod(0o755)
    include.mkdir()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert str(include) in preflight._compiler_problem(str(python))
    (include / "Python.h").touch()
    assert preflight._compiler_problem(str(python)) is None
    monkeypatch.setenv("PATH", str(include))  # without a compiler
    assert preflight._compiler_problem(str(python)) is not None


# ---- disk, memory and locks ----------------------------------------------------------------------
def test_disk_and_memory_are_checked_and_written_files_count_as_free(monkeypatch, tmp_path, lm):
    settings = replace(SMALL, out=tmp_path)
    inputs = (settings, lm, 200, 64, 4)
    monkeypatch.setattr(preflight, "SMALL_RUN", 0)
    monkeypatch.setattr(preflight, "free_memory", lambda: 10**10)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(InputError) as raised:
        preflight.check_room(*inputs)
    assert (raised.value.option, raised.value.file) == ("--out", str(tmp_path))
    (tmp_path / "vllm-0.log").write_bytes(bytes(10**8))
    preflight.check_room(*inputs)
    monkeypatch.setattr(preflight, "free_memory", lambda: 1000)
    with pytest.raises(InputError):
        preflight.check_room(*inputs)


def test_a_file_system_without_locks(monkeypatch, tmp_path):
    refuse = mock.Mock(side_effect=OSError(37, "No locks available"))
    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(InputError) as raised:
        run_small(tmp_path / "run")
    assert raised.value.option == "--out"
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_folder_that_another_node_does_not_see(monkeypatch, tmp_path):
    """As on the second of two nodes: rank zero has made the folder somewhere else."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(files, "_lock", lambda *_: None)
    with (
        pytest.raises(InputError) as raised,
        files.locked_run_folder(tmp_path / "run", {}),
    ):
        pass
    assert raised.value.option == "--out"


@pytest.mark.parametrize(("optimizer", "weights"), [("adafactor", 1), ("adamw", 3)])
def test_the_disk_of_the_paper_s_run(optimizer, weights):
    """Five models of 32 GB and two checkpoints; before each iteration and after the last 64 samples
    of 1,319 problems."""
    size = preflight.RunSize(LLAMA_8B, 7_473 * 16, 1_319 * 64, 1_100 + 512)
    samples = 30 * 1_612 * (5 * size.num_samples + 6 * size.num_eval_samples)
    actual = preflight.disk_needed(replace(PAPER, optimizer=optimizer), size)
    assert actual == (5 + 2 * weights) * 4 * LLAMA_8B + samples


@pytest.mark.parametrize(("has_gpu", "copies"), [(False, 3), (True, 1)])
def test_the_memory_of_the_paper_s_run(monkeypatch, has_gpu, copies):
    """On a CPU two copies of the weights and a checkpoint; samples in each of eight processes."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    size = preflight.RunSize(LLAMA_8B, 7_473 * 16, 1_319 * 64, 1_612)
    per_process = 30 * 1_612 * (size.num_samples + 50_000) + has_gpu * 6 * 10**9
    assert preflight.memory_needed(PAPER, size) == copies * 4 * LLAMA_8B + 8 * per_process


def test_free_memory_is_the_machine_s_or_the_container_s(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1_024_000))
    monkeypatch.setattr(preflight, "CGROUP", tmp_path)
    assert preflight.free_memory() == 1_024_000
    (tmp_path / "memory.stat").write_text("anon 300000\nfile 600000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.free_memory() == 1_024_000
    (tmp_path / "memory.max").write_text("1000000\n")
    assert preflight.free_memory() == 700_000


# ---- the hub -------------------------------------------------------------------------------------
class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with one model, and another one whose licence has to be accepted.

    stops_after: it falls silent after so many bytes of the weights.
    """

    protocol_version = "HTTP/1.1"
    folder = Path(Settings().model)
    commit = "0" * 40
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
        is_api = self.path.startswith("/api/")
        content = b"{}"
        if is_api:
            content = self.describe_model()
        elif "/resolve/" in self.path and file.exists():
            content = file.read_bytes()
        self.send_response(200 if file.exists() or is_api else 404)
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

    def describe_model(self):
        names = [file.name for file in self.folder.iterdir()]
        content = {
            "id": "owner/model",
            "sha": self.commit,
            "siblings": [{"rfilename": name} for name in names],
        }
        if "/tree/" in self.path:
            content = [{"type": "file", "path": name, "size": 0, "oid": "0"} for name in names]
        return json.dumps(content).encode()


@pytest.fixture(scope="module")
def hub():
    """The address of a hub that answers here."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("is_offline", [False, True])
def test_a_licence_to_accept_or_no_hub(hub, tmp_path, monkeypatch, is_offline):
    monkeypatch.setenv("NO_PROXY", "*")
    template = f"{hub}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    # The library has read the environment already.
    monkeypatch.setattr(constants, "ENDPOINT", hub)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    with pytest.raises(InputError) as raised:
        run_small(tmp_path / "run", model="owner/licensed")
    assert (raised.value.option, raised.value.file) == ("--model", "owner/licensed")
    assert not (tmp_path / "run").exists()


def test_a_model_that_is_larger_than_the_disk_is_not_downloaded(monkeypatch):
    listed = [
        SimpleNamespace(file_size=5e9, will_download=True),
        SimpleNamespace(file_size=9e9, will_download=False),
    ]
    for free, num_calls in ((4e9, 1), (6e9, 2)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("shutil.disk_usage", lambda folder, usage=usage: usage)
        fetch = mock.Mock(side_effect=[listed, OSError("it is fetched")])
        monkeypatch.setattr(language_model, "snapshot_download", fetch)
        with pytest.raises(InputError):
            language_model.download_model("owner/model")
        assert fetch.call_count == num_calls


@pytest.mark.slow
def test_a_hub_that_falls_silent_and_a_repeated_command(hub, tmp_path):
    out = tmp_path / "run"
    arguments = "--model owner/model --iterations 0 --test-problems 2 --eval-samples 2 --k 2"
    command = [sys.executable, "train_gsm8k.py", *arguments.split(), "--out", str(out)]
    environment = os.environ | {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path),
        "NO_PROXY": "*",
        "HF_HUB_DOWNLOAD_TIMEOUT": "1",
    }
    Hub.stops_after = 1000
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    Hub.released.set()
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    Hub.stops_after = None
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert (out / "results.json").exists()
    shutil.rmtree(out)
