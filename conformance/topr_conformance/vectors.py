"""Test vectors: small inputs, worked out by hand, on which other losses differ from the paper's."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from topr_conformance.losses import Loss, LossInputs, describe_error, neg_grad
from topr_conformance.random_batches import paper_neg_grad

# R w is the gradient over that of an on-policy example of the same length with R = 1.
# V16 comes first: a loss that keeps the weights of its first call fails it.
TEXT = """\
V16 does the weight follow the policy? R = -1; log-ratio -1; then log pi 2 lower
    paper: w = e^-1 = 0.367879, then e^-3 = 0.0497871 (weights of the first call: 0.367879 twice)
V1  is the ratio that of the sequence? R = -1; four tokens, log-ratio -0.5 each
    paper: R w = -e^(4 x -0.5) = -e^-2 = -0.135335 (geometric mean, per-token: -0.606531)
V2  is the ratio clipped as a whole, not token by token? R = -1; log-ratios +1, -1
    paper: R w = -e^(1 - 1) = -1 (per-token: -1, -0.367879)
V3  is the ratio neither per token nor a geometric mean? R = -1; log-ratios +0.5, -1.5
    paper: R w = -e^(0.5 - 1.5) = -0.367879 (geometric mean: -0.606531; per-token: -1, -0.22313)
V4  are the four bounds 1, 1, 0, 1? R = +1: log-ratios -3 and +2; R = -1: +2
    paper: R w = 1, 1, -1 (TIS: 0.0497871, 1, -1; plain IS: 0.0497871, 7.38906, -7.38906)
V5  is a long sequence computed without overflow? R = -1; 512 tokens, log-ratio -0.2 or +0.2 each
    paper: R w = -e^-102.4 = -3e-45, and -1; e^102.4 exceeds float32 (clip after exp: NaN)
