"""Test vectors: small inputs, worked out by hand, on which variants differ from the paper."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from topr_conformance.losses import Loss, LossInputs, describe_error, neg_grad
from topr_conformance.oracle import paper_neg_grad

TEXT = """\
V1   is the ratio that of the sequence?
     inputs: R = -1; four tokens, log-ratio -0.5 each
     paper: weight e^(4 x -0.5) = e^-2 = 0.135335
     geometric mean, per-token: 0.606531
V2   is the ratio clipped as a whole, not token by token?
     inputs: R = -1; log-ratios +1, -1
     paper: weight e^(1 - 1) = 1
     per-token: 1, 0.367879
V3   is the ratio neither per token nor a geometric mean?
     inputs: R = -1; log-ratios +0.5, -1.5
     paper: weight e^(0.5 - 1.5) = e^-1 = 0.367879
     geometric mean: 0.606531; per-token: 1, 0.223130
V4   are the four bounds 1, 1, 0, 1?
     inputs: R = +1: log-ratio -3 and +2; R = -1: +2
     paper: weights [e^-3]_1^1 = 1, [e^2]_1^1 = 1, [e^2]_0^1 = 1
     TIS: 0.049787, 1, 1; plain IS: 0.049787, 7.389056, 7.389056
V5   is a long sequence computed without overflow?
     inputs: R = -1; 512 tokens, log-ratio -0.2 each; +0.2 each; float32
     paper: weights e^-102.4 = 3e-45, and 1; e^102.4 exceeds float32, so clip before exp
     exp before clip, differentiated: 0 x inf = NaN; geometric mean: 0.818731
V6   does a negative's weight go to 0?
     inputs: R = -1; one token, log-ratio -3
     paper: weight e^-3 = 0.049787, and a- = 0 does not stop it
     clip 0.8..1.2: 0.8
V7   is the weight held fixed in the gradient?
     inputs: R = -1; one token, log pi = -2, log-ratio -0.5
     paper: dL/dlogp = e^-0.5 = +0.606531, of L = -w R log pi with w constant
     differentiated too: w (1 + log pi) = -0.606531, the sign flips
V8   does the sign after the baseline choose the bounds?
     inputs: scores 1, 1, 1, 0.2; the last has log-ratio -2
     paper, if the loss itself subtracts the mean: 0.2 - 0.8 < 0, so [e^-2]_0^1 = 0.135335
     paper, if it takes the scores as they are: [e^-2]_1^1 = 1
     branch by raw score: a negative update at weight 1
V9   does every sequence count alike, whatever its length?
     inputs: R = +1, on-policy; one token and three tokens
     paper: each loss is divided by its length (Section 4.2): a token of three has 1/3
     token mean, sequence sum: the same gradient for every token
V10  is the gradient 0 at R = 0, and is a reward slightly below 0 tapered?
     inputs: R = 0, log-ratio -1; R = -0.2, log-ratio -2
     paper: 0 times any weight; -0.2 [e^-2]_0^1 = -0.2 x 0.135335
     weight 1 on small negatives: -0.2
V11  are prompt and padding left out?
     inputs: logp, and not logmu, of masked positions filled with -50; then padded on the left
     paper: the sums run over the completion's tokens: the same gradient to the bit, 0 on padding
     unmasked: a factor of e^-49 in the weight for each such position, log mu being -1 there
V13  does the loss compute with log-probabilities only?
     inputs: R = -1; 20 tokens of log mu = -3, log-ratio 0
     paper: weight e^(-60 + 60) = 1
     mu made explicit as exp(-60): 8.757e-27
V16  does the weight follow the policy?
     inputs: R = -1; log-ratio -1; then log pi of the same tokens 2 lower
     paper: weight e^-1 = 0.367879, then e^-3 = 0.049787
     frozen weight: 0.367879 twice; old log-probabilities recomputed at every step: 1 twice
V17  is the ratio taken to the power 1?
     inputs: R = -1; log-ratio -2
     paper: weight e^-2 = 0.135335
     tempered by 1/2: 0.367879
V20  does every example count once?
     inputs: two positives, three negatives; then the positives alone, the negatives alone
     paper: one term for each sequence, over B or not: mean 5 g = 2 g+ + 3 g-; sum g = g+ + g-
     masked sums divided by their own counts: double counting
