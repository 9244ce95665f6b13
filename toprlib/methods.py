"""The methods that learn from samples: METHODS has an entry for each, and here are those that TOPR is compared with.

torch is imported where it is used, so that the names of the methods are there without it.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[
    ..., "Tensor"
]  # (logp, logmu, reward, length, denominator=...) -> scalar: as `topr.train` calls it


def ppo_loss(
    logp: "Tensor",
    logmu: "Tensor",
    reward: "Tensor",
    length: "Tensor",
    eps: float = 0.2,
    denominator: float | None = None,
) -> "Tensor":
    """PPO's clipped loss (Eq. 6) with the ratio of whole sequences: - min(r R, [r]_{1-eps}^{1+eps} R) / length.

    Arguments as in `topr.topr_loss`; 0 <= eps <= 1, 0.2 is the paper's (Section 4.3). The ratio is clipped above for
    R >= 0, below for R < 0, and has the gradient. ValueError where shapes differ, or a length or eps is out of range.

    >>> import torch
    >>> two = torch.tensor([2.0]).log()
    >>> ppo_loss(two, torch.zeros(1), reward=torch.ones(1), length=torch.ones(1))
    tensor(-1.2000)
    """
    from topr import Limits, importance_weight

    if not 0 <= eps <= 1:
        raise ValueError(f"eps = {eps}: must lie in [0, 1]")
    if (length < 1).any():
        raise ValueError(f"length = {length.min().item():g}: a completion has at least one token")
    denominator = _check_shapes(denominator, logp, logmu, reward, length)
    clipped = importance_weight(
        logp - logmu, *Limits(0, 1 + eps, 1 - eps, math.inf).of_sign(reward)
    )
    return -(clipped * reward / length).sum() / denominator


def dpo_loss(
    logp: "Tensor",
    logmu: "Tensor",
    reward: "Tensor",
    length: "Tensor | None" = None,
    denominator: float | None = None,
    beta: float = 0.1,
) -> "Tensor":
    """DPO (Rafailov et al. 2023): - log sigmoid(beta * (log-ratio of the positive - log-ratio of the negative)).

    Arguments as in `topr.topr_loss`: the i-th positive and the i-th negative of the (B,) completions are a pair of the
    same prompt. The mean over B / 2 or denominator / 2 pairs, whatever the length; ValueError on shapes that differ.

    >>> import torch
    >>> dpo_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]))  # log 2 where nothing is preferred yet
    tensor(0.6931)
    """
    from torch.nn.functional import logsigmoid

    denominator = _check_shapes(denominator, logp, logmu, reward)
    log_ratio = [logp[chosen] - logmu[chosen] for chosen in (reward >= 0, reward < 0)]
    return -logsigmoid(beta * (log_ratio[0] - log_ratio[1])).sum() / (denominator / 2)


def _check_shapes(denominator: float | None, *columns: "Tensor") -> float:
    """The denominator, or else B; ValueError unless all columns have one shape (B,)."""
    shapes = {tuple(column.shape) for column in columns}
    denominator = len(columns[0]) if denominator is None else denominator
    if len(shapes) != 1 or columns[0].dim() != 1 or denominator == 0:
        raise ValueError(
            f"need one number per sequence, all of one shape (B,) with B >= 1; got {sorted(shapes)}"
        )
    return denominator


class Method(NamedTuple):
    """How a method learns."""

    loss: Loss | None = None  # None: topr.topr_loss, with its row of Table 1 or --limits
    options: tuple[str, ...] = ()  # the settings that the loss takes
    of_pairs: bool = False  # whether a row is a pair, a positive and a negative of a prompt; there is no baseline then


METHODS = dict.fromkeys(("topr", "tis", "sft", "reinforce", "off_policy"), Method()) | {
    "ppo": Method(ppo_loss, ("eps",)),
    "dpo": Method(dpo_loss, ("beta",), of_pairs=True),
}
