"""vLLM in a process of its own: log-probabilities, tensor parallelism, environment, errors.

Tests without a real vLLM run a script, or a module of the same name, in its place.
"""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import psutil
import pytest
import torch
from chat_models import save_chat_model
from engine_helpers import MODEL, PROMPT, exact_token_logprobs, generate, make_prompts

from toprlib import vllm_client
from toprlib.language_model import load_model, load_without_weights
from toprlib.records import InputError
from toprlib.sampling import SamplingParameters
from toprlib.settings import Settings, check
from toprlib.vllm_client import VllmOptions, VllmProcess, stable_path, vllm_engine

ARGUMENTS = json.dumps({"model": MODEL, "max_model_len": 200})
HERE = Path(__file__).parent
OPTIONS = VllmOptions(None, gpus=1, dtype="float32", max_tokens=200, log=Path("vllm.log"))


def check_engine_logprobs(samples, lm, prompt):
    """The engine's log-probabilities are the model's own, among all tokens of the vocabulary."""
    for sample in samples:
        expected = exact_token_logprobs(lm, prompt, sample.token_ids)
        assert sample.token_logmu_engine == pytest.approx(expected, abs=1e-4)


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


# ---- with vLLM -----------------------------------------------------------------------------------
def test_log_probabilities_are_over_all_tokens_whatever_top_k(make_vllm_engine, lm):
    engine = make_vllm_engine(SamplingParameters(max_new_tokens=64, top_k=3))
    [samples] = generate(engine, make_prompts(lm, [PROMPT]))
    check_engine_logprobs(samples, lm, PROMPT)


HASHES = """
import sys
from vllm.config import ModelConfig
for path in iter(sys.stdin.readline, ""):
    print("hash", ModelConfig(path.strip(), dtype="float32").compute_hash(), flush=True)
"""


def test_vllm_finds_what_it_compiled_for_the_iteration_before(python, lm, tmp_path):
    """Its cache is named by a hash of the model's path: the same link in all iterations."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([python, "-c", HASHES], stderr=subprocess.DEVNULL, **pipes) as hasher:

        def compute_hash(path):
            print(path, file=hasher.stdin, flush=True)
            return next(line for line in hasher.stdout if line.startswith("hash"))

        link_hashes = []
        folder_hashes = []
        for folder in (tmp_path / "first", tmp_path / "second"):
            lm.model.save_pretrained(folder)
            link_hashes.append(compute_hash(stable_path(str(folder), tmp_path / "vllm-0.log")))
            folder_hashes.append(compute_hash(folder))
        hasher.stdin.close()
    assert link_hashes[0] == link_hashes[1]
    assert folder_hashes[0] != folder_hashes[1]


@pytest.mark.slow
def test_an_engine_of_two_processes(python, make_vllm_engine, lm, tmp_path):
    """Each computes a half of every layer. If one dies, the engine ends with an error."""
    options = replace(OPTIONS, python=python, gpus=2, log=tmp_path / "vllm.log")
    prompts = make_prompts(lm, [PROMPT, PROMPT + " 31 +"])
    parameters = SamplingParameters(max_new_tokens=48)
    of_other_tests = set(vllm_processes(os.getpid()))
    with vllm_engine(lm, MODEL, parameters, options) as engine:
        assert engine.gpus == 2
        samples = generate(engine, prompts, n=4, seed=3)
        processes = set(vllm_processes(os.getpid())) - of_other_tests
        [second] = [each for each in processes if each.name().endswith("Worker_TP1")]
        threading.Timer(1, second.kill).start()  # one of the two that compute
        with pytest.raises(InputError) as raised:
            generate(engine, prompts, n=1000)
    assert raised.value.file == str(options.log)
    assert len(processes) >= 3  # the worker, and two that compute
    assert still_running(processes) == []
    of_one_process = generate(make_vllm_engine(parameters), prompts, n=4, seed=3)
    for actual, expected in zip(chain(*samples), chain(*of_one_process), strict=True):
        assert actual.token_ids == expected.token_ids
        # Sums in another order.
        assert actual.token_logmu_engine == pytest.approx(expected.token_logmu_engine, abs=1e-4)


@pytest.mark.slow
def test_the_end_of_a_turn_ends_a_completion_of_a_chat_model(python, tmp_path):
    """Neither the tokenizer nor the generation config of this model names Llama 3's end of turn."""
    folder = str(save_chat_model(tmp_path / "model", "llama3"))
    chat_lm = load_model(folder, uses_chat=True)
    prompt = chat_lm.chat.format("Hi?")
    options = replace(OPTIONS, python=python, log=tmp_path / "vllm.log")
    with vllm_engine(chat_lm, folder, SamplingParameters(max_new_tokens=60), options) as engine:
        [samples] = generate(engine, make_prompts(chat_lm, [prompt]), n=32)
    finished = [sample for sample in samples if sample.finish_reason == "stop"]
    assert len(finished) > 24
    for sample in finished:
        assert sample.token_ids.index(chat_lm.chat.end) == len(sample.token_ids) - 1
        assert sample.completion == chat_lm.tokenizer.decode(sample.token_ids[:-1])
    check_engine_logprobs(samples, chat_lm, prompt)  # both have read the same prompt


