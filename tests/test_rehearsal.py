"""The preset `paper` at small size, on processors: two ranks, each with a vLLM of its own, killed and left alone."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from killing import finish, lines, started, status, told, wait
from pipeline.models.language_model import load_model
from runs import json_lines

import train_gsm8k as gsm8k

PROBLEMS, CANDIDATES, STEPS = 16, 16, 12
USUAL = gsm8k.Settings()
SMALL = (
    f"paper --model {USUAL.model} --data {USUAL.data} --shots 0 --engine vllm --composition anna_karenina"
    f" --max-new-tokens 48 --problems {PROBLEMS} --candidates {CANDIDATES} --examples {8 * STEPS} --chunk 4"
    " --iterations 2 --save-every 3 --lr 1e-3 --test-problems 8 --test-samples 6 --k 4"
).split()


@pytest.fixture(scope="module")
def rehearsal(python):
    """What `started` and `finish` are to be told of a folder."""

    def rehearsal(folder):
        asked = [*SMALL, "--vllm-python", str(python), "--out", str(folder)]
        return {"folder": folder, "ranks": 2, "variables": {"TOPR_ON_CPU": "1"}, "asked": asked}

    return rehearsal


@pytest.fixture(scope="module")
def undisturbed(rehearsal, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return folder, finish(**rehearsal(folder))


@pytest.mark.slow
def test_ended_while_it_samples_and_killed_while_it_trains_it_ends_with_the_same_bits(
    undisturbed, rehearsal, tmp_path
):
    folder = tmp_path / "run"
    here = folder / "iteration-1"
    with started(**rehearsal(folder)) as process:
        wait(process, lambda: lines(here / "samples.jsonl.part-1") >= 4 * CANDIDATES)  # a chunk
        os.kill(
            process.pid, signal.SIGTERM
        )  # as a scheduler does that knows torchrun's process alone
        assert status(process) != 0
    [_] = [
        line
        for line in told(folder)
        if line.endswith("stopped; what is done is kept, and the same command goes on")
    ]
    assert not (here / "samples.jsonl").exists()
    with started(**rehearsal(folder)) as process:
        wait(
            process, lambda: (here / "checkpoint-3").exists() and lines(here / "metrics.jsonl") >= 4
        )
    assert not (here / "model").exists()
    assert finish(**rehearsal(folder)) == undisturbed[1]


@pytest.mark.slow
def test_both_ranks_samples_are_there_and_each_model_draws_its_own(undisturbed):
    folder, _ = undisturbed
    here = folder / "iteration-1"
    assert json.loads((folder / "results.json").read_text())["device"] == "cpu, a rehearsal"
    config = json.loads((folder / "config.json").read_text())
    assert (config["ranks"], config["compute"], config["optimizer"]) == (2, "bfloat16", "adafactor")
    questions = [row["question"] for row in json_lines(Path(USUAL.data) / "train.jsonl")[:PROBLEMS]]
    samples, metrics = json_lines(here / "samples.jsonl"), json_lines(here / "metrics.jsonl")
    assert [s["prompt"] for s in samples] == [
        f"Q: {q}\nA:" for q in questions for _ in range(CANDIDATES)
    ]
    assert len({str(sample["token_ids"]) for sample in samples}) > len(samples) / 4
    assert [step["step"] for step in metrics] == list(range(1, STEPS + 1))
    assert abs(metrics[0]["log_ratio_neg_q50"]) < 0.02  # pi = mu, to bfloat16
    tested = [len(json_lines(folder / f"iteration-{i}" / f"test-{STEPS}.jsonl")) for i in (1, 2)]
    assert tested == [8 * 16, 8 * 6]  # between iterations as many as `paper` has
    models = (USUAL.model, here / "model")
    for name, model in (
        ("test-0", models[0]),
        ("samples", models[0]),
        (f"test-{STEPS}", models[1]),
    ):
        errors = {
            path: mean_error(json_lines(here / f"{name}.jsonl")[::7], path) for path in models
        }
        assert {path for path in models if errors[path] < 0.02} == {model}, (name, errors)


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
