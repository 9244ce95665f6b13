"""The batches on which hypotheses about a loss are tried."""

from typing import NamedTuple

import torch
from torch import Tensor

from topr_conformance.losses import LossInputs

# The absolute log-ratios of single tokens, dense where the bounds of public code lie, and never a
# round number, at which a log-ratio may be clipped
LOG_RATIOS = (1.1e-4, 1.1e-3, 0.011, 0.032, 0.11, 0.21, 0.51, 1.05, 2.05)
LOG_RATIOS += (3.05, 4.05, 6.05, 8.05, 12.05, 16.05, 24.05, 32.05, 40.05)
# The rows of a probe: first an on-policy positive and an on-policy negative of one token each.
# Then come these single tokens: of each log-ratio, - and +, two signs of the reward and two log pi.
SINGLES = slice(2, 2 + 2 * len(LOG_RATIOS) * 2 * 2)
NUM_LONG = 31  # completions of 2 to 6 tokens, the last rows
WIDTH = 6  # T


class SingleToken(NamedTuple):
    """A completion of one token."""

    log_ratio: float
    reward: float
    logp: float


def probes(
    dtype: torch.dtype = torch.float64, is_coarse: bool = False, scale: float = 1.0
) -> list[LossInputs]:
    """Five batches of one shape and one token_logmu, so that frozen weights fit all of them.

    The first batch begins with an on-policy positive of a single token with log pi = 0, by which
    all gradients are divided. SINGLES says what follows. The other batches change the first in one
    way each. is_coarse: all numbers are multiples of 1/4, which bfloat16 sums without rounding.
    scale: a factor on LOG_RATIOS.

    >>> first, *others = probes()
    >>> first.mask.shape, first.reward.mean().item(), len(others)
    (torch.Size([177, 6]), 0.0, 4)
    """
    generator = torch.Generator().manual_seed(0)
    first = _first_probe(generator, is_coarse, scale)
    drift = _random_rows(-1, 0.6, generator, is_coarse)
    changed = [
        first,
        first._replace(token_logp=first.token_logp + drift * first.mask),  # is the weight frozen?
        # what divides the sum, and does padding count?
        first._replace(mask=first.mask * (torch.arange(WIDTH) < 3)),
        first._replace(reward=first.reward + 1.5),  # does the loss subtract a baseline?
        first._replace(reward=100 * first.reward),  # is it clipped?
    ]
    batches = []
    for batch in changed:
        batches.append(LossInputs(*[column.to(dtype) for column in batch]))
    return batches


def _first_probe(generator: torch.Generator, is_coarse: bool, scale: float) -> LossInputs:
    token_logp = _random_rows(-3, -0.5, generator, is_coarse)
    token_logmu = _random_rows(-3, -0.5, generator, is_coarse)
    rewards = [1.0, -2.0]  # of the two on-policy rows, whose log pi and log mu are 0
    lengths = [1, 1]
    for row, single in enumerate(_single_tokens(is_coarse, scale), start=SINGLES.start):
        token_logp[row, 0] = single.logp
        token_logmu[row, 0] = single.logp - single.log_ratio
        rewards.append(single.reward)
        lengths.append(1)
    for i in range(NUM_LONG):
        size = (0.5, 1.0, 2.0, 0.0)[i // 2 % 4]
        rewards.append(size if i % 2 == 0 else -size)
        lengths.append(2 + i % 5)
    reward = torch.tensor(rewards, dtype=torch.float64)
    reward[-1] -= reward.sum()  # the mean is 0 now: to subtract it changes nothing
    mask = (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).double()
    return LossInputs(token_logp, token_logmu, reward, mask)


def _single_tokens(is_coarse: bool, scale: float) -> list[SingleToken]:
    sizes = [scale * size for size in LOG_RATIOS]
    if is_coarse:
        sizes = [max(round(4 * size) / 4, 0.25) for size in LOG_RATIOS]
    singles = []
    for log_ratio in [-size for size in reversed(sizes)] + sizes:
        for reward in (1.0, -1.0):
            for logp in two_log_probabilities(abs(log_ratio)):
                singles.append(SingleToken(log_ratio, reward, logp))
    return singles


def two_log_probabilities(size: float) -> tuple[float, float]:
    """Two log pi for a log-ratio of this size.

    They grow with it, so that log mu stays below 0, and are small where it is small, so that
    float32 resolves log pi - log mu.
    """
    if size < 0.05:
        return -0.25, -0.75
    if size < 5:
        return -5.0, -9.0
    return -45.0, -50.0


def _random_rows(low: float, high: float, generator: torch.Generator, is_coarse: bool) -> Tensor:
    """Uniform numbers for the long completions, and 0 in the rows before them, (B, T)."""
    uniform = torch.rand(NUM_LONG, WIDTH, generator=generator, dtype=torch.float64)
    values = low + (high - low) * uniform
    if is_coarse:
        values = (4 * values).round() / 4
    return torch.cat([torch.zeros(SINGLES.stop, WIDTH, dtype=torch.float64), values])
