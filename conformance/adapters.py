"""From what a framework has to what the checker takes: a loss by its name, and losses with other signatures."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from conformance.gradient import InputError, Loss, total


def load(name: str) -> Callable[..., Tensor]:
    """The function that package.module:function names, the current folder included; InputError where there is none.

    >>> load("conformance.variants:per_token").__name__
    'per_token'
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise InputError(f"{name}: write it as package.module:function")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a foreign module may raise
        raise InputError(f"{name}: cannot be imported: {type(error).__name__}: {error}") from error
    here = Path(*module.split(".")).with_suffix(".py")
    if here.exists() and here.read_bytes() != Path(found.__file__).read_bytes():  # imported before, from elsewhere
        raise InputError(f"{name}: {here} is hidden by {found.__file__}: give it another name")
    found = getattr(found, attribute, None)
    if not callable(found):
        raise InputError(f"{name}: {module} has no function {attribute!r}")
    return found


def takes_advantages(loss: Callable[..., Tensor]) -> Loss:
    """For loss(logp, logmu, advantages, mask) with an advantage for each token, (B, T).

    >>> from conformance import identify
    >>> def theirs(logp, logmu, advantages, mask):
    ...     return -(advantages * logp * mask).sum(1).div(mask.sum(1)).mean()
    >>> identify(takes_advantages(theirs)).variant
    'naive reinforce'
    """
    return lambda logp, logmu, reward, mask: loss(logp, logmu, reward[:, None].expand_as(logp), mask)


def takes_sequences(loss: Callable[..., Tensor]) -> Loss:
    """For loss(logp, logmu, reward, length) with one number per sequence, (B,), as `topr.topr_loss` takes them.

    >>> from conformance import identify
    >>> from topr import topr_loss
    >>> identify(takes_sequences(topr_loss)).variant
    'paper'
    """
    return lambda logp, logmu, reward, mask: loss(total(logp, mask), total(logmu, mask), reward, mask.sum(1))


def takes_packed(loss: Callable[..., Tensor]) -> Loss:
    """For loss(logp, logmu, reward, lengths) on sequences laid end to end: logp, logmu (N,), reward, lengths (B,).

    >>> from conformance import identify
    >>> import torch
    >>> def theirs(logp, logmu, reward, lengths):
    ...     rows = zip(logp.split(lengths.tolist()), reward)
    ...     return -torch.stack([r * row.mean() for row, r in rows]).mean()
    >>> identify(takes_packed(theirs)).variant
    'naive reinforce'
    """
    return lambda logp, logmu, reward, mask: loss(logp[mask > 0], logmu[mask > 0], reward, mask.sum(1).long())


def returns_tokens(loss: Callable[..., Tensor]) -> Loss:
    """For a loss that returns a value for each token, (B, T), and leaves the mean to its caller.

    The mean is taken as in Section 4.2: over a sequence's tokens, then over sequences. The mean is part of the loss: if
    your trainer takes another, check a function that does.

    >>> from conformance import identify
    >>> identify(returns_tokens(lambda logp, logmu, reward, mask: -reward[:, None] * logp)).variant
    'naive reinforce'
    """
    return lambda *inputs: (total(loss(*inputs), inputs[-1]) / inputs[-1].sum(1)).mean()


ADAPTERS = {
    "none": lambda loss: loss,
    "advantages": takes_advantages,
    "sequences": takes_sequences,
    "packed": takes_packed,
    "tokens": returns_tokens,
}
