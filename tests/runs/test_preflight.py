"""What is refused before anything is loaded or written: machines and folders that are too small."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import run_helpers
import torch
from run_helpers import input_error, run_small

import train_gsm8k as gsm8k
from figures import scales
from tasks import math, verifier
from toprlib import files, language_model, preflight
from toprlib.distributed import process_group
from toprlib.preflight import RunSize, check_gpu

PAPER = gsm8k.PRESETS["paper"]
LLAMA_8B = 8_030_261_248  # parameters
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


# ---- GPUs ----------------------------------------------------------------------------------------
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
    check_gpu(replace(PAPER, engine="hf"))
    results = run_small(tmp_path / "run", preset="single-gpu", engine="hf", iterations=0)
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
    error = input_error(check_gpu, PAPER)
    assert error.option == "preset"
    assert reason.splitlines()[0] in str(error)


def test_presets_of_tiny_models_sample_in_this_process_on_every_machine(monkeypatch):
    """vLLM's attention for GPUs has no float32, and a machine with a GPU may lack vLLM."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    small = [gsm8k.Settings(), gsm8k.PRESETS["laptop"], verifier.SETTINGS["laptop"]]
    small += [scales.LAPTOP.base, scales.QUICK.base, scales.LAPTOP.verifier]
    assert {settings.engine_name for settings in small} == {"hf"}
    large = [*gsm8k.PRESETS.values(), *math.SETTINGS.values(), *verifier.SETTINGS.values()]
    for settings in large:
        is_for_gpus = settings.dtype == "bfloat16"
        assert settings.engine_name == ("vllm" if is_for_gpus else "hf")


def test_fewer_gpus_than_processes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    error = input_error(process_group().__enter__)
    assert "--nproc-per-node 4" in str(error)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # on each of two machines
    monkeypatch.setattr("torch.cuda.set_device", mock.Mock(side_effect=NotImplementedError))
    with pytest.raises(NotImplementedError):  # each process chooses its GPU
        process_group().__enter__()


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
    evaluation = sample * size.num_eval_samples
    assert preflight.disk_needed(replace(PAPER, iterations=0), size) == evaluation


@pytest.mark.parametrize("has_gpu", [False, True])
def test_memory_of_the_paper_s_run(monkeypatch, has_gpu):
    """Weights once on the way to GPUs; on a CPU two copies, a checkpoint and batches of samples.

    The plan of a run for GPUs is the same on a machine without one.
    """
    monkeypatch.setenv("TOPR_ON_CPU", "0" if has_gpu else "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    cache = 2 * 4 * 32 * 8 * 128  # keys and values of 32 layers with 8 heads of 128
    size = RunSize(LLAMA_8B, 7_473 * 16, 1_319 * 64, 1_100 + 512, cache)
    samples = 30 * 1_612 * (7_473 * 16 + 50_000)
    of_process = 6 * 10**9 if has_gpu else preflight.CPU_LIBRARIES + 3 * 40_000 * cache
    copies = 1 if has_gpu else 3
    expected = copies * 4 * LLAMA_8B + 8 * (samples + of_process)
    assert preflight.memory_needed(PAPER, size) == expected
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert preflight.memory_needed(PAPER, size) == expected - 6 * (samples + of_process)
    without_vllm = preflight.memory_needed(replace(PAPER, engine="hf"), size)
    assert without_vllm == expected - 6 * (samples + of_process) - (6 * 10**9 if has_gpu else 0)


@pytest.mark.parametrize("sizes", [(10, 30), (30, 10)])
def test_memory_of_a_small_run_is_that_of_its_larger_part(sizes, monkeypatch):
    """Keys and values of fewer tokens than a batch may have: of its samples, or of its tests."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    size = RunSize(1_000, *sizes, max_tokens=100, cache_bytes=5_000)
    settings = gsm8k.Settings()
    without_cache = preflight.memory_needed(settings, size._replace(cache_bytes=0))
    assert preflight.memory_needed(settings, size) - without_cache == 30 * 100 * 5_000


MEASURE = """
import train_gsm8k
train_gsm8k.main("train_gsm8k", "", train_gsm8k.gsm8k_task)
with open("/proc/self/status") as status:  # ru_maxrss would begin with the size of the parent
    [peak] = [line.split()[1] for line in status if line.startswith("VmHWM:")]
print(1024 * int(peak))
"""


def test_memory_of_a_run_on_a_cpu_is_near_what_it_uses(tmp_path, lm):
    changes = {"problems": 20, "max_new_tokens": 96, "examples": 32, "test_problems": 0}
    settings = replace(gsm8k.Settings(), out=tmp_path / "run", **changes)
    options = ["--problems", "20", "--max-new-tokens", "96", "--examples", "32"]
    options += ["--test-problems", "0", "--out", str(settings.out)]
    command = [sys.executable, "-c", MEASURE, *options]
    done = subprocess.run(command, cwd=run_helpers.ROOT, capture_output=True, text=True, check=True)
    actual = int(done.stdout.splitlines()[-1])
    size = preflight.measure_run(settings, lm, 39 + 96, 20 * settings.n, 0)
    assert 0.6 < preflight.memory_needed(settings, size) / actual < 1.5


GROUPS = [  # lines of /proc/self/cgroup, then files with limits and uses; 700,000 are left by each
    # version 2: a Slurm job, whose step has no limit of its own
    (
        "0::/slurm/job_7/step_0\n",
        {
            "slurm/job_7/step_0/memory.max": "max\n",
            "slurm/job_7/memory.max": "1000000\n",
            "slurm/job_7/memory.stat": "anon 300000\nfile 600000\n",
            "slurm/memory.max": "9000000\n",
            "slurm/memory.stat": "anon 300000\n",
        },
    ),
    # version 2: a container, which sees its own group as the root
    ("0::/\n", {"memory.max": "1000000\n", "memory.stat": "anon 300000\nfile 600000\n"}),
    # version 1: the limit of the outer group counts, too
    (
        "9:cpu,cpuacct:/job\n4:memory:/slurm/job_7\n0::/\n",
        {
            "memory/slurm/job_7/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/slurm/job_7/memory.stat": "rss 5\ntotal_rss 300000\n",
            "memory/slurm/memory.limit_in_bytes": "1000000\n",
            "memory/slurm/memory.stat": "rss 5\ntotal_rss 300000\n",
            "memory/job/memory.limit_in_bytes": "7\n",
            "memory/job/memory.stat": "total_rss 1\n",
        },
    ),
    # version 1: a container whose path is that of its host
    (
        "4:memory:/docker/0a1b\n",
        {
            "memory/memory.limit_in_bytes": "1000000\n",
            "memory/memory.stat": "total_rss 300000\n",
        },
    ),
]


@pytest.mark.parametrize(("own_groups", "limits"), GROUPS)
def test_free_memory_is_that_of_the_machine_the_job_or_the_container(
    own_groups, limits, tmp_path, monkeypatch
):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1_024_000))
    monkeypatch.setattr(preflight, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(preflight, "OWN_GROUPS", tmp_path / "own")
    assert preflight.free_memory() == 1_024_000
    (tmp_path / "own").write_text(own_groups)
    assert preflight.free_memory() == 1_024_000
    for name, content in limits.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    assert preflight.free_memory() == 700_000
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=600_000))
    assert preflight.free_memory() == 600_000


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
