"""Memory of log pi and its gradient, from hidden states through a head of 128,256 tokens: by slices, and otherwise.

    make .venv-trl/ready
    .venv-trl/bin/python benchmarks/loss_memory.py

Peak of the process's memory above what it has with weights and hidden states, forward and backward pass, the gradient
of the weights included (Linux: VmHWM). The time of the same calls stands beside it.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measuring import Comparison, Goal, in_turn, peak_above, report, seconds
from trl_sides import chunked_logprobs, selective_log_softmax, trl

import topr
from pipeline.models.chunked_head import SLICE, selected_logprobs

SLICED, TOPR, PLAIN = "slices of the vocabulary", "topr.select_logprobs", "log_softmax + gather"
SELECTIVE, CHUNKED = "TRL's selective log-softmax", "TRL's trainer's head, in tiles"


@dataclass(frozen=True)
class Settings:
    """What is measured; every default is ours."""

    vocabulary: int = 128_256
    """tokens of the vocabulary: Llama 3's"""
    hidden: int = 512
    """width of the hidden states"""
    tokens: int = 512
    """of completions in a batch (paper: the longest completion has as many)"""
    rounds: int = 5
    """times that each side is measured"""
    seed: int = 0
    """seed of weights, hidden states and tokens"""
    out: Path = Path("runs/bench")
    """folder to write loss_memory.json into"""


def sides(hidden: Tensor, weight: Tensor, tokens: Tensor) -> dict[str, Callable[[], Tensor]]:
    """log pi of the tokens, (N,), each way."""

    def logits() -> Tensor:
        return hidden @ weight.T

    return {
        SLICED: lambda: selected_logprobs(hidden, weight, tokens),
        SELECTIVE: lambda: selective_log_softmax(logits()[None], tokens[None])[0],
        PLAIN: lambda: logits().log_softmax(-1).gather(-1, tokens[:, None])[:, 0],
        TOPR: lambda: topr.select_logprobs(logits(), tokens),
        CHUNKED: lambda: chunked_logprobs(hidden, weight, tokens),
    }


def main(settings: Settings) -> None:
    """Check that all sides agree, measure, print, write."""
    torch.manual_seed(settings.seed)
    hidden = torch.randn(settings.tokens, settings.hidden, requires_grad=True)
    weight = (torch.randn(settings.vocabulary, settings.hidden) / settings.hidden**0.5).requires_grad_()
    tokens = torch.randint(settings.vocabulary, (settings.tokens,))
    found = sides(hidden, weight, tokens)

    def step(side: str) -> None:
        weight.grad = hidden.grad = None
        found[side]().sum().backward()

    of_weight, of_hidden, logp = {}, {}, {}
    for side, compute in found.items():
        step(side)
        logp[side], of_hidden[side], of_weight[side] = (
            compute().detach(),
            hidden.grad.clone(),
            weight.grad[::1000].clone(),
        )
        for values, tolerance in ((logp, 1e-6), (of_hidden, 1e-5), (of_weight, 1e-5)):
            assert (values[side] - values[SLICED]).norm() < tolerance * values[SLICED].norm(), side

    def peak(side: str) -> float:
        weight.grad = hidden.grad = None
        return peak_above(lambda: step(side)) / 1e6

    memory = in_turn({side: lambda side=side: peak(side) for side in found}, settings.rounds)
    time = in_turn({side: lambda side=side: seconds(lambda: step(side)) for side in found}, settings.rounds)
    gradient, slice_of_logits = weight.numel() * 4 / 1e6, SLICE * settings.tokens * 4 / 1e6
    notes = [
        f"the gradient of the weights alone: {gradient:.0f} MB; a slice of logits: {slice_of_logits:.1f} MB; "
        f"all logits: {settings.vocabulary * settings.tokens * 4 / 1e6:.0f} MB"
    ]
    what = f"{settings.tokens} tokens, hidden {settings.hidden}, {settings.vocabulary:,} in the vocabulary, float32"
    comparisons = [
        Comparison(f"peak memory: {what}", "MB", memory, [Goal(SLICED, SELECTIVE, 0.5, is_least=False)], notes),
        Comparison(f"time: {what}", "s", time),
    ]
    report(settings.out, "loss_memory", "python benchmarks/loss_memory.py", comparisons, trl=trl.__version__)


if __name__ == "__main__":
    if not os.access("/proc/self/clear_refs", os.W_OK):
        sys.exit("loss_memory.py: reads a process's peak memory from /proc, which this system does not have")
    main(tyro.cli(Settings, description=__doc__))
