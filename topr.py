"""Tapered Off-Policy REINFORCE (TOPR), Le Roux, Bellemare et al. 2025, arXiv 2503.14286: the method in one file.

    weight = [pi(y|x) / mu(y|x)]_0^1 if R < 0 else 1                     Algorithm 1
    loss   = - stop_gradient(weight) * R * log pi(y|x) / length          Section 4.2 divides by the length

mu is the model that sampled the completion y; pi is the model in training. The ratio is that of whole sequences, the
product over all tokens. A positive example keeps weight 1 however improbable it is: it is learnt as fast as in
supervised training. Once the model hardly writes a negative example, its weight is near 0 and training leaves it.

Names, in the whole project: logp is log pi, logmu is log mu, log_ratio is logp - logmu. A loss's reward is that after
the baseline was subtracted; its sign chooses the bounds, and zero counts as positive. A bare name is one number per
sequence, (B,); token_* is one per token, (B, T). Logarithms are natural, lengths are in tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor


# ---- the four bounds: Equation 7 and Table 1 --------------------------------------------------------------------
@dataclass(frozen=True)
class Limits:
    """Where the importance ratio is clipped: to [a_pos, b_pos] if reward >= 0, to [a_neg, b_neg] otherwise (Eq. 7).

    Raises ValueError unless 0 <= a <= b for both pairs and a is finite; b may be infinite.

    >>> Limits(1, 1, 0.8, 0.2)
    Traceback (most recent call last):
    ValueError: limits a_neg = 0.8, b_neg = 0.2: need 0 <= a <= b and a finite
    """

    a_pos: float
    b_pos: float
    a_neg: float
    b_neg: float

    def __post_init__(self) -> None:
        for sign, a, b in (("pos", self.a_pos, self.b_pos), ("neg", self.a_neg, self.b_neg)):
            if not 0 <= a <= b or math.isinf(a):  # a NaN fails every comparison
                raise ValueError(
                    f"limits a_{sign} = {a:g}, b_{sign} = {b:g}: need 0 <= a <= b and a finite"
                )

    def of_sign(self, reward: Tensor) -> tuple[Tensor, Tensor]:
        """The bounds a and b of each reward's sign, in reward's shape and precision (at least float32).

        >>> PRESETS["topr"].of_sign(torch.tensor([0.5, 0.0, -0.5]))
        (tensor([1., 1., 0.]), tensor([1., 1., 1.]))
        """
        a_pos, b_pos, a_neg, b_neg = _at_least_float32(reward).new_tensor(astuple(self))
        return torch.where(reward >= 0, a_pos, a_neg), torch.where(reward >= 0, b_pos, b_neg)


PRESETS: dict[str, Limits] = {  # Table 1
    "topr": Limits(1, 1, 0, 1),  # the paper's canonical choice
    "tis": Limits(0, 1, 0, 1),  # truncated importance sampling
    "sft": Limits(1, 1, 0, 0),  # supervised training on the positives (STaR, ReST)
    "reinforce": Limits(1, 1, 1, 1),  # naive REINFORCE
    "off_policy": Limits(0, math.inf, 0, math.inf),  # plain importance sampling
}


# ---- loss, weight, taper, baseline: Algorithm 1, Sections 3.1 and 4.2, Equation 12 ------------------------------
def topr_loss(
    logp: Tensor,
    logmu: Tensor,
    reward: Tensor,
    length: Tensor,
    limits: Limits = PRESETS["topr"],
    denominator: float | None = None,
) -> Tensor:
    """The loss of Algorithm 1: - sum of stop_gradient(weight) * reward * logp / length, over `denominator`.

    logp, logmu: (B,) log-probabilities of whole sequences; reward: (B,), after the baseline; length: (B,) tokens, >= 1.
    denominator: the completions of the optimiser's step, all micro-batches and processes counted (default B). Divide it
    by the number of processes if the framework averages their gradients, as DDP and FSDP do.
    Returns a scalar. Raises ValueError: other shapes, a length below 1, a NaN reward.

    >>> logp = torch.tensor([-2.0], requires_grad=True)
    >>> topr_loss(logp, logp.detach() + 0.5, reward=torch.tensor([-1.0]), length=torch.tensor([1])).backward()
    >>> logp.grad  # descent lowers log pi, with weight exp(-0.5)
    tensor([0.6065])
    """
    denominator = len(logp) if denominator is None else denominator
    shapes = [tuple(column.shape) for column in (logp, logmu, reward, length)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1 or denominator == 0:
        raise ValueError(
            f"need one number per sequence, all of one shape (B,) with B >= 1; got {shapes}"
        )
    if not isinstance(limits, Limits):
        raise TypeError(
            f"limits = {limits!r}: need Limits(a_pos, b_pos, a_neg, b_neg) or a row of PRESETS"
        )
    if (length < 1).any():
        raise ValueError(f"length = {length.min().item():g}: a completion has at least one token")
    if reward.isnan().any():
        raise ValueError(f"reward = {reward.tolist()}: NaN is no reward")
    log_ratio = (_at_least_float32(logp) - logmu).detach()
    weight = importance_weight(log_ratio, *limits.of_sign(reward))  # (B,) [pi/mu]_a^b
    return -(weight * reward * logp / length).sum() / denominator


def topr_loss_of_tokens(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    limits: Limits = PRESETS["topr"],
    denominator: float | None = None,
) -> Tensor:
    """`topr_loss`, with its `denominator`, in the form that trainers have at hand, to be pasted into them.

    token_logp, token_logmu: (B, T) log-probabilities of single tokens; reward: (B,), after the baseline; mask: (B, T),
    1 on the completion's tokens and 0 elsewhere. Returns a scalar; raises ValueError where a completion has no token.

    >>> topr_loss_of_tokens(*torch.tensor([[[-2.0, -9.0]], [[-1.5, 0.0]]]), -torch.ones(1), torch.tensor([[1, 0]]))
    tensor(-1.2131)
    """
    logp, logmu = (
        torch.where(mask > 0, _at_least_float32(x), 0.0).sum(1) for x in (token_logp, token_logmu)
    )
    return topr_loss(logp, logmu, reward, (mask > 0).sum(1), limits, denominator)


def importance_weight(log_ratio: Tensor | float, a: Tensor | float, b: Tensor | float) -> Tensor:
    """[exp(log_ratio)]_a^b: the weight of a sequence's gradient (Eq. 7), clipped in log space, before exp.

    log_ratio: any shape; a, b: numbers, or tensors that broadcast to it. Returns its shape and precision (at least
    float32). No number gives NaN; infinity comes out only where b is infinite. Raises ValueError unless 0 <= a <= b.

    >>> importance_weight(torch.tensor([-1000.0, -0.5, 1000.0]), 0, 1)
    tensor([0.0000, 0.6065, 1.0000])
    """
    log_ratio, a, b = _with_bounds(log_ratio, a, b)
    return (
        log_ratio.clamp(a.log(), b.log()).exp().clamp(a, b)
    )  # again: exp(log(a)) may miss a by a rounding error


def taper(ratio: Tensor | float, a: float, b: float) -> Tensor:
    """rho(ratio, a, b): the ratio within [a, b], continued by its logarithm outside (Section 3.1).

    rho(x) = a (1 + log(x/a)) if x < a;  b (1 + log(x/b)) if x > b;  x otherwise; 0 if b = 0. It is never above x, and
    d rho / d log x = [x]_a^b. Any shape. Raises ValueError unless ratios are positive and 0 <= a <= b.

    >>> taper(torch.tensor([0.5, 1.0, 2.0]), 0.8, 1.2)
    tensor([0.4240, 1.0000, 1.8130])
    """
    ratio, a, b = _with_bounds(ratio, a, b)
    if (ratio <= 0).any():
        raise ValueError(f"ratio = {ratio.min():g}: a ratio of probabilities is positive")
    return _taper_of_log(ratio.log(), a, b)


def topr_objective(log_ratio: Tensor, reward: Tensor, limits: Limits) -> Tensor:
    """rho(pi/mu) * reward, with the bounds of the reward's sign: the integrand of Eq. 11, to be maximised.

    log_ratio, reward: (B,). Returns (B,), whose gradient is that of `topr_loss`: weight * reward * grad log pi.

    >>> topr_objective(torch.tensor([-2.0, -2.0]), torch.tensor([1.0, -1.0]), PRESETS["topr"])
    tensor([-1.0000, -0.1353])
    """
    return _taper_of_log(*_with_bounds(log_ratio, *limits.of_sign(reward))) * reward


def _taper_of_log(log_ratio: Tensor, a: Tensor, b: Tensor) -> Tensor:
    clipped = log_ratio.clamp(a.log(), b.log())
    # Where b = 0 the clipped log-ratio is -inf and the weight 0: the difference would make it 0 * inf = NaN.
    return clipped.exp() * (1 + torch.where(clipped.isfinite(), log_ratio - clipped, 0.0))


def _with_bounds(
    value: Tensor | float, a: Tensor | float, b: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    value = _at_least_float32(value)
    a, b = (torch.as_tensor(bound, dtype=value.dtype, device=value.device) for bound in (a, b))
    if not ((a >= 0) & (a <= b)).all():
        raise ValueError(f"bounds a = {a.tolist()}, b = {b.tolist()}: need 0 <= a <= b")
    return value, a, b


def _at_least_float32(value: Tensor | float) -> Tensor:
    value = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, int | float) else None)
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def effective_proportion(p: Tensor | float, c: Tensor | float) -> Tensor | float:
    """The share of positives in total absolute reward, from a share p and baseline c; rewards -1 and +1 (Eq. 12).

    p~ = p (1-c) / (1 + (1-2p) c), for numbers or tensors, 0 < p < 1 and -1 <= c <= 1 (ValueError otherwise).

    >>> round(effective_proportion(0.1, -0.8), 12)
    0.5
    """
    _check_within("p", p, 0, 1, slack=0)
    _check_within("c", c, -1, 1)
    return p * (1 - c) / (1 + (1 - 2 * p) * c)


def baseline_for_proportion(p: Tensor | float, p_tilde: Tensor | float) -> Tensor | float:
    """The baseline c that turns a share p of positives into p_tilde: the inverse of Eq. 12.

    c = (p - p~) / (p + p~ - 2 p p~), for numbers or tensors, 0 < p < 1 and 0 <= p_tilde <= 1 (else ValueError).

    >>> round(baseline_for_proportion(0.5, 0.2), 12)
    0.6
    """
    _check_within("p", p, 0, 1, slack=0)
    _check_within("p_tilde", p_tilde, 0, 1)
    return (p - p_tilde) / (p + p_tilde - 2 * p * p_tilde)


def _check_within(
    name: str, value: Tensor | float, low: float, high: float, slack: float = 1e-6
) -> None:
    value = torch.as_tensor(
        value
    )  # a closed interval is meant up to rounding; one without slack is open
    if not ((value > low - slack) & (value < high + slack)).all():
        raise ValueError(
            f"{name} = {value.tolist()}: must lie {'strictly ' * (slack == 0)}between {low} and {high}"
        )


# ---- training a language model: Algorithm 1 as a loop ------------------------------------------------------------
class Batch(NamedTuple):
    """A micro-batch with one padded row per completion: what `sequence_logprobs` reads and `train` learns from.

    The last three may be empty, (0,): the rows are then computed, and nothing is learnt from them, as by a process that
    has no completions left in a step which all processes must compute together.
    """

    input_ids: Tensor  # (B, T) prompt, then completion; padding on either side
    attention_mask: Tensor  # (B, T) 1 on prompt and completion
    completion_mask: Tensor  # (B, T) 1 on the completion's tokens, its end of sequence included
    logmu: Tensor  # (B,) log mu(y|x)
    reward: Tensor  # (B,) after the baseline
    length: Tensor  # (B,) tokens of the completion


def sequence_logprobs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """log pi(y|x) = sum over the completion's tokens of log pi(y_i | x, y_<i): (B,), over the full vocabulary.

    model: any causal language model of `transformers`. Prompt and padding are masked: what they hold has no effect.

    >>> uniform = lambda ids, **_: NamedTuple("Out", [("logits", Tensor)])(torch.zeros(*ids.shape, 8))  # 8 tokens
    >>> ids, mask = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 1]])
    >>> sequence_logprobs(uniform, Batch(ids, torch.ones(1, 3), mask, *torch.ones(3, 1))).exp() * 64
    tensor([1.])
    """
    return token_logprobs(model, batch).sum(-1)


def token_logprobs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """log pi(y_i | x, y_<i): (B, C) for the columns from the batch's first completion token on; 0 outside completions.

    >>> uniform = lambda ids, **_: NamedTuple("Out", [("logits", Tensor)])(torch.zeros(*ids.shape, 8))  # 8 tokens
    >>> ids, mask = torch.tensor([[1, 2, 3, 0]]), torch.tensor([[0, 0, 1, 0]])
    >>> token_logprobs(uniform, Batch(ids, torch.ones(1, 4), mask, *torch.ones(3, 1))).exp() * 8
    tensor([[1., 8.]])
    """
    mask = batch.completion_mask[
        :, 1:
    ].bool()  # (B, T - 1): nothing predicts the first token of a row
    width = mask.shape[1] - int(mask.any(0).int().argmax())  # C
    logits = model(
        batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=(batch.attention_mask.long().cumsum(-1) - 1).clamp_min(0),
        logits_to_keep=width
        + 1,  # none of the prompt but its last token's, which predict the first of the completion
        use_cache=False,
    ).logits[:, -width - 1 : -1]  # (B, C, V): each predicts the next token
    token_logp = select_logprobs(logits, batch.input_ids[:, -width:])
    return torch.where(mask[:, -width:], token_logp, 0.0)


def select_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at `tokens`: logits (..., V), tokens (...); returns (...), at least float32.

    >>> select_logprobs(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    logits = _at_least_float32(logits)
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)


class Step(NamedTuple):
    """What one step of the optimiser learns from: this process's micro-batches, and the sequences of all processes."""

    micro_batches: Sequence[Batch]
    sequences: int