V22  does each of a prompt's negatives count as one example?
     inputs: one positive, three negatives of a prompt, on-policy
     paper: every weight is 1, the mean is over all four: coefficients +1, -1, -1, -1
     negatives renormalised to share one positive's weight: -1/3 each
V23  does every token of a very long completion count?
     inputs: 2,100 tokens: R = +1, on-policy; R = -1, log-ratio -1/1024 each
     paper: a token has 1/2100 of the gradient of one alone; weight e^(-2100/1024) = 0.128634
     a filter on length: 0; a ratio of the last 1,000 tokens: 0.376603"""
LONG = 2100  # tokens of a completion
# A vector's name -> its question, its inputs, the paper's value and those of variants
VECTORS: dict[str, str] = {}
for paragraph in re.split(r"\n(?=V)", TEXT):
    VECTORS[paragraph.split()[0]] = paragraph

NOT_FINITE = "not a number"
MIXED = "the other sign's completions change it"
LEFT_OUT = "have no gradient"


@dataclass(frozen=True)
class VectorResult:
    """The result of a vector for a loss."""

    name: str  # such as V1
    asks: str  # its question
    status: Literal["pass", "fail", "not applicable"]
    measured: str  # the loss's numbers


def check_vector(name: str, loss: Loss) -> VectorResult:
    """Apply one of VECTORS to a loss. A loss that raises an exception fails.

    >>> from topr_conformance.variants import per_token
    >>> check_vector("V1", per_token).measured
    'R w = -0.606531'
    """
    try:
        passed, measured = CHECKS[name](loss) if name in CHECKS else _check_weights(name, loss)
    except Exception as error:  # a user's loss may raise anything
        passed, measured = False, describe_error(error)
    question = VECTORS[name].partition("?")[0].removeprefix(name).strip() + "?"
    status = "pass" if passed else "fail"
    return VectorResult(name, question, status, spell_out_not_finite(measured))


def spell_out_not_finite(text: str) -> str:
    """Numbers as people write them: without nan and inf.

    >>> spell_out_not_finite("R w = nan, inf")
    'R w = not a number, infinity'
    """
    return re.sub(r"\binf\b", "infinity", re.sub(r"\bnan\b", NOT_FINITE, text))


# ---- batches of single cases ---------------------------------------------------------------------
class Case(NamedTuple):
    """A completion of a vector's batch."""

    reward: float
    log_ratio: tuple[float, ...]  # of each token
    logp: float = -3.0  # log pi of each token

    @classmethod
    def on_policy(cls, length: int) -> "Case":
        """A positive whose log pi and log mu are 0."""
        return cls(1, (0.0,) * length, logp=0.0)


def batch_of(cases: Sequence[Case]) -> LossInputs:
    """A padded float32 batch: the cases, an on-policy positive of each length, a balancing row.

    Padding has log pi = log mu = -1. The balancing row makes the mean reward 0, so that nothing
    changes if the loss subtracts the mean; there is none if the mean is 0 without it.

    >>> batch_of([Case(-1, (-0.5, -0.5))]).reward
    tensor([-1.,  1.])
    """
    rows = [*cases]
    for length in _lengths(cases):
        rows.append(Case.on_policy(length))
    balance = -sum(case.reward for case in rows)
    if balance:
        rows.append(Case(balance, (0.0,), logp=0.0))
    shape = len(rows), max(_lengths(cases))
    token_logp = torch.full(shape, -1.0)
    token_logmu = torch.full(shape, -1.0)
    mask = torch.zeros(shape)
    for i, case in enumerate(rows):
        length = len(case.log_ratio)
        token_logp[i, :length] = case.logp
        token_logmu[i, :length] = case.logp - torch.tensor(case.log_ratio)
        mask[i, :length] = 1
    reward = torch.tensor([float(case.reward) for case in rows])
    return LossInputs(token_logp, token_logmu, reward, mask)


def _lengths(cases: Sequence[Case]) -> list[int]:
    return sorted({len(case.log_ratio) for case in cases})


