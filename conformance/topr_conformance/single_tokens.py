"""The weight of single tokens as a function of their log-ratio, from a loss's gradients."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from topr_conformance.limits import Limits
from topr_conformance.losses import LossInputs
from topr_conformance.probes import SINGLES, two_log_probabilities

NegGrad = Callable[[LossInputs], Tensor]  # a batch -> `neg_grad` of a loss on it, (B, T)
NUM_ROUNDS = 5  # in which an edge of a window is found: each divides the interval by 70


class Curve(NamedTuple):
    """The weights of single tokens with rewards of one sign, where they are not cut to 0."""

    log_ratio: Tensor  # rising
    weight: Tensor
    edges: list[tuple[float, float]]  # an inner and an outer log-ratio: between them 0 begins

    @property
    def has_zeros(self) -> bool:
        """Whether the weight is 0 at log-ratios outside."""
        return bool(self.edges)


class SingleTokens(NamedTuple):
    """A loss's weights on `probes`, relative to that of an on-policy positive."""

    log_ratio: Tensor  # (log-ratios,), rising; of mu/pi if is_inverted
    weight: Tensor  # (log-ratios, 2): of positives, of negatives
    negative: float  # the weight of an on-policy negative
    stops_gradient: bool
    is_inverted: bool
    underflow: float  # smaller weights may be 0 without a threshold

    @classmethod
    def measure(cls, neg_grads: Tensor, batch: LossInputs, rtol: float) -> "SingleTokens":
        """From the gradients on the first probe; rtol: their relative error.

        The gradient of a single token is R (w + w' logp). The weight's derivative w' is 0 if the
        weight is detached. Two values of log pi separate w from w'.
        """
        per_reward = neg_grads[:, 0] / neg_grads[0, 0] / batch.reward  # (B,)
        # As `probes` orders them: (log-ratios, two signs, two log pi)
        far, near = per_reward[SINGLES].view(-1, 2, 2).unbind(-1)  # (log-ratios, signs) each
        logp_far, logp_near = batch.token_logp[SINGLES, 0].view(-1, 2, 2).unbind(-1)
        all_log_ratios = (batch.token_logp - batch.token_logmu)[SINGLES, 0]
        log_ratio = all_log_ratios.view(-1, 4)[:, 0]  # (log-ratios,): four rows have the same
        is_new = log_ratio.diff(prepend=log_ratio.new_tensor([-math.inf])) > 0  # coarse ones repeat
        log_ratio, far, near = log_ratio[is_new], far[is_new], near[is_new]
        logp_far, logp_near = logp_far[is_new], logp_near[is_new]
        derivative = (far - near) / (logp_far - logp_near)  # w'
        weight = far - derivative * logp_far
        is_flat = derivative.abs() < 0.1 * rtol * weight.abs().clamp_min(1)
        stops_gradient = bool(is_flat.all())
        if stops_gradient:
            weight = (far + near) / 2
        underflow = rtol**2  # 1e-8, or 4e-4 for losses that round to 16 bits
        negative = per_reward[1].item()
        tokens = cls(log_ratio, weight, negative, stops_gradient, False, underflow)
        if tokens._falls(rtol):  # the weight rises with mu/pi
            return tokens._replace(
                log_ratio=-log_ratio.flip(0), weight=weight.flip(0), is_inverted=True
            )
        return tokens

    def _falls(self, rtol: float) -> bool:
        for weight in self.weight.T.abs():
            seen = weight[weight > 1e-12 * weight.max()]
            if len(seen) and seen[0] > seen[-1] + rtol:
                return True
        return False

    def inside_window(self, factor: float) -> list[Curve] | None:
        """The curves of positives and negatives, the latter divided by a factor; None with holes.

        The weight may jump to 0 on either side of an on-policy token, and must then stay 0.
        """
        curves = []
        on_policy = (1.0, self.negative)
        for weight, center, divisor in zip(self.weight.T, on_policy, (1.0, factor), strict=True):
            first, last = self._extent(weight, center)
            is_outside = torch.ones_like(weight, dtype=torch.bool)
            is_outside[first : last + 1] = False
            if (weight[is_outside].abs() > 1e-9).any():
                return None
            edges = []
            if first > 0:
                edges.append((self.log_ratio[first:].clamp(max=0)[0], self.log_ratio[first - 1]))
            if last < len(weight) - 1:
                edges.append((self.log_ratio[last].clamp(min=0), self.log_ratio[last + 1]))
            edges = [(inner.item(), outer.item()) for inner, outer in edges]
            inside = slice(first, last + 1)
            curves.append(Curve(self.log_ratio[inside], weight[inside] / divisor, edges))
        return curves

    def _extent(self, weight: Tensor, center: float) -> tuple[int, int]:
        """The first and the last index between which a weight does not jump to 0.

        All of them if the weight of on-policy tokens, center, is 0.
        """
        middle = len(weight) // 2
        ends = []
        for indices in (range(middle - 1, -1, -1), range(middle, len(weight))):
            end = indices[0] - indices.step
            before = abs(center)
            for i in indices:
                # A ratio falls by e^-8 at most from one log-ratio to the next.
                if before > self.underflow and abs(weight[i]) <= 1e-6 * before:
                    break
                end = i
                before = abs(weight[i])
            ends.append(end)
        return ends[0], ends[1]

    def find_window(self, function: "WeightOfSingleTokens", power: float, digits: int) -> Limits:
        """The edges of the windows, by calls of the loss: ratios to this power."""
        bounds = []
        for curve, sign in zip(self.inside_window(1.0) or [], (1.0, -1.0), strict=True):
            low, high = 0.0, math.inf
            for edge in curve.edges:
                log_ratio = _edge(function, edge, sign, -1.0 if self.is_inverted else 1.0)
                bound = float(f"{math.exp(power * log_ratio):.{digits}g}")
                if edge[1] < edge[0]:
                    low = bound
                else:
                    high = bound
            bounds += [low, high]
        return Limits(*bounds)


