"""Memory of log pi and its gradient, from hidden states through a head of 128,256 tokens: by slices, and otherwise.

    make .venv-trl/ready
    .venv-trl/bin/python -m benchmarks loss_memory

Peak of the process's memory above what it has with weights and hidden states, forward and backward pass, the gradient
of the weights included (Linux: VmHWM). The time of the same calls stands beside it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import topr
from benchmarks.measuring import Comparison, Goal, Settings, in_turn, peak_above, record, seconds
from benchmarks.trl_sides import chunked_logprobs, selective_log_softmax, trl
from pipeline.models.chunked_head import SLICE, selected_logprobs

SLICED, TOPR, PLAIN = "slices of the vocabulary", "topr.select_logprobs", "log_softmax + gather"
SELECTIVE, CHUNKED = "TRL's selective log-softmax", "TRL's trainer's head, in tiles"


def sides(hidden: Tensor, weight: Tensor, tokens: Tensor) -> dict[str, Callable[[], Tensor]]:
    """log pi of the tokens, (N,), each way."""
    return {
        SLICED: lambda: selected_logprobs(hidden, weight, tokens),
        SELECTIVE: lambda: selective_log_softmax((hidden @ weight.T)[None], tokens[None])[0],
        PLAIN: lambda: (hidden @ weight.T).log_softmax(-1).gather(-1, tokens[:, None])[:, 0],
        TOPR: lambda: topr.select_logprobs(hidden @ weight.T, tokens),
        CHUNKED: lambda: chunked_logprobs(hidden, weight, tokens),
    }


def measure(settings: Settings) -> dict[str, Any]:
    """Peak memory and time of each side, once all have been seen to agree."""
    width, count, vocabulary = (16, 16, 2_048) if settings.small else (512, 512, 128_256)
    torch.manual_seed(settings.seed)
    hidden = torch.randn(count, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) / width**0.5).requires_grad_()
    found = sides(hidden, weight, torch.randint(vocabulary, (count,)))

    def step(side: str) -> Tensor:
        weight.grad = hidden.grad = None
        logp = found[side]()
        logp.sum().backward()
        return logp.detach()

    expected = step(SLICED), hidden.grad, weight.grad[::1000].clone()
    for side in found:
        computed = step(side), hidden.grad, weight.grad[::1000]
        for own, other, tolerance in zip(computed, expected, (1e-6, 1e-5, 1e-5), strict=True):
            assert (own - other).norm() < tolerance * other.norm(), side

    def peak(side: str) -> float:
        weight.grad = hidden.grad = None
        return peak_above(lambda: step(side)) / 1e6

    memory = in_turn({side: lambda side=side: peak(side) for side in found}, settings.rounds)
    time = in_turn({side: lambda side=side: seconds(lambda: step(side)) for side in found}, settings.rounds)
    notes = [
        f"the gradient of the weights alone: {weight.numel() * 4 / 1e6:.0f} MB; a slice of logits: "
        f"{SLICE * count * 4 / 1e6:.1f} MB; all logits: {vocabulary * count * 4 / 1e6:.0f} MB"
    ]
    what = f"{count} tokens, hidden {width}, {vocabulary:,} in the vocabulary, float32"
    comparisons = [
        Comparison(f"peak memory: {what}", "MB", memory, [Goal(SLICED, SELECTIVE, 0.5, is_least=False)], notes),
        Comparison(f"time: {what}", "s", time),
    ]
    return record(comparisons, trl=trl.__version__)
