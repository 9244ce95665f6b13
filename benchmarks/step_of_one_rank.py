"""A training step as one of N GPUs computes it, on one GPU with random weights.

    python benchmarks/step_of_one_rank.py SHAPE RANKS [--reshard] [--gradient-checkpointing]

Collectives return at once, so the time of NVLink is missing. Memory, shapes and kernels are real.
Prints a line of JSON.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

import topr
from toprlib.language_model import Sharding, make_optimizer, shard

ROPE = {"rope_type": "default", "rope_theta": 5e5}
LLAMA = {"vocab_size": 128_256, "max_position_embeddings": 8192, "rope_parameters": ROPE}


SHAPES = {
    "qwen0.5b": Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
    "llama1b": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        **LLAMA,
    ),
    "llama8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        **LLAMA,
    ),
}


def gather(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> None:
    """All parts are this rank's own, so that values stay finite."""
    parts = output.view(dist.get_world_size(group), -1)
    for part in parts:
        if part.data_ptr() != input.data_ptr():  # FSDP2 gathers in place
            part.copy_(input.view(-1))


def reduce(
    output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> None:
    """This rank's own part, not summed over ranks."""
    output.view(-1).copy_(input.view(dist.get_world_size(group), -1)[0])


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("ranks", type=int)
    for name, value in (("steps", 12), ("prompt", 1100), ("completion", 205), ("longest", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--reshard", action="store_true")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--profile", type=Path)
    return parser.parse_args()


def make_model(
    config: Any, asked: argparse.Namespace, device: torch.device
) -> tuple[torch.nn.Module, int]:
    """The sharded model with random weights, and the number of all its weights."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    parameters = sum(weight.numel() for weight in model.parameters())
    shard(model, Sharding("bfloat16", asked.gradient_checkpointing, asked.reshard))
    model.to_empty(device=device)
    with torch.no_grad():  # as transformers begins: norms 1, matrices of 0.02
        for name, weight in model.named_parameters():
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            local.fill_(1.0) if local.ndim == 1 and "norm" in name else local.normal_(0, 0.02)
        decoder = model.get_decoder()
        decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)
    return model, parameters


def main() -> None:
    """Time scoring passes and steps, and print a line of JSON."""
    asked = read_arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    sync = torch.cuda.synchronize if cuda else lambda: None
    torch.backends.cuda.enable_cudnn_sdp(False)  # as toprlib does
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=asked.ranks)
    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = gather, reduce
    config = SHAPES[asked.shape]
    model, parameters = make_model(config, asked, device)
    optimizer = make_optimizer("adafactor", model, 5e-7)

    def batch(completion: int) -> topr.Batch:
        size = asked.prompt + completion
        ids = torch.randint(0, config.vocab_size, (1, size), device=device)
        ones = torch.ones_like(ids)
        mask = ones[:, -completion:]
        return topr.Batch(
            ids,
            ones,
            mask,
            torch.zeros(mask.shape, device=device),
            torch.tensor([-1.0], device=device),
        )

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        sync()
        begun = time.perf_counter()
        value = work()
        sync()
        return time.perf_counter() - begun, value

    with torch.no_grad():
        one, long = batch(asked.completion), batch(asked.longest)
        scoring = [timed(lambda: topr.token_logprobs(model, one)) for _ in range(6)]
        differing = max(float((value - scoring[-1][1]).abs().max()) for _, value in scoring)
        one = one._replace(token_logmu=scoring[-1][1])
        long = long._replace(token_logmu=topr.token_logprobs(model, long))
    each = max(8 // asked.ranks, 1)  # micro-batches of a GPU in a step of 8 samples
    steps = [([one] * each, 8)] * asked.steps + [([long] * each, 8)] * 3
    trained = topr.train(model, optimizer, iter(steps))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds, ratios, norms, peaks = [], [], [], []
    for number, _ in enumerate(steps):
        took, stats = timed(lambda: next(trained))
        seconds.append(took)
        ratios.append(float(stats.log_ratio[0]))
        norms.append(stats.grad_norm)
        if cuda and number == asked.steps - 1:
            peaks.append(torch.cuda.max_memory_allocated() / 1e9)
    if cuda:
        peaks.append(torch.cuda.max_memory_allocated() / 1e9)
        free, total = torch.cuda.mem_get_info()
    if asked.profile and cuda:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            list(topr.train(model, optimizer, iter(steps[:2])))
        asked.profile.write_text(seen.key_averages().table(sort_by="cuda_time_total", row_limit=40))
    step, score = median(seconds[3 : asked.steps]), median(took for took, _ in scoring[2:])
    tokens = asked.prompt + asked.completion
    tables = 1 if config.tie_word_embeddings else 2
    body = parameters - config.vocab_size * config.hidden_size * tables
    forward = 2 * (body * tokens + config.vocab_size * config.hidden_size * asked.completion)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    forward += 2 * tokens**2 * config.num_hidden_layers * config.num_attention_heads * head_dim
    passes = each * (3 + asked.gradient_checkpointing)
    result = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "command": " ".join(sys.argv[1:]),
        "parameters": parameters,
        "peak GB": [round(peak, 2) for peak in peaks],
        "reserved GB": torch.cuda.max_memory_reserved() / 1e9 if cuda else None,
        "used of card GB": (total - free) / 1e9 if cuda else None,
        "step s": step,
        "first step s": seconds[0],
        "longest step s": seconds[-1],
        "score s": score,
        "forward TFLOP": forward / 1e12,
        "score TFLOP/s": forward / score / 1e12,
        "train TFLOP/s": passes * forward / step / 1e12,
        "log-ratio at step 1": ratios[0],
        "largest difference of two scores": differing,
        "grad norms": norms[:3],
    }
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