def test_vllm_stops_at_every_end(lm):
    two_ends = lm._replace(ends=frozenset({7, 1}))
    arguments = vllm_client._sampling_params(two_ends, SamplingParameters())
    assert arguments["stop_token_ids"] == [1, 7]


# ---- with a fake vLLM ----------------------------------------------------------------------------
@pytest.fixture
def fake_python(tmp_path):
    """An interpreter whose vLLM is fake_vllm/vllm.py."""
    return write_script(
        tmp_path / "python", f'PYTHONPATH={HERE / "fake_vllm"} exec "{sys.executable}" "$@"'
    )


def write_script(file, command):
    file.write_text(f"#!/bin/sh\n{command}\n")
    file.chmod(0o755)
    return file


def test_requests_and_answers(fake_python, tmp_path):
    """Three requests to one process, which has not started before the first and has ended after."""
    lm = load_without_weights(MODEL)
    prompts = make_prompts(lm, [PROMPT, "Q"])
    options = replace(OPTIONS, python=fake_python, log=tmp_path / "logs" / "vllm.log")
    of_other_tests = set(vllm_processes(os.getpid()))
    with vllm_engine(lm, MODEL, SamplingParameters(max_new_tokens=4), options) as engine:
        assert set(vllm_processes(os.getpid())) == of_other_tests
        for seed in (100, 200, 300):
            samples = generate(engine, prompts, n=2, seed=seed)
            # The prompts have at least 4 tokens, and 1.
            lengths = [4, 4, 1, 1]
            for k, sample in enumerate(chain(*samples)):
                expected = list(range(seed + k, seed + k + lengths[k]))
                assert sample.token_ids == expected
                assert sample.completion == lm.tokenizer.decode(expected)
                logmu = [-1 / (t + 1) for t in range(lengths[k])]
                assert sample.token_logmu_engine == pytest.approx(logmu, abs=1e-7)
                assert sample.finish_reason == "length"
        processes = set(vllm_processes(os.getpid())) - of_other_tests
        assert len(processes) == 2  # the worker, and one that it has started
    assert still_running(processes) == []
    log = options.log.read_text()  # nothing that vLLM prints is taken for an answer
    [loading] = re.findall(r"^loading (.*)$", log, re.MULTILINE)
    arguments = ast.literal_eval(loading)
    assert arguments["enforce_eager"]  # of a CPU
    assert "gpu_memory_utilization" not in arguments
    assert log.count("generating") == 3


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
    command = [sys.executable, "-c", CLIENT, fake_python, vllm_client.WORKER, ARGUMENTS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **pipes) as client:
        assert client.stdout.readline() == b"null\n"
        processes = vllm_processes(client.pid)
        assert len(processes) == 2
        client.kill()
    assert still_running(processes) == []


