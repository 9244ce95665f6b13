"""vLLM in a process of its own: its log-probabilities, what it feeds, and what happens when it dies."""

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Timer

import psutil
import pytest
import torch
from chats import save_chat_model
from engines import PROMPT, drawn, logps_after
from killing import finish, lines, started, status, wait
from runs import SMALL

import train_gsm8k as gsm8k
from pipeline.models.language_model import load_model
from pipeline.records import InputError, Sample, read_records
from pipeline.sampling import SamplingParameters
from pipeline.vllm import client
from pipeline.vllm.client import vllm_engine

SETTINGS = gsm8k.Settings(engine="vllm", max_new_tokens=64)


def has_the_models_own_logps(completion, lm, prompt):
    return completion.token_logmu_engine == pytest.approx(
        logps_after(lm, prompt, completion.token_ids)[0], abs=1e-4
    )


def test_log_probabilities_are_those_among_all_tokens_and_seeds_do_not_overlap(vllm, lm):
    sampling = SamplingParameters(max_new_tokens=64, top_k=3)
    two = drawn(vllm, sampling, [PROMPT, PROMPT])
    assert (
        two[1] == drawn(vllm, sampling, seed=8)[0]
    )  # a prompt's seeds begin where those of the prompt before it end
    assert all(has_the_models_own_logps(completion, lm, PROMPT) for completion in two[0])


HASHES = """
import sys
from vllm.config import ModelConfig
for path in iter(sys.stdin.readline, ""):
    print("hash", ModelConfig(path.strip(), dtype="float32").compute_hash(), flush=True)
"""


def test_what_vllm_compiles_for_one_iteration_it_finds_again_in_the_next(python, lm, tmp_path):
    """Its cache is named by a hash of the model's path, which is the same link for each model of a run."""
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([python, "-c", HASHES], stderr=subprocess.DEVNULL, **piped) as worker:

        def hash_of(path):
            print(path, file=worker.stdin, flush=True)
            return next(line for line in worker.stdout if line.startswith("hash"))

        by_link, by_folder = [], []
        for folder in (tmp_path / "first", tmp_path / "second"):
            lm.model.save_pretrained(folder)
            link = client.path_for_vllm(str(folder), tmp_path / "vllm-0.log")
            assert Path(link).samefile(folder)
            by_link.append(hash_of(link))
            by_folder.append(hash_of(folder))
        worker.stdin.close()
    assert by_link[0] == by_link[1]
    assert by_folder[0] != by_folder[1]
    assert client.path_for_vllm("owner/name", tmp_path / "vllm-0.log") == "owner/name"


def workers_of(pid):
    """The workers that a process has started, or its children have."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # another, which has just ended
            found += [process] if "vllm/worker" in " ".join(process.cmdline()) else []
    return found


def left_of(processes):
    """Those that do not end within a minute; one that nobody waits for is a zombie when it has ended."""
    return [
        p for p in psutil.wait_procs(processes, timeout=60)[1] if p.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.slow
def test_an_engine_of_two_processes_draws_what_one_draws_and_ends_whole_when_one_dies(
    python, vllm, lm, tmp_path
):
    """Tensor parallelism, on a processor: a process for each half of every layer."""
    settings = replace(SETTINGS, vllm_python=python, engine_gpus=2)
    prompts, sampling = [PROMPT, PROMPT + " 31 +"], SamplingParameters(max_new_tokens=48)
    with vllm_engine(SETTINGS.model, lm, 200, settings, tmp_path / "vllm.log") as engine:
        found = drawn(engine, sampling, prompts, n=4, seed=3)
        processes = workers_of(os.getpid())[-1].children(recursive=True)
        Timer(1, processes[-1].kill).start()  # the last that was started is one that computes
        with pytest.raises(
            InputError, match=r"vLLM ended with exit status 1; its messages are in .*vllm.log"
        ):
            drawn(engine, sampling, prompts, n=1000)
    assert len(processes) >= 2  # besides what Python's multiprocessing has of its own
    assert not left_of(processes)
    pairs = zip(chain(*found), chain(*drawn(vllm, sampling, prompts, n=4, seed=3)), strict=True)
    for one, other in pairs:
        assert one.token_ids == other.token_ids
        assert one.token_logmu_engine == pytest.approx(
            other.token_logmu_engine, abs=1e-4
        )  # sums in another order


@pytest.mark.slow
def test_a_chat_ends_with_its_turn(python, tmp_path):
    """Llama 3's, whose end of turn neither the tokenizer nor the generation config of this model names."""
    folder = str(save_chat_model(tmp_path / "model", "llama3"))
    settings = replace(SETTINGS, vllm_python=python, model=folder, chat=True)
    chat = load_model(folder, None, settings)
    prompt = chat.chat.ask("Hi?")
    with vllm_engine(folder, chat, 200, settings, tmp_path / "vllm.log") as engine:
        [found] = drawn(engine, SamplingParameters(max_new_tokens=60), [prompt], n=32, lm=chat)
    finished = [completion for completion in found if completion.finish_reason == "stop"]
    assert len(finished) > 24
    assert all(c.token_ids.index(chat.chat.end) == len(c.token_ids) - 1 for c in finished)
    assert all(c.completion == chat.tokenizer.decode(c.token_ids[:-1]) for c in finished)
    assert all(
        has_the_models_own_logps(completion, chat, prompt) for completion in found
    )  # both saw the same prompt


