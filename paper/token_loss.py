"""Training with a loss over single tokens, for the figure that compares the variants of TOPR."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.gradient import Loss


def logprobs_with_gradient_of(
    token_loss: Loss, token_logprobs: Callable[[torch.nn.Module, Any], Tensor]
) -> Callable[[torch.nn.Module, Any], Tensor]:
    """log pi(y|x), (B,), made so that naive REINFORCE of it has the gradient of `token_loss`.

    `topr.train` hands a loss one number per sequence. So that a loss of single tokens can be trained, hand `train` this
    as its logprobs, and naive REINFORCE (`PRESETS["reinforce"]`) as its loss. The reported weights are then 1.

    token_loss: a mean over its micro-batch, as in conformance/variants.py. A completion with reward 0 gets no gradient.
    token_logprobs(model, batch): (B, T), 0 on padding. The batch has token_logmu (B, T), reward and length (B,), and
    padding on the right.

    >>> from types import SimpleNamespace
    >>> batch = SimpleNamespace(token_logmu=-torch.ones(1, 2), reward=-torch.ones(1), length=torch.tensor([2]))
    >>> token_logp = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    >>> first_token = lambda logp, logmu, reward, mask: -(reward * logp[:, 0]).mean()
    >>> logp = logprobs_with_gradient_of(first_token, lambda model, batch: token_logp)(None, batch)
    >>> logp.tolist()
    [-4.0]
    >>> (-batch.reward * logp / batch.length).mean().backward()
    >>> token_logp.grad
    tensor([[1., 0.]])
    """

    def logprobs(model: torch.nn.Module, batch: Any) -> Tensor:
        token_logp = token_logprobs(model, batch)  # (B, T)
        leaf = token_logp.detach().requires_grad_()
        mask = torch.arange(leaf.shape[1], device=leaf.device) < batch.length[:, None]
        loss = token_loss(leaf, batch.token_logmu, batch.reward, mask.to(leaf.dtype))
        [gradient] = torch.autograd.grad(loss, leaf)
        # naive REINFORCE: the gradient of its mean over the batch, in each log pi(y|x)
        naive = -torch.where(batch.reward == 0, torch.inf, batch.reward) / batch.length / len(batch.reward)
        weighted = (gradient / naive[:, None] * token_logp).sum(1)
        return weighted + (token_logp.sum(1) - weighted).detach()  # the value of log pi(y|x), the gradient of weighted

    return logprobs
