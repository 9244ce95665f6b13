"""Compare a loss with the paper's on random batches."""

import math

import torch
from torch import Tensor

from topr_conformance.losses import Loss, LossInputs, describe_error, neg_grad
from topr_conformance.oracle import paper_neg_grad
from topr_conformance.vectors import spell_out_not_finite

MAX_LENGTH = 8  # of a completion, in tokens


def compare(loss: Loss, count: int, seed: int = 0) -> str | None:
    """Compare the gradients on `count` random batches with those of Equation 7.

    Returns None, or a text with the smallest batch that differs. A constant factor is ignored. It
    is fitted on one completion and on two: it may stay (a sum) or be halved (a mean).

    >>> from topr_conformance.variants import paper, token_mean
    >>> compare(paper, 20)
    >>> compare(token_mean, 20).splitlines()[0]
    'differs from Eq. 7 on this batch:'
    """
    try:
        of_one = _neg_grad_of_positives(loss, 1)
        of_two = _neg_grad_of_positives(loss, 2)
    except Exception as error:  # a user's loss may raise anything
        raised = describe_error(error)
        return f"differs from Eq. 7: on an on-policy positive it raised {raised}"
    is_sum = math.isclose(of_one, of_two, rel_tol=1e-4)
    is_mean = math.isclose(of_one, 2 * of_two, rel_tol=1e-4)
    if not (of_one > 0 and (is_sum or is_mean)):
        wanted = "the first must be positive, the second the same or half"
        found = f"neg_grad of an on-policy positive is {of_one + 0:g} and in a pair {of_two + 0:g}"
        return spell_out_not_finite(f"differs from Eq. 7: {found}; {wanted}")
    generator = torch.Generator().manual_seed(seed)
    batches = [random_batch(generator) for _ in range(count)]
    batches.sort(key=lambda batch: batch.mask.numel())  # a small batch is easier to understand
    for batch in batches:
        denominator = 1 if is_sum else len(batch.reward)
        expected = torch.tensor(paper_neg_grad(batch)) * of_one / denominator
        difference = _difference(loss, batch, expected, atol=1e-6 * of_one)
        if difference is not None:
            lines = ["differs from Eq. 7 on this batch:"]
            for name, column in batch._asdict().items():
                lines.append(f"{name} {_rounded(column)}")
            return spell_out_not_finite("\n".join([*lines, difference]))
    return None


def _neg_grad_of_positives(loss: Loss, count: int) -> float:
    """`neg_grad` of the first of `count` on-policy positives of one token."""
    ones = torch.ones(count, 1)
    return neg_grad(loss, LossInputs(-ones, -ones, ones[:, 0], ones))[0, 0].item()


def _difference(loss: Loss, batch: LossInputs, expected: Tensor, atol: float) -> str | None:
    try:
        actual = neg_grad(loss, batch)
    except Exception as error:  # a user's loss may raise anything
        return f"raised {describe_error(error)}"
    if torch.allclose(actual, expected, rtol=1e-4, atol=atol):
        return None
    return f"neg_grad {_rounded(actual)}\npaper {_rounded(expected)}"


def _rounded(values: Tensor) -> list:
    return values.double().round(decimals=6).tolist()


def random_batch(generator: torch.Generator) -> LossInputs:
    """1 to 5 completions of 1 to 8 tokens; padding, on one side, holds numbers from -50 to 50.

    >>> random_batch(torch.Generator().manual_seed(0)).mask.shape
    torch.Size([5, 8])
    """

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator)

    num_rows = int(integers(1, 5))
    width = int(integers(1, MAX_LENGTH))
    lengths = integers(1, width, num_rows, 1)
    logp = integers(-500, 0, num_rows, width) / 100  # hundredths, which bfloat16 rounds
    logmu = integers(-500, 0, num_rows, width) / 100
    padding = integers(-50, 50, num_rows, width)
    mask = (torch.arange(width) < lengths).float()
    is_padded_on_the_left = bool(integers(0, 1))
    if is_padded_on_the_left:
        mask = mask.flip(1)
    reward = torch.tensor([-50.0, -1.0, -0.3, 0.0, 0.3, 1.0, 50.0])[integers(0, 6, num_rows)]
    return LossInputs(
        token_logp=torch.where(mask > 0, logp, padding),
        token_logmu=torch.where(mask > 0, logmu, -padding),
        reward=reward,
        mask=mask,
    )
