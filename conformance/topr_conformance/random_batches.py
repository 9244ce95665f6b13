"""The gradient of the paper's loss by hand, and a comparison with it on random batches."""

import math

import torch
from torch import Tensor

from topr_conformance.losses import Loss, LossInputs, describe_error, neg_grad

# On masked positions. A mistake like 0 * NaN shows with infinity and NaN, any other with numbers.
POISON = (-50.0, 7.0, 50.0, math.nan, math.inf, -math.inf)


def paper_neg_grad(inputs: LossInputs) -> list[list[float]]:
    """The paper's `neg_grad`, times B: R [pi/mu]_a^b / length on each token, 0 on padding.

    Loops over numbers, without torch: an oracle must not share code with what it checks.
    """
    rows = zip(*[column.double().tolist() for column in inputs], strict=True)
    neg_grads = []
    for token_logp, token_logmu, reward, mask in rows:
        log_ratio = 0.0
        for logp, logmu, inside in zip(token_logp, token_logmu, mask, strict=True):
            if inside:
                log_ratio += logp - logmu
        weight = 1.0
        if reward < 0 and log_ratio < 0:
            weight = math.exp(log_ratio)
        of_token = reward * weight / sum(mask)
        neg_grads.append([of_token if inside else 0.0 for inside in mask])
    return neg_grads


def compare(loss: Loss, count: int = 100, seed: int = 0) -> str | None:
    """Compare the gradients on `count` random batches with those of Equation 7.

    Returns None, or the smallest batch that differs. A mean over completions may be a sum.

    >>> from topr_conformance import VARIANTS, paper
    >>> compare(paper, 20)
    >>> compare(VARIANTS["token mean"], 20).splitlines()[0]
    'differs from Eq. 7 on this batch:'
    """
    generator = torch.Generator().manual_seed(seed)
    batches = [random_batch(generator) for _ in range(count)]
    batches.sort(key=lambda batch: batch.mask.numel())  # a small batch is easier to understand
    ones = torch.ones(2, 1)
    batch = pair = LossInputs(-ones, -ones, ones[:, 0], ones)  # on-policy positives
    try:
        unit = abs(neg_grad(loss, LossInputs(*[column[:1] for column in pair])).item()) or 1.0
        is_sum = math.isclose(unit, neg_grad(loss, pair)[0, 0].item(), rel_tol=1e-4)
        for batch in batches:
            scale = unit if is_sum else unit / len(batch.reward)
            expected = torch.tensor(paper_neg_grad(batch)) * scale
            actual = neg_grad(loss, batch)
            if not torch.allclose(actual, expected, rtol=1e-4, atol=1e-6 * unit):
                outcome = f"neg_grad {_rounded(actual)}\npaper {_rounded(expected)}"
                break
        else:
            return None
    except Exception as error:  # a user's loss may raise anything
        outcome = f"raised {describe_error(error)}"
    lines = [f"{name} {_rounded(column)}" for name, column in batch._asdict().items()]
    return "\n".join(["differs from Eq. 7 on this batch:", *lines, outcome])


def _rounded(values: Tensor) -> list:
    return values.double().round(decimals=6).tolist()


def random_batch(generator: torch.Generator) -> LossInputs:
    """1 to 5 completions of 1 to 8 tokens, padded on one side, with tool output inside.

    Masked positions have mask 0. In a batch they all hold one of POISON.
    """

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    num_rows = int(integers(1, 5))
    width = int(integers(1, 8))
    logp = integers(-500, 0, num_rows, width) / 100  # hundredths, which bfloat16 rounds
    logmu = integers(-500, 0, num_rows, width) / 100
    mask = torch.arange(width) < integers(1, width, num_rows, 1)
    mask = mask.flip(1) if integers(0, 1) else mask
    with_holes = mask & (integers(0, 3, num_rows, width) > 0)
    mask = torch.where(with_holes.any(1, keepdim=True), with_holes, mask)
    of_logp, of_logmu = integers(0, len(POISON) - 1, 2).tolist()
    token_logp = torch.where(mask, logp, POISON[of_logp])
    token_logmu = torch.where(mask, logmu, POISON[of_logmu])
    reward = torch.tensor([-50.0, -1.0, -0.3, 0.0, 0.3, 1.0, 50.0])[integers(0, 6, num_rows)]
    return LossInputs(token_logp, token_logmu, reward, mask.float())
