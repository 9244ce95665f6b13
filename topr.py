"""Tapered Off-Policy REINFORCE in one file. Sections and equations are those of arXiv 2503.14286.

    weight = 1 if R >= 0 else [pi(y|x) / mu(y|x)]_0^1              Algorithm 1
    loss   = - stop_gradient(weight) R log pi(y|x) / length        Section 4.2 divides by the length

The behavior policy mu sampled the completion y of the prompt x. The target policy pi is the model
in training. pi(y|x) / mu(y|x) is the sequence-level importance ratio: a product over tokens. A
positive example keeps weight 1, so it is learned as in supervised training. Once a negative has
become unlikely under pi, its weight is near 0.

Names: logp is log pi, logmu is log mu, log_ratio is logp - logmu; a bare name is one number per
completion, (B,), token_* is one per token, (B, T). Logarithms are natural, lengths are in tokens.
`reward` is the reward less the baseline. Its sign chooses the bounds; zero counts as positive.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Number = Tensor | float


# ---- the four bounds: Equation 7 and Table 1 -----------------------------------------------------
@dataclass(frozen=True)
class Limits:
    """The bounds of the ratio: [a_pos, b_pos] if reward >= 0, else [a_neg, b_neg] (Equation 7).

    Raises ValueError unless 0 <= a <= b for both signs, with a finite; b may be infinite.
    """

    a_pos: float
    b_pos: float
    a_neg: float
    b_neg: float

    def __post_init__(self) -> None:
        for sign, a, b in (("pos", self.a_pos, self.b_pos), ("neg", self.a_neg, self.b_neg)):
            if not 0 <= a <= b or math.isinf(a):  # NaN fails every comparison
                raise ValueError(f"a_{sign} = {a:g}, b_{sign} = {b:g}: need 0 <= a <= b, a finite")

    def bounds_for(self, reward: Tensor) -> tuple[Tensor, Tensor]:
        """The bounds a and b of each reward's sign, both in the shape of `reward`.

        >>> TABLE_1["topr"].bounds_for(torch.tensor([0.5, 0.0, -0.5]))
        (tensor([1., 1., 0.]), tensor([1., 1., 1.]))
        """
        a_pos, b_pos, a_neg, b_neg = _at_least_float32(reward).new_tensor(astuple(self))
        return torch.where(reward >= 0, a_pos, a_neg), torch.where(reward >= 0, b_pos, b_neg)


TABLE_1: dict[str, Limits] = {
    "topr": Limits(1, 1, 0, 1),  # the paper's canonical choice
    "tis": Limits(0, 1, 0, 1),  # truncated importance sampling
    "sft": Limits(1, 1, 0, 0),  # supervised training on the positives (STaR, ReST)
    "reinforce": Limits(1, 1, 1, 1),  # naive REINFORCE
    "off_policy": Limits(0, math.inf, 0, math.inf),  # plain importance sampling
}


# ---- the loss: Algorithm 1 and Section 4.2 -------------------------------------------------------
def topr_loss(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    limits: Limits = TABLE_1["topr"],
    denominator: float | None = None,
) -> Tensor:
    """Algorithm 1: - sum of stop_gradient(weight) R log pi(y|x) / length, over `denominator`.

    token_logp, token_logmu: (B, T) log-probabilities of tokens; reward: (B,), after the baseline;
    mask: (B, T), 1 on the completion's tokens and 0 elsewhere, where values have no effect.
    denominator: number of completions of the optimizer step, over all micro-batches and processes
    (default: B). If processes average gradients, as in DDP and FSDP, divide it by their number.
    Returns a scalar. Raises ValueError: other shapes, an empty completion, a NaN reward.

    >>> token_logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    >>> token_logmu = torch.tensor([[-0.5, -1.0]])
    >>> topr_loss(token_logp, token_logmu, torch.tensor([-1.0]), torch.ones(1, 2)).backward()
    >>> token_logp.grad  # descent lowers log pi, with weight exp(-0.5), over 2 tokens
    tensor([[0.3033, 0.3033]])
    """
    check_shapes(token_logp, token_logmu, reward, mask)
    token_logp = _at_least_float32(token_logp)
    log_ratio = sequence_log_ratio(token_logp.detach(), token_logmu, mask)  # (B,)
    weight = importance_weight(log_ratio, *limits.bounds_for(reward))  # (B,) [pi/mu]_a^b
    logp = torch.where(mask > 0, token_logp, 0.0).sum(1)  # (B,)
    length = (mask > 0).sum(1)  # (B,)
    denominator = len(reward) if denominator is None else denominator
    return -(weight * reward * logp / length).sum() / denominator


def sequence_log_ratio(token_logp: Tensor, token_logmu: Tensor, mask: Tensor) -> Tensor:
    """log pi(y|x) - log mu(y|x) of whole completions: (B, T) each; returns (B,).

    >>> sequence_log_ratio(torch.tensor([[-1.0, -3.0]]), torch.zeros(1, 2), torch.ones(1, 2))
    tensor([-4.])
    """
    # `where`, not a product: padding may hold infinity or NaN, and 0 * inf is NaN.
    logp = torch.where(mask > 0, _at_least_float32(token_logp), 0.0).sum(1)  # (B,)
    logmu = torch.where(mask > 0, _at_least_float32(token_logmu), 0.0).sum(1)  # (B,)
    return logp - logmu


def check_shapes(token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> None:
    """Raises ValueError unless these can be the arguments of a loss: see `topr_loss`."""
    shapes = [tuple(tensor.shape) for tensor in (token_logp, token_logmu, mask, reward)]
    if token_logp.dim() != 2 or shapes != [shapes[0]] * 3 + [shapes[0][:1]] or 0 in shapes[0]:
        raise ValueError(f"shapes {shapes}: need (B, T) of logp, logmu, mask; (B,) of reward; no 0")
    if not (mask > 0).any(1).all():
        raise ValueError("mask: a completion has no token; it needs at least one")
    if reward.isnan().any():
        raise ValueError(f"reward = {reward.tolist()}: NaN is not a reward")


# ---- weight, taper and objective: Section 3.1, Equations 7 and 11 --------------------------------
def importance_weight(log_ratio: Number, a: Number, b: Number) -> Tensor:
    """[exp(log_ratio)]_a^b: the weight of a completion's gradient (Equation 7).

    log_ratio: any shape; a, b broadcast to it. Returns infinity only where b is infinite, and no
    NaN. Raises ValueError unless 0 <= a <= b.

    >>> importance_weight(torch.tensor([-1000.0, -0.5, 1000.0]), 0, 1)
    tensor([0.0000, 0.6065, 1.0000])
    """
    log_ratio, a, b = _with_bounds(log_ratio, a, b)
    weight = log_ratio.clamp(a.log(), b.log()).exp()  # clipped before exp, which would overflow
    return weight.clamp(a, b)  # again: exp(log(a)) may miss a by a rounding error


def taper(ratio: Tensor | float, a: float, b: float) -> Tensor:
    """rho(ratio, a, b): the ratio within [a, b], continued by its logarithm outside (Section 3.1).

    rho(x) = a (1 + log(x/a)) if x < a;  b (1 + log(x/b)) if x > b;  x otherwise;  0 if b = 0.
    It is never above x, and d rho / d log x = [x]_a^b. ratio: any shape, positive (ValueError).

    >>> taper(torch.tensor([0.5, 1.0, 2.0]), 0.8, 1.2)
    tensor([0.4240, 1.0000, 1.8130])
    """
    ratio, a, b = _with_bounds(ratio, a, b)
    if (ratio <= 0).any():
        raise ValueError(f"ratio = {ratio.min():g}: a ratio must be positive")
    return _taper_of_log(ratio.log(), a, b)


def topr_objective(log_ratio: Tensor, reward: Tensor, limits: Limits) -> Tensor:
    """rho(pi/mu) R with the bounds of the reward's sign: Equation 11's summand, to be maximised.

    log_ratio, reward: (B,). Returns (B,). Its gradient is weight * R * grad log pi.

    >>> topr_objective(torch.tensor([-2.0, -2.0]), torch.tensor([1.0, -1.0]), TABLE_1["topr"])
    tensor([-1.0000, -0.1353])
    """
    return _taper_of_log(*_with_bounds(log_ratio, *limits.bounds_for(reward))) * reward


def _taper_of_log(log_ratio: Tensor, a: Tensor, b: Tensor) -> Tensor:
    clipped = log_ratio.clamp(a.log(), b.log())
    # Where b = 0 the clipped log-ratio is -inf and the weight 0: 0 * inf would be NaN.
    beyond = torch.where(clipped.isfinite(), log_ratio - clipped, 0.0)
    return clipped.exp() * (1 + beyond)


def _with_bounds(value: Number, a: Number, b: Number) -> tuple[Tensor, Tensor, Tensor]:
    value = _at_least_float32(value)
    a, b = (torch.as_tensor(bound, dtype=value.dtype, device=value.device) for bound in (a, b))
    if not ((a >= 0) & (a <= b)).all():
        raise ValueError(f"bounds a = {a.tolist()}, b = {b.tolist()}: need 0 <= a <= b")
    return value, a, b


def _at_least_float32(value: Number) -> Tensor:
    # bfloat16 has 8 bits: a sum of 500 log-probabilities would be off by whole nats.
    value = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, int | float) else None)
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


# ---- baseline and effective proportion of positives: Equation 12 ---------------------------------
def effective_proportion(p: Number, c: Number) -> Number:
    """p~ = p (1-c) / (1 + (1-2p) c): the positives' part of the sum of |R - c| (Equation 12).

    p: proportion of positives among rewards of -1 and +1; c: baseline. Numbers or tensors with
    0 < p < 1 and -1 <= c <= 1, else ValueError.

    >>> round(effective_proportion(0.1, -0.8), 12)
    0.5
    """
    _check_range("p", p, 0, 1, slack=0)
    _check_range("c", c, -1, 1)
    return p * (1 - c) / (1 + (1 - 2 * p) * c)


def baseline_for_proportion(p: Number, p_tilde: Number) -> Number:
    """c = (p - p~) / (p + p~ - 2 p p~): the baseline that turns p into p~; Equation 12 inverted.

    Numbers or tensors with 0 < p < 1 and 0 <= p_tilde <= 1, else ValueError.

    >>> round(baseline_for_proportion(0.5, 0.2), 12)
    0.6
    """
    _check_range("p", p, 0, 1, slack=0)
    _check_range("p_tilde", p_tilde, 0, 1)
    return (p - p_tilde) / (p + p_tilde - 2 * p * p_tilde)


def _check_range(name: str, value: Number, low: float, high: float, slack: float = 1e-6) -> None:
    value = torch.as_tensor(value)  # slack allows for rounding; 0 excludes the bounds themselves
    if not ((value > low - slack) & (value < high + slack)).all():
        strictly = "strictly " if slack == 0 else ""
        raise ValueError(f"{name} = {value.tolist()}: must lie {strictly}between {low} and {high}")


# ---- training a language model: Algorithm 1 as a loop --------------------------------------------
class Batch(NamedTuple):
    """A micro-batch of rows [ prompt | completion | padding ], one per completion.

    The last T of the L columns have all completions; the columns before them only prompts. A causal
    model reads no padding before it writes a completion: padding needs no attention mask.
    """

    input_ids: Tensor  # (B, L) prompt and completion; padding may be any token
    mask: Tensor  # (B, T) 1 on the completion's tokens, its end of sequence included
    token_logmu: Tensor  # (B, T) log mu of the completion's tokens
    reward: Tensor  # (B,) after the baseline; a reward of 0 adds nothing to the gradient


def token_logprobs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """log pi(y_i | x, y_<i) by a causal model of `transformers`: (B, T), 0 outside of completions.

    >>> uniform = lambda ids, **_: type("Output", (), {"logits": torch.zeros(*ids.shape, 8)})
    >>> mask = torch.tensor([[1, 0]])  # a completion of one token, and padding
    >>> batch = Batch(torch.tensor([[5, 3, 0]]), mask, 0 * mask, torch.ones(1))
    >>> token_logprobs(uniform, batch).exp() * 8
    tensor([[1., 8.]])
    """
    width = batch.mask.shape[1]  # T
    output = model(
        batch.input_ids,
        logits_to_keep=width + 1,  # a prompt's last token predicts the completion's first
        use_cache=False,
    )
    logits = _at_least_float32(output.logits[:, -width - 1 : -1])  # (B, T, V) of the next token
    tokens = batch.input_ids[:, -width:, None]  # (B, T, 1)
    token_logp = logits.gather(-1, tokens).squeeze(-1) - logits.logsumexp(-1)
    return torch.where(batch.mask > 0, token_logp, 0.0)


class StepStats(NamedTuple):
    """Numbers of a step before its update; tensors are (n,), one number per completion."""

    loss: float  # this process's part
    grad_norm: float  # before clipping
    log_ratio: Tensor
    reward: Tensor


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[tuple[Iterable[Batch], int]],
    loss: Callable[..., Tensor] = topr_loss,
    max_grad_norm: float = 1.0,
) -> Iterator[StepStats]:
    """Algorithm 1, lines 5 to 9, as a generator: each `next()` is one optimizer step.

    steps: pairs (this process's micro-batches, completions of all processes). token_logmu:
    `token_logprobs` of the model before the first step, without gradient and dropout.
    loss: called as loss(token_logp, token_logmu, reward, mask, denominator=completions).
    max_grad_norm: the gradient is clipped to this norm (Section 4.2: 1.0). Several processes must
    sum their gradients. FloatingPointError, before the update, if loss or gradient is not finite.

    >>> class Model(torch.nn.Embedding):  # a "language model" with a vocabulary of 2
    ...     forward = lambda self, ids, **_: type("Output", (), {"logits": self.weight[ids]})
    >>> model = Model.from_pretrained(torch.zeros(2, 2), freeze=False)
    >>> batch = Batch(torch.tensor([[0, 1]]), torch.ones(1, 1), 0, torch.ones(1))
    >>> batch = batch._replace(token_logmu=token_logprobs(model, batch).detach())
    >>> sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> [stats.log_ratio for stats in train(model, sgd, [([batch], 1)] * 2)]
    [tensor([0.]), tensor([0.3799])]
    """
    for micro_batches, completions in steps:
        optimizer.zero_grad()
        total = 0.0
        log_ratios = []
        rewards = []
        for batch in micro_batches:
            token_logp = token_logprobs(model, batch)  # (B, T)
            inputs = (token_logp, batch.token_logmu, batch.reward, batch.mask)
            value = loss(*inputs, denominator=completions)
            value.backward()
            total += value.detach()
            log_ratio = sequence_log_ratio(token_logp.detach(), batch.token_logmu, batch.mask)
            log_ratios.append(log_ratio)
            rewards.append(batch.reward)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        stats = StepStats(float(total), norm.item(), torch.cat(log_ratios), torch.cat(rewards))
        if not math.isfinite(stats.loss + stats.grad_norm):
            raise FloatingPointError(f"loss is {stats.loss:g}, grad_norm is {stats.grad_norm:g}")
        optimizer.step()
        yield stats
