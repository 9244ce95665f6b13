"""A loss to try `python conformance.py topr_example:loss` on, and to change: is it still TOPR then?"""

import torch
from torch import Tensor


def loss(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """TOPR by Algorithm 1: logp, logmu (B, T) per token; reward (B,) after the baseline; mask (B, T) of 0 and 1.

    >>> loss(*torch.tensor([[[-2.0]], [[-1.5]]]), torch.tensor([-1.0]), torch.ones(1, 1))
    tensor(-1.2131)
    """
    log_ratio = torch.where(mask > 0, logp - logmu, 0.0).sum(1)
    weight = torch.where(reward < 0, log_ratio.clamp(max=0).exp(), 1.0).detach()
    mean_logp = torch.where(mask > 0, logp, 0.0).sum(1) / mask.sum(1)
    return -(weight * reward * mean_logp).mean()