class StepStats(NamedTuple):
    """What one step saw before its update; (n,) for the n sequences of this process."""

    loss: float  # this process's part
    grad_norm: float  # before clipping
    log_ratio: Tensor  # (n,)
    reward: Tensor  # (n,)
    weight: Tensor  # (n,)


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Step],
    loss: Callable[..., Tensor] = topr_loss,
    logprobs: Callable[..., Tensor] = sequence_logprobs,
    max_norm: float = 1.0,
) -> Iterator[StepStats]:
    """Algorithm 1: each round of `for stats in train(...):` is one step of the optimiser; its body may log, save, stop.

    Of a batch it reads logmu, reward and length; its other fields are for logprobs(model, batch). Make batches with any
    logmu. Then, once before the first step, without gradient and dropout, put in that of the model as it is:
    `batch = batch._replace(logmu=sequence_logprobs(model, batch))`.
    loss is called as loss(logp, logmu, reward, length, denominator=...). max_norm: the gradient is clipped to this norm
    (Section 4.2: 1.0). Several processes must sum their gradients, not average them. Raises FloatingPointError, before
    the update, where loss or gradient is not finite.

    >>> coin = torch.nn.Embedding(1, 1)  # its only weight plays log pi of the only completion
    >>> batch = Batch(None, None, None, coin.weight[0].detach().clone(), torch.ones(1), torch.ones(1))
    >>> sgd = torch.optim.SGD(coin.parameters(), lr=0.1)
    >>> [_, second] = train(coin, sgd, [Step([batch], 1)] * 2, logprobs=lambda model, _: model.weight[0])
    >>> second.log_ratio
    tensor([0.1000])
    """
    for step in steps:
        optimizer.zero_grad()
        total, seen = 0.0, []
        for batch in step.micro_batches:
            logp = logprobs(model, batch)[
                : len(batch.reward)
            ]  # (B,), or (0,) of rows that nothing is learnt from
            logp.retain_grad()
            value = loss(logp, batch.logmu, batch.reward, batch.length, denominator=step.sequences)
            # A loss that is not finite makes the gradient's norm NaN on all processes, so that all stop together.
            (value if value.isfinite() else value * math.nan).backward()
            total += value.detach()
            # For the log, read back from the gradient: d loss / d logp = -weight * reward / length / denominator.
            weight = (
                -logp.grad
                * step.sequences
                * batch.length
                / torch.where(batch.reward == 0, 1, batch.reward)
            )
            seen.append(torch.stack([logp.detach() - batch.logmu, batch.reward, weight]))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a sharded model
        stats = StepStats(float(total), norm.item(), *torch.cat(seen, dim=1).unbind())
        if not math.isfinite(stats.loss + stats.grad_norm):
            raise FloatingPointError(f"loss is {stats.loss:g}, grad_norm is {stats.grad_norm:g}")
        optimizer.step()
        yield stats
