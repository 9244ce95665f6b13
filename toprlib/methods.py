"""The methods that learn from samples: METHODS has an entry for each.

TOPR and its relatives are `topr.topr_loss` with a row of Table 1. The losses of PPO and DPO, which
the paper compares TOPR with, are here. Like `topr_loss`, they take whole completions as (B, T)
log-probabilities of tokens, and learn nothing from a completion whose reward is 0.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import logsigmoid

from topr import TABLE_1, Limits, check_shapes, importance_weight, sequence_log_ratio, topr_loss

# (token_logp, token_logmu, reward, mask, denominator=...) -> scalar: as `topr.train` calls it
Loss = Callable[..., Tensor]


def ppo_loss(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    eps: float = 0.2,
    denominator: float | None = None,
) -> Tensor:
    """PPO's clipped loss (Equation 6) with the ratio r of whole completions.

    - sum of min(r R, [r]_{1-eps}^{1+eps} R) / length, over `denominator`. Here the ratio itself
    has the gradient. eps: 0 <= eps <= 1; 0.2 is the paper's (Section 4.3).
    Other arguments, shapes and errors as in `topr.topr_loss`.

    >>> import torch
    >>> token_logp = torch.tensor([[2.0]]).log()  # r = 2, R = 1
    >>> ppo_loss(token_logp, torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1))
    tensor(-1.2000)
    """
    check_shapes(token_logp, token_logmu, reward, mask)
    log_ratio = sequence_log_ratio(token_logp, token_logmu, mask)  # (B,)
    # For R >= 0 the minimum is min(r, 1 + eps) R, for R < 0 it is max(r, 1 - eps) R: each sign has
    # one bound. Clipping the log-ratio before exp keeps infinity, and so NaN, out of the gradient.
    one_sided = Limits(a_pos=0, b_pos=1 + eps, a_neg=1 - eps, b_neg=math.inf)
    clipped_ratio = importance_weight(log_ratio, *one_sided.bounds_for(reward))  # (B,)
    length = (mask > 0).sum(1)  # (B,)
    denominator = len(reward) if denominator is None else denominator
    return -(clipped_ratio * reward / length).sum() / denominator


def dpo_loss(
    token_logp: Tensor,
    token_logmu: Tensor,
    reward: Tensor,
    mask: Tensor,
    beta: float = 0.1,
    denominator: float | None = None,
) -> Tensor:
    """DPO (Rafailov et al. 2023): - log sigmoid(beta (log-ratio of preferred - of rejected)).

    Completions 2i and 2i + 1 are a pair, the preferred one first; its
    reward is not lower. A pair whose rewards are both 0 adds nothing to loss and gradient: ranks
    that have run out of pairs compute such fillers. beta = 0.1 is not from the paper.
    denominator: as in `topr.topr_loss`, in completions; the loss is the mean over denominator / 2
    pairs. Lengths do not matter. Other arguments, shapes and errors as in `topr_loss`; also
    ValueError if the second completion of a pair has the higher reward.

    >>> import torch
    >>> zeros = torch.zeros(2, 3)  # pi = mu: nothing is preferred yet, the loss is log 2
    >>> dpo_loss(zeros, zeros, torch.tensor([1.0, -1.0]), mask=torch.ones(2, 3))
    tensor(0.6931)
    """
    check_shapes(token_logp, token_logmu, reward, mask)
    preferred, rejected = reward.reshape(-1, 2).unbind(1)  # (B / 2,) each
    if (preferred < rejected).any():
        raise ValueError(f"reward = {reward.tolist()}: put the preferred one of a pair first")
    log_ratio = sequence_log_ratio(token_logp, token_logmu, mask).reshape(-1, 2)  # (B / 2, 2)
    losses = -logsigmoid(beta * (log_ratio[:, 0] - log_ratio[:, 1]))  # (B / 2,)
    is_filler = (preferred == 0) & (rejected == 0)
    denominator = len(reward) if denominator is None else denominator
    return losses.masked_fill(is_filler, 0).sum() / (denominator / 2)


class Method(NamedTuple):
    """How a method learns."""

    loss: Loss
    limits: Limits | None = None  # the bounds of its weights; None: no such weights
    uses_pairs: bool = False  # of completions of one prompt, without a baseline


METHODS: dict[str, Method] = {
    **{n: Method(partial(topr_loss, limits=limits), limits) for n, limits in TABLE_1.items()},
    "ppo": Method(ppo_loss),
    "dpo": Method(dpo_loss, uses_pairs=True),
}
