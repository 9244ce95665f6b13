"""Sampling with vLLM, in a process of its own that ends before training starts: no GPU memory stays behind.

That process may run under another interpreter: what vLLM pins need not fit the trainer. Requests go to its standard
input and answers come from its standard output, each a line of JSON.
"""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from toprlib.language_model import LanguageModel
from toprlib.records import Drawn, InputError
from toprlib.distributed import rank
from toprlib.sampling import Engine, Prompt, SamplingParameters
from toprlib.settings import Settings

WORKER = Path(__file__).with_name("worker.py")
START_SECONDS = 1800.0  # an engine that has not started by then never will; ours
GPU_MEMORY = 0.85  # share of the GPU's memory that vLLM may fill; the rest is for what the trainer keeps; ours
# What vLLM would else compile with CUDA's toolkit: FlashInfer's attention on B200, its fused all-reduce between GPUs.
WITHOUT_NVCC = {
    "attention_config": {"backend": "FLASH_ATTN"},
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
ADVICE = (
    "vLLM comes with requirements-gpu.txt for a GPU, and with `make .venv-vllm/ready` for a processor; --vllm-python "
    "names its interpreter, --engine hf does without it"
)


@contextmanager
def vllm_engine(
    model: str, lm: LanguageModel, longest: int, settings: Settings, log: Path
) -> Iterator[Engine]:
    """vLLM on this process's GPU and on those of the `engine_gpus` - 1 processes after it, or on the CPU.

    model: folder or hub name; lm: its tokenizer, which makes the prompts' tokens and spells the completions'. longest:
    tokens of a prompt and its completion. log: for vLLM's own messages. InputError where it does not start, or dies.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    options = {
        "model": path_for_vllm(model, log),
        "dtype": settings.compute,
        "max_model_len": longest,
    }
    options |= {
        "trust_remote_code": settings.trust_remote_code,
        "tensor_parallel_size": settings.engine_gpus,
    }
    if torch.cuda.is_available():
        options |= {"gpu_memory_utilization": GPU_MEMORY, **WITHOUT_NVCC}
    else:  # vLLM 0.32 takes back a draw when a prompt is split, which a processor's random generators refuse
        options |= {"enforce_eager": True, "enable_chunked_prefill": False}
    free = 0.98 * torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0.0  # bytes
    command = [
        str(settings.vllm_python or sys.executable),
        str(WORKER),
        json.dumps(options),
        str(os.getpid()),
    ]
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with log.open("ab") as messages:
        fcntl.flock(
            messages, fcntl.LOCK_EX
        )  # all processes of the worker inherit it until they have ended
        try:  # in a session of its own: the processes that it starts end with it
            environment = _environment(settings.engine_gpus)
            worker = subprocess.Popen(
                command, stderr=messages, env=environment, start_new_session=True, **piped
            )
        except OSError as error:
            raise InputError(
                f"--vllm-python {settings.vllm_python}: cannot be run: {error.strerror}"
            ) from None

    def answer() -> Any:
        line = worker.stdout.readline()
        if not line.endswith("\n"):  # it may have died in the middle of an answer
            advice = "What was sampled before is kept: the same command goes on behind it"
            raise InputError(
                f"vLLM ended with exit status {worker.wait()}; its messages are in {log}. {advice}"
            )
        return json.loads(line)

    def engine(
        prompts: Sequence[Prompt], n: int, sampling: SamplingParameters, seed: int
    ) -> Iterator[tuple[int, Drawn]]:
        parameters = asdict(sampling) | {
            "include_stop_str_in_output": True,
            "stop_token_ids": sorted(lm.ends),
        }
        parameters |= {"max_tokens": parameters.pop("max_new_tokens"), "stop": list(sampling.stop)}
        prompt_ids = [prompt.ids for prompt in prompts]
        request = json.dumps({"prompts": prompt_ids, "n": n, "sampling": parameters, "seed": seed})
        with suppress(BrokenPipeError):  # it has ended, as `answer` tells
            print(request, file=worker.stdin, flush=True)
        for number, completions in enumerate(answer()):
            for one in completions:
                asked = {"problem_id": prompts[number].problem.id, "prompt": prompts[number].text}
                yield number, Drawn(**asked, completion=lm.text(one["token_ids"]), **one)

    try:
        if not select.select([worker.stdout], [], [], START_SECONDS)[0]:
            raise InputError(
                f"vLLM has not started within {START_SECONDS:.0f} s; its messages are in {log}"
            )
        if error := answer():
            error = " ".join(error.split())[:300]
            raise InputError(
                f"--engine vllm: {worker.args[0]}: {error} ({ADVICE}; all messages: {log})"
            )
        yield engine
    finally:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)  # its processes have nothing to save
        worker.communicate()  # waits, and closes what leads to it
        with log.open("ab") as messages:
            fcntl.flock(messages, fcntl.LOCK_EX)  # its processes have ended
        for _ in range(
            300
        ):  # the driver may take a moment to free their memory: half a minute at most
            if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] >= free:
                break
            time.sleep(0.1)


def path_for_vllm(model: str, log: Path) -> str:
    """The same path for each model of a run: a link beside `log`. What vLLM compiles it finds again by this path."""
    if not Path(model).is_dir():
        return model  # of the hub
    link = log.with_suffix(".model").absolute()
    link.unlink(missing_ok=True)
    link.symlink_to(Path(model).absolute())
    return str(link)


def _environment(gpus: int) -> dict[str, str]:
    """This process's own, without torchrun's variables, which vLLM would take for its own, and the GPUs to see."""
    torchrun_names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_",
        "GROUP_",
        "ROLE_",
        "MASTER_",
        "TORCHELASTIC",
        "TORCH_NCCL",
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(torchrun_names)
    }
    if torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(
            map(str, range(torch.cuda.device_count()))
        )
        first = int(os.environ.get("LOCAL_RANK", 0))
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[first : first + gpus])
    else:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if gpus > 1:
            environment.setdefault(
                "VLLM_CPU_OMP_THREADS_BIND", "nobind"
            )  # "auto" wants a NUMA node for each process
    cache = os.environ.get(
        "VLLM_CACHE_ROOT", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "vllm")
    )
    return environment | {
        # Engines that start together write the same names. Inductor's and Triton's caches lie below this one.
        "VLLM_CACHE_ROOT": os.path.join(cache, f"engine-{rank()}"),
        # FlashInfer's sampler takes no seeds, which all our requests have; to start it, nvcc would have to be there.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": os.environ.get(
            "VLLM_NO_USAGE_STATS", "1"
        ),  # else it sends statistics of its use
        # One process where that is enough. Where vLLM needs more, they are not forked: ours has threads.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
