"""Tapered Off-Policy REINFORCE (TOPR), Le Roux, Bellemare et al. 2025, arXiv 2503.14286: the algorithm in one file.

    weight = [pi(y|x) / mu(y|x)]_0^1 if R < 0 else 1                     Algorithm 1
    loss   = - stop_gradient(weight) * R * log pi(y|x) / length          Section 4.2 divides by the length

mu is the model that drew the completion y, pi the model in training, and the ratio is that of whole sequences: a
product over all tokens. Positive examples keep weight 1 however improbable they have become, so they are learnt as
fast as by supervised training; a negative example is pushed down only as long as the model would still write it,
so that nothing is pushed to minus infinity.

Names, here and in pipeline/: logp is log pi, logmu is log mu, log_ratio = logp - logmu; reward is what remains after
the baseline was subtracted, and its sign chooses the bounds (zero counts as positive: its gradient is zero). A bare
name is one number per sequence, (B,); token_* is one per token, (B, T). Logarithms are natural, lengths in tokens.
Left out: nothing of the method. Sampling, grading and evaluation are in pipeline/ and train_gsm8k.py.
"""

import math
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

# ---- the four bounds: Equation 7 and Table 1 --------------------------------------------------------------------


class Limits(namedtuple("_FourBounds", "a_pos b_pos a_neg b_neg")):
    """Where the importance ratio is clipped: to [a_pos, b_pos] if reward >= 0, to [a_neg, b_neg] otherwise (Eq. 7).

    Raises ValueError unless 0 <= a <= b for both pairs; b may be infinite.

    >>> Limits(1, 1, 0.8, 0.2)
    Traceback (most recent call last):
    ValueError: limits a_neg = 0.8, b_neg = 0.2: need 0 <= a <= b and a finite
    """

    __slots__ = ()

    def __new__(cls, a_pos: float, b_pos: float, a_neg: float, b_neg: float) -> Self:
        for sign, a, b in (("pos", a_pos, b_pos), ("neg", a_neg, b_neg)):
            if not 0 <= a <= b or math.isinf(a):  # a NaN fails every comparison
                raise ValueError(f"limits a_{sign} = {a:g}, b_{sign} = {b:g}: need 0 <= a <= b and a finite")
        return super().__new__(cls, float(a_pos), float(b_pos), float(a_neg), float(b_neg))

    @classmethod
    def _make(cls, bounds: Iterable[float]) -> Self:  # what _replace calls: it must check too
        return cls(*bounds)


PRESETS: dict[str, Limits] = {  # Table 1
    "topr": Limits(1, 1, 0, 1),  # the paper's canonical choice
    "tis": Limits(0, 1, 0, 1),  # truncated importance sampling
    "sft": Limits(1, 1, 0, 0),  # supervised training on the positives (STaR, ReST)
    "reinforce": Limits(1, 1, 1, 1),  # naive REINFORCE
    "off_policy": Limits(0, math.inf, 0, math.inf),  # plain importance sampling
}

# ---- weight, taper, objective: Section 3.1 ----------------------------------------------------------------------


def importance_weight(log_ratio: Tensor | float, a: Tensor | float, b: Tensor | float) -> Tensor:
    """[exp(log_ratio)]_a^b: the weight of a sequence's gradient (Eq. 7), clipped in log space, before exp.

    log_ratio: any shape; a, b: numbers, or tensors that broadcast to it. Returns its shape and precision (at least
    float32). No number gives NaN; infinity comes out only where b is infinite. Raises ValueError unless 0 <= a <= b.

    >>> importance_weight(torch.tensor([-1000.0, -0.5, 1000.0]), 0, 1)
    tensor([0.0000, 0.6065, 1.0000])
    """
    log_ratio, a, b = _with_bounds(log_ratio, a, b)
    return log_ratio.clamp(a.log(), b.log()).exp().clamp(a, b)  # again, as exp(log(a)) may miss a by a rounding error


