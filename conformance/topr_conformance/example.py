"""A template: copy this file, call your framework's loss in it, and check the copy.

    topr-conformance my_copy:loss       # "paper", or the differences, such as "batch-mean baseline"

For a first difference write `reward - reward.mean()` below instead of `reward`.
"""

from torch import Tensor

from topr import topr_loss_of_tokens


def loss(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
    """A scalar to be minimised, of B completions that are padded to T tokens.

    logp, logmu: (B, T) log-probability of each token, from the model in training and from the model that sampled;
    reward: (B,), after the baseline: the advantage; mask: (B, T), 1.0 on the completion's tokens, 0.0 elsewhere.

    >>> from topr_conformance import identify
    >>> identify(loss).variant
    'paper'
    """
    return topr_loss_of_tokens(logp, logmu, reward, mask)
