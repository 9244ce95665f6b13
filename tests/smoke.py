"""Try a machine: its parts, then a small run that is interrupted, resumed and compared.

    python tests/smoke.py                          # or: make smoke
    python tests/smoke.py --model DIR --data DIR   # where the hub cannot be reached

Options are those of train_gsm8k.py. On GPUs the run is one of the preset single-gpu (1 GB), with
vLLM and a process for each GPU; otherwise one of the tiny model. The last lines are the accuracy
before and after the run, and "all right".
"""

import argparse
import filecmp
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.utils import collect_env

ROOT = Path(__file__).resolve().parent.parent
STEPS = 32  # of the optimizer
SAVE_EVERY = 5  # steps between two checkpoints
SMALL = f"""--problems 64 --n 8 --batch-size 16 --examples {16 * STEPS} --save-every {SAVE_EVERY}
    --test-problems 64 --eval-samples 8 --k 8 --evaluate-after"""
RATES = {"laptop": "1e-4", "single-gpu": "1e-5"}  # above the presets', since the steps are few
TOLERANCE = 0.01  # of a loss on GPUs, which add in another order each time


def check_machine(out: Path) -> None:
    """Print what the machine has; end the program if something is missing."""
    collect_env.main()
    gpus = torch.cuda.device_count()
    need = 10 if gpus else 0.1
    free = shutil.disk_usage(out).free / 1e9
    checks = {
        "torch sees no GPU, nvidia-smi does: install the driver that torch's CUDA needs": (
            gpus > 0 or shutil.which("nvidia-smi") is None
        ),
        "this GPU has no bfloat16: use --engine hf --dtype float32": (
            gpus == 0 or torch.cuda.is_bf16_supported(including_emulation=False)
        ),
        "NCCL needs 1 GB in /dev/shm: docker run --ipc host": (
            gpus < 2 or shutil.disk_usage("/dev/shm").total > 1e9
        ),
        f"{free:.1f} GB are free, {need} are needed: choose an --out on another disk": free > need,
    }
    failures = [message for message, is_fine in checks.items() if not is_fine]
    if failures:
        sys.exit("\n".join(f"smoke: {message}" for message in failures))


def make_command(out: Path, options: list[str]) -> list[str]:
    """The command of the small run."""
    gpus = torch.cuda.device_count()
    launcher = [sys.executable]
    if gpus > 1:
        launcher += ["-m", "torch.distributed.run", "--nproc-per-node", str(gpus), "--"]
    preset = "single-gpu" if gpus else "laptop"
    program = [str(ROOT / "train_gsm8k.py"), preset, *SMALL.split(), "--lr", RATES[preset]]
    program += options
    return [*launcher, *program, "--out", str(out)]


def interrupt(command: list[str], checkpoint: Path) -> None:
    """Start a command, and send it SIGTERM once it has written a checkpoint."""
    with subprocess.Popen(command) as run:
        while run.poll() is None and not checkpoint.is_dir():
            time.sleep(0.01)
        run.terminate()
    if run.returncode == 0 or not checkpoint.is_dir():
        sys.exit(f"smoke: the run ended by itself, with status {run.returncode}")


def read_losses(run: Path) -> list[tuple[int, float]]:
    """The number and the loss of each optimizer step."""
    lines = (run / "iteration-1" / "metrics.jsonl").read_text().splitlines()
    return [(step["step"], step["loss"]) for step in map(json.loads, lines)]


def compare(first: Path, second: Path) -> None:
    """End the program unless two runs are equal: on a CPU to the bit, on GPUs up to rounding."""
    losses = read_losses(first)
    again = read_losses(second)
    steps = [step for step, _ in again]
    if steps != list(range(1, STEPS + 1)):
        sys.exit(f"smoke: {second} has the steps {steps}: choose an --out on a local disk")
    difference = max(abs(one[1] - other[1]) for one, other in zip(losses, again, strict=True))
    names = [str(file.relative_to(first)) for file in first.rglob("*.json*")]
    _, different, missing = filecmp.cmpfiles(first, second, names, shallow=False)
    has_gpu = torch.cuda.is_available()  # where the last samples of vLLM differ, too
    if difference > TOLERANCE or (different + missing and not has_gpu):
        message = f"losses differ by {difference:.2g}; files that differ: {different + missing}"
        sys.exit(f"smoke: {message}; report the machine and its versions")


def print_accuracy(run: Path) -> None:
    """Print pass@1 of the test problems before and after a run."""
    results = json.loads((run / "results.json").read_text())
    [iteration] = results["iterations"]
    evaluations = {"before": results["before"], "after": iteration["after"]}
    for when, evaluation in evaluations.items():
        accuracy = evaluation["pass@1"]
        print(f"pass@1 {when}: {accuracy['mean']:.1%}, standard error {accuracy['se']:.1%}")


def main() -> None:
    """Check the machine, then make both runs."""
    parser = argparse.ArgumentParser(usage=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "smoke")
    arguments, options = parser.parse_known_args()
    first = arguments.out / "undisturbed"
    second = arguments.out / "interrupted"
    for run in (first, second):
        shutil.rmtree(run, ignore_errors=True)
    (second / "iteration-1").mkdir(parents=True)
    check_machine(arguments.out)

    subprocess.run(make_command(first, options), check=True)
    # Both train on the same samples: vLLM's differ between two runs.
    for name in ("config.json", "iteration-1/samples.jsonl", "iteration-1/test-0.jsonl"):
        shutil.copy(first / name, second / name)
    command = make_command(second, options)
    interrupt(command, second / "iteration-1" / f"checkpoint-{SAVE_EVERY}")
    subprocess.run(command, check=True)
    compare(first, second)
    print_accuracy(first)
    print("all right")


if __name__ == "__main__":
    main()
