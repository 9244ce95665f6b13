"""Adafactor as HuggingFace's trainer sets it, also for weights that FSDP2 has sharded."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

EPS = 1e-30  # added to the squares of gradients
DECAY = -0.8  # the newest value has weight step^DECAY in the moving averages


class Adafactor(torch.optim.Optimizer):
    """Adafactor (arXiv 1804.04235) with scale_parameter=False and relative_step=False.

    Its other settings are the defaults of transformers, whose own takes no sharded weights.

    A matrix W with gradient G is updated at step t, with d = t^-0.8:

        S = G^2 + 1e-30
        R += d (row sums of S - R),  C += d (column sums of S - C)
        U = G / sqrt(R C / sum of R)
        W -= lr U / max(1, root mean square of U)

    A vector has a moving average of S in place of R C / sum of R.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> weight.grad = torch.tensor([0.5, -3.0])
    >>> Adafactor([weight], lr=0.1).step()
    >>> weight.data
    tensor([0.9000, 2.1000])
    """

    def __init__(self, weights: Iterable[Tensor], lr: float):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all weights that have a gradient. Every rank calls it."""
        [group] = self.param_groups
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            state["step"] = state.get("step", 0) + 1
            squares = weight.grad.square() + EPS
            averages = {"squares": squares}
            if squares.ndim > 1:
                averages = {"rows": squares.sum(-1), "columns": _replicated(squares.sum(-2))}
            for name, value in averages.items():
                state.setdefault(name, value).lerp_(value, state["step"] ** DECAY)
            if squares.ndim > 1:
                rows = state["rows"] / _replicated(state["rows"].sum(-1, keepdim=True))
                columns = state["columns"].rsqrt()[..., None, :]
                update = weight.grad * rows.rsqrt()[..., None] * columns
            else:
                update = weight.grad * state["squares"].rsqrt()
            if isinstance(update, DTensor):  # DTensor replicates a single row
                update = update.redistribute(placements=weight.placements)
            rms = _replicated(torch.linalg.vector_norm(update)) / math.sqrt(update.numel())
            weight.addcdiv_(update, rms.clamp(min=1), value=-group["lr"])


def _replicated(tensor: Tensor) -> Tensor:
    """The tensor with its sum over ranks, if it is sharded."""
    if isinstance(tensor, DTensor):
        return tensor.redistribute(placements=[Replicate()])
    return tensor
