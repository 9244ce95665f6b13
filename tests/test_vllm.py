"""The real vLLM on the tiny model: its tokens and log-probabilities, what it feeds, and what happens when it dies."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_gsm8k as gsm8k
from pipeline import dataset
from pipeline.models.language_model import token_logprobs
from pipeline.records import InputError, Sample, read_rows
from pipeline.sampling import SamplingParameters
from pipeline.vllm.client import vllm_engine

SMALL = gsm8k.Settings(
    engine="vllm", problems=16, n=8, max_new_tokens=64, test_problems=4, test_samples=6, k=4, curve_points=1, chunk=4
)
PROMPT = "Q: Ada has 31 apples and finds 45 more. How many apples does Ada have now?\nA:"


@pytest.fixture(scope="module")
def python():
    """The interpreter that has vLLM: `make test-vllm` makes one and says where it is."""
    if not os.environ.get("VLLM_PYTHON"):
        pytest.skip("VLLM_PYTHON is not set: make test-vllm sets it")
    return Path(os.environ["VLLM_PYTHON"]).absolute()


@pytest.fixture(scope="module")
def draw(python, lm, tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with vllm_engine(SMALL.model, lm, 200, replace(SMALL, vllm_python=python), log) as engine:

        def draw(sampling, prompts=(PROMPT,), n=8, seed=0):
            found = [[] for _ in prompts]
            for number, completion in engine(prompts, n, sampling, seed):
                found[number].append(completion)
            return found

        yield draw


def test_the_same_seed_gives_the_same_completions_and_seeds_do_not_overlap(draw):
    sampling = SamplingParameters(max_new_tokens=24)
    two = draw(sampling, [PROMPT, PROMPT], n=8, seed=0)
    assert two == draw(sampling, [PROMPT, PROMPT], n=8, seed=0)
    assert two[1] == draw(sampling, n=8, seed=8)[0]  # a prompt's seeds begin where those of the prompt before it end
    assert two[0] != two[1]


def test_completions_keep_their_end_and_their_log_probabilities_are_the_models_own(draw, lm):
    completions = draw(SamplingParameters(max_new_tokens=64, top_k=3), n=16)[0]
    assert {completion.finish_reason for completion in completions} == {"stop"}
    samples = []
    for completion in completions:
        assert completion.token_ids[-1] == lm.tokenizer.eos_token_id
        assert completion.text == lm.tokenizer.decode(completion.token_ids[:-1])
        samples.append(Sample(prompt=PROMPT, completion=completion.text, token_ids=completion.token_ids, reward=1.0))
    rows = [[replace(example, row=i)] for i, example in enumerate(dataset.encode(samples, lm))]
    scored = dataset.score(rows, dataset.epoch_steps(rows, 16, 16), lm, token_logprobs)
    for completion, [example] in zip(completions, scored, strict=True):
        assert completion.token_logmu == pytest.approx(example.token_logmu, abs=1e-4)  # top-k 3 has not shifted them


def test_a_stop_string_is_kept_and_a_completion_at_the_limit_is_cut(draw, lm):
    stopped = draw(SamplingParameters(max_new_tokens=64, stop=(" The answer",)))[0]
    assert all(c.text.endswith(" The answer") for c in stopped if c.finish_reason == "stop" and "answer" in c.text)
    assert any("answer" in c.text for c in stopped)
    assert all(lm.text(c.token_ids) == c.text for c in stopped)
    for completion in draw(SamplingParameters(max_new_tokens=3))[0]:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)


@pytest.mark.parametrize("top_k", [500, 2])
def test_tokens_are_drawn_from_the_models_own_distribution(draw, lm, top_k):
    prompt, n = PROMPT + " 31 +", 3000
    found = Counter(c.token_ids[0] for c in draw(SamplingParameters(max_new_tokens=1, top_k=top_k), [prompt], n=n)[0])
    with torch.no_grad():
        probabilities = lm.model(torch.tensor([lm.tokenizer(prompt)["input_ids"]])).logits[0, -1].softmax(-1)
    kept, tokens = probabilities.topk(min(top_k, len(probabilities)))
    for token, p in zip(tokens.tolist(), (kept / kept.sum()).tolist(), strict=True):
        assert found[token] / n == pytest.approx(p, abs=5 * math.sqrt(p / n) + 1e-3)
    assert set(found) <= set(tokens.tolist())


def children(pid):
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in listed for child in file.read_text().split()}


def is_worker(pid):
    return b"vllm/worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_worker_ends_with_the_process_that_started_it(python, tmp_path):
    command = [sys.executable, gsm8k.__file__, "--engine", "vllm", "--vllm-python", str(python), "--out"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([*command, str(tmp_path / "run")], stdout=log, stderr=log)
    while not (workers := [pid for pid in children(process.pid) if is_worker(pid)]):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while Path(f"/proc/{workers[0]}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not Path(f"/proc/{workers[0]}").exists()


def test_what_vllm_samples_trains_the_model_and_its_death_loses_nothing(python, tmp_path):
    folder = tmp_path / "run"
    part = folder / "iteration-1" / "samples.jsonl.part-0"
    settings = replace(SMALL, out=folder, vllm_python=python)

    def kill_worker():
        while not part.exists() or part.read_bytes().count(b"\n") < 32:  # a chunk: four problems, eight samples each
            time.sleep(0.001)
        for pid in children(os.getpid()):
            if is_worker(pid):
                os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_worker)
    killer.start()
    with pytest.raises(InputError, match=r"vLLM ended with exit status -9; its messages are in .*vllm-0.log"):
        gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))
    killer.join()
    kept = part.read_bytes()

    results = gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))
    samples = read_rows(folder / "iteration-1" / "samples.jsonl", Sample)
    assert len(samples) == 128
    kept = [json.loads(line) for line in kept.splitlines()]
    assert [s.token_ids for s in samples[: len(kept)]] == [line["token_ids"] for line in kept]

    [entry] = results["iterations"]
    assert entry["engine_mismatch"]["largest"] < 1e-3
    assert entry["after"] != results["before"]
    metrics = [json.loads(line) for line in (folder / "iteration-1" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 8
    assert abs(metrics[0]["log_ratio_pos_q50"]) < 1e-4


# ---- what needs no vLLM ------------------------------------------------------------------------------------------


@pytest.fixture
def open_engine(lm, tmp_path):
    def open_engine(python):
        settings = replace(SMALL, vllm_python=python)
        with vllm_engine(SMALL.model, lm, 200, settings, tmp_path / "vllm.log") as engine:
            list(engine([PROMPT], 1, SamplingParameters(), 0))

    return open_engine


def test_an_interpreter_without_vllm_is_named(open_engine):
    with pytest.raises(
        InputError, match=r"--engine vllm: .*python.*No module named 'vllm' \(vLLM comes with requirements"
    ):
        open_engine(sys.executable)


def test_an_interpreter_that_is_none_is_named(open_engine, tmp_path):
    with pytest.raises(InputError, match=r"--vllm-python .*nowhere: cannot be run: No such file"):
        open_engine(tmp_path / "nowhere")


def test_a_worker_that_dies_is_told_with_its_status_and_log(open_engine, tmp_path):
    dying = tmp_path / "dying"  # a worker that starts, takes a request and ends
    dying.write_text("""#!/bin/sh\necho '{"ready": "0"}'\nread request\nexit 3\n""")
    dying.chmod(0o755)
    with pytest.raises(InputError, match=r"vLLM ended with exit status 3; its messages are in .*vllm.log"):
        open_engine(dying)


def test_torchruns_variables_do_not_reach_vllm(open_engine, monkeypatch, tmp_path):
    telling = tmp_path / "telling"
    telling.write_text(f"#!/bin/sh\nenv > {tmp_path}/seen\n")
    telling.chmod(0o755)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(InputError, match="exit status 0"):
        open_engine(telling)
    seen = (tmp_path / "seen").read_text()
    assert "MASTER_ADDR" not in seen
    assert "RANK" not in seen
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in seen
