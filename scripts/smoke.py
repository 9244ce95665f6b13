"""Try a machine: what it has, then a small run that is interrupted and resumed.

    python scripts/smoke.py                          # or: make smoke
    python scripts/smoke.py --model DIR --data DIR   # where the hub cannot be reached

Each line is a check with its result and its bound. The program ends with "all right", or with exit
status 1, the first failed check and its fix. On GPUs it tries the preset single-gpu,
which the hub sends 1 GB for: about five minutes on one GPU, and more with two processes on two.
Without a GPU it tries the preset laptop, in under a minute.
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import tyro  # noqa: E402
from huggingface_hub import constants  # noqa: E402

from toprlib.command import command  # noqa: E402
from toprlib.files import remove  # noqa: E402
from toprlib.metrics import START_TOLERANCE  # noqa: E402
from toprlib.preflight import free_memory, group_folders, why_no_gpu  # noqa: E402
from toprlib.records import InputError  # noqa: E402
from toprlib.results import MISMATCH_TOLERANCE  # noqa: E402
from toprlib.settings import AtLeastZero, Count  # noqa: E402

GIGABYTE = 1e9
STEPS = 16  # of the optimizer
SAVE_EVERY = 5  # steps between two checkpoints
SMALL = f"""
    --problems 16 --n 8 --batch-size 8 --examples {8 * STEPS} --save-every {SAVE_EVERY}
    --test-problems 8 --eval-samples 16 --k 8 --evals-per-epoch 1
"""
# The measured tokens per second and seconds per step of a card, by its name. None yet.
EXPECTED: dict[str, tuple[float, float]] = {}


@dataclass(frozen=True)
class Options:
    """What to try."""

    model: str | None = None
    """folder or hub name; default: that of the preset single-gpu, or laptop without a GPU"""
    data: str | None = None
    """folder or hub name of the problems; default: the preset's"""
    processes: Count | None = None
    """processes of a second run by torchrun; default: 2 with two GPUs, else no second run"""
    vllm_python: Path | None = None
    """interpreter that has vLLM; default on a GPU: this one; without a GPU: vLLM is not tried"""
    seed: AtLeastZero = 0
    """seed of the runs"""
    out: Path = Path("runs/smoke")
    """folder to write into"""

    @property
    def most_processes(self) -> int:
        """The most processes of a run."""
        return self.processes or 1


class Found(NamedTuple):
    """The result of a check, and whether it is right."""

    text: str
    is_right: bool


class Check(NamedTuple):
    """One check. bound, fix: for the reader."""

    name: str
    bound: str
    find: Callable[..., Found]
    fix: str


# ---- the machine ---------------------------------------------------------------------------------
def find_python(options: Options) -> Found:
    """The version of the interpreter that trains."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Found(version, sys.version_info >= (3, 11))


def find_cores(options: Options) -> Found:
    """The cores that this process may use: of the machine, the job and the container."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in group_folders("cpu"):
        with suppress(OSError, ValueError):  # another version; "max", if there is no limit
            quota, period = (folder / "cpu.max").read_text().split()
            cores = min(cores, int(quota) / int(period))
        with suppress(OSError, ValueError):
            quota = int((folder / "cpu.cfs_quota_us").read_text())  # -1, if there is no limit
            period = int((folder / "cpu.cfs_period_us").read_text())
            cores = min(cores, quota / period) if quota > 0 else cores
    needed = 2 * options.most_processes if has_gpu() else 1
    return Found(f"{cores:g}", cores >= needed)


def find_memory(options: Options) -> Found:
    """The memory that is left on the machine, in the job and in the container."""
    needed = 8 * options.most_processes if has_gpu() else 1.5
    return at_least(free_memory(), needed)


def find_disk(options: Options) -> Found:
    """The free space in the folder of the runs."""
    return at_least(free_disk(options.out), 10 if has_gpu() else 0.1)


def find_hub_cache(options: Options) -> Found:
    """The free space for models and data of the hub."""
    return at_least(free_disk(Path(constants.HF_HUB_CACHE)), 3)


def free_disk(folder: Path) -> int:
    """Bytes that are free where a folder is, or will be."""
    folders = [folder.absolute(), *folder.absolute().parents]
    existing = next(each for each in folders if each.is_dir())
    return shutil.disk_usage(existing).free


def at_least(size: float, gigabytes: float) -> Found:
    """A size in bytes, which should reach so many gigabytes."""
    return Found(f"{size / GIGABYTE:,.1f} GB", size >= gigabytes * GIGABYTE)