@pytest.mark.slow
def test_two_ranks_with_one_engine_lose_the_leader_and_draw_what_one_rank_draws(
    python, vllm, tmp_path
):
    """The leader draws for both. When it is killed, its engine of two processes ends; the same command goes on."""
    folder, few = tmp_path / "run", {"iterations": 0, "test_problems": 6, "chunk": 2}
    asked = few | {"usual": {}, "engine": "vllm", "engine_gpus": 2, "vllm_python": python}
    file = folder / "iteration-1" / "test-0.jsonl"
    with started(folder, 2, **asked) as process:
        wait(process, lambda: lines(file.with_name("test-0.jsonl.part-0")) >= 12)
        [worker] = workers_of(process.pid)
        processes = [worker, *worker.children(recursive=True)]
        worker.parent().kill()
        assert status(process) != 0
        assert not left_of(processes)
    finish(folder, 2, **asked)
    assert [log.name for log in folder.glob("vllm-*.log")] == ["vllm-0.log"]
    settings = replace(SMALL, **few)
    task, sampling = (
        gsm8k.gsm8k_task(settings),
        SamplingParameters(max_new_tokens=settings.max_new_tokens),
    )
    prompts, seed = [task.prompt(problem) for problem in task.test], settings.seed_of("test 1 0")
    alone = chain(
        *drawn(vllm, replace(sampling, stop=task.stop), prompts, settings.test_samples, seed)
    )
    assert [sample.token_ids for sample in read_records(file, Sample)] == [
        completion.token_ids for completion in alone
    ]


@pytest.fixture
def opened(lm, tmp_path):
    """What the engine tells that `python` starts, which is no interpreter with vLLM, but a script."""

    def opened(python, script="", **changes):
        if script:
            python.write_text(f"#!/bin/sh\n{script}\n")
            python.chmod(0o755)
        settings, log = replace(SETTINGS, vllm_python=python, **changes), tmp_path / "vllm.log"
        with (
            pytest.raises(InputError) as told,
            vllm_engine(SETTINGS.model, lm, 200, settings, log) as engine,
        ):
            drawn(engine, SamplingParameters(), n=1)
        return str(told.value)

    return opened


def test_an_engine_that_does_not_start_or_dies_is_told(opened, tmp_path):
    dying = "echo null; read request; exit 3"  # null: it has started
    for python, script, message in (
        (
            Path(sys.executable),
            "",
            r"--engine vllm: .*python.*No module named 'vllm' \(vLLM comes with requirements",
        ),
        (tmp_path / "nowhere", "", "--vllm-python .*nowhere: cannot be run: No such file"),
        (
            tmp_path / "dying",
            dying,
            "vLLM ended with exit status 3; its messages are in .*vllm.log",
        ),
    ):
        assert re.match(message, opened(python, script))


def test_an_engine_is_not_waited_for_for_ever(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "START_SECONDS", 0.5)
    assert re.match(
        "vLLM has not started .*; its messages are in .*vllm.log",
        opened(tmp_path / "silent", "sleep 60"),
    )


@pytest.mark.parametrize(
    "visible", ["", "4,5,6,7,0,1,2,3", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h"]
)
def test_an_engine_sees_the_gpus_of_its_processes_and_nothing_of_torchrun(
    opened, monkeypatch, tmp_path, visible
):
    """Engines of a machine with eight GPUs, which may have names and be in any order: of four GPUs, four, and one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda: (0, 0)
    )  # all that was free is free again
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    names, seen = visible.split(",") if visible else list("01234567"), []
    telling = f'env > {tmp_path}/seen; echo "$2" > {tmp_path}/options'
    for local, gpus in ((0, 4), (4, 4), (5, 1)):
        monkeypatch.setenv("LOCAL_RANK", str(local))
        assert "exit status 0" in opened(tmp_path / "telling", telling, engine_gpus=gpus)
        environment = dict(
            line.split("=", 1)
            for line in (tmp_path / "seen").read_text().splitlines()
            if "=" in line
        )
        seen.append(environment["CUDA_VISIBLE_DEVICES"].split(","))
        assert json.loads((tmp_path / "options").read_text())["tensor_parallel_size"] == gpus
    assert seen == [names[:4], names[4:], names[5:6]]
    assert not [name for name in environment if name.startswith("MASTER") or "RANK" in name]
    assert environment["VLLM_CACHE_ROOT"].endswith("/engine-1")  # 1 is this process's rank
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert (
        environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    )  # else vLLM does not start on a node without nvcc


def test_engines_that_do_not_divide_a_machine_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # of two machines
    for gpus in (3, 16):
        with pytest.raises(
            InputError, match=f"--engine-gpus {gpus}: must divide the 8 processes of a machine"
        ):
            gsm8k.check(replace(SETTINGS, engine_gpus=gpus), 16)
    gsm8k.check(replace(SETTINGS, engine_gpus=4), 16)
