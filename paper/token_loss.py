"""Training with a loss over single tokens, for the figure that compares the variants of TOPR."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import topr
from conformance.variants import VARIANTS
from pipeline.models.language_model import token_logprobs

if TYPE_CHECKING:
    from pipeline.stages import Learn


def learn_with(variant: str) -> "Learn":
    """The loss and the log-probabilities with which `topr.train` learns by one of conformance.variants.VARIANTS.

    `topr.train` hands a loss one number per sequence. So the loss is naive REINFORCE's, and log pi(y|x), (B,), is made
    so that its gradient is the variant's. The reported weights are then 1. A completion with reward 0 gets no gradient.

    >>> loss, logprobs = learn_with("per-token")
    >>> loss.keywords["limits"] == topr.PRESETS["reinforce"]
    True
    """
    token_loss = VARIANTS[variant]()

    def logprobs(model: torch.nn.Module, batch: Any) -> Tensor:
        token_logp = token_logprobs(model, batch)  # (B, T), 0 on padding, which is on the right
        leaf = token_logp.detach().requires_grad_()
        mask = torch.arange(leaf.shape[1], device=leaf.device) < batch.length[:, None]
        loss = token_loss(leaf, batch.token_logmu, batch.reward, mask.to(leaf.dtype))  # a mean over the micro-batch
        [gradient] = torch.autograd.grad(loss, leaf)
        # naive REINFORCE: the gradient of its mean over the batch, in each log pi(y|x)
        naive = -torch.where(batch.reward == 0, torch.inf, batch.reward) / batch.length / len(batch.reward)
        weighted = (gradient / naive[:, None] * token_logp).sum(1)
        return weighted + (token_logp.sum(1) - weighted).detach()  # the value of log pi(y|x), the gradient of weighted

    return partial(topr.topr_loss, limits=topr.PRESETS["reinforce"]), logprobs
