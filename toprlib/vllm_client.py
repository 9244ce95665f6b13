"""Sampling with vLLM, in a separate process that ends before training starts and frees the GPU.

The process may run under another interpreter, because vLLM pins versions that the trainer may not
want. Requests go to its standard input, answers come from its standard output: JSON lines.
"""

import fcntl
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toprlib.distributed import rank
from toprlib.language_model import LanguageModel
from toprlib.records import InputError, Prompt, Sample
from toprlib.sampling import Completions, Engine, SamplingParameters

WORKER = Path(__file__).with_name("vllm_worker.py")
START_SECONDS = 1800.0  # after which the start of an engine has failed; ours
FREE_SECONDS = 30.0  # in which the driver frees the GPU's memory after an engine has ended; ours
GPU_MEMORY = 0.85  # share of the GPU's memory for vLLM; the trainer keeps some of the rest; ours
# Without these, vLLM compiles FlashInfer's attention on B200 and its fused all-reduce between GPUs:
# that needs CUDA's toolkit, which a node may lack.
GPU_OPTIONS = {
    "gpu_memory_utilization": GPU_MEMORY,
    "compilation_config": {"pass_config": {"fuse_allreduce_rms": False}},
}
ATTENTION = {"bfloat16": {"attention_config": {"backend": "FLASH_ATTN"}}}  # it has no float32
# With chunked prefill, vLLM 0.32 rewinds a random generator, and a CPU's cannot be rewound.
CPU_OPTIONS = {"enforce_eager": True, "enable_chunked_prefill": False}
TORCHRUN_NAMES = (  # vLLM would take torchrun's variables for its own
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC",
    "TORCH_NCCL",
)


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM is started.

    python: an interpreter that has vLLM; None: this one. gpus: the ranks whose GPUs one engine
    spans by tensor parallelism. max_tokens: of a prompt and its completion. log: file for the
    messages of vLLM.
    """

    python: Path | None
    gpus: int
    dtype: str
    max_tokens: int
    log: Path


@contextmanager
def vllm_engine(
    lm: LanguageModel, model: str, parameters: SamplingParameters, options: VllmOptions
) -> Iterator[Engine]:
    """An engine in a process of its own, which its first call starts and which ends with the block.

    lm: its tokenizer, for the text of completions. model: folder or hub name of the weights. The
    process uses the GPUs of this rank and of the `options.gpus` - 1 ranks after it, or the CPU.
    Raises InputError if vLLM does not start, or ends by itself.
    """
    process = VllmProcess(model, options)
    try:
        generate = partial(sample_completions, process, lm, parameters)
        yield Engine(generate, options.gpus, process.start)
    finally:
        process.close()


def sample_completions(
    process: "VllmProcess",
    lm: LanguageModel,
    parameters: SamplingParameters,
    prompts: Sequence[Prompt],
    n: int,
    seed: int,
) -> Completions:
    """Yields n completions of each prompt, not graded, with the index of the prompt: all at once.

    Completion j of prompt i uses the seed `seed + i * n + j`.
    """
    request = {
        "prompts": [prompt.ids for prompt in prompts],
        "n": n,
        "seed": seed,
        "sampling": _sampling_params(lm, parameters),
    }
    answer = process.request(request)
    finished = []
    for index, (prompt, completions) in enumerate(zip(prompts, answer, strict=True)):
        for fields in completions:  # token_ids, token_logmu_engine, finish_reason
            if not all(map(math.isfinite, fields["token_logmu_engine"])):
                message = "log-probabilities of its tokens are NaN or infinite"
                fix = "check its weights, or give a --dtype with a larger range"
                raise InputError(f"{message}: {fix}", option="--model", file=process.model)
            text = lm.text(fields["token_ids"])
            sample = Sample(
                problem_id=prompt.problem.id, prompt=prompt.text, completion=text, **fields
            )
            finished.append((index, sample))
    yield finished


def _sampling_params(lm: LanguageModel, parameters: SamplingParameters) -> dict[str, Any]:
    """The arguments of vLLM's SamplingParams."""
    return {
        "temperature": parameters.temperature,
        "top_p": parameters.top_p,
        "top_k": parameters.top_k,
        "max_tokens": parameters.max_new_tokens,
        "stop": list(parameters.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted(lm.ends),
    }


class VllmProcess:
    """A process that samples with vLLM. The first request starts it."""

    def __init__(self, model: str, options: VllmOptions) -> None:
        self.model = model
        self.options = options
        self.process: subprocess.Popen | None = None
        self.free_memory = 0  # bytes on the GPU before vLLM takes them

    def request(self, request: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Send a request. Returns the fields of n samples for each of its prompts."""
        self.start()
        with suppress(BrokenPipeError):  # the process has ended, which `_read_answer` reports
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read_answer()

    def start(self) -> None:
        """Start the process, unless it runs, and wait until the model is loaded."""
        if self.process is not None:
            return
        log = self.options.log
        log.parent.mkdir(parents=True, exist_ok=True)
        self.free_memory = _free_gpu_memory()
        command = [
            str(self.options.python or sys.executable),
            str(WORKER),
            json.dumps(self._vllm_arguments()),
            str(os.getpid()),
        ]
        with log.open("ab") as messages:
            # Every process of vLLM inherits the lock, so it is free when all of them have ended.
            fcntl.flock(messages, fcntl.LOCK_EX)
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=messages,
                    text=True,
                    env=_environment(self.options.gpus),
                    start_new_session=True,  # so that `close` can end all processes of vLLM
                )
            except OSError as error:
                message = f"{command[0]}: cannot be run: {error.strerror}"
                raise InputError(message, option="--vllm-python") from None
        ready, _, _ = select.select([self.process.stdout], [], [], START_SECONDS)
        if not ready:
            message = f"vLLM has not started within {START_SECONDS:.0f} s; see this file"
            raise InputError(message, file=log)
        error = self._read_answer()
        if error is not None:
            reason = " ".join(error.split())[:300]
            advice = "install vLLM from requirements-gpu.txt for a GPU, or with `make "
            advice += ".venv-vllm/ready` for a CPU, and pass its interpreter as --vllm-python; "
            advice += f"or use --engine hf. All messages are in {log}"
            raise InputError(f"{command[0]}: {reason}; {advice}", option="--engine")

    def _vllm_arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's LLM."""
        arguments = {
            "model": stable_path(self.model, self.options.log),
            "dtype": self.options.dtype,
            "max_model_len": self.options.max_tokens,
            "tensor_parallel_size": self.options.gpus,
        }
        if not torch.cuda.is_available():
            return arguments | CPU_OPTIONS
        return arguments | GPU_OPTIONS | ATTENTION.get(self.options.dtype, {})

    def _read_answer(self) -> Any:
        line = self.process.stdout.readline()
        if not line.endswith("\n"):  # it may have ended in the middle of an answer
            message = f"vLLM ended with exit status {self.process.wait()}; see this file. "
            message += "Finished completions are saved: repeat the command to resume"
            raise InputError(message, file=self.options.log)
        return json.loads(line)

    def close(self) -> None:
        """End all processes of vLLM, and wait until they and their GPU memory are gone."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # they have nothing to save
        self.process.communicate()  # waits for it, and closes its pipes
        with self.options.log.open("ab") as messages:
            fcntl.flock(messages, fcntl.LOCK_EX)  # waits for the processes that it started
        deadline = time.monotonic() + FREE_SECONDS
        while _free_gpu_memory() < 0.98 * self.free_memory and time.monotonic() < deadline:
            time.sleep(0.1)


def _free_gpu_memory() -> int:
    """Bytes; 0 without a GPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def stable_path(model: str, log: Path) -> str:
    """A path to a model that is the same for each iteration of a run: a link next to `log`.

    vLLM finds what it has compiled by the path of the model. A hub name is returned as it is.
    """
    if not Path(model).is_dir():
        return model
    link = log.with_suffix(".model").absolute()
    link.unlink(missing_ok=True)
    link.symlink_to(Path(model).absolute())
    return str(link)


def _environment(gpus: int) -> dict[str, str]:
    """The environment of vLLM: this process's own without torchrun's, and the GPUs to use."""
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(TORCHRUN_NAMES):
            environment[name] = value
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = _visible_devices(gpus)
    else:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        if gpus > 1:  # the default, "auto", requires a NUMA node for each process
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    user_cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    cache = os.environ.get("VLLM_CACHE_ROOT", os.path.join(user_cache, "vllm"))
    # Engines that start together would write the same files. Inductor and Triton cache here, too.
    environment["VLLM_CACHE_ROOT"] = os.path.join(cache, f"engine-{rank()}")
    # FlashInfer's sampler ignores seeds, which all of our requests have, and it needs nvcc.
    environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")  # sends nothing about its use
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process where one is enough
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a fork of a process with threads hangs
    return environment


def _visible_devices(gpus: int) -> str:
    """The GPUs of this rank and of the gpus - 1 ranks after it, for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    first = int(os.environ.get("LOCAL_RANK", "0"))
    return ",".join(names[first : first + gpus])