def test_an_error_of_vllm_is_one_line(fake_python, tmp_path):
    options = replace(OPTIONS, python=fake_python, max_tokens=1001, log=tmp_path / "vllm.log")
    process = VllmProcess(MODEL, options)
    with pytest.raises(InputError) as raised:
        process.request({})
    process.close()
    assert raised.value.option == "--engine"
    assert "ValueError: max_model_len is too large: at most 1000" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "Traceback" in options.log.read_text()


# ---- with a script in place of the interpreter ---------------------------------------------------
@pytest.fixture
def error_of(tmp_path):
    """error_of(python, gpus): the InputError of a request to what `python` starts."""

    def error_of(python, gpus=1):
        options = replace(OPTIONS, python=python, gpus=gpus, log=tmp_path / "vllm.log")
        process = VllmProcess(MODEL, options)
        with pytest.raises(InputError) as raised:
            process.request({"prompts": []})
        process.close()
        return raised.value

    return error_of


def test_an_interpreter_without_vllm(error_of):
    error = error_of(Path(sys.executable))
    assert error.option == "--engine"
    assert "No module named 'vllm'" in str(error)


def test_an_interpreter_that_cannot_be_run(error_of, tmp_path):
    assert error_of(tmp_path / "nowhere").option == "--vllm-python"


@pytest.mark.parametrize(
    "command",
    [
        "exit 3",
        "echo null; read request; exit 3",  # null: it has started
        "echo null; read request; printf '[[{\"token_ids'; exit 3",
        "echo null; exec <&-; exit 3",
    ],
)
def test_a_process_that_dies(error_of, tmp_path, command):
    error = error_of(write_script(tmp_path / "python", command))
    assert error.file == str(tmp_path / "vllm.log")
    assert "exit status 3" in str(error)


def test_a_process_that_dies_between_two_requests(tmp_path):
    python = write_script(tmp_path / "python", "echo null; read request; echo []; exit 3")
    options = replace(OPTIONS, python=python, log=tmp_path / "vllm.log")
    process = VllmProcess(MODEL, options)
    assert process.request({"prompts": []}) == []
    process.process.wait()
    with pytest.raises(InputError) as raised:
        process.request({"prompts": []})
    process.close()
    assert raised.value.file == str(options.log)


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
def test_log_probabilities_of_damaged_weights(tmp_path, value):
    sample = f'{{"token_ids": [5], "token_logmu_engine": [{value}], "finish_reason": "stop"}}'
    command = f"echo null; read request; echo '[[{sample}]]'; sleep 60"
    options = replace(
        OPTIONS, python=write_script(tmp_path / "python", command), log=tmp_path / "vllm.log"
    )
    lm = load_without_weights(MODEL)
    with (
        vllm_engine(lm, MODEL, SamplingParameters(), options) as engine,
        pytest.raises(InputError) as raised,
    ):
        generate(engine, make_prompts(lm, [PROMPT]), n=1)
    assert (raised.value.option, raised.value.file) == ("--model", MODEL)


