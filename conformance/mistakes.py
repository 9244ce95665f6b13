"""Mistakes: what to change in a loss that has one, and the loss without it, where that can be had from outside."""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from conformance.losses import LossInputs

_LENGTH = "divide each completion's sum by its own number of tokens, mask.sum(1); then take the mean over completions"
OF_NAME = {  # how the name of a difference begins -> what to change
    "per-token": "sum logp - logmu over the completion's tokens first; then clip, and take exp of, the sum",
    "geometric mean": "do not divide the sum of the log-ratios by the length; divide the loss by it",
    "tis": "give positives (reward >= 0) the weight 1; clip that of negatives alone",
    "plain is": "give positives (reward >= 0) the weight 1; clip that of negatives to at most 1",
    "naive reinforce": "weight negatives by min(pi/mu, 1); take log mu from the samples, not from the current model",
    "sft": "do not drop negatives: give them the weight min(pi/mu, 1)",
    "clip": "clip to [1, 1] where reward >= 0 and to [0, 1] elsewhere; a guard of exp, at -20 or lower, does no harm",
    "tempered": "take the ratio to the power 1: no factor and no temperature on its logarithm",
    "inverted ratio": "take logp - logmu, not logmu - logp",
    "no stop-gradient": "detach the weight",
    "frozen weight": "compute the weight from the current logp at every step",
    "batch-mean baseline": "subtract the baseline that you want before the loss, or leave this one, if you want it",
    "branch by raw score": "choose the bounds by the sign of what multiplies log pi: the reward after the baseline",
    "normalised reward": "do not divide the reward by its standard deviation",
    "token mean": _LENGTH,
    "sequence sum": _LENGTH,
    "divided by the longest length": f"{_LENGTH}, not by the longest, and not by the width of the padded batch",
    "length off by": f"{_LENGTH}: as many as are summed",
    "separate means": "take one mean over all completions, positives and negatives together",
    "negatives count": "remove the factor on negatives; choose a baseline if they are to count less",
    "token missing": "shift logits against labels once, and after that cut neither logp nor the mask",
    "scaled log-probabilities": "take logp and logmu at one temperature, that of sampling, and without a factor",
    "extra term": "remove what does not depend on the reward, such as a KL or an entropy, also from within the reward",
    "unmasked": "align the mask with logp, multiply by it before each sum, and count lengths by mask.sum(1)",
    "bfloat16": "compute log-probabilities, their sums and the weight in float32",
    "surrogate": "take the detached weight, however small, times log pi: without a threshold, or PPO's min() of terms",
    "overflow": "clip the log-ratio before exp, and take exp of differences only: log pi - log mu of a completion",
    "objective": "put a minus before what is returned: a loss is minimised",
}
OF_VECTOR = {"V1": "per-token", "V2": "per-token", "V3": "geometric mean", "V4": "clip", "V5": "overflow"}
OF_VECTOR |= {"V6": "surrogate", "V7": "no stop-gradient", "V8": "branch by raw score", "V9": "length off by"}
OF_VECTOR |= {"V10": "extra term", "V11": "unmasked", "V13": "overflow", "V16": "frozen weight", "V17": "tempered"}
OF_VECTOR |= {"V20": "separate means", "V22": "negatives count"}  # whose sentence a loss is told that fails it
FIRST = ("V10", "V6", "V9", "V11", "V20", "V22")  # in this order, before all others: each asks for one thing alone


def change(name: str) -> str:
    """What to change in a loss with a difference of this name.

    >>> change("clip 0.00673795..1").partition("; 0")[2]
    '.00673795 is e^-5'
    """
    logs = {bound: math.log(float(bound)) for bound in re.findall(r"0\.\d+", name) if name.startswith("clip ")}
    powers = [f"; {bound} is e^{log:.0f}" for bound, log in logs.items() if abs(log - round(log)) < 1e-5]
    return "".join([*(text for start, text in OF_NAME.items() if name.startswith(start)), *powers])


Push = Callable[[LossInputs], Tensor]  # a batch -> the push on each token, (B, T)
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
