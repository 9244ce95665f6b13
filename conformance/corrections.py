"""Mistakes that can be undone from outside: a loss whose inputs or gradient are corrected is identified once more."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.losses import LossInputs

Push = Callable[[LossInputs], Tensor]
"""a batch -> the push on each token, (B, T)"""
PLACES: dict[str, Callable[[Tensor], Tensor]] = {  # of one more token: mask (B, T) -> its position, (B, 1)
    "end": lambda mask: mask.sum(1, keepdim=True),
    "start": lambda mask: 0 * mask[:, :1],
    "padding": lambda mask: 0 * mask[:, :1] + mask.shape[1],
}


def corrections(push: Push, batch: LossInputs, singles: slice) -> Iterator[tuple[list[str], Push]]:
    """What a loss may do wrong, and its pushes if it did not; `singles`: the rows of single tokens, as in a probe.

    What it adds where all rewards are 0 is a term of its own, such as a KL. A token more for each completion makes up
    for one that is left out, or not counted. A factor on log-probabilities is taken out again.
    """
    names: list[str] = []
    extra = push(batch._replace(reward=0 * batch.reward))
    if extra.isfinite().all() and extra.any():
        names, push = ["extra term"], lambda inputs, of=push: of(inputs) - of(inputs._replace(reward=0 * inputs.reward))
        yield names, push
    for place in PLACES:
        longer, added = with_a_token(batch, place)
        name = f"token missing at the {place.replace('padding', 'end')}"
        name = "length off by -1" if push(longer)[added].any() else name
        yield [name, *names], partial(_longer, push, place)
    weight, logp = (column[singles, 0].view(-1, 2, 2)[:, 1] for column in (push(batch), batch.logp))  # of negatives
    slopes = (weight[:, 0] / weight[:, 1]).log() / (logp[:, 0] - logp[:, 1])  # at one log-ratio; 0 between bounds
    slope = slopes[slopes.isfinite() & (slopes.abs() > 1e-6)].median().nan_to_num(0.0).item()
    for column, factor in (("logp", 1 + slope), ("logmu", 1 - slope)):
        if factor > 0.01 and slope:
            name = f"scaled log-probabilities ({column} x {factor:.4g})"
            yield [name, *names], lambda b, of=column, by=factor: push(b._replace(**{of: getattr(b, of) / by}))


def with_a_token(batch: LossInputs, place: str) -> tuple[LossInputs, Tensor]:
    """Each completion with one more token at one of PLACES, of log pi = log mu = 0; where it stands, (B, T + 1).

    >>> with_a_token(LossInputs(*torch.tensor([[[-1.0]], [[-2.0]]]), torch.ones(1), torch.ones(1, 1)), "start")[0].logmu
    tensor([[ 0., -2.]])
    """
    positions = torch.arange(batch.mask.shape[1] + 1).expand(len(batch.mask), -1)
    at = PLACES[place](batch.mask)
    others = positions - (positions > at).long()  # what follows moves to the right
    logp, logmu, mask = (
        torch.where(positions == at, value, pad(column, (0, 1)).gather(1, others))
        for value, column in ((0.0, batch.logp), (0.0, batch.logmu), (float(place != "padding"), batch.mask))
    )
    return LossInputs(logp, logmu, batch.reward, mask), positions == at


def _longer(push: Push, place: str, batch: LossInputs) -> Tensor:
    longer, added = with_a_token(batch, place)
    return push(longer)[~added].view_as(batch.logp)
