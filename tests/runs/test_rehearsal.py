"""The preset `paper` at a small size on CPUs: two ranks, each with a vLLM of its own.

The run is stopped while it samples, killed while it trains, and then left alone.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from run_helpers import checksums, count_lines, read_lines

import train_gsm8k
from toprlib.language_model import load_model
from toprlib.results import MISMATCH_TOLERANCE
from toprlib.settings import Settings

ROOT = Path(train_gsm8k.__file__).parent
MODEL = Settings().model
DATA = Settings().data
PROBLEMS = 16
N = 16
STEPS = 12
OPTIONS = f"""
    paper --model {MODEL} --data {DATA} --shots 0 --engine vllm --composition anna_karenina
    --max-new-tokens 48 --problems {PROBLEMS} --n {N} --examples {8 * STEPS} --iterations 2
    --save-every 3 --lr 1e-3 --test-problems 8 --eval-samples 16 --k 4
"""


@pytest.fixture(scope="module")
def start(python):
    """folder -> a process of torchrun that runs the command in this folder; its log lies beside."""

    def start(folder):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--"]
        options = [*OPTIONS.split(), "--vllm-python", str(python), "--out", str(folder)]
        with log_of(folder).open("a") as log:
            return subprocess.Popen(
                [*torchrun, "train_gsm8k.py", *options],
                cwd=ROOT,
                env=os.environ | {"TOPR_ON_CPU": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    return start


def log_of(folder):
    return folder.with_suffix(".log")


def kill_all(process):
    """kill -9 torchrun and the ranks. These have sessions of their own, so killpg spares them."""
    for each in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            each.kill()
    process.kill()
    process.wait()


def wait_until(condition, process):
    while not condition():
        assert process.poll() is None, "the run has ended before"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert start(folder).wait() == 0, log_of(folder).read_text()[-3000:]
    return folder


@pytest.mark.slow
def test_stopped_and_killed_it_ends_with_the_same_files(undisturbed, start, tmp_path):
    folder = tmp_path / "run"
    first = folder / "iteration-1"
    process = start(folder)
    wait_until(lambda: count_lines(first / "test-0.jsonl") > 0, process)
    process.send_signal(signal.SIGTERM)  # as a scheduler does, which knows torchrun alone
    assert process.wait() != 0
    assert not (first / "samples.jsonl").exists()
    process = start(folder)
    has_checkpoint = (first / "checkpoint-3").exists
    wait_until(lambda: has_checkpoint() and count_lines(first / "metrics.jsonl") >= 4, process)
    kill_all(process)
    assert not (first / "model").exists()
    assert start(folder).wait() == 0, log_of(folder).read_text()[-3000:]
    assert checksums(folder) == checksums(undisturbed)


@pytest.mark.slow
def test_each_stage_samples_from_its_own_model(undisturbed):
    first = undisturbed / "iteration-1"
    results = json.loads((undisturbed / "results.json").read_text())
    assert results["device"] == "cpu, a rehearsal"
    for iteration in results["iterations"]:
        assert abs(iteration["engine_mismatch"]["mean_per_token"]) <= MISMATCH_TOLERANCE
    config = json.loads((undisturbed / "config.json").read_text())
    assert (config["ranks"], config["dtype"], config["optimizer"]) == (2, "bfloat16", "adafactor")
    expected = []
    for row in read_lines(Path(DATA) / "train.jsonl")[:PROBLEMS]:
        expected += [f"Q: {row['question']}\nA:"] * N
    samples = read_lines(first / "samples.jsonl")
    assert [sample["prompt"] for sample in samples] == expected
    assert len({str(sample["token_ids"]) for sample in samples}) > len(samples) / 4
    metrics = read_lines(first / "metrics.jsonl")
    assert [step["step"] for step in metrics] == list(range(1, STEPS + 1))
    assert abs(metrics[0]["log_ratio_neg_q50"]) < 0.02  # pi = mu, to bfloat16
    models = (MODEL, str(first / "model"))
    for name, model in (
        ("test-0", models[0]),
        ("samples", models[0]),
        (f"test-{STEPS}", models[1]),
    ):
        some = read_lines(first / f"{name}.jsonl")[::7]
        errors = {path: mean_error(some, path) for path in models}
        assert {path for path in models if errors[path] < 0.02} == {model}, (name, errors)


def mean_error(samples, path):
    """Mean over samples of |log mu by the engine - by the model at `path` in float32| per token."""
    lm = load_model(path)
    errors = []
    for sample in samples:
        [prompt_ids] = lm.prompt_ids([sample["prompt"]])
        ids = torch.tensor([prompt_ids + sample["token_ids"]])
        with torch.no_grad():
            logp = lm.model(ids).logits[0, len(prompt_ids) - 1 : -1].log_softmax(-1)
        exact = logp.gather(1, ids[0, len(prompt_ids) :, None]).sum()
        difference = exact - sum(sample["token_logmu_engine"])
        errors.append(difference.abs().item() / len(sample["token_ids"]))
    return sum(errors) / len(errors)
