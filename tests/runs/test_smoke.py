"""`make smoke`: what it finds on machines that lack something, its runs; the script for Slurm."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from run_helpers import ROOT, read_lines

from scripts import smoke
from toprlib import preflight
from toprlib.files import to_lines, write_file

ENOUGH = int(1e12)


# ---- the machine ---------------------------------------------------------------------------------
def write_script(file, content):
    file.write_text(f"#!/bin/sh\n{content}\n")
    file.chmod(0o755)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with two GPUs and all that they need; returns a record whose values break it."""
    machine = SimpleNamespace(
        capabilities=[(9, 0), (8, 0)],
        free_memory=[79, 80],
        mode="Default",
        vllm="0.32.0",
        disk=dict.fromkeys(["/dev/shm", str(tmp_path / "hub"), str(tmp_path)], ENOUGH),
        cores={0, 2, 4, 6},
        memory=ENOUGH,
        tools=tmp_path,
        options=smoke.Options(processes=2, vllm_python=tmp_path / "python", out=tmp_path),
    )
    (tmp_path / "hub").mkdir()
    (tmp_path / "Python.h").touch()
    compiler = 'cat > /dev/null; [ "$2" = -I ] && [ -f "$3/Python.h" ]'
    write_script(tmp_path / "gcc", compiler)
    write_script(
        tmp_path / "python",
        f'case "$2" in *vllm*) cat {tmp_path}/vllm;; *) echo {tmp_path};; esac',
    )
    write_script(tmp_path / "nvidia-smi", f"cat {tmp_path}/mode {tmp_path}/mode")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(smoke.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_name": lambda gpu: "card",
        "get_device_capability": lambda gpu: machine.capabilities[gpu],
        "mem_get_info": lambda gpu: (machine.free_memory[gpu], 80),
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: machine.cores)
    monkeypatch.setattr(smoke, "group_folders", lambda _: [])
    monkeypatch.setattr(smoke, "free_memory", lambda: machine.memory)

    def disk_usage(folder):
        size = machine.disk[str(folder)]
        return SimpleNamespace(free=size, total=size)

    monkeypatch.setattr("shutil.disk_usage", disk_usage)
    return machine


def failures(machine):
    """The names of the checks that fail."""
    (machine.tools / "mode").write_text(f"{machine.mode}\n")
    (machine.tools / "vllm").write_text(f"{machine.vllm}\n")
    found = smoke.show(smoke.ANY_MACHINE, machine.options)
    found += smoke.show(smoke.MACHINE_WITH_GPU, machine.options)
    return [failure.partition(":")[0] for failure in found]


def test_a_machine_that_lacks_nothing(machine):
    assert failures(machine) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("cores", {"cores": {0, 2, 4}}),  # two processes and their engines
        ("memory left", {"memory": 15.9e9}),
        ("compute capability", {"capabilities": [(9, 0), (7, 5)]}),
        ("compute mode", {"mode": "Exclusive_Process"}),
        ("GPU memory", {"free_memory": [80, 71]}),
        ("vLLM", {"vllm": "0.31.0"}),
    ],
)
def test_a_machine_that_lacks_one_thing(machine, name, changes):
    vars(machine).update(changes)
    assert failures(machine) == [name]


def test_a_machine_with_too_little_disk(machine):
    for (folder, size), name in zip(
        {"/dev/shm": 64e6, "hub": 2.9e9, ".": 9.9e9}.items(),
        ["/dev/shm", "disk, hub", "disk, --out"],
        strict=True,
    ):
        folder = str(machine.tools / folder)
        machine.disk[folder] = size
        assert failures(machine) == [name]
        machine.disk[folder] = ENOUGH


def test_a_machine_without_compiler_or_headers(machine, monkeypatch):
    (machine.tools / "Python.h").unlink()
    assert failures(machine) == ["Python.h"]
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert failures(machine) == ["C compiler", "Python.h"]


