"""Build losses from the one function in which they differ, and disguise them.

A loss here takes logp, logmu (B, T), reward (B,) and mask (B, T).
"""

import torch
from torch.nn.functional import pad

import topr
from topr_conformance.variants import paper


def method_loss(logp, logmu, reward, mask, limits=topr.PRESETS["topr"], denominator=None):
    """topr.py's loss, which the checker does not import."""
    return topr.topr_loss(logp, logmu, reward, mask, limits, denominator)


def total(values, mask):
    """The sum over a completion's tokens, (B,)."""
    return torch.where(mask > 0, values, 0.0).sum(1)


def tapered(logp, logmu, mask):
    """The paper's weight of negatives, (B,)."""
    return total(logp - logmu, mask).clamp(max=0).exp()


# ---- decorators: the paper's loss, but for one function ------------------------------------------
def weight_of_negatives(weight):
    """weight(logp, logmu, mask) -> (B,), which is detached."""

    def loss(logp, logmu, reward, mask):
        of_each = torch.where(reward < 0, weight(logp, logmu, mask), 1.0).detach()
        return -(of_each * reward * total(logp, mask) / mask.sum(1)).mean()

    return named_after(weight, loss)


def divisor(length):
    """length(mask) -> (B,), or one number: what a completion's sum is divided by."""

    def loss(logp, logmu, reward, mask):
        of_each = torch.where(reward < 0, tapered(logp, logmu, mask), 1.0).detach()
        return -(of_each * reward * total(logp, mask) / length(mask)).mean()

    return named_after(length, loss)


def changed_reward(change):
    """change(reward) -> (B,)."""

    def loss(logp, logmu, reward, mask):
        return paper(logp, logmu, change(reward), mask)

    return named_after(change, loss)


def surrogate(term):
    """term(ratio, logp, reward) -> (B,), of completions: differentiated, then times the reward."""

    def loss(logp, logmu, reward, mask):
        ratio = total(logp - logmu, mask).exp()
        value = term(ratio, total(logp, mask), reward)
        return -(value * reward / mask.sum(1)).mean()

    return named_after(term, loss)


def extra_term(term):
    """term(logp, logmu) -> (B, T): its mean, over tokens and then over completions, is added."""

    def loss(logp, logmu, reward, mask):
        extra = total(term(logp, logmu), mask) / mask.sum(1)
        return paper(logp, logmu, reward, mask) + 0.1 * extra.mean()

    return named_after(term, loss)


def named_after(function, loss):
    # Not functools.wraps: the checker reads the names of a loss's arguments.
    loss.__name__ = function.__name__
    return loss


# ---- changes of a loss ---------------------------------------------------------------------------
def disguised(loss):
    """A small multiple of the loss, with rows in another order, padded on both sides: no change."""

    def same(logp, logmu, reward, mask):
        generator = torch.Generator().manual_seed(len(reward))
        order = torch.randperm(len(reward), generator=generator)
        wide_logp = pad(logp[order], (2, 2), value=-7.0)
        wide_logmu = pad(logmu[order], (2, 2), value=-7.0)
        return 1e-3 * loss(wide_logp, wide_logmu, reward[order], pad(mask[order], (2, 2)))

    return same


def taking_padding_for_tokens(loss):
    def blind(logp, logmu, reward, mask):
        return loss(logp, logmu, reward, torch.ones_like(mask))

    return blind


def in_bfloat16(loss, then=torch.bfloat16):
    """The loss of rounded inputs, computed in the precision `then`."""

    def rounded(logp, logmu, reward, mask):
        columns = (logp, logmu, reward, mask)
        return loss(*[column.bfloat16().to(then) for column in columns])

    return rounded


def in_one_precision(dtype):
    """The paper's loss with a product of matrices, which takes this precision only."""

    def loss(logp, logmu, reward, mask):
        product = mask @ torch.ones(mask.shape[1], dtype=dtype)
        return paper(logp, logmu, reward, mask) + 0 * product.sum()

    return loss