def test_ctrl_c_ends_vllm_in_the_middle_of_a_request(tmp_path):
    """It may have hours of sampling left."""
    command = f"echo null; read request; touch {tmp_path}/requested; sleep 1000"
    python = write_script(tmp_path / "python", command)
    options = replace(OPTIONS, python=python, log=tmp_path / "vllm.log")
    lm = load_without_weights(MODEL)
    main_thread = threading.main_thread().ident

    def interrupt():
        while not (tmp_path / "requested").exists():
            time.sleep(0.01)
        signal.pthread_kill(main_thread, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with (
        pytest.raises(KeyboardInterrupt),
        vllm_engine(lm, MODEL, SamplingParameters(), options) as engine,
    ):
        generate(engine, make_prompts(lm, [PROMPT]))
    thread.join()


def test_a_process_that_does_not_start(error_of, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_client, "START_SECONDS", 0.5)
    error = error_of(write_script(tmp_path / "python", "sleep 60"))
    assert error.file == str(tmp_path / "vllm.log")


@pytest.mark.parametrize(
    "visible", ["", "4,5,6,7,0,1,2,3", "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h"]
)
def test_an_engine_sees_its_own_gpus_and_nothing_of_torchrun(
    error_of, monkeypatch, tmp_path, visible
):
    """A machine has eight GPUs, of any names in any order; engines have four, four, and one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))  # no memory to wait for
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    save = f'env > {tmp_path}/environment; echo "$2" > {tmp_path}/arguments'
    script = write_script(tmp_path / "python", save)
    names = visible.split(",") if visible else list("01234567")
    for local_rank, gpus, expected in ((0, 4, names[:4]), (4, 4, names[4:]), (5, 1, names[5:6])):
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        error_of(script, gpus)
        environment = {}
        for line in (tmp_path / "environment").read_text().splitlines():
            name, _, value = line.partition("=")
            environment[name] = value
        assert environment["CUDA_VISIBLE_DEVICES"].split(",") == expected
        arguments = json.loads((tmp_path / "arguments").read_text())
        assert arguments["tensor_parallel_size"] == gpus
        assert arguments["max_model_len"] == 200
        assert 0.5 < arguments["gpu_memory_utilization"] < 1
        assert "enforce_eager" not in arguments
    assert [name for name in environment if name.startswith(("MASTER", "TORCHEL"))] == []
    assert [name for name in environment if "RANK" in name or "WORLD" in name] == []
    assert environment["VLLM_CACHE_ROOT"].endswith("/engine-1")  # the rank
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_USE_FLASHINFER_SAMPLER"] == "0"  # it would require nvcc


SUPPORTED = """
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(*AttentionBackendEnum.FLASH_ATTN.get_class().supported_dtypes)
"""


def options_on_a_gpu(monkeypatch, dtype):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return VllmProcess(MODEL, replace(OPTIONS, dtype=dtype))._vllm_arguments()


def test_float32_is_not_sent_to_an_attention_without_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # for the link to the model
    in_bfloat16 = options_on_a_gpu(monkeypatch, "bfloat16")
    assert in_bfloat16["attention_config"] == {"backend": "FLASH_ATTN"}
    in_float32 = options_on_a_gpu(monkeypatch, "float32")
    assert set(in_bfloat16) - set(in_float32) == {"attention_config"}


@pytest.mark.slow
def test_the_attention_that_is_named_has_its_precisions(python):
    done = subprocess.run([python, "-c", SUPPORTED], capture_output=True, text=True, check=True)
    dtypes = done.stdout.split()
    assert {f"torch.{dtype}" for dtype in vllm_client.ATTENTION} <= set(dtypes)
    assert "torch.float32" not in dtypes


@pytest.mark.parametrize("gpus", [3, 16])
def test_engines_must_divide_the_ranks_of_a_machine(monkeypatch, gpus):
    """Of two machines with eight ranks each: no engine spans both."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(InputError) as raised:
        check(Settings(engine="vllm", engine_gpus=gpus), 16)
    assert raised.value.option == "--engine-gpus"
    check(Settings(engine="vllm", engine_gpus=4), 16)


# ---- paths ---------------------------------------------------------------------------------------
def test_models_of_a_run_have_the_same_path(tmp_path):
    log = tmp_path / "vllm-0.log"
    paths = []
    for name in ("model-1", "model-2"):
        (tmp_path / name).mkdir()
        path = stable_path(str(tmp_path / name), log)
        assert Path(path).samefile(tmp_path / name)
        paths.append(path)
    assert paths[0] == paths[1]
    assert stable_path("owner/name", log) == "owner/name"
