"""The real vLLM on the tiny model: its tokens and log-probabilities, what it feeds, and what happens when it dies."""

import json
import math
import os
import re
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
from chats import save_chat_model
from helpers import children

import train_gsm8k as gsm8k
from pipeline import dataset
from pipeline.models.chat import in_chat
from pipeline.models.language_model import load_model, token_logprobs
from pipeline.records import InputError, Sample, read_rows
from pipeline.sampling import SamplingParameters
from pipeline.vllm.client import vllm_engine

SMALL = gsm8k.Settings(
    engine="vllm", problems=16, n=8, max_new_tokens=64, test_problems=4, test_samples=6, k=4, curve_points=1, chunk=4
)
PROMPT = "Q: Ada has 31 apples and finds 45 more. How many apples does Ada have now?\nA:"


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


def is_worker(pid):
    return b"vllm/worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_alive(pid):
    """Whether it runs; one that has ended is a zombie as long as nobody asks for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left_of(processes):
    """Those that do not end within a minute; one that was killed lets go of its files a moment before it is gone."""
    until = time.monotonic() + 60
    while alive := [pid for pid in processes if is_alive(pid)]:
        if time.monotonic() > until:
            return alive
        time.sleep(0.1)
    return []


def session_of(worker):
    """The processes of a worker's session, itself included."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if is_alive(pid) and os.getsid(pid) == worker]