def taper(ratio: Tensor | float, a: float, b: float) -> Tensor:
    """rho(ratio, a, b): the ratio within [a, b], continued by its logarithm outside (Section 3.1).

    rho(x) = a (1 + log(x/a)) if x < a;  b (1 + log(x/b)) if x > b;  x otherwise. It is never above x, has a
    continuous derivative, and d rho / d log x = [x]_a^b. At b = 0 it is 0. Any shape; ValueError if a ratio is
    negative or not 0 <= a <= b.

    >>> taper(torch.tensor([0.5, 1.0, 2.0]), 0.8, 1.2)
    tensor([0.4240, 1.0000, 1.8130])
    """
    ratio, a, b = _with_bounds(ratio, a, b)
    if (ratio < 0).any():
        raise ValueError(f"ratio = {ratio.min():g}: a ratio of probabilities cannot be negative")
    is_zero = ratio == 0
    at_zero = torch.where(a > 0, -math.inf, ratio * (b > 0))
    return torch.where(is_zero, at_zero, _taper_of_log(torch.where(is_zero, 1.0, ratio).log(), a, b))


def topr_objective(log_ratio: Tensor, reward: Tensor, limits: Limits) -> Tensor:
    """rho(pi/mu) * reward, with the bounds of the reward's sign: the integrand of Eq. 11, to be maximised.

    log_ratio, reward: (B,). Returns (B,), differentiable; values and gradients are finite for all presets as long
    as exp(log_ratio) is. Its gradient is weight * reward * grad log pi, which is what `topr_loss` uses.

    >>> topr_objective(torch.tensor([-2.0, -2.0]), torch.tensor([1.0, -1.0]), PRESETS["topr"])
    tensor([-1.0000, -0.1353])
    """
    return _taper_of_log(*_with_bounds(log_ratio, *_bounds_of_sign(log_ratio, reward, limits))) * reward


def _taper_of_log(log_ratio: Tensor, a: Tensor, b: Tensor) -> Tensor:
    clipped = log_ratio.clamp(a.log(), b.log())
    # Where the clipped log-ratio is -inf (b = 0) the weight is 0 and the difference would make it 0 * inf = NaN.
    excess = torch.where(clipped.isfinite(), log_ratio - clipped, 0.0)
    return clipped.exp() * (1 + excess)


