"""Mistakes that no hypothesis describes: find them, and remove them from the gradient."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from topr_conformance import losses
from topr_conformance.hypotheses import Hypothesis
from topr_conformance.losses import LossInputs
from topr_conformance.probes import SINGLES
from topr_conformance.single_tokens import NegGrad

Place = Literal["end", "start", "padding"]


class Corrected(NamedTuple):
    """Names of mistakes, and the gradient of the loss if it did not make them."""

    mistakes: list[str]
    neg_grad: NegGrad


def corrections(neg_grad: NegGrad, batch: LossInputs) -> Iterator[Corrected]:
    """Possible mistakes of a loss, each with its gradient without them.

    batch: the first of `probes`. The first result has the mistakes with padding only. An extra term
    is the gradient that remains if all rewards are 0. An additional token for each completion
    replaces one that the loss omits or does not count. Changes to log-probabilities or rewards are
    undone.

    >>> from topr_conformance import losses, variants
    >>> from topr_conformance.probes import probes
    >>> found = corrections(partial(losses.neg_grad, variants.unmasked), probes()[0])
    >>> next(found).mistakes
    ['unmasked in the ratio', 'unmasked in the loss']
    """
    masked = _without_padding(neg_grad, batch)
    yield masked
    baseline = _affine_baseline(masked.neg_grad, batch)
    if baseline:
        undone = partial(_with_reward_added, masked.neg_grad, baseline)
        yield Corrected([name_of_baseline(baseline), *masked.mistakes], undone)
    reward_mistakes = _reward_mistakes(masked.neg_grad, batch)
    if reward_mistakes:
        undone = partial(_with_reward_undone, masked.neg_grad, batch)
        yield Corrected(reward_mistakes + masked.mistakes, undone)
    plain = _without_extra_term(masked, batch)
    if plain is not masked:
        yield plain
    for place in ("end", "start", "padding"):
        yield _with_longer_completions(plain, batch, place)
    yield from _with_log_probabilities_unscaled(plain, batch)


# ---- padding -------------------------------------------------------------------------------------
def _without_padding(neg_grad: NegGrad, batch: LossInputs) -> Corrected:
    original = neg_grad(batch)
    mistakes = []
    if not torch.allclose(_masked(neg_grad, batch), original * batch.mask):
        mistakes.append("unmasked in the ratio")
    if original[batch.mask == 0].any():
        mistakes.append("unmasked in the loss")
    return Corrected(mistakes, partial(_masked, neg_grad) if mistakes else neg_grad)


def _masked(neg_grad: NegGrad, batch: LossInputs) -> Tensor:
    """The gradient on the completion's tokens, with log pi = log mu = 0 elsewhere."""
    logp = torch.where(batch.mask > 0, batch.token_logp, 0.0)
    logmu = torch.where(batch.mask > 0, batch.token_logmu, 0.0)
    return neg_grad(batch._replace(token_logp=logp, token_logmu=logmu)) * batch.mask


# ---- rewards -------------------------------------------------------------------------------------
def _reward_mistakes(neg_grad: NegGrad, batch: LossInputs) -> list[str]:
    """Mistakes in the growth of the on-policy positive's gradient with its reward."""
    of_zero = _neg_grad_at_reward(neg_grad, batch, 0.0)
    of_one = _neg_grad_at_reward(neg_grad, batch, 1.0)
    of_1e3 = _neg_grad_at_reward(neg_grad, batch, 1e3)
    of_1e4 = _neg_grad_at_reward(neg_grad, batch, 1e4)
    if not of_one > 0:
        return []
    mistakes = []
    if of_zero < -1e-6 * of_one:
        mistakes.append("zero rewards as negatives")
    if math.isclose(of_1e3, of_1e4, rel_tol=1e-3):
        mistakes.append("clipped reward")
    return mistakes


