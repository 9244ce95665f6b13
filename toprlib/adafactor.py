"""Adafactor as HuggingFace's trainer sets it, for sharded weights: two collectives a step, however many weights.

HuggingFace's own leaves the collectives to DTensor, which makes 1,034 in a step of 291 weights. Here each rank computes
on its own rows, and what has to be summed over ranks is summed for all weights at once.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

EPS = 1e-30  # added to the squares of gradients
DECAY = -0.8  # the moving averages give step^DECAY to the newest value, all at the first step


class Adafactor(torch.optim.Optimizer):
    """Adafactor (arXiv 1804.04235) with scale_parameter=False, relative_step=False and transformers' other defaults.

    A matrix W with gradient G is updated at step t, with d = t^-0.8, by

        S = G^2 + 1e-30
        R += d (row sums of S - R),  C += d (column sums of S - C)
        U = G / sqrt(R C / sum of R)
        W -= lr U / max(1, root mean square of U)

    and a vector with a moving average of S itself in place of R C / sum of R. weights: ordinary tensors, or sharded
    along their first dimension (FSDP2); shards may be empty. The state is this rank's own, in at least float32.
    torch.optim.Adafactor multiplies lr by the root mean square of W where that is above its eps2, and takes no shards.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> weight.grad = torch.tensor([0.5, -3.0])
    >>> Adafactor([weight], lr=0.1).step()
    >>> weight.data
    tensor([0.9000, 2.1000])
    """

    def __init__(self, weights: Iterable[Tensor], lr: float):
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        """Update all weights that have a gradient; every rank calls it."""
        [group] = self.param_groups
        weights = [weight for weight in group["params"] if weight.grad is not None]
        gradients = [_local(weight.grad) for weight in weights]
        gradients = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in gradients]
        for weight, gradient in zip(weights, gradients, strict=True):
            state = self.state[weight]
            state["step"] = state.get("step", 0) + 1
            squares = gradient.square().add_(
                EPS
            )  # the averages of columns are over this rank's rows only
            new = (
                {"rows": squares.sum(-1), "columns": squares.sum(-2)}
                if squares.ndim > 1
                else {"squares": squares}
            )
            for name, value in new.items():
                state.setdefault(name, value).lerp_(value, state["step"] ** DECAY)
        factors = self._factors(weights)
        # The products are made twice: kept for all weights, they would take as much memory as the weights.
        norms = [
            torch.linalg.vector_norm(_product(f) * g)
            for f, g in zip(factors, gradients, strict=True)
        ]
        torch._foreach_div_(norms, [weight.numel() ** 0.5 for weight in weights])
        [mean_squares] = _summed([torch.stack(norms).square_()], weights)
        torch._foreach_div_(
            [factor[0] for factor in factors], list(mean_squares.sqrt_().clamp_(min=1).unbind())
        )
        for weight, factor, gradient in zip(weights, factors, gradients, strict=True):
            _local(weight).addcmul_(_product(factor), gradient, value=-group["lr"])

    def _factors(self, weights: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """What each gradient is multiplied by: (factor of rows, factor of columns), or (factor of elements,)."""
        states = [self.state[weight] for weight in weights]
        sums = [
            (s["columns"], s["rows"].sum(-1, keepdim=True)) if "rows" in s else () for s in states
        ]
        # A matrix has rows on other ranks. Of a tensor with more dimensions, a rank has whole matrices.
        split = [i for i, weight in enumerate(weights) if weight.ndim == 2]
        over_ranks = iter(_summed([part for i in split for part in sums[i]], weights))
        for i in split:
            sums[i] = next(over_ranks), next(over_ranks)
        return [
            ((s["rows"] / pair[1]).rsqrt_(), pair[0].rsqrt()) if pair else (s["squares"].rsqrt(),)
            for s, pair in zip(states, sums, strict=True)
        ]


def _product(factor: tuple[Tensor, ...]) -> Tensor:
    return factor[0][..., None] * factor[1][..., None, :] if len(factor) == 2 else factor[0]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _summed(tensors: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The vectors, summed in one collective over the ranks that the weights are sharded over."""
    if not tensors or not isinstance(weights[0], DTensor):
        return tensors
    flat = torch.cat(tensors)
    dist.all_reduce(flat, group=weights[0].device_mesh.get_group())
    return list(flat.split([len(tensor) for tensor in tensors]))