# ---- the GPUs ------------------------------------------------------------------------------------
def has_gpu() -> bool:
    """Whether torch can use a GPU."""
    return torch.cuda.is_available()


def gpus() -> range:
    """Their numbers."""
    return range(torch.cuda.device_count())


def find_gpu(options: Options) -> Found:
    """The cards and the driver."""
    if has_gpu():
        names = {torch.cuda.get_device_name(gpu) for gpu in gpus()}
        drivers = set(ask_nvidia_smi("driver_version"))
        driver = f", driver {', '.join(drivers)}" if drivers else ""
        return Found(f"{len(gpus())} x {', '.join(names)}{driver}", True)
    is_installed = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    if not is_installed:
        return Found("none", True)
    return Found(f"none that torch can use ({why_no_gpu()})", False)


def ask_nvidia_smi(field: str) -> list[str]:
    """A field of each GPU; nothing without the program."""
    asked = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    with suppress(OSError):
        return subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
    return []


def find_capability(options: Options) -> Found:
    """The lowest compute capability."""
    lowest = min(torch.cuda.get_device_capability(gpu) for gpu in gpus())
    return Found(f"{lowest[0]}.{lowest[1]}", lowest >= (8, 0))


def find_compute_mode(options: Options) -> Found:
    """Whether the trainer and the engine may use a GPU together."""
    modes = set(ask_nvidia_smi("compute_mode")) or {"unknown"}
    return Found(", ".join(modes), modes <= {"Default", "unknown"})


def find_gpu_memory(options: Options) -> Found:
    """The least share of a GPU's memory that is free."""
    shares = []
    for gpu in gpus():
        free, total = torch.cuda.mem_get_info(gpu)
        shares.append(free / total)
    return Found(f"{100 * min(shares):.0f} % free", min(shares) >= 0.9)


def find_shared_memory(options: Options) -> Found:
    """The size of /dev/shm, through which the processes of a machine exchange tensors."""
    size = shutil.disk_usage("/dev/shm").total
    return Found(f"{size / GIGABYTE:,.1f} GB", options.most_processes == 1 or size >= GIGABYTE)


def engine_python(options: Options) -> str:
    """The interpreter that runs vLLM."""
    return str(options.vllm_python or sys.executable)


def ask_python(python: str, code: str) -> str:
    """What an interpreter prints; nothing if it cannot be run."""
    with suppress(OSError):
        return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
    return ""


def find_vllm(options: Options) -> Found:
    """The version of vLLM."""
    code = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    version = ask_python(engine_python(options), code)
    return Found(version or "none", version == "0.32.0")


