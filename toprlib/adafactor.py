"""Adafactor as HuggingFace's trainer sets it, for sharded weights: two collectives per step.

HuggingFace's own leaves the collectives to DTensor, which makes 1,034 in a step of 291 weights.
Here each rank computes on its own rows, and what has to be summed over ranks is summed for all
weights at once.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

EPS = 1e-30  # added to the squares of gradients
DECAY = -0.8  # the newest value has weight step^DECAY in the moving averages


class Adafactor(torch.optim.Optimizer):
    """Adafactor (arXiv 1804.04235) with scale_parameter=False and relative_step=False.

    Its other settings are the defaults of transformers.

    A matrix W with gradient G is updated at step t, with d = t^-0.8:

        S = G^2 + 1e-30
        R += d (row sums of S - R),  C += d (column sums of S - C)
        U = G / sqrt(R C / sum of R)
        W -= lr U / max(1, root mean square of U)

    A vector has a moving average of S in place of R C / sum of R. weights: ordinary
    tensors, or sharded along their first dimension (FSDP2); shards may be empty. The state is this
    rank's own, in at least float32. torch.optim.Adafactor multiplies lr by the root mean square of
    W if that is above its eps2, and takes no shards.

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
        """Update all weights that have a gradient. Every rank calls it."""
        [group] = self.param_groups
        weights = [weight for weight in group["params"] if weight.grad is not None]
        gradients = []
        for weight in weights:
            gradient = _local(weight.grad)
            gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            self._update_averages(weight, gradient)
            gradients.append(gradient)
        factors = self._factors(weights)

        # U = factor * G is computed twice: to store it would take as much memory as the weights.
        norms = []
        for factor, gradient in zip(factors, gradients, strict=True):
            norms.append(torch.linalg.vector_norm(_product(factor) * gradient))
        torch._foreach_div_(norms, [weight.numel() ** 0.5 for weight in weights])
        [mean_squares] = _sum_over_ranks([torch.stack(norms).square_()], weights)
        divisors = mean_squares.sqrt_().clamp_(min=1)  # max(1, root mean square of U)
        torch._foreach_div_([factor[0] for factor in factors], list(divisors.unbind()))
        for weight, factor, gradient in zip(weights, factors, gradients, strict=True):
            _local(weight).addcmul_(_product(factor), gradient, value=-group["lr"])

    def _update_averages(self, weight: Tensor, gradient: Tensor) -> None:
        """R and C of a matrix, or S of a vector, over this rank's rows."""
        state = self.state[weight]
        state["step"] = state.get("step", 0) + 1
        squares = gradient.square().add_(EPS)
        averages = {"squares": squares}
        if squares.ndim > 1:
            averages = {"rows": squares.sum(-1), "columns": squares.sum(-2)}
        for name, value in averages.items():
            state.setdefault(name, value).lerp_(value, state["step"] ** DECAY)

    def _factors(self, weights: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """The factors of each gradient: (rows, columns) of a matrix, (elements,) of a vector.

        That is 1 / sqrt(R C / sum of R), in two factors, or 1 / sqrt(S).
        """
        column_sums = {}
        row_totals = {}
        matrices = []  # on several ranks; a larger tensor is divided into whole matrices
        for index, weight in enumerate(weights):
            state = self.state[weight]
            if "rows" in state:
                column_sums[index] = state["columns"]
                row_totals[index] = state["rows"].sum(-1, keepdim=True)
                if weight.ndim == 2:
                    matrices.append(index)
        parts = []
        for index in matrices:
            parts += [column_sums[index], row_totals[index]]
        sums = iter(_sum_over_ranks(parts, weights))
        for index in matrices:
            column_sums[index] = next(sums)
            row_totals[index] = next(sums)
        factors = []
        for index, weight in enumerate(weights):
            state = self.state[weight]
            if index in column_sums:
                of_rows = (state["rows"] / row_totals[index]).rsqrt_()
                factors.append((of_rows, column_sums[index].rsqrt()))
            else:
                factors.append((state["squares"].rsqrt(),))
        return factors


def _product(factor: tuple[Tensor, ...]) -> Tensor:
    if len(factor) == 1:
        return factor[0]
    rows, columns = factor
    return rows[..., None] * columns[..., None, :]  # (..., rows, columns)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sum_over_ranks(tensors: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """The vectors, summed in one collective over the ranks that the weights are sharded over."""
    if not tensors or not hasattr(weights[0], "to_local"):
        return tensors
    flat = torch.cat(tensors)
    dist.all_reduce(flat, group=weights[0].device_mesh.get_group())
    return list(flat.split([len(tensor) for tensor in tensors]))