def test_a_driver_that_torch_cannot_use(machine, monkeypatch):
    def refuse():
        raise RuntimeError("Error 802: system not yet initialized\nMore lines.")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    found = smoke.find_gpu(machine.options)
    assert not found.is_right
    assert "802" in found.text
    assert "More" not in found.text
    monkeypatch.setattr("shutil.which", lambda name: None)  # no driver is installed
    monkeypatch.setattr(smoke.Path, "exists", lambda path: False)
    assert smoke.find_gpu(machine.options).is_right


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        # The group of the controller cpuset is none of the controller cpu.
        ({"cpu/set/cpu.cfs_quota_us": "7\n", "cpu/set/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_cores_are_those_of_the_job_and_the_container(monkeypatch, tmp_path, files, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(preflight, "GROUPS", tmp_path)
    monkeypatch.setattr(preflight, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("3:cpu,cpuacct:/job\n5:cpuset:/set\n0::/job\n")
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    found = smoke.find_cores(smoke.Options())
    assert (float(found.text), found.is_right) == (cores, cores >= 1)


# ---- the runs ------------------------------------------------------------------------------------
def attempt(folder, metrics, mismatch=None):
    """A finished run with these lines of metrics.jsonl."""
    iteration = folder / "iteration-1"
    iteration.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(line) + "\n" for line in metrics]
    (iteration / "metrics.jsonl").write_text("".join(lines))
    entry = {} if mismatch is None else {"engine_mismatch": mismatch}
    (folder / "results.json").write_text(json.dumps({"iterations": [entry]}))
    folder.with_suffix(".log").write_text("training: resumes after step 5 of 16\n")
    return smoke.Attempt(folder, 0.0, [0.0, 0.5, 0.8, 2.8], "bfloat16")


def test_a_run_whose_numbers_are_wrong(tmp_path):
    steps = [{"step": step, "log_ratio_neg_q05": -0.2 * step} for step in range(1, 17)]
    run = attempt(tmp_path / "run", steps, {"mean": -0.9, "mean_per_token": -0.009})
    for find in (smoke.find_log_ratio, smoke.find_mismatch, smoke.find_checkpoint):
        assert find(run).is_right
    assert smoke.find_step(run).text.startswith("0.500 s")
    run = attempt(tmp_path / "run", steps, {"mean": -1.1, "mean_per_token": -0.011})
    assert not smoke.find_mismatch(run).is_right
    run = attempt(tmp_path / "run", [{"step": 1, "log_ratio_neg_q05": -5.1}, *steps[1:]])
    assert not smoke.find_log_ratio(run).is_right
    assert smoke.find_mismatch(run).is_right  # the trainer's process has sampled
    for wrong in (steps[:15], [*steps[:5], *steps[4:]]):
        assert not smoke.find_checkpoint(attempt(tmp_path / "run", wrong)).is_right
    run.folder.with_suffix(".log").write_text("")
    assert not smoke.find_checkpoint(run).is_right


def test_speeds_are_read_from_the_times_of_files(tmp_path):
    run = attempt(tmp_path / "run", [{"step": 1}])
    iteration = run.folder / "iteration-1"
    write_file(iteration / "test-0.jsonl", to_lines([{"token_ids": [7]}]))
    write_file(iteration / "samples.jsonl", to_lines([{"token_ids": [7] * n} for n in (9, 3)]))
    os.utime(iteration / "samples.jsonl", (904, 904))
    for seconds, is_right in ((900, True), (901, False)):
        os.utime(iteration / "test-0.jsonl", (seconds, seconds))  # the run began at 0
        assert smoke.find_start(run).is_right == is_right
    assert smoke.find_tokens(run).text.startswith("4 tokens/s")  # 12 in 3 seconds


def make_smoke(folder, arguments):
    """`make smoke` on this machine, where the environment is there already."""
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    make = ["make", "--no-print-directory", "-f", ROOT / "Makefile", "-o", ".venv/ready"]
    command = [*make, "smoke", f"ARGS={arguments}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_and_a_run_of_two_processes_are_interrupted_and_resumed(tmp_path):
    (tmp_path / "out" / "one-process").mkdir(parents=True)
    (tmp_path / "out" / "one-process" / "results.json").touch()  # of an earlier command
    done = make_smoke(tmp_path, f"--processes 2 --seed 3 --out {tmp_path}/out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("all right")
    for name in ("one-process", "2-processes"):
        folder = tmp_path / "out" / name
        steps = [line["step"] for line in read_lines(folder / "iteration-1" / "metrics.jsonl")]
        assert steps == list(range(1, 17))
        assert json.loads((folder / "config.json").read_text())["seed"] == 3
        assert len(json.loads((folder / "results.json").read_text())["iterations"]) == 1
        assert len(list((folder / "iteration-1").glob("checkpoint-*"))) == 0


@pytest.mark.slow
def test_a_run_that_fails_ends_with_its_line(tmp_path):
    done = make_smoke(tmp_path, f"--model {tmp_path}/nowhere --out {tmp_path}/out")
    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if line.startswith("smoke: ")]
    assert "--model" in line
    assert f"{tmp_path}/nowhere" in line
    assert str(tmp_path / "out" / "one-process.log") in line


# ---- files for clusters --------------------------------------------------------------------------
def test_the_job_of_slurm_waits_for_the_run_that_it_ends(tmp_path):
    """Slurm's signal reaches the script alone, and its end would kill the run."""
    project = tmp_path / "topr"
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "activate").write_text(f"PATH={tmp_path}:$PATH\n")
    run = f"""trap 'sleep 0.5; echo "$@" > {tmp_path}/saved; exit 3' TERM
touch {tmp_path}/started
while true; do sleep 0.1; done"""
    write_script(tmp_path / "torchrun", run)
    script = ["bash", ROOT / "examples" / "slurm.sh", "--seed", "7"]
    with subprocess.Popen(script, env=os.environ | {"SCRATCH": str(tmp_path)}) as job:
        while not (tmp_path / "started").exists():
            assert job.poll() is None
            time.sleep(0.01)
        job.send_signal(signal.SIGTERM)
    assert job.returncode == 3
    arguments = (tmp_path / "saved").read_text().split()
    assert arguments[-4:] == ["--out", str(tmp_path / "paper"), "--seed", "7"]
    assert "paper" in arguments


def test_the_container_keeps_nothing_where_users_cannot_read():
    lines = (ROOT / "examples" / "Dockerfile").read_text().splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    assert [line for line in commands if "/root" in line or "~" in line] == []