def find_compiler(options: Options) -> Found:
    """The C compiler with which Triton compiles vLLM's kernels."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return Found(compiler or "none", compiler is not None and shutil.which(compiler) is not None)


def find_headers(options: Options) -> Found:
    """Whether the compiler finds Python.h, of the Python that runs vLLM."""
    code = (
        "import sysconfig; scheme = sysconfig.get_default_scheme().replace('_local', '_prefix');"
        "print(sysconfig.get_paths(scheme)['include'])"
    )
    include = ask_python(engine_python(options), code)
    compiler = find_compiler(options).text
    compiling = [compiler, "-fsyntax-only", "-I", include, "-x", "c", "-"]
    source = "#include <Python.h>"
    with suppress(OSError):
        tried = subprocess.run(compiling, input=source, text=True, capture_output=True)
        return Found(include, tried.returncode == 0)
    return Found("not tried", False)


ANY_MACHINE = [
    Check("Python", "3.11 or newer", find_python, "make PYTHON=python3.12 .venv/ready"),
    Check(
        "GPU",
        "one that torch can use, for single-gpu and paper",
        find_gpu,
        "install driver 580 or newer; error 802: sudo systemctl start nvidia-fabricmanager",
    ),
    Check(
        "cores",
        "2 for each process on a GPU, else 1",
        find_cores,
        "raise the job's limit: --cpus-per-task of Slurm, --cpus of docker",
    ),
    Check(
        "memory left",
        "8 GB for each process on a GPU, else 1.5 GB",
        find_memory,
        "end other programs, or raise the job's limit: --mem of Slurm, --memory of docker",
    ),
    Check(
        "disk, --out",
        "10 GB with a GPU, else 0.1 GB",
        find_disk,
        "choose an --out on another disk",
    ),
]
MACHINE_WITH_GPU = [
    Check(
        "compute capability",
        "8.0: A100, L4, RTX 30 or newer",
        find_capability,
        "this card has no bfloat16: use --engine hf --dtype float32",
    ),
    Check(
        "compute mode",
        "Default",
        find_compute_mode,
        "trainer and engine share each GPU: sudo nvidia-smi --compute-mode DEFAULT",
    ),
    Check("GPU memory", "90 % free", find_gpu_memory, "end other programs; nvidia-smi lists them"),
    Check(
        "/dev/shm",
        "1 GB for two processes",
        find_shared_memory,
        "NCCL needs it: docker run --ipc host, or --shm-size 8g",
    ),
    Check("disk, hub", "3 GB", find_hub_cache, "set HF_HOME to a folder on another disk"),
    Check(
        "vLLM",
        "0.32.0",
        find_vllm,
        "pip install -r requirements-gpu.txt -c constraints-gpu.txt; or set --vllm-python",
    ),
    Check(
        "C compiler",
        "gcc, clang, or CC",
        find_compiler,
        "apt-get install build-essential, or load the compiler's module",
    ),
    Check(
        "Python.h",
        "can be compiled",
        find_headers,
        "apt-get install python3-dev, or use a Python that has its headers",
    ),
]


# ---- the run -------------------------------------------------------------------------------------
class Attempt(NamedTuple):
    """A run that was interrupted after a checkpoint, and resumed by the same command."""

    folder: Path
    start: float  # of the first command, seconds since the epoch
    step_times: list[float]  # when each line of metrics.jsonl was seen
    dtype: str


def make_attempt(options: Options, folder: Path, launcher: Sequence[str]) -> Attempt:
    """Run, interrupt after a checkpoint, and resume. InputError if a command fails."""
    preset = "single-gpu" if has_gpu() else "laptop"
    arguments = [preset, *SMALL.split(), "--seed", str(options.seed), "--out", str(folder)]
    for option in ("model", "data", "vllm_python"):
        value = getattr(options, option)
        if value is not None:
            arguments += [f"--{option.replace('_', '-')}", str(value)]
    if options.vllm_python is not None:
        arguments += ["--engine", "vllm"]
    remove(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    run = [*launcher, str(ROOT / "train_gsm8k.py"), *arguments]
    start = time.time()
    step_times: list[float] = []
    watch(run, log, folder, step_times, stops_at_checkpoint=True)
    watch(run, log, folder, step_times)
    dtype = json.loads((folder / "config.json").read_text())["dtype"]
    return Attempt(folder, start, step_times, dtype)


def watch(
    run: Sequence[str],
    log: Path,
    folder: Path,
    step_times: list[float],
    stops_at_checkpoint: bool = False,
) -> None:
    """Run a command until it ends, or until its first checkpoint.

    step_times: gets the time at which each line of metrics.jsonl is seen. Raises InputError with
    the command's last line if it fails by itself.
    """
    iteration = folder / "iteration-1"
    is_stopped = False
    with log.open("a") as messages, subprocess.Popen(run, stdout=messages, stderr=messages) as it:
        try:
            while it.poll() is None:
                time.sleep(0.01)
                with suppress(FileNotFoundError):
                    lines = (iteration / "metrics.jsonl").read_bytes().count(b"\n")
                    step_times += [time.monotonic()] * (lines - len(step_times))
                checkpoint = iteration / f"checkpoint-{SAVE_EVERY}"
                if stops_at_checkpoint and not is_stopped and checkpoint.is_dir():
                    it.terminate()
                    is_stopped = True
        finally:
            it.send_signal(signal.SIGTERM)  # after Ctrl-C; nothing if it has ended
    if it.returncode != 0 and not is_stopped:
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("train_gsm8k: ")]
        last = (errors or lines or ["it printed nothing"])[-1]
        raise InputError(f"the run ended: {last}; all messages are in {log}")


def read_lines(file: Path) -> list[dict]:
    """The records of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def find_start(attempt: Attempt) -> Found:
    """The time until the first completions are written."""
    first = (attempt.folder / "iteration-1" / "test-0.jsonl").stat().st_mtime
    return Found(f"{first - attempt.start:.0f} s", first - attempt.start <= 900)


def find_tokens(attempt: Attempt) -> Found:
    """Tokens a second of the training samples, which follow the test samples."""
    iteration = attempt.folder / "iteration-1"
    tokens = 0
    for sample in read_lines(iteration / "samples.jsonl"):
        tokens += len(sample["token_ids"])
    seconds = os.path.getmtime(iteration / "samples.jsonl")
    seconds -= os.path.getmtime(iteration / "test-0.jsonl")
    speed = tokens / max(seconds, 1e-3)
    return Found(f"{speed:,.0f} tokens/s{expected(0)}", True)