def _with_bounds(value: Tensor | float, a: Tensor | float, b: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    value = _at_least_float32(value)
    a, b = (torch.as_tensor(bound, dtype=value.dtype, device=value.device) for bound in (a, b))
    if not ((a >= 0) & (a <= b)).all():
        raise ValueError(f"bounds a = {a.tolist()}, b = {b.tolist()}: need 0 <= a <= b")
    return value, a, b


def _bounds_of_sign(log_ratio: Tensor, reward: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    a_pos, b_pos, a_neg, b_neg = _at_least_float32(log_ratio).new_tensor(limits)
    return torch.where(reward >= 0, a_pos, a_neg), torch.where(reward >= 0, b_pos, b_neg)


def _at_least_float32(value: Tensor | float) -> Tensor:
    value = torch.as_tensor(value, dtype=torch.float64 if isinstance(value, int | float) else None)
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


# ---- the losses: Algorithm 1, Section 4.2; Equation 6; DPO -------------------------------------------------------


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
    denominator: the number of sequences in the optimiser's step (default B); counted over all micro-batches and
    ranks, it keeps their sizes out of the gradient. Returns a scalar. The ratio stays a product over all tokens:
    only the loss is divided by the length. ValueError where shapes differ or a length is below 1.

    >>> logp = torch.tensor([-2.0], requires_grad=True)
    >>> topr_loss(logp, logp.detach() + 0.5, reward=torch.tensor([-1.0]), length=torch.tensor([1])).backward()
    >>> logp.grad  # descent lowers log pi, with weight exp(-0.5)
    tensor([0.6065])
    """
    denominator = _check_batch(denominator, length, logp, logmu, reward)
    log_ratio = (_at_least_float32(logp) - logmu).detach()
    weight = importance_weight(log_ratio, *_bounds_of_sign(log_ratio, reward, limits))
    return -(weight * reward * logp / length).sum() / denominator


def ppo_loss(
    logp: Tensor, logmu: Tensor, reward: Tensor, length: Tensor, eps: float = 0.2, denominator: float | None = None
) -> Tensor:
    """PPO's clipped loss (Eq. 6) with the ratio of whole sequences: - min(r R, [r]_{1-eps}^{1+eps} R) / length.

    Arguments, shapes and errors as in `topr_loss`; 0 <= eps <= 1, and 0.2 is the paper's (Section 4.3). The minimum is
    a clipped ratio too, above for R >= 0 and below for R < 0; here the gradient goes through it and is zero outside.

    >>> two = torch.tensor([2.0]).log()
    >>> ppo_loss(two, torch.zeros(1), reward=torch.ones(1), length=torch.ones(1))
    tensor(-1.2000)
    """
    denominator = _check_batch(denominator, length, logp, logmu, reward)
    if not 0 <= eps <= 1:
        raise ValueError(f"eps = {eps}: must lie in [0, 1]")
    log_ratio = _at_least_float32(logp) - logmu
    clipped = importance_weight(log_ratio, *_bounds_of_sign(log_ratio, reward, Limits(0, 1 + eps, 1 - eps, math.inf)))
    return -(clipped * reward / length).sum() / denominator


def dpo_loss(
    logp_pos: Tensor,
    logp_neg: Tensor,
    logmu_pos: Tensor,
    logmu_neg: Tensor,
    beta: float,
    denominator: float | None = None,
) -> Tensor:
    """DPO (Rafailov et al. 2023): - log sigmoid(beta * (log-ratio of the positive - log-ratio of the negative)).

    Each (B,), one pair of completions of the same prompt an entry; not divided by the length. beta > 0.
    denominator: the number of pairs in the step (default B). Returns a scalar; ValueError on shapes that differ.

    >>> zero = torch.zeros(2)
    >>> dpo_loss(zero, zero, zero, zero, beta=0.1)  # log 2 where nothing is preferred yet
    tensor(0.6931)
    """
    denominator = _check_batch(denominator, None, logp_pos, logmu_pos, logp_neg, logmu_neg)
    margin = (_at_least_float32(logp_pos) - logmu_pos) - (_at_least_float32(logp_neg) - logmu_neg)
    return -torch.nn.functional.logsigmoid(beta * margin).sum() / denominator


def _check_batch(denominator: float | None, length: Tensor | None, *columns: Tensor) -> float:
    """The denominator, or else B, once the columns are found to be of one shape (B,); B = 0 needs a denominator."""
    if length is not None and (length < 1).any():
        raise ValueError(f"length = {length.min().item():g}: a completion has at least one token")
    shapes = [tuple(column.shape) for column in (*columns, length) if column is not None]
    denominator = len(columns[0]) if denominator is None else denominator
    if len(set(shapes)) != 1 or len(shapes[0]) != 1 or denominator == 0:
        raise ValueError(f"need one number per sequence, all of one shape (B,) with B >= 1; got {shapes}")
    return denominator


# ---- what a baseline does: Equation 12 ---------------------------------------------------------------------------


def effective_proportion(p: Tensor | float, c: Tensor | float) -> Tensor | float:
    """The share of positives that baseline c turns a share p into, rewards being -1 and +1 (Eq. 12).

    p~ = p (1-c) / (1 + (1-2p) c), for numbers or tensors, 0 < p < 1 and -1 <= c <= 1 (ValueError otherwise).

    >>> round(effective_proportion(0.1, -0.8), 12)
    0.5
    """
    _check_within("p", p, 0, 1, is_open=True)
    _check_within("c", c, -1, 1)
    return p * (1 - c) / (1 + (1 - 2 * p) * c)


def baseline_for_proportion(p: Tensor | float, p_tilde: Tensor | float) -> Tensor | float:
    """The baseline c that turns a share p of positives into p_tilde: the inverse of Eq. 12.

    c = (p - p~) / (p + p~ - 2 p p~), for numbers or tensors, 0 < p < 1 and 0 <= p_tilde <= 1 (else ValueError).

    >>> round(baseline_for_proportion(0.5, 0.2), 12)
    0.6
    """
    _check_within("p", p, 0, 1, is_open=True)
    _check_within("p_tilde", p_tilde, 0, 1)
    return (p - p_tilde) / (p + p_tilde - 2 * p * p_tilde)


def _check_within(name: str, value: Tensor | float, low: float, high: float, is_open: bool = False) -> None:
    value = torch.as_tensor(value)
    slack = 0.0 if is_open else 1e-6  # a closed interval is meant up to rounding
    if not ((value > low - slack) & (value < high + slack)).all():
        raise ValueError(f"{name} = {value.tolist()}: must lie {'strictly ' * is_open}between {low} and {high}")


# ---- log-probabilities of a language model -----------------------------------------------------------------------


class Batch(NamedTuple):
    """A micro-batch with one padded row per completion: what `sequence_logprobs` reads and `train` learns from."""

    input_ids: Tensor  # (B, T) prompt, then completion; padding on either side
    attention_mask: Tensor  # (B, T) 1 on prompt and completion
    completion_mask: Tensor  # (B, T) 1 on the completion's tokens, its end of sequence included
    logmu: Tensor  # (B,) log mu(y|x)
    reward: Tensor  # (B,) after the baseline
    length: Tensor  # (B,) tokens of the completion


def sequence_logprobs(model: torch.nn.Module, batch: Batch) -> Tensor:
    """log pi(y|x) = sum over the completion's tokens of log pi(y_i | x, y_<i): (B,), over the full vocabulary.

    model: any causal language model of `transformers`. Prompt and padding are masked: what they hold has no effect.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=4, num_attention_heads=1, num_hidden_layers=1))
    >>> _ = torch.nn.init.zeros_(model.lm_head.weight)  # every word is as likely as every other
    >>> ids, ones = torch.tensor([[1, 2, 3]]), torch.ones(1, 3)
    >>> batch = Batch(ids, ones, torch.tensor([[0, 1, 1]]), *torch.ones(3, 1))
    >>> sequence_logprobs(model, batch).exp().item() * 64
    1.0
    """
    position_ids = (batch.attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    out = model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=position_ids, use_cache=False)
    token_logp = select_logprobs(out.logits[:, :-1], batch.input_ids[:, 1:])  # (B, T - 1)
    return torch.where(batch.completion_mask[:, 1:].bool(), token_logp, 0.0).sum(-1)


def select_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at `tokens`: logits (..., V), tokens (...); returns (...), at least float32.

    >>> select_logprobs(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """
    logits = _at_least_float32(logits)
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)


