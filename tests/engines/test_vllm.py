"""vLLM in a process of its own: requests, options, environment, and how it ends.

All but the last test have fake_vllm/vllm.py in place of vLLM.
"""

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path

import psutil
import pytest
import torch
from helpers import (
    MODEL,
    PROMPT,
    check_seeds,
    check_stop_string,
    exact_logprobs,
    generate,
    make_prompts,
    token_logprobs,
)

from toprlib import vllm_client
from toprlib.language_model import load_tokenizer
from toprlib.records import InputError
from toprlib.settings import Settings
from toprlib.vllm_client import vllm_engine

FAKE = Path(__file__).parent / "fake_vllm"


@pytest.fixture
def fake_python(tmp_path):
    """An interpreter that has the fake."""
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH="{FAKE}" exec "{sys.executable}" "$@"\n')
    file.chmod(0o755)
    return file


def read_log(folder, rank=0):
    """What the fake has printed, which nobody takes for an answer."""
    lines = (folder / f"vllm-{rank}.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def vllm_processes(pid):
    """The processes of vLLM that a process or its descendants have started."""
    processes = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # another one, which has just ended
            if "vllm_worker" in " ".join(process.cmdline()):
                processes += [process, *process.children(recursive=True)]
    return processes


def still_running(processes):
    """Those that do not end within a minute; zombies have ended."""
    _, alive = psutil.wait_procs(processes, timeout=60)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


# ---- requests and answers ------------------------------------------------------------------------
def test_requests_and_answers(fake_python, tmp_path):
    """Three requests to one process, which has not started before the first and has ended after."""
    lm = load_tokenizer(MODEL)._replace(ends=[7, 1])
    prompts = make_prompts(lm, [PROMPT, "Q"])  # of at least 4 tokens, and 1
    lengths = [4, 4, 1, 1]
    changes = {"max_new_tokens": 4, "temperature": 0.5, "top_k": 9}
    settings = Settings(engine="vllm", vllm_python=fake_python, out=tmp_path, **changes)
    with vllm_engine(lm, MODEL, settings, ("Q:",), 200) as engine:
        assert vllm_processes(os.getpid()) == []
        for seed in (100, 200, 300):
            changes = {"temperature": 0} if seed == 300 else {}
            engine_then = engine._replace(generate=partial(engine.generate, **changes))
            completions = generate(engine_then, prompts, n=2, seed=seed)
            for k, fields in enumerate(chain(*completions)):
                token_ids = list(range(seed + k, seed + k + lengths[k]))
                logmu = [-1 / (t + 1) for t in range(lengths[k])]
                assert fields.pop("token_logmu_engine") == pytest.approx(logmu, abs=1e-7)
                text = lm.tokenizer.decode(token_ids)
                expected = {"completion": text, "token_ids": token_ids}
                assert fields == {**expected, "finish_reason": "length"}
        processes = vllm_processes(os.getpid())
        assert len(processes) == 2  # the worker, and one that it has started
    assert still_running(processes) == []
    _, *requests = read_log(tmp_path)
    for number, request in enumerate(requests, start=1):
        assert request["prompts"] == [{"prompt_token_ids": prompt.ids} for prompt in prompts]
        assert [sampling.pop("seed") for sampling in request["sampling"]] == [
            number * 100,
            number * 100 + 2,
        ]
        temperature = 0 if number == 3 else 0.5
        expected = {"n": 2, "temperature": temperature, "top_k": 9, "max_tokens": 4}
        expected |= {"stop": ["Q:"], "include_stop_str_in_output": True}
        expected |= {"stop_token_ids": [1, 7], "logprobs": 0}
        assert request["sampling"] == [expected] * 2
    assert len(requests) == 3


# ---- options and environment ---------------------------------------------------------------------
@pytest.fixture
def start(make_vllm_engine, lm, fake_python, tmp_path):
    """start(**changes): the arguments and the environment of the fake, once it has answered."""

    def start(**changes):
        generate(make_vllm_engine(fake_python, **changes), make_prompts(lm, ["Q"]))
        log = read_log(tmp_path, os.environ.get("RANK", "0"))
        entry = [entry for entry in log if "arguments" in entry][-1]
        return entry["arguments"], entry["environment"]

    return start


def test_options_on_a_cpu(start):
    arguments, environment = start(engine_gpus=2)
    expected = {"model": MODEL, "dtype": "float32", "max_model_len": 200}
    expected |= {"tensor_parallel_size": 2}
    expected |= {"enable_prefix_caching": True, "enable_chunked_prefill": False}
    assert arguments == expected | {"enforce_eager": True}
    assert int(environment["VLLM_CPU_KVCACHE_SPACE"]) > 0
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize("visible", ["", "4,5,6,7,0,1,2,3", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f"])
@pytest.mark.parametrize(
    ("local_rank", "gpus", "dtype"), [(0, 4, "bfloat16"), (4, 2, "float32"), (5, 1, "float32")]
)
def test_an_engine_sees_its_own_gpus(start, monkeypatch, visible, local_rank, gpus, dtype):
    """And nothing of torchrun."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))  # no memory to wait for
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    torchrun = {"LOCAL_RANK": str(local_rank), "RANK": "13", "WORLD_SIZE": "16", "GROUP_RANK": "1"}
    torchrun |= {"ROLE_RANK": "1", "MASTER_ADDR": "::1", "TORCHELASTIC_RUN_ID": "1"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    arguments, environment = start(model="owner/name", engine_gpus=gpus, dtype=dtype)
    names = visible.split(",") if visible else list("01234567")
    expected = names[local_rank : local_rank + gpus]
    assert environment["CUDA_VISIBLE_DEVICES"].split(",") == expected
    assert torchrun.keys().isdisjoint(environment)
    assert environment["VLLM_CACHE_ROOT"] == "/cache/engine-13"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"  # it ignores seeds
    assert 0.5 < arguments.pop("gpu_memory_utilization") < 1
    assert (arguments["model"], arguments["dtype"]) == ("owner/name", dtype)
    assert arguments["tensor_parallel_size"] == gpus
    assert "enforce_eager" not in arguments
    # FlashAttention does not take float32.
    assert ("attention_config" in arguments) == (dtype == "bfloat16")


# ---- how it ends ---------------------------------------------------------------------------------
CLIENT = """
import os, subprocess, sys
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
command = [*sys.argv[1:], str(os.getpid())]
worker = subprocess.Popen(command, start_new_session=True, **pipes)
print(worker.stdout.readline().decode(), end="", flush=True)
sys.stdin.read()
"""


def test_vllm_ends_when_its_client_is_killed(fake_python):
    """Else it would keep the GPU."""
    arguments = json.dumps({"model": MODEL, "max_model_len": 200})
    command = [sys.executable, "-c", CLIENT, fake_python, vllm_client.WORKER, arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as client:
        assert client.stdout.readline() == b"null\n"
        processes = vllm_processes(client.pid)
        assert len(processes) == 2
        client.kill()
    assert still_running(processes) == []


@pytest.mark.parametrize(
    ("max_tokens", "seed", "logged"),
    [
        (200, 0, "No module named 'vllm'"),
        (1001, 0, "max_model_len is too large"),
        (200, 666, ""),  # the fake ends in this request
    ],
)
def test_a_process_that_dies_is_an_error_with_its_log(fake_python, lm, max_tokens, seed, logged):
    folder = fake_python.parent
    python = Path(sys.executable) if "No module" in logged else fake_python
    settings = Settings(engine="vllm", vllm_python=python, out=folder)
    with (
        pytest.raises(InputError, match=r"exit status [13].*vllm-0\.log"),
        vllm_engine(lm, MODEL, settings, (), max_tokens) as engine,
    ):
        generate(engine, make_prompts(lm, [PROMPT]), seed=seed)
    assert logged in (folder / "vllm-0.log").read_text()
    assert still_running(vllm_processes(os.getpid())) == []


# ---- the real vLLM -------------------------------------------------------------------------------
@pytest.fixture
def python():
    """The interpreter that has vLLM: `make test-all` sets VLLM_PYTHON."""
    if not os.environ.get("VLLM_PYTHON"):
        pytest.skip("VLLM_PYTHON is not set: `make test-all` sets it")
    return Path(os.environ["VLLM_PYTHON"]).absolute()


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_samples_of_vllm_are_the_models(make_vllm_engine, python, lm, gpus):
    """On one CPU process, or on two of which each computes a half of every layer."""
    changes = {"temperature": 0.7, "top_k": 3, "max_new_tokens": 60, "engine_gpus": gpus}
    engine = make_vllm_engine(python, stop=("7 2 7", "The ans"), **changes)
    [prompt] = make_prompts(lm, [PROMPT])
    check_seeds(engine, prompt)
    [completions] = generate(engine, [prompt], n=300)
    check_stop_string(completions, lm.tokenizer, "The ans")
    for fields in completions[:20]:  # among all tokens, at temperature 1
        logprobs = exact_logprobs(lm, PROMPT, fields["token_ids"])
        expected = token_logprobs(logprobs, fields["token_ids"]).tolist()
        assert fields["token_logmu_engine"] == pytest.approx(expected, abs=1e-4)
    tokens = [fields["token_ids"][0] for fields in completions]
    logits = exact_logprobs(lm, PROMPT, tokens[:1])[0] / 0.7
    likeliest = logits.topk(3)
    allowed = likeliest.indices.tolist()
    assert set(tokens) <= set(allowed)
    # Five standard deviations, and one more for rare tokens, whose distribution is not normal.
    for token, p in zip(allowed, likeliest.values.softmax(0).tolist(), strict=True):
        deviation = math.sqrt(300 * p * (1 - p))
        assert abs(tokens.count(token) - 300 * p) < 5 * deviation + 1