def find_step(attempt: Attempt) -> Found:
    """The median time of a step."""
    seconds = [later - earlier for earlier, later in pairwise(attempt.step_times)]
    return Found(f"{statistics.median(seconds):.3f} s{expected(1)}", True)


def expected(index: int) -> str:
    """The measured value of this card, or that none was measured."""
    card = torch.cuda.get_device_name() if has_gpu() else "this processor"
    if card in EXPECTED:
        return f", measured on a {card}: {EXPECTED[card][index]:g}"
    return f", no expectation for {card}"


def find_mismatch(attempt: Attempt) -> Found:
    """How far the engine's log mu is from the trainer's, a token."""
    results = json.loads((attempt.folder / "results.json").read_text())
    mismatch = results["iterations"][0].get("engine_mismatch")
    if mismatch is None:
        return Found("none: the trainer's process samples", True)
    per_token = mismatch["mean_per_token"]
    text = f"{per_token:.2g} nats a token, {mismatch['mean']:.2g} a completion"
    return Found(text, abs(per_token) <= MISMATCH_TOLERANCE)


def find_log_ratio(attempt: Attempt) -> Found:
    """The largest log-ratio of step 1 among its quantiles."""
    first = read_lines(attempt.folder / "iteration-1" / "metrics.jsonl")[0]
    sizes = [abs(value) for name, value in first.items() if name.startswith("log_ratio")]
    return Found(f"{max(sizes):.2g} nats", max(sizes) <= START_TOLERANCE[attempt.dtype])


def find_checkpoint(attempt: Attempt) -> Found:
    """Whether the run has each step once, though it was interrupted."""
    lines = read_lines(attempt.folder / "iteration-1" / "metrics.jsonl")
    steps = [line["step"] for line in lines]
    log = attempt.folder.with_suffix(".log").read_text()
    resumed = re.search(r"resumes after step (\d+)", log)
    is_right = steps == list(range(1, STEPS + 1)) and resumed is not None
    text = f"resumed after step {resumed[1]} of {STEPS}" if resumed else "not read"
    return Found(text, is_right)


RUN = [
    Check(
        "first completions",
        "900 s",
        find_start,
        "a first start compiles and reads for minutes: try again; vllm-0.log has the messages",
    ),
    Check("sampling", "no bound", find_tokens, ""),
    Check("a training step", "no bound", find_step, ""),
    Check(
        "engine less trainer",
        f"{MISMATCH_TOLERANCE} nats a token",
        find_mismatch,
        "the engine samples from another distribution: try another version of vLLM, or --engine hf",
    ),
    Check(
        "log-ratio, step 1",
        f"{START_TOLERANCE['float32']:g} nats, {START_TOLERANCE['bfloat16']:g} in bfloat16",
        find_log_ratio,
        "scoring and training compute different numbers: report the card and the versions",
    ),
    Check(
        "checkpoint",
        "written, read back",
        find_checkpoint,
        "the folder of --out must keep files and locks: choose an --out on a local disk",
    ),
]


# ---- the program ---------------------------------------------------------------------------------
def show(checks: Sequence[Check], subject: Options | Attempt) -> list[str]:
    """Print a line for each check; returns what failed, each with its fix."""
    failures = []
    for check in checks:
        found = check.find(subject)
        word = "ok" if found.is_right else "FAILED"
        print(f"{word:7}{check.name:20}{found.text}   [{check.bound}]", flush=True)
        if not found.is_right:
            failures.append(f"{check.name}: {found.text}; {check.fix}")
    return failures


def main() -> None:
    """Run all checks; stop after the first group in which one fails."""
    with command("smoke"):
        options = tyro.cli(Options, description=__doc__)
        if options.processes is None and len(gpus()) >= 2:
            options = replace(options, processes=2)
        start = time.monotonic()
        failures = show(ANY_MACHINE, options)
        if has_gpu():
            failures += show(MACHINE_WITH_GPU, options)
        launchers = {"one-process": [sys.executable]}
        if options.processes is not None:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
            launchers[f"{options.processes}-processes"] = [*torchrun, str(options.processes), "--"]
        for name, launcher in launchers.items():
            if not failures:
                print(f"a run of {STEPS} steps in {options.out / name}", flush=True)
                failures = show(RUN, make_attempt(options, options.out / name, launcher))
        if failures:
            raise InputError(failures[0])
        print(f"all right, after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