def _affine_baseline(neg_grad: NegGrad, batch: LossInputs) -> float:
    """The reward at which the on-policy positive's gradient is 0, if it grows linearly; else 0."""
    of_zero = _neg_grad_at_reward(neg_grad, batch, 0.0)
    of_one = _neg_grad_at_reward(neg_grad, batch, 1.0)
    of_1e3 = _neg_grad_at_reward(neg_grad, batch, 1e3)
    slope = of_one - of_zero
    if slope > 0 and math.isclose(of_1e3 - of_zero, 1e3 * slope, rel_tol=1e-4):
        return -of_zero / slope
    return 0.0


def name_of_baseline(baseline: float) -> str:
    """The name of a constant that a loss subtracts from the rewards."""
    return f"constant baseline {baseline:.4g}"


def _with_reward_added(neg_grad: NegGrad, amount: float, batch: LossInputs) -> Tensor:
    return neg_grad(batch._replace(reward=batch.reward + amount))


def _neg_grad_at_reward(neg_grad: NegGrad, batch: LossInputs, reward: float) -> float:
    """`neg_grad` of the batch's first token if its completion has this reward."""
    rewards = torch.cat([batch.reward.new_tensor([reward]), batch.reward[1:]])
    return neg_grad(batch._replace(reward=rewards))[0, 0].item()


def _with_reward_undone(neg_grad: NegGrad, first: LossInputs, batch: LossInputs) -> Tensor:
    """The gradient if each reward counted in proportion to its size; first: as in `corrections`."""
    sizes, index_of_row = batch.reward.abs().unique(return_inverse=True)
    factors = []
    for size in sizes.tolist():
        factors.append(size / _neg_grad_at_reward(neg_grad, first, size) if size else 0.0)
    factor_of_row = torch.tensor(factors, dtype=torch.float64)[index_of_row]
    return neg_grad(batch) * factor_of_row[:, None]


# ---- terms that do not depend on the reward ------------------------------------------------------
def _without_extra_term(corrected: Corrected, batch: LossInputs) -> Corrected:
    """The correction with an extra term removed; the same object if there is none."""
    extra = _at_zero_reward(corrected.neg_grad, batch)
    if not (extra.isfinite().all() and extra.any()):
        return corrected
    less_extra = partial(_less_extra_term, corrected.neg_grad)
    return Corrected(["extra term", *corrected.mistakes], less_extra)


def find_constant_baseline(
    neg_grad: NegGrad, corrected: Corrected, hypothesis: Hypothesis, batch: LossInputs
) -> str | None:
    """The name of a constant baseline, if the extra term is the push of a constant reward.

    neg_grad: of the loss with the extra term. hypothesis: explains the loss without the term.
    """
    extra = _at_zero_reward(neg_grad, batch)
    unit = corrected.neg_grad(batch)[0, 0]  # of a reward of 1
    amount = (extra[0, 0] / unit).item()
    constant = batch._replace(reward=torch.full_like(batch.reward, amount))
    loss = replace(hypothesis, baseline="none").loss()
    expected = losses.neg_grad(loss, LossInputs(*[column.double() for column in constant]))
    if amount and torch.allclose(extra / extra[0, 0], expected / expected[0, 0], rtol=1e-3):
        return name_of_baseline(-amount)
    return None


def _less_extra_term(neg_grad: NegGrad, batch: LossInputs) -> Tensor:
    return neg_grad(batch) - _at_zero_reward(neg_grad, batch)


def _at_zero_reward(neg_grad: NegGrad, batch: LossInputs) -> Tensor:
    return neg_grad(batch._replace(reward=0 * batch.reward))


# ---- tokens that are left out --------------------------------------------------------------------
def _with_longer_completions(corrected: Corrected, batch: LossInputs, place: Place) -> Corrected:
    longer, is_added = add_a_token(batch, place)
    where = "start" if place == "start" else "end"
    mistake = f"token missing at the {where}"
    if corrected.neg_grad(longer)[is_added].any():  # it is summed, so it was only not counted
        mistake = "length off by -1"
    mistakes = [mistake, *corrected.mistakes]
    return Corrected(mistakes, partial(_of_longer, corrected.neg_grad, place))


def _of_longer(neg_grad: NegGrad, place: Place, batch: LossInputs) -> Tensor:
    longer, is_added = add_a_token(batch, place)
    return neg_grad(longer)[~is_added].view_as(batch.token_logp)


