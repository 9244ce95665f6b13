"""Who follows the checker's advice to its end has the paper's loss, and never one that lowers
right answers: whatever the loss did wrong, and whatever its parameters are called."""

import inspect
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import pytest
import torch
from loss_builders import total
from mistaken_losses import NAMED_MISTAKES, UNNAMED_MISTAKES
from public_losses import PUBLIC, PUBLIC_UNNAMED

from topr_conformance import VARIANTS, compare, identify
from topr_conformance.advice import ADVICE, change

LOGP_FIRST = ("logp", "logmu", "reward", "mask")
LOGMU_FIRST = ("logmu", "logp", "reward", "mask")
TELLING = {"logp": "curr_logprobs", "logmu": "prev_logprobs", "reward": "advantages"}
TELLING["mask"] = "mask"


def called(names, roles, loss):
    """The loss of (logp, logmu, reward, mask) with parameters of other names, in another order."""

    def in_order(*values):
        value_of = dict(zip(roles, values, strict=True))
        return loss(*[value_of[role] for role in LOGP_FIRST])

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    in_order.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
    return in_order


def push(loss, reward):
    """By how much descent raises each log pi of a completion, as the trainer calls the loss."""
    token_logp = torch.tensor([[-1.0, -2.0], [-0.5, -1.5]], dtype=torch.float64, requires_grad=True)
    token_logmu = torch.tensor([[-1.2, -1.9], [-0.4, -1.4]], dtype=torch.float64)
    rewards = torch.tensor([reward, 1.0], dtype=torch.float64)
    value = loss(token_logp, token_logmu, rewards, torch.ones(2, 2, dtype=torch.float64))
    [gradient] = torch.autograd.grad(value, token_logp)
    return -gradient[0]


# ---- losses that are repaired step by step -------------------------------------------------------
@dataclass(frozen=True)
class Recipe:
    """A loss by its mistakes; the defaults are the paper's."""

    names: tuple[str, ...] = tuple(TELLING.values())
    roles: tuple[str, ...] = LOGP_FIRST
    form: str = "weight"  # or "objective" (Equation 11), or "surrogate" (a ratio with a gradient)
    sign: int = 1  # -1: a minus is missing
    is_inverted: bool = False  # mu/pi
    is_per_token: bool = False
    has_token_mean: bool = False

    def of_roles(self, logp, logmu, reward, mask):
        log_ratio = (logp - logmu) * mask
        if self.is_inverted:
            log_ratio = -log_ratio
        if not self.is_per_token:
            log_ratio = log_ratio.sum(1, keepdim=True)
        clipped = log_ratio.clamp(max=0)
        negative = reward[:, None] < 0
        # Each form has one gradient for each token; the sums are over units.
        match self.form:
            case "weight":
                weight = torch.where(negative, clipped.exp(), 1.0).detach()
                values = weight * (logp if self.is_per_token else total(logp, mask)[:, None])
            case "objective":
                of_negatives = clipped.exp() * (1 + log_ratio - clipped)
                values = torch.where(negative, of_negatives, 1 + log_ratio)
            case "surrogate":
                values = log_ratio.exp()
        if self.is_per_token:
            values = values * mask
        divisor = mask.sum(1).mean() if self.has_token_mean else mask.sum(1)
        return -self.sign * (values.sum(1) * reward / divisor).mean()

    def loss(self):
        return called(self.names, self.roles, self.of_roles)


NAMES = [
    (tuple(TELLING[role] for role in LOGP_FIRST), LOGP_FIRST),
    (tuple(TELLING[role] for role in LOGMU_FIRST), LOGMU_FIRST),
]
NAMES += [(tuple("abcd"), LOGP_FIRST), (tuple("abcd"), LOGMU_FIRST)]
NAMES += [(("x_logprobs", "y_logprobs", "adv", "mask"), LOGMU_FIRST)]
RECIPES = []
for (names, roles), form, sign, is_inverted, is_per_token in product(
    NAMES, ("weight", "objective", "surrogate"), (1, -1), (False, True), (False, True)
):
    RECIPES.append(Recipe(names, roles, form, sign, is_inverted, is_per_token, is_per_token))

# How an advice begins in ADVICE -> what it changes, whether or not that was wrong
REPAIRS = {
    "a guess": lambda recipe: replace(recipe, names=tuple(TELLING[r] for r in recipe.roles)),
    "wrong sign": lambda recipe: replace(recipe, sign=-recipe.sign),
    "inverted ratio": lambda recipe: replace(recipe, is_inverted=not recipe.is_inverted),
    "per-token": lambda recipe: replace(recipe, is_per_token=False),
    "token mean": lambda recipe: replace(recipe, has_token_mean=False),
    "plain is": lambda recipe: replace(recipe, form="weight"),
}


@cache
def verdict_and_advice(recipe):
    """The verdict, and the keys of REPAIRS whose advice was given."""
    report = identify(recipe.loss())
    if report.variant not in ("unknown", "paper"):
        return report.variant, report.variant.split(" + ")
    return report.variant, [key for key in ADVICE if change(key) in report.changes]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_advice_leads_to_the_paper_s_loss_by_the_roles_of_its_arguments(recipe):
    for _ in range(4):
        variant, advice = verdict_and_advice(recipe)
        if not advice:
            break
        for key in advice:
            recipe = REPAIRS[key](recipe)
    assert variant == "paper"
    assert (push(recipe.of_roles, 1.0) > 0).all()
    assert (push(recipe.of_roles, -1.0) < 0).all()
    assert compare(recipe.of_roles, 20) is None


# ---- losses that circulate -----------------------------------------------------------------------
WRONG = [*VARIANTS.values()]
for verdict, loss in NAMED_MISTAKES + PUBLIC:
    if verdict not in ("paper", "wrong sign"):
        WRONG.append(loss)
for *_, loss in UNNAMED_MISTAKES + PUBLIC_UNNAMED:
    WRONG.append(loss)


@pytest.mark.parametrize("loss", WRONG)
def test_a_wrong_loss_without_its_minus_is_never_the_paper_s(loss):
    """The names do not tell which parameter is what, and logmu comes first, against the page."""

    def negated(*inputs):
        return -loss(*inputs)

    report = identify(called(("a", "b", "c", "d"), LOGMU_FIRST, negated))
    assert report.variant != "paper"
    advice = " ".join(report.changes)
    # The gradient tells which is logp, and the sign is named; or nothing else is said.
    assert change("wrong sign") in advice or report.changes == [change("a guess")]
