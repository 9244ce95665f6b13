"""Mistakes: what to change in a loss that has one, and the loss without it, where that can be had from outside."""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from topr_conformance.losses import LossInputs
from topr_conformance.vectors import NOT_FINITE, VectorResult

_LENGTH = "divide each completion's sum by its own number of tokens, mask.sum(1); then take the mean over completions"
ADVICE = {  # how the name of a difference begins -> what to change
    "per-token": "sum logp - logmu over the completion's tokens first; then clip, and take exp of, the sum",
    "geometric mean": "do not divide the sum of the log-ratios by the length; divide the loss by it",
    "tis": "give positives (reward >= 0) the weight 1; clip that of negatives alone",
    "plain is": "give positives (reward >= 0) the weight 1; clip that of negatives to at most 1",
    "naive reinforce": "weight negatives by min(pi/mu, 1); take log mu from the samples, not from the current model",
    "sft": "do not drop negatives: give them the weight min(pi/mu, 1)",
    "clip ": "clip to [1, 1] where reward >= 0 and to [0, 1] elsewhere; a guard of exp, at -20 or lower, does no harm",
    "clip 0..1 on positives, 1..1 on negatives": "; the signs are exchanged: it is negatives that are tapered",
    "tempered": "take the ratio to the power 1: no factor and no temperature on its logarithm",
    "inverted ratio": "take logp - logmu, not logmu - logp",
    "no stop-gradient": "detach the weight",
    "frozen weight": "compute the weight from the current logp at every step",
    "batch-mean baseline": "subtract the baseline that you want before the loss, or leave this one, if you want it",
    "branch by raw score": "choose the bounds by the sign of what multiplies log pi: the reward after the baseline",
    "normalised reward": "do not divide the reward by its standard deviation, or by another measure of its size",
    "normalised weights": "do not divide the weights by their mean or their sum in the batch",
    "clipped reward": "do not clip the reward or the advantage, and do not take its sign",
    "zero rewards": "leave a reward of 0 at 0, without a gradient; a baseline makes it negative, if you want that",
    "token mean": _LENGTH,
    "sequence sum": _LENGTH,
    "divided by the longest length": f"{_LENGTH}, not by the longest, and not by the width of the padded batch",
    "length off by": f"{_LENGTH}: as many as are summed",
    "mean over non-zero rewards": "divide by the number of all completions, those with a reward of 0 too",
    "separate means": "take one mean over all completions, positives and negatives together",
    "negatives count": "remove the factor on negatives; choose a baseline if they are to count less",
    "token missing": "shift logits against labels once, and after that cut neither logp nor the mask",
    "scaled log-probabilities": "take logp and logmu at one temperature, that of sampling, and without a factor",
    "extra term": "remove what does not depend on the reward, such as a KL or an entropy, also from within the reward",
    "unmasked": "align the mask with logp, and multiply by it before each sum, that of the log-ratios too",
    "bfloat16": "compute log-probabilities, their sums and the weight in float32",
    "weight": "weight negatives by the completion's min(pi/mu, 1): no other function of it, no clip of single tokens",
    "surrogate": "take the detached weight, however small, times log pi: without a threshold, or PPO's min() of terms",
    "overflow": "clip the log-ratio before exp, and take exp of differences only: log pi - log mu of a completion",
    "no known loss": "compare the gradients that --random 200 shows",
    "objective": "put a minus before what is returned: a loss is minimised",
}
READINGS = [  # (vector, how what it measured begins, in ADVICE what to change): these tell most
    ("V10", "R w = (?!0;)", "extra term"),
    ("V6", "R w = 0$", "surrogate"),
    ("V4", ".* 0(;|$)", "surrogate"),
    ("V7", "R w = (?!-)", "no stop-gradient"),
    ("V20", ".*infinity", "batch-mean baseline"),
]
# Then come the vectors in this order, first those that ask for one thing alone.
BY_VECTOR = {
    "V9": "length off by",
    "V11": "unmasked",
    "V6": "weight",
    "V17": "weight",
    "V20": "separate means",
}
BY_VECTOR |= {
    "V22": "negatives count",
    "V1": "per-token",
    "V2": "per-token",
    "V3": "geometric mean",
    "V4": "clip ",
}
BY_VECTOR |= {"V8": "branch by raw score", "V10": "branch by raw score", "V16": "frozen weight"}
BY_VECTOR |= {"V7": "no stop-gradient", "V5": "overflow", "V13": "overflow"}


def telling(results: list[VectorResult]) -> tuple[VectorResult, str] | None:
    """The failed vector that tells most, if any, and the name whose advice it gets. Numbers tell more than NaN."""
    failed = {result.name: result for result in results if result.status == "fail"}
    failed = {
        name: result for name, result in failed.items() if NOT_FINITE not in result.measured
    } or failed
    for vector, start, name in [
        *READINGS,
        *((vector, "", name) for vector, name in BY_VECTOR.items()),
    ]:
        if vector in failed and re.match(start, failed[vector].measured):
            return failed[vector], name
    return None


def change(name: str) -> str:
    """What to change in a loss with a difference of this name.

    >>> change("clip 0.00673795..1").partition("; 0")[2]
    '.00673795 is e^-5'
    """
    logs = {
        bound: math.log(float(bound))
        for bound in re.findall(r"0\.\d+", name)
        if name.startswith("clip ")
    }
    powers = [
        f"; {bound} is e^{log:.0f}" for bound, log in logs.items() if abs(log - round(log)) < 1e-5
    ]
    return "".join([*(text for start, text in ADVICE.items() if name.startswith(start)), *powers])