def add_a_token(batch: LossInputs, place: Place) -> tuple[LossInputs, Tensor]:
    """Add a token of log pi = log mu = 0 to each completion; padding must be on the right.

    place: before the completion, after it, or in its padding, where the mask stays 0. Returns the
    batch, (B, T + 1), and where the token is, (B, T + 1).

    >>> token_logp, token_logmu = torch.tensor([[[-1.0]], [[-2.0]]])
    >>> batch = LossInputs(token_logp, token_logmu, torch.ones(1), torch.ones(1, 1))
    >>> add_a_token(batch, "start")[0].token_logmu
    tensor([[ 0., -2.]])
    """
    sides = (1, 0) if place == "start" else (0, 1)
    mask = pad(batch.mask, sides)
    column: Tensor | int = batch.mask.shape[1]  # where the token is
    if place == "start":
        column = 0
    elif place == "end":
        column = batch.mask.sum(1, keepdim=True)  # (B, 1)
    is_added = torch.arange(mask.shape[1]).expand_as(mask) == column
    longer = LossInputs(
        token_logp=torch.where(is_added, 0.0, pad(batch.token_logp, sides)),
        token_logmu=torch.where(is_added, 0.0, pad(batch.token_logmu, sides)),
        reward=batch.reward,
        mask=mask if place == "padding" else torch.where(is_added, 1.0, mask),
    )
    return longer, is_added


# ---- scaled log-probabilities --------------------------------------------------------------------
def _with_log_probabilities_unscaled(
    corrected: Corrected, batch: LossInputs
) -> Iterator[Corrected]:
    slope = _slope_of_weight(corrected.neg_grad(batch), batch)
    factors = {"token_logp": 1 + slope, "token_logmu": 1 - slope}
    for column, factor in factors.items():
        if slope and factor > 0.01:
            name = column.removeprefix("token_")
            mistake = f"scaled log-probabilities ({name} x {factor:.4g})"
            undone = partial(_with_column_divided, corrected.neg_grad, column, factor)
            yield Corrected([mistake, *corrected.mistakes], undone)


def _slope_of_weight(neg_grads: Tensor, batch: LossInputs) -> float:
    """d log weight / d log pi of negatives at one log-ratio: 0 unless logp or logmu is scaled."""
    # As `probes` orders them: (log-ratios, two signs, two log pi); negatives are the second sign.
    weight = neg_grads[SINGLES, 0].view(-1, 2, 2)[:, 1]
    logp = batch.token_logp[SINGLES, 0].view(-1, 2, 2)[:, 1]
    slopes = (weight[:, 0] / weight[:, 1]).log() / (logp[:, 0] - logp[:, 1])
    is_between_bounds = slopes.isfinite() & (slopes.abs() > 1e-6)
    return slopes[is_between_bounds].median().nan_to_num(0.0).item()


def _with_column_divided(
    neg_grad: NegGrad, column: str, factor: float, batch: LossInputs
) -> Tensor:
    divided = getattr(batch, column) / factor
    return neg_grad(batch._replace(**{column: divided}))


# ---- completions that change each other's gradients ----------------------------------------------
def find_coupling(neg_grad: NegGrad, batch: LossInputs) -> str | None:
    """The name of a mistake by which other rows change the gradients of the first two rows.

    None without such a mistake.
    """
    is_other = torch.arange(len(batch.reward)) > 1
    lower = torch.where(is_other[:, None], batch.token_logp - 1, batch.token_logp)
    doubled = torch.where(is_other, 2 * batch.reward, batch.reward)
    positive = torch.where(is_other, batch.reward.abs(), batch.reward)
    without_zeros = torch.where(batch.reward == 0, 2.0, batch.reward)
    changed = {
        "normalised weights": batch._replace(token_logp=lower),
        "normalised reward": batch._replace(reward=doubled),
        "separate means of positives and negatives": batch._replace(reward=positive),
        "mean over non-zero rewards": batch._replace(reward=without_zeros),
    }
    before = neg_grad(batch)[:2]
    for name, other in changed.items():
        if not torch.allclose(neg_grad(other)[:2], before, rtol=1e-3):
            return name
    return None