# ---- vectors that ask for weights ----------------------------------------------------------------
CASES: dict[str, list[Case]] = {  # the inputs of TEXT, in figures
    "V1": [Case(-1, (-0.5,) * 4)],
    "V2": [Case(-1, (1.0, -1.0))],
    "V3": [Case(-1, (0.5, -1.5))],
    "V4": [Case(1, (-3.0,)), Case(1, (2.0,)), Case(-1, (2.0,))],
    "V5": [Case(-1, (-0.2,) * 512), Case(-1, (0.2,) * 512)],
    "V6": [Case(-1, (-3.0,))],
    "V7": [Case(-1, (-0.5,), logp=-2.0)],
    "V10": [Case(0, (-1.0,)), Case(-0.2, (-1.0, -1.0))],
    "V13": [Case(-1, (0.0,) * 20)],
    "V17": [Case(-1, (-2.0,))],
}


def _check_weights(name: str, loss: Loss) -> tuple[bool, str]:
    """Whether R w of each case's tokens is the paper's, and what it is."""
    cases = CASES[name]
    batch = batch_of(cases)
    neg_grads = neg_grad(loss, batch)
    for row, length in enumerate(_lengths(cases), start=len(cases)):
        num_zeros = int((neg_grads[row, :length] == 0).sum())
        if 0 < num_zeros < length:
            return False, f"{num_zeros} of {length} tokens of an on-policy positive {LEFT_OUT}"
    actual = _signed_weights(neg_grads, cases)
    expected = _signed_weights(torch.tensor(paper_neg_grad(batch)), cases)
    passed = all(_is_near(*pair) for pair in zip(actual, expected, strict=True))
    return passed, "R w = " + "; ".join(_format(weights) for weights in actual)


def _signed_weights(neg_grads: Tensor, cases: Sequence[Case]) -> list[Tensor]:
    """R w of each case's tokens: the gradient over that of the on-policy positive as long as it."""
    # The divisor, whatever it is, cancels out.
    unit = {}
    for row, length in enumerate(_lengths(cases), start=len(cases)):
        unit[length] = neg_grads[row, 0]
    weights = []
    for row, case in enumerate(cases):
        length = len(case.log_ratio)
        weights.append(neg_grads[row, :length] / unit[length])
    return weights


# ---- vectors that ask for something else: whether the loss passes, and what was measured ---------
def _check_sign_after_baseline(loss: Loss) -> tuple[bool, str]:
    token_logmu = torch.full((4, 1), -1.0)
    token_logp = token_logmu.clone()
    token_logp[3] -= 2
    scores = torch.tensor([1.0, 1.0, 1.0, 0.2])
    neg_grads = neg_grad(loss, LossInputs(token_logp, token_logmu, scores, torch.ones(4, 1)))[:, 0]
    ratio = neg_grads[3] / neg_grads[0]
    measured = (
        f"neg_grad of the last / the first: {ratio:.6g} (raw scores: 0.2; less their mean: -0.406)"
    )
    # The mean is 0.8: a loss that subtracts it has -0.6 e^-2 over 0.2.
    return _is_near(ratio, 0.2) or _is_near(ratio, -3 * math.exp(-2)), measured


def _check_length(length: int, loss: Loss) -> tuple[bool, str]:
    on_policy = [Case.on_policy(1), Case.on_policy(length)]
    of_one, of_more = neg_grad(loss, batch_of(on_policy))[:2]  # (length,) each
    share = of_more / of_one[0]
    measured = f"a token of {length} has {_format(share)} of the gradient of one alone"
    return _is_near(share * length, 1.0), measured


def _check_long_completion(loss: Loss) -> tuple[bool, str]:
    has_length, measured = _check_length(LONG, loss)
    if not has_length:
        return False, measured
    off_policy = batch_of([Case(-1, (-1 / 1024,) * LONG)])  # exact in float32
    of_negative, of_positive = neg_grad(loss, off_policy)[:2, 0]
    weight = -of_negative / of_positive
    return _is_near(weight, math.exp(-LONG / 1024)), f"{measured}; weight {weight:.6g}"