Push = Callable[[LossInputs], Tensor]  # a batch -> the push on each token, (B, T)


def corrections(push: Push, batch: LossInputs, singles: slice) -> Iterator[tuple[list[str], Push]]:
    """What a loss may do wrong, at first nothing, and its pushes if it did not; singles: as SINGLES of a probe.

    What is added where all rewards are 0 is an extra term. A token more for each completion makes up for one that is
    left out, or not counted. What is done to log-probabilities or rewards is taken out again.
    """
    pushed, masked = push(batch), partial(_masked, push)
    names = ["unmasked in the ratio"] * (not torch.allclose(masked(batch), pushed * batch.mask))
    names += ["unmasked in the loss"] * bool(pushed[batch.mask == 0].any())
    push = masked if names else push
    yield names, push
    zero, one, large, larger = (_push_at(push, batch, reward) for reward in (0.0, 1.0, 1e3, 1e4))
    changed = ["zero rewards as negatives"] * (zero < -1e-6 * one)
    changed += ["clipped reward"] * math.isclose(large, larger, rel_tol=1e-3)
    if changed and one > 0:
        yield changed + names, partial(_unclipped, push, batch)
    extra = push(batch._replace(reward=0 * batch.reward))
    if extra.isfinite().all() and extra.any():
        names, push = (
            ["extra term", *names],
            lambda b, raw=push: raw(b) - raw(b._replace(reward=0 * b.reward)),
        )
        yield names, push
    for place in ("end", "start", "padding"):
        longer, added = with_a_token(batch, place)
        name = f"token missing at the {place.replace('padding', 'end')}"
        name = "length off by -1" if push(longer)[added].any() else name
        yield [name, *names], partial(_longer, push, place)
    weight, logp = (
        column[singles, 0].view(-1, 2, 2)[:, 1] for column in (push(batch), batch.logp)
    )  # of negatives
    slopes = (weight[:, 0] / weight[:, 1]).log() / (
        logp[:, 0] - logp[:, 1]
    )  # at one log-ratio; 0 between bounds
    slope = slopes[slopes.isfinite() & (slopes.abs() > 1e-6)].median().nan_to_num(0.0).item()
    for column, factor in (("logp", 1 + slope), ("logmu", 1 - slope)):
        if factor > 0.01 and slope:
            name = f"scaled log-probabilities ({column} x {factor:.4g})"
            yield (
                [name, *names],
                lambda b, x=column, by=factor: push(b._replace(**{x: getattr(b, x) / by})),
            )


def _masked(push: Push, batch: LossInputs) -> Tensor:
    """Pushes on the completion's tokens, with log pi = log mu = 0 elsewhere."""
    logp, logmu = (torch.where(batch.mask > 0, column, 0.0) for column in batch[:2])
    return push(batch._replace(logp=logp, logmu=logmu)) * batch.mask


def _push_at(push: Push, batch: LossInputs, reward: float) -> float:
    """The push of the batch's first token if its reward is this."""
    return push(
        batch._replace(reward=torch.cat([batch.reward.new_tensor([reward]), batch.reward[1:]]))
    )[0, 0].item()


def _unclipped(push: Push, batch: LossInputs, inputs: LossInputs) -> Tensor:
    sizes, which = inputs.reward.abs().unique(return_inverse=True)
    factors = [size / _push_at(push, batch, size) if size else 0.0 for size in sizes.tolist()]
    return push(inputs) * torch.tensor(factors, dtype=torch.float64)[which][:, None]


def factor_of_batch(push: Push, batch: LossInputs) -> list[str]:
    """The name, if any, of what else than their own rewards and ratios changes the pushes of the first two rows."""
    logp, reward, is_other = batch.logp, batch.reward, torch.arange(len(batch.reward)) > 1
    changed = {
        "normalised weights": batch._replace(logp=torch.where(is_other[:, None], logp - 1, logp)),
        "normalised reward": batch._replace(reward=torch.where(is_other, 2 * reward, reward)),
        "separate means of positives and negatives": batch._replace(
            reward=torch.where(is_other, reward.abs(), reward)
        ),
        "mean over non-zero rewards": batch._replace(reward=torch.where(reward == 0, 2.0, reward)),
    }
    before = push(batch)[:2]
    return [
        name
        for name, other in changed.items()
        if not torch.allclose(push(other)[:2], before, rtol=1e-3)
    ][:1]


def with_a_token(batch: LossInputs, place: str) -> tuple[LossInputs, Tensor]:
    """Each completion, padded on the right, with one more token of log pi = log mu = 0; and where that is, (B, T + 1).

    >>> with_a_token(LossInputs(*torch.tensor([[[-1.0]], [[-2.0]]]), torch.ones(1), torch.ones(1, 1)), "start")[0].logmu
    tensor([[ 0., -2.]])
    """
    sides = (1, 0) if place == "start" else (0, 1)
    logp, logmu, mask = (pad(column, sides) for column in (batch.logp, batch.logmu, batch.mask))
    at = {
        "start": torch.zeros(1, 1),
        "end": batch.mask.sum(1, keepdim=True),
        "padding": batch.mask.shape[1],
    }[place]
    added = torch.arange(mask.shape[1]).expand_as(mask) == at
    logp, logmu = (torch.where(added, 0.0, column) for column in (logp, logmu))
    return LossInputs(
        logp, logmu, batch.reward, torch.where(added & (place != "padding"), 1.0, mask)
    ), added


def _longer(push: Push, place: str, batch: LossInputs) -> Tensor:
    longer, added = with_a_token(batch, place)
    return push(longer)[~added].view_as(batch.logp)
