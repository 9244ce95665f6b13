"""Name a loss: the combination with the same gradient and the fewest differences."""

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from topr_conformance.combinations import ADVICE, GRADIENTS, POWERS, Bounds, Combination, family
from topr_conformance.losses import Loss, LossInputs, by_names, check_gradient, neg_grad
from topr_conformance.random_batches import compare
from topr_conformance.vectors import CASES, VECTORS, VectorResult, batch_of, check_vector

LENGTHS = (1, 2, 3, 5, 20)  # of the probes' completions
SIZES = (1e-4, 1e-2, 0.1, 0.5, 1.5)  # of the log-ratios of tokens, as far apart as public clips
NOT = "not the paper's"


@dataclass
class Report:
    """The verdict on a loss."""

    variant: str  # "paper", "a proportion of ...", its differences joined by " + ", or NOT
    changes: list[str]  # what to change, or what shows that it is not the paper's; none if it is
    arguments: str  # the parameter of each argument
    vectors: list[VectorResult]


def identify(loss: Loss, seed: int = 0) -> Report:
    """Name a loss. Raises InputError if it cannot be called, or has no finite gradient.

    It is the paper's if its gradients equal those of `Combination()` on all probes, up to one
    constant factor, every vector passes, and random batches agree with Equation 7. A factor on
    negatives is an effective proportion, and so a baseline (Equation 12): if it is all that
    differs, the loss is the paper's, too.

    >>> from topr_conformance import VARIANTS
    >>> identify(VARIANTS["per-token + token mean"]).variant
    'per-token + token mean'
    """
    called, arguments = by_names(loss)
    check_gradient(called, batch_of(CASES["V16"]))
    report = _judge(called, arguments, seed)
    only_factor = re.fullmatch(r"negatives count (\S+) times", report.variant)
    if not only_factor:
        return report
    factor = float(only_factor[1])

    def without_factor(logp: Tensor, logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
        return called(logp, logmu, torch.where(reward < 0, reward / factor, reward), mask)

    rest = _judge(without_factor, arguments, seed)
    if rest.variant != "paper":
        return report
    proportion = f"a proportion of {100 / (1 + factor):.4g} %"
    return replace(rest, variant=f"{proportion}: the paper's loss with a baseline")


def _judge(called: Loss, arguments: str, seed: int) -> Report:
    vectors = [check_vector(name, called) for name in VECTORS]
    differences = None
    for dtype in (torch.float64, torch.float32):  # some losses take float32 only
        with suppress(Exception):  # a user's loss may raise anything on a batch of some shape
            differences = find_differences(
                lambda *inputs, dtype=dtype: called(*[column.to(dtype) for column in inputs])
            )
            break
    if differences:
        changes = []
        for name in differences:
            advice = next(text for start, text in ADVICE.items() if name.startswith(start))
            changes.append(f"to change: {name}: {advice}")
        return Report(" + ".join(differences), changes, arguments, vectors)
    shown = [str(result) for result in vectors if not result.passed]
    if not shown:
        unknown = "has the gradient of no known loss" if differences is None else None
        difference = compare(called, seed=seed) or unknown
        shown = [f"every vector passes, but it {difference}"] if difference else []
    return Report(NOT if shown else "paper", shown, arguments, vectors)


def find_differences(loss: Loss) -> list[str] | None:
    """The names of the differences that explain the loss's gradients; None if none do."""
    first, *_ = probes()
    at_zero = neg_grad(loss, first._replace(reward=0 * first.reward)).nan_to_num()  # 0 / 0
    has_extra_term = bool(at_zero.any())
    is_negated = neg_grad(loss, first)[0, 0] < at_zero[0, 0]

    def corrected(token_logp: Tensor, token_logmu: Tensor, reward: Tensor, mask: Tensor) -> Tensor:
        """Without the extra term, and with the right sign."""
        value = loss(token_logp, token_logmu, reward, mask)
        if has_extra_term:
            value = value - loss(token_logp, token_logmu, 0 * reward, mask)
        return -value if is_negated else value

    combination = find_combination(corrected)
    if combination is None:
        return None
    before = ["wrong sign"] * bool(is_negated)
    return before + combination.differences() + ["extra term"] * has_extra_term


def find_combination(loss: Loss) -> Combination | None:
    """The combination with the loss's gradients on all probes and the fewest differences."""
    observed = [(batch, neg_grad(loss, batch)) for batch in probes()]
    single = _columns(probes()[0], 1)  # tokens: only bounds, power and stop-gradient matter
    of_single = [(single, neg_grad(loss, single))]
    factor = _rounded(_weight_of_tokens(loss, -1.0, 1.0, 0.0)) or 1.0  # of on-policy negatives
    measured = [measure_bounds(loss, each) for each in dict.fromkeys((1.0, factor))]
    for bounds, power, gradient in product(measured, POWERS, GRADIENTS):
        start = replace(bounds, power=power, gradient=gradient)
        if explains(start, of_single):
            return next((each for each in family(start) if explains(each, observed)), None)
    return None


def explains(candidate: Combination, observed: list[tuple[LossInputs, Tensor]]) -> bool:
    """Whether the gradients are those of the combination, up to one constant factor."""
    unit = None
    for batch, actual in observed:
        expected = neg_grad(candidate.loss, batch)
        if unit is None:  # of the on-policy positive
            unit = actual[0, 0] / expected[0, 0]
            atol = 1e-6 * actual[0, 0].abs().item()
        if not torch.allclose(actual, unit * expected, rtol=1e-4, atol=atol):
            return False
    return True


def probes() -> list[LossInputs]:
    """Batches in float64; the first row is an on-policy positive of one token with log pi = 0."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, *LENGTHS * 10])
    sizes = torch.tensor([0.0, *sorted(SIZES * 10)], dtype=torch.float64)[:, None]
    mask = (torch.arange(max(LENGTHS)) < lengths[:, None]).double()

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(mask.shape, generator=generator, dtype=torch.float64)

    token_logmu = uniform(-3, -0.5)
    token_logmu[0] = 0
    reward = uniform(-1, 1)[:, 0]
    reward[0] = 1
    reward[1:] -= reward.sum() / (len(reward) - 1)  # the mean is 0: to subtract it changes nothing
    first = LossInputs(token_logmu + sizes * uniform(-1, 1), token_logmu, reward, mask)
    lower = first._replace(token_logp=first.token_logp - sizes * uniform(0, 1))
    others = [first._replace(reward=reward + 0.3), first._replace(reward=100 * reward)]
    return [first, lower, _columns(first, 3), *others]


def _columns(batch: LossInputs, count: int) -> LossInputs:
    """The batch with the first tokens of each completion only."""
    return LossInputs(*[column[:, :count] if column.dim() == 2 else column for column in batch])


# ---- bounds: read from single tokens -------------------------------------------------------------
FAR = 17.0  # a log-ratio beyond all clips, but below the guards at 20 that keep exp from overflow
NOTHING = 1e-8  # less than e^-17


def measure_bounds(loss: Loss, factor: float) -> Combination:
    """The paper's combination with the loss's bounds, if it multiplies negatives by a factor."""
    limits = []
    edges = []
    guard = math.inf
    for sign, unit in ((1.0, 1.0), (-1.0, factor)):
        weight = partial(_weight_of_tokens, loss, sign, unit)
        low, first = _bound_and_edge(weight, -FAR)
        high, last = _bound_and_edge(weight, FAR)
        # A bound on the log-ratio of each token, not on their sum, is squared by two tokens.
        if 0 < low < 1 and math.isclose(weight(-FAR, length=2), low**2, rel_tol=1e-4):
            guard = -math.log(low)
            low = 0.0
        limits += sorted([low, high])  # those of mu/pi are exchanged
        edges += [first, last]
    return Combination(Bounds(*limits), window=Bounds(*edges), negatives=factor, guard=guard)


def _weight_of_tokens(
    loss: Loss, sign: float, unit: float, log_ratio: float, length: int = 1
) -> float:
    """The weight at a log-ratio of each token, over that of an on-policy positive, and `unit`."""
    zeros = torch.zeros(3, length, dtype=torch.float64)  # log pi = 0: no gradient in the weight
    token_logmu = zeros.clone()
    token_logmu[1] = -log_ratio
    reward = torch.tensor([1.0, sign, -1.0 - sign], dtype=torch.float64)  # the mean is 0
    pushes = neg_grad(loss, LossInputs(zeros, token_logmu, reward, torch.ones_like(zeros)))
    return sign * (pushes[1, 0] / pushes[0, 0]).item() / unit


def _bound_and_edge(weight: Callable[[float], float], far: float) -> tuple[float, float]:
    """The weight's bound on this side of 0, and the ratio beyond which the weight is 0."""
    without = 0.0 if far < 0 else math.inf
    at_end = weight(far)
    if abs(at_end) < NOTHING and abs(weight(0.0)) > NOTHING:
        inside = 0.0
        outside = far
        for _ in range(26):
            middle = (inside + outside) / 2
            if abs(weight(middle)) < NOTHING:
                outside = middle
            else:
                inside = middle
        return without, _rounded(math.exp(inside))
    before = weight(0.97 * far)
    if math.isclose(at_end, before, rel_tol=1e-6):
        return _rounded(at_end), without
    return (0.0 if at_end < before else math.inf), without


def _rounded(bound: float) -> float:
    """To five digits. A ratio above e^9.99 is only kept from overflow."""
    return float(f"{bound:.5g}") if bound < 2.2e4 else math.inf