V6  does a negative's weight go to 0? R = -1; one token, log-ratio -3
    paper: R w = -e^-3 = -0.0497871 (clip 0.8..1.2: -0.8; PPO's min() of two terms: 0)
V7  is the weight held fixed in the gradient? R = -1; one token, log pi = -2, log-ratio -0.5
    paper: R w = -e^-0.5 = -0.606531 (differentiated too: R w (1 + log pi) = 0.606531)
V8  does the sign after the baseline choose the bounds? scores 1, 1, 1, 0.2; the last: log-ratio -2
    paper: last / first = 0.2 for scores as they are; less their mean, -0.6 e^-2 / 0.2 = -0.406006
V9  does every sequence count alike, whatever its length? R = +1, on-policy; 1 and 3 tokens
    paper: each loss is divided by its length: three / one = 0.333333 (token mean, sum: 1)
V10 is a reward of 0 without gradient, one below 0 tapered? R = 0, log-ratio -1; R = -0.2, -2
    paper: R w = 0, -0.2 e^-2 = -0.0270671 (weight 1 on small negatives: -0.2)
V11 do positions with mask 0 count? filled with -50; with NaN; between tokens, as a tool's output
    paper: the gradient changes by 0, and stays 0 there (values * mask instead of torch.where: NaN)
V13 does the loss compute with log-probabilities only? R = -1; 20 tokens, log mu -3, log-ratio 0
    paper: R w = -e^(-60 + 60) = -1 (mu as exp(-60) + 1e-12: -8.75651e-15)
V17 is the ratio taken to the power 1? R = -1; log-ratio -2
    paper: R w = -e^-2 = -0.135335 (tempered by 1/2: -0.367879)
V20 does every example count once? R = 1.5, 1.5, -1, -1, -1; log-ratios -0.3, +0.1
    paper: R w = 1.5, and -e^-0.2 = -0.818731 (separate means of 7 and 4: -1.43278)
V23 does every token of a long completion count? R = -1; 20,000 tokens, log-ratio -1/8192 each
    paper: R w = -e^(-20000/8192) = -0.0870355 (a ratio of the last 4,096 tokens: -0.606531)"""
VECTORS = {text.split()[0]: text for text in re.split(r"\n(?=V)", TEXT)}


@dataclass(frozen=True)
class VectorResult:
    """The result of a vector for a loss."""

    name: str  # such as V1
    asks: str  # its question and its inputs
    passed: bool
    measured: str  # the loss's numbers
    paper: str  # the paper's

    def __str__(self) -> str:
        question = f"{'passes' if self.passed else 'fails'} {self.name}: {self.asks}"
        return f"{question}\n    measured: {self.measured}\n    paper: {self.paper}"


def check_vector(name: str, loss: Loss) -> VectorResult:
    """Apply one of VECTORS to a loss. A loss that raises an exception fails."""
    try:
        passed, measured = CHECKS.get(name, _check_weights)(loss, CASES[name])
    except Exception as error:  # a user's loss may raise anything
        passed, measured = False, describe_error(error)
    asks, paper = VECTORS[name].removeprefix(name).split("paper: ")
    return VectorResult(name, asks.strip(), passed, measured, paper)


class Case(NamedTuple):
    """A completion of a vector's batch."""

    reward: float
    log_ratio: tuple[float, ...]  # of each token
    logp: float = -3.0  # log pi of each token


def _on_policy(reward: float, length: int) -> Case:
    return Case(reward, (0.0,) * length, logp=0.0)


CASES: dict[str, list[Case]] = {  # the inputs of TEXT, in figures
    "V16": [Case(-1, (-1.0,), logp=-2.0), _on_policy(1, 3)],
    "V1": [Case(-1, (-0.5,) * 4)],
    "V2": [Case(-1, (1.0, -1.0))],
    "V3": [Case(-1, (0.5, -1.5))],
    "V4": [Case(1, (-3.0,)), Case(1, (2.0,)), Case(-1, (2.0,))],
    "V5": [Case(-1, (-0.2,) * 512), Case(-1, (0.2,) * 512)],
    "V6": [Case(-1, (-3.0,))],
    "V7": [Case(-1, (-0.5,), logp=-2.0)],
    "V8": [Case(1, (0.0,)), Case(1, (0.0,)), Case(1, (0.0,)), Case(0.2, (-2.0,))],
    "V9": [_on_policy(1, 1), _on_policy(1, 3)],
    "V10": [Case(0, (-1.0,)), Case(-0.2, (-1.0, -1.0))],
    "V11": [Case(-1, (-0.5, 0.2)), Case(1, (0.1,) * 4), Case(-1, (-1.0,))],
    "V13": [Case(-1, (0.0,) * 20)],
    "V17": [Case(-1, (-2.0,))],
    "V20": [Case(reward, (-0.3, 0.1)) for reward in (1.5, 1.5, -1.0, -1.0, -1.0)],
    "V23": [Case(-1, (-1 / 8192,) * 20_000)],  # exact in float32; longer than usual contexts
}


def batch_of(cases: Sequence[Case]) -> LossInputs:
    """A padded float32 batch: the cases, an on-policy positive as long as each, a balancing row.

    Padding has log pi = log mu = -1. The balancing row makes the mean reward 0, so that nothing
    changes if the loss subtracts the mean; there is none if it is 0 already.
    """
    rows = [*cases, *[_on_policy(1, len(case.log_ratio)) for case in cases]]
    balance = -sum(case.reward for case in rows)
    rows += [_on_policy(balance, 1)] if balance else []
    token_logp = torch.full((len(rows), max(len(case.log_ratio) for case in rows)), -1.0)
    token_logmu = token_logp.clone()
    mask = torch.zeros_like(token_logp)
    for i, case in enumerate(rows):
        length = len(case.log_ratio)
        token_logp[i, :length] = case.logp
        token_logmu[i, :length] = case.logp - torch.tensor(case.log_ratio)
        mask[i, :length] = 1
    reward = torch.tensor([float(case.reward) for case in rows])
    return LossInputs(token_logp, token_logmu, reward, mask)


def _check_weights(loss: Loss, cases: Sequence[Case]) -> tuple[bool, str]:
    batch = batch_of(cases)
    actual = _signed_weights(neg_grad(loss, batch), cases)
    expected = _signed_weights(torch.tensor(paper_neg_grad(batch)), cases)
    return _is_near(actual, expected), f"R w = {_format(actual)}"


def _signed_weights(neg_grads: Tensor, cases: Sequence[Case]) -> Tensor:
    """R w of the cases' tokens: the gradient over that of the on-policy positive as long."""
    weights = []  # the divisor, whatever it is, cancels out
    for row, case in enumerate(cases):
        tokens = slice(len(case.log_ratio))
        weights.append(neg_grads[row, tokens] / neg_grads[len(cases) + row, tokens])
    return torch.cat(weights)


def _check_current_policy(loss: Loss, cases: Sequence[Case]) -> tuple[bool, str]:
    batch = batch_of(cases)
    lower = batch.token_logp.clone()
    lower[0] -= 2
    both = [neg_grad(loss, inputs) for inputs in (batch, batch._replace(token_logp=lower))]
    weights = torch.stack([-_signed_weights(neg_grads, cases)[0] for neg_grads in both])
    return _is_near(weights, torch.tensor([-1.0, -3.0]).exp()), f"w = {_format(weights)}"


def _check_sign_after_baseline(loss: Loss, cases: Sequence[Case]) -> tuple[bool, str]:
    without_balance = LossInputs(*[column[:4] for column in batch_of(cases)])
    neg_grads = neg_grad(loss, without_balance)[:, 0]
    ratio = neg_grads[3] / neg_grads[0]
    passed = _is_near(ratio, 0.2) or _is_near(ratio, -3 * math.exp(-2))
    return passed, f"last / first = {ratio:.6g}"


def _check_length(loss: Loss, cases: Sequence[Case]) -> tuple[bool, str]:
    of_one, of_three = neg_grad(loss, batch_of(cases))[:2]  # (3,) each
    share = of_three / of_one[0]
    return _is_near(share, 1 / 3), f"three / one = {_format(share)}"


def _check_masked_positions(loss: Loss, cases: Sequence[Case]) -> tuple[bool, str]:
    batch = batch_of(cases)
    is_token = batch.mask > 0
    low = batch._replace(token_logp=torch.where(is_token, batch.token_logp, -50.0))
    with_nan = [torch.where(is_token, column, torch.nan) for column in batch[:2]]
    rolled = [column.roll(-1, 1) if column.dim() == 2 else column for column in low]
    neg_grads = [
        neg_grad(loss, low),
        neg_grad(loss, LossInputs(*with_nan, *batch[2:])),
        neg_grad(loss, LossInputs(*rolled)).roll(1, 1),
    ]
    before = torch.where(is_token, neg_grad(loss, batch), 0.0)
    changes = torch.stack([(each - before).abs().max() for each in neg_grads])
    passed = bool((changes[:2] == 0).all()) and _is_near(changes[2], 0.0)
    return passed, f"it changes by {', '.join(f'{each:.3g}' for each in changes)}"


CHECKS: dict[str, Callable[[Loss, Sequence[Case]], tuple[bool, str]]] = {
    "V8": _check_sign_after_baseline,
    "V9": _check_length,
    "V11": _check_masked_positions,
    "V16": _check_current_policy,
}


def _is_near(actual: Tensor, expected: Tensor | float) -> bool:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)  # False if there is a NaN


def _format(values: Tensor) -> str:
    """The first four numbers that differ from the one before."""
    texts = [f"{number:.6g}" for number in (values + 0.0).tolist()]  # no -0
    distinct = [text for text, _ in groupby(texts)]
    return ", ".join(distinct[:4])
