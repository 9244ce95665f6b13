"""A template: copy this file, call your framework's loss in it, and check the copy.

topr-conformance my_copy.py:loss     # "paper", or the differences, such as "per-token"
"""

from torch import Tensor

from topr_conformance import paper as framework_loss  # import yours instead


def loss(token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """A scalar to be minimised, of B completions that are padded to T tokens.

    token_logp: (B, T) log-probability of each token, from the model in training; token_logmu:
    (B, T) from the model that sampled; reward: (B,) after the baseline, that is, the advantage;
    mask: (B, T) 1.0 on the completion's tokens, 0.0 elsewhere.
    """
    return framework_loss(token_logp, token_logmu, reward, mask)
