"""The preset `paper` at small size, on processors: two ranks, each with a vLLM of its own, killed and left alone."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from killing import lines

import train_gsm8k as gsm8k
from pipeline.models.language_model import load_model

PROBLEMS, CANDIDATES, STEPS = 16, 16, 12
SMALL = (
    "paper --shots 0 --engine vllm --iterations 2 --composition anna_karenina --max-new-tokens 48"
    f" --problems {PROBLEMS} --candidates {CANDIDATES} --examples {8 * STEPS} --chunk 4 --save-every 3 --lr 1e-3"
    " --test-problems 8 --test-samples 6 --k 4"
).split()
TOLD = "train_gsm8k: stopped; what is done is kept, and the same command goes on"


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def descendants(pid):
    """The process and all that it has started, in that order."""
    return [pid, *(process.pid for process in psutil.Process(pid).children(recursive=True))]


@contextmanager
def started(folder, python):
    """The run under torchrun; it and all its children are killed at the end of the block."""
    usual = gsm8k.Settings()
    where = ["--model", usual.model, "--data", usual.data, "--vllm-python", str(python), "--out", str(folder)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with open(folder.with_suffix(".log"), "a") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOPR_ON_CPU": "1"}
        command = [*torchrun, "--", gsm8k.__file__, *SMALL, *where]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield process
        finally:
            for pid in descendants(process.pid) if process.poll() is None else ():
                os.kill(pid, signal.SIGKILL)
            process.wait()


def wait(process, is_reached):
    while not is_reached():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)


def ask_to_end(process, folder):
    """As a scheduler does that knows torchrun's process alone."""
    process.send_signal(signal.SIGTERM)
    assert process.wait() != 0
    assert TOLD in folder.with_suffix(".log").read_text()
    folder.with_suffix(".log").unlink()


def finish(folder, python):
    with started(folder, python) as process:
        assert process.wait() == 0, folder.with_suffix(".log").read_text()[-3000:]
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".log")
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def undisturbed(python, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, finish(folder, python)


@pytest.mark.slow
def test_killed_while_it_samples_and_trains_it_ends_with_the_same_bits(undisturbed, python, tmp_path):
    folder = tmp_path / "run"
    first, second = (folder / f"iteration-{number}" for number in (1, 2))
    a_chunk = 4 * CANDIDATES

    with started(folder, python) as process:
        wait(process, lambda: lines(first / "samples.jsonl.part-1") >= a_chunk)
    assert not (first / "samples.jsonl").exists()

    with started(folder, python) as process:
        wait(process, lambda: lines(first / "metrics.jsonl") >= 1)
        ask_to_end(process, folder)
    assert (first / f"checkpoint-{lines(first / 'metrics.jsonl')}").exists()

    with started(folder, python) as process:
        wait(process, lambda: lines(second / "samples.jsonl.part-1") >= a_chunk)
        ask_to_end(process, folder)
    assert not (second / "samples.jsonl").exists()

    with started(folder, python) as process:
        wait(process, lambda: (second / "checkpoint-3").exists() and lines(second / "metrics.jsonl") >= 4)
    assert not (second / "model").exists()

    found, expected = finish(folder, python), undisturbed[1]
    assert [name for name in {*expected, *found} if found.get(name) != expected.get(name)] == []


@pytest.mark.slow
def test_both_ranks_samples_are_there_and_each_model_draws_its_own(undisturbed):
    folder, _ = undisturbed
    assert json.loads((folder / "results.json").read_text())["device"] == "cpu, a rehearsal"
    config = json.loads((folder / "config.json").read_text())
    assert (config["ranks"], config["compute"], config["optimizer"]) == (2, "bfloat16", "adafactor")
    questions = [row["question"] for row in rows(Path(gsm8k.Settings().data) / "train.jsonl")[:PROBLEMS]]
    prompts = [f"Q: {question}\nA:" for question in questions for _ in range(CANDIDATES)]
    models = [gsm8k.Settings().model, folder / "iteration-1" / "model", folder / "iteration-2" / "model"]
    for number in (1, 2):
        here = folder / f"iteration-{number}"
        samples = rows(here / "samples.jsonl")
        assert [sample["prompt"] for sample in samples] == prompts
        assert len({str(sample["token_ids"]) for sample in samples}) > len(samples) / 4
        metrics = rows(here / "metrics.jsonl")
        assert [step["step"] for step in metrics] == list(range(1, STEPS + 1))
        assert abs(metrics[0]["log_ratio_neg_q50"]) < 0.02  # pi = mu, to bfloat16
        assert len(rows(here / f"test-{STEPS}.jsonl")) == 8 * 6
        drawn = {"test-0": models[0]} if number == 1 else {}
        drawn |= {"samples": models[number - 1], f"test-{STEPS}": models[number]}
        for name, model in drawn.items():
            errors = {path: mean_error(rows(here / f"{name}.jsonl")[::7], path) for path in models}
            assert {path for path in models if errors[path] < 0.02} == {model}, (number, name, errors)


def mean_error(samples, path):
    """Mean over samples of |log mu of the engine's tokens - that of the model at `path` in float32| per token."""
    model, errors = load_model(str(path)), []
    for sample in samples:
        prompt = model.tokenizer(sample["prompt"])["input_ids"]
        ids = torch.tensor([prompt + sample["token_ids"]])
        with torch.no_grad():
            known = model.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logps = known.gather(1, ids[0, len(prompt) :, None])[:, 0]
        errors.append((logps - torch.tensor(sample["token_logmu_engine"])).abs().mean())
    return torch.stack(errors).mean().item()
