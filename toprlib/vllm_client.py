"""Sampling with vLLM, in a separate process that ends before training starts and frees the GPU.

The process may run under another interpreter, because vLLM pins versions that the trainer may not
want. Requests go to its standard input, answers come from its standard output: JSON lines.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from toprlib.distributed import rank
from toprlib.language_model import LanguageModel
from toprlib.records import Completion, Engine, InputError, Prompt
from toprlib.settings import Settings

WORKER = Path(__file__).with_name("vllm_worker.py")
FREE_SECONDS = 30.0  # in which the driver frees the GPU's memory after an engine has ended
GPU_OPTIONS = {
    "gpu_memory_utilization": 0.85,  # the trainer keeps some of the rest
    # Otherwise vLLM compiles FlashInfer's fused all-reduce on B200, which needs CUDA's toolkit.
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
# With chunked prefill, vLLM 0.32 rewinds a random generator, and a CPU's cannot be rewound.
CPU_OPTIONS = {"enforce_eager": True, "enable_chunked_prefill": False}
# vLLM would take torchrun's variables for its own.
TORCHRUN = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "TORCH_NCCL")


@contextmanager
def vllm_engine(
    lm: LanguageModel, model: str, settings: Settings, stop: Sequence[str], max_tokens: int
) -> Iterator[Engine]:
    """An engine in a process of its own, which its first call starts and which ends with the block.

    lm: its tokenizer, for the text of completions. model: folder or hub name of the weights. stop:
    strings that end a completion. max_tokens: of a prompt and its completion. Completion j of
    prompt i uses the seed `seed + i * n + j`.
    """
    worker = None
    free_before = 0
    log = settings.out / f"vllm-{rank()}.log"
    sampling = {  # arguments of vLLM's SamplingParams
        "top_k": settings.top_k,
        "max_tokens": settings.max_new_tokens,
        "stop": list(stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted(lm.ends),
    }

    def generate(
        prompts: Sequence[Prompt], n: int, seed: int, temperature: float = settings.temperature
    ) -> Iterator[list[Completion]]:
        nonlocal worker, free_before
        if worker is None:
            free_before = _free_gpu_memory()
            worker = _start(model, settings, max_tokens, log)
            _read_answer(worker, log)  # the model is loaded
        ids = [prompt.ids for prompt in prompts]
        at_temperature = sampling | {"temperature": temperature}
        request = {"prompts": ids, "n": n, "seed": seed, "sampling": at_temperature}
        print(json.dumps(request), file=worker.stdin, flush=True)
        finished = []
        for index, completions in enumerate(_read_answer(worker, log)):
            for fields in completions:  # token_ids, token_logmu_engine, finish_reason
                finished.append((index, fields | {"completion": lm.text(fields["token_ids"])}))
        yield finished

    try:
        yield Engine(generate, settings.engine_gpus)
    finally:
        if worker is not None:
            with suppress(ProcessLookupError):  # it may have ended by itself
                os.killpg(worker.pid, signal.SIGKILL)  # its processes have nothing to save
            worker.communicate()
            deadline = time.monotonic() + FREE_SECONDS
            while _free_gpu_memory() < 0.98 * free_before and time.monotonic() < deadline:
                time.sleep(0.1)


def _start(model: str, settings: Settings, max_tokens: int, log: Path) -> subprocess.Popen:
    """Start the process, which answers when it has the model. log: for the messages of vLLM."""
    arguments = {
        "model": model,
        "dtype": settings.dtype,
        "max_model_len": max_tokens,
        "tensor_parallel_size": settings.engine_gpus,
    }
    if not torch.cuda.is_available():
        arguments |= CPU_OPTIONS
    else:
        arguments |= GPU_OPTIONS
        if settings.dtype == "bfloat16":  # FlashInfer's attention needs CUDA's toolkit on B200
            arguments["attention_config"] = {"backend": "FLASH_ATTN"}
    python = str(settings.vllm_python or sys.executable)
    with log.open("ab") as messages:
        return subprocess.Popen(
            [python, str(WORKER), json.dumps(arguments), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env=_environment(settings.engine_gpus),
            start_new_session=True,  # so that all processes of vLLM can be ended
        )


def _read_answer(worker: subprocess.Popen, log: Path) -> Any:
    line = worker.stdout.readline()
    if not line.endswith("\n"):  # it may have ended in the middle of an answer
        message = f"vLLM ended with exit status {worker.wait()}, see {log}"
        raise InputError(f"{message}; correct this, then repeat the command to resume")
    return json.loads(line)


def _free_gpu_memory() -> int:
    """Bytes; 0 without a GPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def _environment(gpus: int) -> dict[str, str]:
    """The environment of vLLM: this process's own without torchrun's, and its GPUs.

    gpus: those of this rank and of the gpus - 1 ranks after it.
    """
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(TORCHRUN):
            environment[name] = value
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else map(str, range(torch.cuda.device_count()))
        first = int(os.environ.get("LOCAL_RANK", "0"))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(list(names)[first : first + gpus])
    else:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if gpus > 1:  # the default requires a NUMA node for each process
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Engines that start together would write the same files. Inductor and Triton cache here, too.
    cache = os.environ.get("VLLM_CACHE_ROOT", os.path.expanduser("~/.cache/vllm"))
    environment["VLLM_CACHE_ROOT"] = os.path.join(cache, f"engine-{rank()}")
    # FlashInfer's sampler ignores seeds, which all of our requests have, and it needs nvcc.
    environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process where one is enough
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of a process with threads hangs
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")  # sends nothing about its use
    return environment
