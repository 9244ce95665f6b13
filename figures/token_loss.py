"""How `topr.train` trains with a loss of tokens, such as those of conformance/variants.py.

`topr.train` gives a loss one log-probability per sequence. This file goes once `topr.train` gives
a loss those of the tokens.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import topr
from conformance.variants import VARIANTS
from pipeline.methods import METHODS


def loss_and_logprobs(
    variant: str, mu: torch.nn.Module
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The loss and the log-probabilities with which `topr.train` learns by a variant of the loss.

    variant: one of conformance.variants.VARIANTS. mu: the model that the samples are from; it
    gives log mu of each token.

    The loss is that of naive REINFORCE, and log pi(y|x), (B,), is made so that its gradient is the
    variant's. The reported weights are then 1. A completion with reward 0 gets no gradient.

    >>> loss, logprobs = loss_and_logprobs("per-token", torch.nn.Identity())
    >>> loss.keywords["limits"] == topr.PRESETS["reinforce"]
    True
    """
    token_loss = VARIANTS[variant]()

    def logprobs(pi: torch.nn.Module, batch: topr.Batch) -> Tensor:
        with torch.no_grad():
            token_logmu = topr.token_logprobs(mu, batch)  # (B, C)
        token_logp = topr.token_logprobs(pi, batch)  # (B, C), 0 on padding, which is on the right
        leaf = token_logp.detach().requires_grad_()
        mask = torch.arange(leaf.shape[1], device=leaf.device) < batch.length[:, None]
        # A mean over the micro-batch.
        loss = token_loss(leaf, token_logmu, batch.reward, mask.to(leaf.dtype))
        [gradient] = torch.autograd.grad(loss, leaf)
        # The gradient of naive REINFORCE's mean over the batch, in each log pi(y|x).
        reward = torch.where(batch.reward == 0, torch.inf, batch.reward)
        naive = -reward / batch.length / len(reward)
        weighted = (gradient / naive[:, None] * token_logp).sum(1)
        # The value of log pi(y|x), with the gradient of `weighted`.
        return weighted + (token_logp.sum(1) - weighted).detach()

    return partial(topr.topr_loss, limits=topr.PRESETS["reinforce"]), logprobs


def loss_of_single_tokens(
    method: str, logp: Tensor, logmu: Tensor, reward: Tensor, **options: float
) -> Tensor:
    """The loss of a method on B completions of one token; logp, logmu and reward are (B,).

    options: `eps` of PPO, `beta` of DPO.

    >>> loss_of_single_tokens("topr", torch.tensor([-2.0]), torch.tensor([-2.0]), torch.ones(1))
    tensor(2.)
    """
    loss = METHODS[method].loss or partial(topr.topr_loss, limits=topr.PRESETS[method])
    return loss(logp, logmu, reward, torch.ones_like(reward), **options)