# ---- training: Algorithm 1 as a loop -----------------------------------------------------------------------------


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[Batch]],
    loss: Callable[..., Tensor] = topr_loss,
    logprobs: Callable[..., Tensor] = sequence_logprobs,
    max_norm: float = 1.0,
    start_at_mu: float | None = 0.01,
    after_step: Callable[[int, dict[str, float]], None] | None = None,
    done: int = 0,
) -> list[dict[str, float]]:
    """Algorithm 1: one pass over `steps`, the model trained in place. Returns each step's metrics.

    steps: for each optimiser step its micro-batches, whose gradients add up. Only `logprobs` looks at their tokens,
    so any record with (B,) logmu, reward and length will do for a `Batch`, given a function that can read it.
    loss: called as loss(logp, logmu, reward, length, denominator=...). logprobs: as logprobs(model, batch).
    max_norm: the gradient is clipped to this norm (Section 4.2: 1.0). The learning rate is the optimiser's, constant.
    start_at_mu: the most that |log pi - log mu| may be at the first step, in nats; None where pi does not start at mu.
    after_step: called with the steps done and the metrics, to log, save or evaluate. done: the steps done before these.

    Under torchrun each rank brings its share of a step, in as many micro-batches as the others (an empty one where it
    has too few), and a model given to `fully_shard`; denominator and metrics span all ranks. Metrics: step, loss,
    grad_norm before clipping, and those of `step_metrics`. FloatingPointError where loss or gradient is not finite,
    ArithmeticError where the first step is not at mu; the weights are then as they were before the step.

    >>> coin = torch.nn.Embedding(1, 1)  # its only weight plays log pi of the only completion
    >>> batch = Batch(None, None, None, coin.weight[0].detach().clone(), torch.ones(1), torch.ones(1))
    >>> sgd = torch.optim.SGD(coin.parameters(), lr=0.1)
    >>> history = train(coin, sgd, [[batch], [batch]], logprobs=lambda model, _: model.weight[0])
    >>> round(history[1]["log_ratio_pos_q50"], 6)
    0.1
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    history = []
    progress = tqdm(steps, desc="training", unit="step", disable=ranks > 1 and dist.get_rank() > 0)
    for step, micro_batches in enumerate(progress, start=done + 1):
        optimizer.zero_grad()
        denominator = sum(from_all_ranks(sum(len(batch.reward) for batch in micro_batches)))
        total, seen = 0.0, []
        for batch in micro_batches:
            logp = logprobs(model, batch)
            logp.retain_grad()
            value = loss(logp, batch.logmu, batch.reward, batch.length, denominator=denominator)
            (value * ranks).backward()  # fully_shard averages gradients over ranks; the denominator is for their sum
            total += value.detach()
            # Whatever the loss, its gradient in logp is -weight * reward / length / denominator.
            weight = -logp.grad / ranks * denominator * batch.length / torch.where(batch.reward == 0, 1, batch.reward)
            seen.append(torch.stack([logp.detach() - batch.logmu, batch.reward, weight]))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # under fully_shard
        log_ratio, reward, weight = torch.cat(from_all_ranks(torch.cat(seen, dim=1).cpu()), dim=1)
        metrics = {"step": step, "loss": sum(from_all_ranks(total.item())), "grad_norm": norm.item()}
        metrics |= step_metrics(log_ratio, reward, weight)
        _check_step(metrics, log_ratio, start_at_mu)
        optimizer.step()
        history.append(metrics)
        progress.set_postfix(loss=f"{metrics['loss']:.3f}", grad_norm=f"{metrics['grad_norm']:.2f}")
        if after_step is not None:
            after_step(step, metrics)
    return history


def step_metrics(log_ratio: Tensor, reward: Tensor, weight: Tensor) -> dict[str, float]:
    """What one step saw, from its sequences' (B,) log-ratios, rewards and weights.

    Quantiles (5, 50, 95%) of log-ratio and weight for reward > 0 (pos) and < 0 (neg); weights_below_1e-6: their share;
    ess: effective sample size (sum w)^2 / sum w^2, in sequences. Reward 0 has no gradient, hence no weight to count.

    >>> step_metrics(torch.zeros(4), torch.ones(4), torch.ones(4))["ess"]
    4.0
    """
    metrics = {}
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=weight.dtype)
    for sign, chosen in (("pos", reward > 0), ("neg", reward < 0)):
        if chosen.any():
            quantiles = torch.stack([log_ratio, weight])[:, chosen].quantile(levels, dim=1).T.tolist()
            for name, values in zip(("log_ratio", "weight"), quantiles, strict=True):
                metrics |= {f"{name}_{sign}_q{100 * q:02.0f}": v for q, v in zip(levels, values, strict=True)}
    weight = weight[reward != 0]
    metrics["weights_below_1e-6"] = (weight < 1e-6).sum().item() / max(len(weight), 1)
    metrics["ess"] = (weight.sum() ** 2 / weight.square().sum().clamp_min(1e-30)).item()
    return metrics


def _check_step(metrics: dict[str, float], log_ratio: Tensor, start_at_mu: float | None) -> None:
    step, furthest = metrics["step"], log_ratio.abs().max().item()
    for name in ("loss", "grad_norm"):
        if not math.isfinite(metrics[name]):
            raise FloatingPointError(f"step {step}: {name} is {metrics[name]}; the weights are of step {step - 1}")
    if step == 1 and start_at_mu is not None and not furthest <= start_at_mu:
        raise ArithmeticError(
            f"step 1: |log pi - log mu| reaches {furthest:.3g}, above {start_at_mu:g}, where pi should be mu: score "
            "log mu with the very model, layout and precision that train here, or pass start_at_mu=None"
        )
    if step == 2 and furthest == 0:
        warnings.warn("every log-ratio is 0 after an update: is log mu recomputed, or lr too small?", stacklevel=3)


def from_all_ranks(value: object) -> list:
    """The ranks' values, in the order of ranks; [value] where there is one process."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values
