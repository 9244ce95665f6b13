"""Sampling with vLLM, in a process of its own that ends before training starts: no GPU memory stays behind.

That process may run under another interpreter, whose environment has vLLM: what vLLM pins need not fit the trainer.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from pipeline.models.language_model import LanguageModel
from pipeline.records import InputError
from pipeline.sampling import Completion, Engine, SamplingParameters
from pipeline.settings import Settings

WORKER = Path(__file__).with_name("worker.py")
ADVICE = (
    "vLLM comes with requirements-gpu.txt for a GPU, and with `make .venv-vllm/ready` for a processor; --vllm-python "
    "names its interpreter, --engine hf does without it"
)


@contextmanager
def vllm_engine(model: str, lm: LanguageModel, longest: int, settings: Settings, log: Path) -> Iterator[Engine]:
    """vLLM on this process's GPU, or on the CPU with a build for it.

    model: folder or hub name; lm: its tokenizer, which makes the prompts' tokens and spells the completions'. longest:
    tokens of a prompt and its completion. log: where vLLM's own messages go. InputError where it does not start, or
    dies; what it had answered before is not lost.
    """
    on_gpu = torch.cuda.is_available()
    options = {"model": model, "dtype": settings.compute, "max_model_len": longest}
    options["trust_remote_code"] = settings.trust_remote_code
    options |= {"gpu_memory_utilization": settings.vllm_memory} if on_gpu else {}
    if not on_gpu:  # vLLM 0.32 takes back a draw when a prompt is split, which a processor's random generators refuse
        options |= {"enforce_eager": True, "enable_chunked_prefill": False}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as messages:
        command = [str(settings.vllm_python or sys.executable), str(WORKER), json.dumps(options)]
        try:
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=messages, env=_environment(on_gpu)
            )
        except OSError as error:
            raise InputError(f"--vllm-python {settings.vllm_python}: cannot be run: {error.strerror}") from None

    def ask(request: dict | None) -> dict:
        try:
            if request is not None:
                worker.stdin.write(json.dumps(request).encode() + b"\n")
                worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):  # it may have died in the middle of one
            raise InputError(
                f"vLLM ended with exit status {worker.wait()}; its messages are in {log}. What was sampled before is "
                "kept: the same command goes on behind it"
            )
        return json.loads(line)

    def engine(
        prompts: Sequence[str], n: int, sampling: SamplingParameters, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        prompt_ids = lm.tokenizer(list(prompts))["input_ids"]
        answer = ask({"prompts": prompt_ids, "n": n, "sampling": _to_vllm(sampling), "seed": seed})
        for number, completions in enumerate(answer["completions"]):
            for completion in completions:
                yield number, Completion(text=lm.text(completion["token_ids"]), **completion)

    try:
        started = ask(None)
        if "error" in started:
            error = " ".join(started["error"].split())[:300]
            raise InputError(f"--engine vllm: {command[0]}: {error} ({ADVICE}; all messages: {log})")
        yield engine
    finally:
        worker.kill()  # it has nothing to save
        worker.wait()
        with suppress(BrokenPipeError):
            worker.stdin.close()
        worker.stdout.close()


def _to_vllm(sampling: SamplingParameters) -> dict:
    settings = asdict(sampling)
    settings["max_tokens"] = settings.pop("max_new_tokens")
    return settings | {"stop": list(sampling.stop), "include_stop_str_in_output": True}


def _environment(on_gpu: bool) -> dict[str, str]:
    """This process's own, without torchrun's variables, which vLLM would take for its own, and one GPU to see."""
    of_torchrun = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC", "TORCH_NCCL")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_torchrun)}
    if on_gpu:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(os.environ.get("LOCAL_RANK", 0))]
    else:
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    # One process, which holds all there is: when it has ended, nothing is left.
    return environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
