"""Random ragged batches: a loss's gradient against Equation 7, written as loops over numbers."""

import math

import torch
from torch import Tensor

from conformance.losses import Loss, LossInputs, push


def oracle(inputs: LossInputs) -> list[list[float]]:
    """The paper's push for each token: R [pi/mu]_a^b / length, and 0 where the mask is 0.

    Not divided by the number of sequences. In plain Python, for it must not share code with what it checks.

    >>> oracle(LossInputs(*torch.tensor([[[-2.0, -2.0]], [[-1.5, -1.5]]]), torch.tensor([-1.0]), torch.ones(1, 2)))
    [[-0.18393972058572117, -0.18393972058572117]]
    """
    pushes = []
    for logp, logmu, reward, mask in zip(*(column.double().tolist() for column in inputs), strict=True):
        log_ratio = sum(p - m for p, m, inside in zip(logp, logmu, mask, strict=True) if inside)
        weight = 1.0 if reward >= 0 or log_ratio > 0 else math.exp(log_ratio)
        pushes.append([reward * weight / sum(mask) if inside else 0.0 for inside in mask])
    return pushes


def compare(loss: Loss, count: int, seed: int = 0) -> str | None:
    """Compare the pushes on `count` random batches with the oracle's: None, or the smallest batch that differs.

    A constant factor is fitted on one sequence and on two: it may stay the same (a sum) or be halved (a mean). A loss
    that cannot take float64 is given float32.

    >>> from conformance.variants import paper, token_mean
    >>> compare(paper, 20)
    >>> compare(token_mean, 20).splitlines()[0]
    'differs from Eq. 7 on this batch:'
    """
    for dtype in (torch.float64, torch.float32):
        try:
            positives = (torch.ones(number, 1, dtype=dtype) for number in (1, 2))
            alone, of_two = (push(loss, LossInputs(-x, -x, x[:, 0], x))[0, 0].item() for x in positives)
            break
        except Exception as error:  # whatever a foreign loss may raise
            told = _in_a_line(error)
    else:
        return f"differs from Eq. 7: on an on-policy positive it {told}"
    is_sum = math.isclose(alone, of_two, rel_tol=1e-4)
    if not alone > 0:
        return f"differs from Eq. 7: an on-policy positive has a push of {alone:g}"
    if not is_sum and not math.isclose(alone, 2 * of_two, rel_tol=1e-4):
        return f"differs from Eq. 7: an on-policy positive has a push of {alone:g} alone, {of_two:g} as one of two"
    draw = torch.Generator().manual_seed(seed)
    batches = [_ragged(draw, dtype) for _ in range(count)]
    differing = [(batch, told) for batch in batches if (told := _difference(loss, batch, alone, is_sum))]
    if not differing:
        return None
    batch, told = min(differing, key=lambda pair: pair[0].mask.numel())
    columns = [f"{name} {column.tolist()}" for name, column in batch._asdict().items()]
    return "\n".join(["differs from Eq. 7 on this batch:", *columns, told])


def _difference(loss: Loss, batch: LossInputs, factor: float, is_sum: bool) -> str | None:
    try:
        found = push(loss, batch)
    except Exception as error:  # whatever a foreign loss may raise
        return _in_a_line(error)
    expected = torch.tensor(oracle(batch), dtype=found.dtype) * factor / (1 if is_sum else len(batch.reward))
    is_equal = torch.allclose(found, expected, rtol=1e-4, atol=1e-6 * factor)
    shown = (values.double().round(decimals=6).tolist() for values in (found, expected))
    return None if is_equal else "push {}\npaper {}".format(*shown)


def _in_a_line(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}".splitlines()[0]


def _ragged(draw: torch.Generator, dtype: torch.dtype) -> LossInputs:
    """A batch of 1 to 5 sequences of 1 to 8 tokens, padded on either side; log pi and log mu from -5 to 0 by quarters.

    Padding holds other numbers, up to 50 on either side of 0.
    """

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=draw)

    many, width = int(integers(1, 5)), int(integers(1, 8))
    lengths = integers(1, width, many, 1)
    logp, logmu = (integers(-20, 0, many, width).to(dtype) / 4 for _ in range(2))  # exact in float32 as well
    padding = integers(-200, 200, many, width).to(dtype) / 4
    mask = (torch.arange(width) < lengths).to(dtype)
    mask = mask.flip(1) if integers(0, 1) else mask
    reward = torch.tensor([-2.0, -1.0, -0.3, 0.0, 0.3, 1.0, 2.0], dtype=dtype)[integers(0, 6, many)]
    return LossInputs(torch.where(mask > 0, logp, padding), torch.where(mask > 0, logmu, -padding), reward, mask)