def _check_padding(loss: Loss) -> tuple[bool, str]:
    batch = batch_of([Case(-1, (-0.5, 0.2)), Case(1, (0.1,) * 4), Case(-1, (-1.0,))])
    filled = batch._replace(token_logp=torch.where(batch.mask > 0, batch.token_logp, -50.0))
    on_the_left = filled._replace(
        token_logp=filled.token_logp.flip(1),
        token_logmu=filled.token_logmu.flip(1),
        mask=filled.mask.flip(1),
    )
    before = neg_grad(loss, batch)
    after = neg_grad(loss, filled)
    after_left = neg_grad(loss, on_the_left).flip(1)
    is_token = batch.mask > 0
    outside = after[~is_token].abs().max()
    inside = (after - before)[is_token].abs().max()
    inside_left = (after_left - before)[is_token].abs().max()
    passed = inside == 0 and outside == 0 and _is_near(after_left, before)
    measured = f"gradient changes by {inside:.3g}; on masked positions it reaches {outside:.3g}"
    return bool(passed), f"{measured}; padded on the left it changes by {inside_left:.3g}"


def _check_current_policy(loss: Loss) -> tuple[bool, str]:
    batch = batch_of([Case(-1, (-1.0,), logp=-2.0)])
    lower = batch._replace(token_logp=batch.token_logp - torch.tensor([[2.0], [0.0]]))
    weights = []
    for inputs in (batch, lower):
        neg_grads = neg_grad(loss, inputs)
        weights.append(-neg_grads[0, 0] / neg_grads[1, 0])
    before, after = weights
    passed = _is_near(before, math.exp(-1)) and _is_near(after, math.exp(-3))
    return passed, f"weights {before:.6g}, {after:.6g}"


def _check_counting(loss: Loss) -> tuple[bool, str]:
    rewards = (1.5, 1.5, -1.0, -1.0, -1.0)  # the mean is 0
    batch = batch_of([Case(reward, (-0.3, 0.1)) for reward in rewards])
    one = _neg_grads_of_rows(loss, batch, slice(1))
    positives = _neg_grads_of_rows(loss, batch, slice(2))
    negatives = _neg_grads_of_rows(loss, batch, slice(2, 5))
    whole = _neg_grads_of_rows(loss, batch, slice(5))
    shares = torch.stack([whole[0] / positives[0], whole[4] / negatives[0]])
    is_mean = _is_near(positives[0] / one[0], 0.5)  # and no sum over completions
    expected = torch.tensor([2 / 5, 3 / 5] if is_mean else [1.0, 1.0])
    measured = f"of the positives' own gradient {shares[0]:.6g}, of the negatives' {shares[1]:.6g}"
    is_known = any(_is_near(shares, value) for value in (expected, torch.ones(2)))
    if shares.isfinite().all() and not is_known:
        measured += f": {MIXED}"
    return _is_near(shares, expected), measured


def _neg_grads_of_rows(loss: Loss, batch: LossInputs, rows: slice) -> Tensor:
    """`neg_grad` of the first tokens, (B,), if the batch has these rows alone."""
    return neg_grad(loss, LossInputs(*[column[rows] for column in batch]))[:, 0]


def _check_weight_of_negatives(loss: Loss) -> tuple[bool, str]:
    on_policy = torch.full((4, 1), -1.0)
    reward = torch.tensor([1.0, -1.0, -1.0, -1.0])
    neg_grads = neg_grad(loss, LossInputs(on_policy, on_policy, reward, torch.ones(4, 1)))[:, 0]
    shares = neg_grads[1:] / neg_grads[0]
    return _is_near(shares, -1.0), f"negatives' neg_grad over the positive's: {_format(shares)}"


CHECKS: dict[str, Callable[[Loss], tuple[bool, str]]] = {
    "V8": _check_sign_after_baseline,
    "V9": partial(_check_length, 3),
    "V11": _check_padding,
    "V16": _check_current_policy,
    "V20": _check_counting,
    "V22": _check_weight_of_negatives,
    "V23": _check_long_completion,
}


def _is_near(actual: Tensor, expected: Tensor | float) -> bool:
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)  # False if there is a NaN


def _format(values: Tensor) -> str:
    """At most four of the numbers, and only one if they are all equal."""
    numbers = (values.flatten() + 0.0).tolist()  # no -0
    if max(numbers) - min(numbers) <= 1e-5 * abs(numbers[0]):
        numbers = numbers[:1]
    text = ", ".join(f"{number:.6g}" for number in numbers[:4])
    return text + ", ..." if len(numbers) > 4 else text