def _edge(
    function: "WeightOfSingleTokens", edge: tuple[float, float], sign: float, direction: float
) -> float:
    inner, outer = edge
    for _ in range(NUM_ROUNDS):
        grid = torch.linspace(inner, outer, function.capacity, dtype=torch.float64)[:, None]
        rewards = torch.full_like(grid, sign)
        is_zero = function(direction * grid, rewards)[:, 0].abs() < 1e-9
        is_zero[0], is_zero[-1] = False, True
        first_zero = int(is_zero.int().argmax())
        inner, outer = grid[first_zero - 1].item(), grid[first_zero].item()
    return (inner + outer) / 2


class WeightOfSingleTokens:
    """A loss's own weight of any log-ratio: that of a single token, measured when it is called."""

    def __init__(self, neg_grad: NegGrad, first: LossInputs) -> None:
        self._neg_grad = neg_grad
        self._first = first  # of `probes`: its single tokens get the log-ratios
        rows = torch.arange(len(first.reward))[SINGLES]
        self._rows = {sign: rows[first.reward[SINGLES] == sign] for sign in (1.0, -1.0)}
        self.capacity = len(self._rows[1.0])  # how many log-ratios one call can measure

    def __call__(self, log_ratio: Tensor, reward: Tensor) -> Tensor:
        """Weights of log-ratios (B, T) or (B, 1), for the signs of rewards (B, 1)."""
        signs = torch.where(reward < 0, -1.0, 1.0).expand_as(log_ratio)
        weights = torch.zeros_like(log_ratio)
        for sign, rows in self._rows.items():
            wanted, index = log_ratio[signs == sign].unique(return_inverse=True)
            measured = [self._measure(part, rows) for part in wanted.split(len(rows))]
            weights[signs == sign] = torch.cat(measured)[index]
        return weights

    def _measure(self, log_ratio: Tensor, rows: Tensor) -> Tensor:
        rows = rows[: len(log_ratio)]
        token_logp = self._first.token_logp.clone()
        token_logmu = self._first.token_logmu.clone()
        logp = torch.tensor(_log_probabilities(log_ratio), dtype=torch.float64)
        token_logp[rows, 0] = logp.to(token_logp.dtype)
        token_logmu[rows, 0] = (logp - log_ratio).to(token_logp.dtype)
        batch = self._first._replace(token_logp=token_logp, token_logmu=token_logmu)
        gradient = self._neg_grad(batch)[:, 0]
        return gradient[rows] / gradient[0] / batch.reward[rows].double()


def _log_probabilities(log_ratio: Tensor) -> Sequence[float]:
    return [two_log_probabilities(abs(size))[0] for size in log_ratio.tolist()]