@pytest.mark.slow
def test_an_engine_of_two_processes_draws_what_one_draws_and_ends_whole(python, draw, lm, tmp_path):
    """Tensor parallelism, on a processor: a process for each half of every layer."""
    settings = replace(SMALL, vllm_python=python, engine_gpus=2)
    prompts, sampling = [PROMPT, PROMPT + " 31 +"], SamplingParameters(max_new_tokens=48)
    with vllm_engine(SMALL.model, lm, 200, settings, tmp_path / "vllm.log") as engine:
        found = [[], []]
        for number, completion in engine(prompts, 8, sampling, 3):
            found[number].append(completion)
        [worker] = [pid for pid in children(os.getpid()) if is_worker(pid) and len(session_of(pid)) > 1]
        processes = session_of(worker)
        assert len(processes) >= 3  # the worker and its two, besides what Python's multiprocessing has of its own
    assert not left_of(processes)
    for ours, theirs in zip(found, draw(sampling, prompts, 8, 3), strict=True):
        assert [completion.token_ids for completion in ours] == [completion.token_ids for completion in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one.token_logmu == pytest.approx(other.token_logmu, abs=1e-4)  # sums in another order


@pytest.mark.slow
def test_a_chat_ends_with_its_turn(python, tmp_path):
    """Llama 3's, whose end of turn neither the tokenizer nor the generation config of this model names."""
    folder = str(save_chat_model(tmp_path / "model", "llama3"))
    chat, settings = in_chat(load_model(folder)), replace(SMALL, vllm_python=python)
    with vllm_engine(folder, chat, 200, settings, tmp_path / "vllm.log") as engine:
        sampling = SamplingParameters(max_new_tokens=60)
        drawn = [completion for _, completion in engine([chat.chat.ask("Hi?")], 32, sampling, 0)]
    finished = [completion for completion in drawn if completion.finish_reason == "stop"]
    assert len(finished) > 24
    assert all(c.token_ids.index(chat.chat.end) == len(c.token_ids) - 1 for c in finished)
    assert all(c.text == chat.tokenizer.decode(c.token_ids[:-1]) for c in finished)
    samples = [Sample(prompt=chat.chat.ask("Hi?"), completion=c.text, token_ids=c.token_ids, reward=1.0) for c in drawn]
    rows = [[replace(example, row=i)] for i, example in enumerate(dataset.encode(samples, chat))]
    for [example], completion in zip(
        dataset.score(rows, dataset.epoch_steps(rows, 16, 16), chat, token_logprobs), drawn, strict=True
    ):
        assert completion.token_logmu == pytest.approx(example.token_logmu, abs=1e-4)  # both saw the same prompt


ON_TWO = (
    "laptop --engine vllm --engine-gpus 2 --problems 16 --n 4 --max-new-tokens 48 --test-problems 3 --test-samples 4"
)
ON_TWO += " --k 2 --curve-points 1 --chunk 2"


@pytest.mark.slow
def test_two_ranks_with_one_engine_lose_a_process_and_end_as_one_rank_does(python, tmp_path):
    """The leader draws for both. One of the engine's processes dies, then the leader; the same command goes on."""
    command = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2", "--"]
    command += [gsm8k.__file__, *ON_TWO.split(), "--vllm-python", str(python), "--out", str(tmp_path / "run")]
    part = tmp_path / "run" / "iteration-1" / "samples.jsonl.part-0"

    def killed(choose):
        """The output of the command, of which one process is killed once another chunk is there."""
        before = part.read_bytes().count(b"\n") if part.exists() else 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            while not part.exists() or part.read_bytes().count(b"\n") < before + 8:
                assert process.poll() is None, process.stdout.read()
                time.sleep(0.01)
            [worker] = [pid for leader in children(process.pid) for pid in children(leader) if is_worker(pid)]
            processes = session_of(worker)
            os.kill(choose(worker), signal.SIGKILL)
            output, _ = process.communicate()
        assert process.returncode != 0
        assert not left_of(processes)
        return output

    told = killed(lambda worker: max(session_of(worker)))  # the last that was started is one that computes
    assert "vLLM ended with exit status 1; its messages are in" in told
    kept = part.read_bytes()
    killed(parent_of)
    assert part.read_bytes().startswith(kept)
    subprocess.run(command, check=True, capture_output=True)
    assert [file.name for file in (tmp_path / "run").glob("vllm-*.log")] == ["vllm-0.log"]
    assert not list((tmp_path / "run" / "iteration-1").glob("*.part-*"))

    settings = gsm8k.read_settings([*ON_TWO.replace("--engine-gpus 2", "").split()], gsm8k.PRESETS)
    alone = replace(settings, vllm_python=python, iterations=0, out=tmp_path / "alone")
    gsm8k.experiment(alone, gsm8k.gsm8k_task(alone))
    drawn, expected = (read_rows(tmp_path / run / "iteration-1" / "test-0.jsonl", Sample) for run in ("run", "alone"))
    assert [sample.token_ids for sample in drawn] == [sample.token_ids for sample in expected]
    assert len(read_rows(tmp_path / "run" / "iteration-1" / "samples.jsonl", Sample)) == 64
    assert (tmp_path / "run" / "results.json").exists()


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


@pytest.fixture
def telling(tmp_path):
    """An interpreter that writes what it is given, and ends."""
    telling = tmp_path / "telling"
    telling.write_text(f'#!/bin/sh\nenv > {tmp_path}/seen\necho "$2" > {tmp_path}/options\n')
    telling.chmod(0o755)
    return telling


@pytest.mark.parametrize("visible", ["", "4,5,6,7,0,1,2,3", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h"])
def test_an_engine_sees_the_gpus_of_its_processes(telling, lm, monkeypatch, tmp_path, visible):
    """Two engines of a machine with eight GPUs, which may have names and be in any order."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    names, seen = visible.split(",") if visible else list("01234567"), []
    for local, gpus in ((0, 4), (4, 4), (5, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        settings = replace(SMALL, vllm_python=telling, engine_gpus=gpus)
        opened = vllm_engine(SMALL.model, lm, 200, settings, tmp_path / "vllm.log")
        with pytest.raises(InputError, match="exit status 0"), opened:
            pass
        environment = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
        seen.append(environment["CUDA_VISIBLE_DEVICES"].split(","))
        assert json.loads((tmp_path / "options").read_text())["tensor_parallel_size"] == gpus
    assert seen == [names[:4], names[4:], names[5:6]]


def test_engines_that_do_not_divide_a_machine_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")  # two machines
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for gpus in (3, 16):
        with pytest.raises(InputError, match=f"--engine-gpus {gpus}: must divide the 8 processes of a machine"):
            gsm8k.check(replace(SMALL, engine_gpus=gpus))
    gsm8k.check(replace(SMALL, engine_gpus=4))


def test_torchruns_variables_do_not_reach_vllm(telling, open_engine, monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(InputError, match="exit status 0"):
        open_engine(telling)
    seen = (tmp_path / "seen").read_text()
    assert "MASTER_ADDR" not in seen
    assert "RANK" not in seen
    assert "VLLM_ENABLE_V1_MULTIPROCESSING=0" in seen
    assert re.search(r"^VLLM_CACHE_ROOT=.*/engine-1$", seen, re.MULTILINE)  # 1 is this process's rank
    assert "VLLM_USE_FLASHINFER_SAMPLER=0" in seen  # else vLLM does not start on a node without nvcc
