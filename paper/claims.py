"""The paper's claims, checked on the bandit of bandit.py: the statements of toy_bandit.py, and what its figures show.

The settings (arms, rewards, steps, learning rates) are ours: the paper has no bandit. Weights, taper and losses are
those of topr.py, so that the claims test the reference itself.
"""

import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paper.bandit import (
    Bandit,
    ascend,
    entropy,
    four_parts,
    gradient,
    gradient_of_loss,
    gradient_of_objective,
    gradient_variance,
    kl,
    objective,
    random_bandits,
    tensor,
    through_softmax,
    upper_bound,
    weights,
)
from pipeline.methods import dpo_loss
from pipeline.plots import Line, Panel, lines
from pipeline.report import Table
from topr import PRESETS, Limits, baseline_for_proportion, effective_proportion, topr_loss, topr_objective

KL = r"$\mathrm{KL}(\mu \| \pi)$ (nats)"


class Statement(NamedTuple):
    """One row of the table: the statement with its condition, its place in the paper, and what was measured."""

    text: str
    source: str
    measured: str
    holds: bool


class Claim(NamedTuple):
    """The statements of one part of the paper, and the panels of its figure."""

    statements: list[Statement]
    panels: list[Panel]


Found = Iterator[Statement | Panel]  # what the functions below yield


def statement(text: str, measured: str, holds: bool) -> Statement:
    """The statement of a text that begins with its source and a colon."""
    source, _, text = text.partition(": ")
    return Statement(text, source, measured, holds)


def identity(text: str, one: Tensor, *others: Tensor, within: float = 1e-12) -> Statement:
    """That `one` equals each of the `others` within a bound; 1e-12 is far above the rounding of sums of a few terms.

    The bound is what it tells: the difference itself is rounding error, which differs between processors.

    >>> identity("ours: one and one is two", tensor([2.0]), tensor([1.0]) + 1).measured
    'equal within 1e-12'
    """
    difference = torch.stack([(one - other).abs().max() for other in others]).max().item()  # NaN if any is
    holds = difference <= within
    return statement(text, f"equal within {within:.0e}" if holds else f"differ by {difference:.0e}", holds)


def always(text: str, found: Tensor, of: str) -> Statement:
    """That `found` is True everywhere; of: what its elements are.

    >>> always("ours: numbers are positive", tensor([1.0, -1.0]) > 0, "numbers").measured
    'in 1 of 2 numbers'
    """
    measured = f"in {found.sum():,} of {found.numel():,} {of}"
    return statement(text, measured, found.numel() > 0 and bool(found.all()))


def moves(text: str, x: Tensor, direction: Literal["up", "down"]) -> Statement:
    """That the means of the columns of x (N, 3) go up, or down, each time by more than two standard errors.

    >>> moves("ours: counting", tensor([[1.0, 2.0, 3.0], [1.5, 2.5, 4.5]]), "up").measured
    'means 1.25, 2.25, 3.75: +1.000 ± 0.000 (in 2 of 2) and +1.500 ± 1.000 (in 2 of 2; 2 SE)'
    """
    sign, step = 1 if direction == "up" else -1, x.diff(dim=-1)
    mean, error = step.mean(0), 2 * step.std(0) / math.sqrt(len(x))
    means = ", ".join(f"{value:.2f}" for value in x.mean(0))
    shares = [f"in {count} of {len(x)}" for count in (sign * step > 0).sum(0)]
    told = [f"{m:+.3f} ± {e:.3f} ({share}" for m, e, share in zip(mean, error, shares, strict=True)]
    return statement(text, f"means {means}: {told[0]}) and {told[1]}; 2 SE)", bool((sign * mean > error).all()))


def _one_bandit(gradients: dict[str, Tensor], arms: list[str]) -> Panel:
    """The first bandit's gradients, with TOPR's bounds and with SFT's."""
    at = range(len(arms))
    drawn = lines(at, {label: gradient[0] for label, gradient in gradients.items()}, "topr sft", "points")
    return Panel("one bandit", "arm", "gradient of the logit", drawn, {"xticks": at, "xticklabels": arms})


FAMILY = [*PRESETS.values(), Limits(0.5, 2, 0.2, 0.8)]  # Table 1, and a choice in which all four bounds act


def exact(generator: torch.Generator) -> Found:
    """Appendix B.1: the exact gradient, and what the negative examples add to it."""
    z, bandit = random_bandits(1000, "+++---", generator)
    pi, pairs = z.softmax(-1), list(product(range(3), range(3, 6)))  # a positive and a negative arm

    def all_of(function: Callable[..., Tensor]) -> Tensor:
        return torch.stack([function(z, bandit, limits) for limits in FAMILY])

    def gap(x: Tensor) -> Tensor:
        return torch.stack([x[:, i] - x[:, j] for i, j in pairs], -1)

    def differences(z: Tensor, *bandit: Any) -> Tensor:
        """`gradient` by central differences of Eq. 11, one logit after the other, with an error of about 1e-6."""
        moves = 1e-6 * torch.eye(z.shape[-1], dtype=z.dtype)
        return torch.stack([objective(z + move, *bandit) - objective(z - move, *bandit) for move in moves], -1) / 2e-6

    closed = all_of(gradient)
    both, only = (gradient(z, bandit, PRESETS[name]) for name in ("topr", "sft"))
    mass, mass_of_sft = (bandit.mu * weights(z, bandit, PRESETS[name]) * bandit.reward for name in ("topr", "sft"))
    lost = -mass.clamp_max(0)
    widening = gap(both) - gap(only)
    formula = gap(pi) * lost.sum(-1, keepdim=True) + torch.stack([lost[:, j] for _, j in pairs], -1)
    assumed = gap(pi) > 0
    length = torch.randint(1, 10, z.shape, generator=generator)
    outside, narrower = ~assumed, (widening < 0) & ~assumed
    share = narrower.sum() / outside.sum()
    residual = (narrower.double() - share * outside).sum(1)  # pairs within a bandit are correlated: summed by bandit
    error = 2 * residual.norm() / outside.sum()
    text = "App. B.1: closed form = autograd of Eq. 11 = autograd of topr_loss, for six choices of bounds"
    yield identity(text, closed, all_of(gradient_of_objective), all_of(gradient_of_loss))
    yield identity("App. B.1: closed form = finite differences", closed, all_of(differences), within=1e-6)
    text = "Sec. 4.2: arms of 1 to 9 tokens: autograd of topr_loss = closed form with R / length in place of R"
    divided = bandit._replace(reward=bandit.reward / length)
    of_divided = torch.stack([gradient(z, divided, limits) for limits in FAMILY])
    yield identity(text, all_of(partial(gradient_of_loss, length=length)), of_divided)
    yield always("App. B.1: Delta is larger without negatives (SFT)", mass.sum(-1) < mass_of_sft.sum(-1), "bandits")
    yield always("App. B.1: where pi- < pi+: negatives widen the gap grad_z+ - grad_z-", widening[assumed] > 0, "pairs")
    yield identity("ours: they widen it by (pi+ - pi-) N + mu- w- |R-|, N = sum over T- of mu w |R|", widening, formula)
    text = "ours: where pi- >= pi+ they may narrow it: the condition is needed (three negatives)"
    yield statement(text, f"in {share:.1%} ± {error:.1%} of {outside.sum():,} pairs (2 SE)", share.item() > 0)
    some = torch.arange(len(z))[:, None].expand_as(widening) < 40
    inside, outside = (Line(gap(pi)[x & some], widening[x & some], kind="points") for x in (assumed, ~assumed))
    inside = inside._replace(label=r"$\pi(\tau^-) < \pi(\tau^+)$", style="topr")
    cloud = [inside, outside._replace(label="elsewhere", style="reinforce")]
    yield _one_bandit({"with negatives": both, "without (SFT)": only}, ["+", "+", "+", "−", "−", "−"])
    yield Panel("what negatives add", r"$\pi(\tau^+) - \pi(\tau^-)$", "what negatives add to the gap", cloud)


def sampled(generator: torch.Generator) -> Found:
    """Appendix B.2: one positive and one negative were drawn (the first two arms), the other two were not."""
    z, bandit = random_bandits(1000, "+-+-", generator)
    pi = z.softmax(-1)
    drawn = bandit._replace(reward=bandit.reward * tensor([1, 1, 0, 0]) / bandit.mu)  # a drawn arm has weight 1, not mu

    def terms(bandit: Bandit, limits: Limits) -> tuple[Tensor, Tensor]:
        """w+ R+ and w- R-, (bandits, 1) each."""
        return (weights(z, bandit, limits) * bandit.reward)[:, :2].split(1, dim=-1)

    def closed_form(limits: Limits) -> Tensor:
        positive, negative = terms(bandit, limits)
        tau_pos = positive * (1 - pi[:, :1]) - negative * pi[:, :1]
        tau_neg = -positive * pi[:, 1:2] + negative * (1 - pi[:, 1:2])
        return torch.cat([tau_pos, tau_neg, -pi[:, 2:] * (positive + negative)], -1)

    def unseen(rewards: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """|w- R-| / (w+ R+), and the norm of the unseen arms' gradient with the negative over that without it."""
        positive, negative = terms(bandit._replace(reward=rewards * bandit.mu), PRESETS[name])
        norms = [
            gradient_of_loss(z, bandit._replace(reward=rewards * kept), PRESETS[name])[:, 2:].norm(dim=-1)
            for kept in (tensor([1, 1, 0, 0]), tensor([1, 0, 0, 0]))
        ]
        return (negative.abs() / positive)[:, 0], norms[0] / norms[1]

    ratio, change = unseen(drawn.reward, "off_policy")  # without bounds, both sides of the condition occur
    unit_ratio, unit_change = unseen(bandit.reward.sign() / bandit.mu, "topr")
    both, only = (gradient_of_loss(z, drawn, PRESETS[name]) for name in ("topr", "sft"))
    by_autograd = torch.stack([gradient_of_loss(z, drawn, limits) for limits in FAMILY])
    text = "App. B.2: the four closed forms (seen and unseen, + and -) = autograd of topr_loss"
    yield identity(text, torch.stack([closed_form(limits) for limits in FAMILY]), by_autograd)
    text = (
        f"App. B.2: unseen arms' gradient shrinks exactly where |w- R-| < 2 w+ R+ ({(ratio < 2).double().mean():.0%})"
    )
    yield always(text, (change < 1) == (ratio < 2), "bandits")
    yield always("App. B.2: TOPR with rewards -1 and +1: it never grows", unit_change <= 1 + 1e-12, "bandits")
    yield always("App. B.2: the negative raises the gradient of tau+", both[:, 0] > only[:, 0], "bandits")
    yield always("App. B.2: and lowers that of tau-", both[:, 1] < only[:, 1], "bandits")
    near = ratio < 4
    ratios = [
        Line(ratio[near][:200], change[near][:200], "plain IS", "off_policy", "points"),
        Line(unit_ratio[:60], unit_change[:60], "TOPR, rewards −1 and +1", "topr", "points"),
        Line([0, 4], [1, 1], style="limit"),
    ]
    yield _one_bandit({"with the negative": both, "without (SFT)": only}, ["seen +", "seen −", "unseen +", "unseen −"])
    yield Panel("gradient of the unseen arms", r"$|w^- R^-|\ /\ (w^+ R^+)$", "norm, relative to no negative", ratios)


def baseline(generator: torch.Generator) -> Found:
    """Appendix C: with a+ = a- = 0 and b+ = b- = b, a baseline acts through the clip alone, as a soft KL.

    Section 3.2 says the same of TOPR. Its correction, derived here, is two-sided on the positives.
    """
    z, bandit = random_bandits(1000, "++---", generator)
    choices = list(product((0.5, 1.0, 2.0), (-1.0, -0.3, 0.4, 1.0)))  # b, c

    def change(z: Tensor, b: float, c: float) -> Tensor:
        """grad J(pi, c) - grad J(pi, 0), by autograd of Eq. 11."""
        shifted, limits = bandit._replace(reward=bandit.reward - c), Limits(0, b, 0, b)
        return gradient_of_objective(z, shifted, limits) - gradient_of_objective(z, bandit, limits)

    def correction(z: Tensor, b: float, c: float) -> Tensor:
        return c * through_softmax(z, (z.softmax(-1) - b * bandit.mu).clamp_min(0))

    def correction_of_topr(z: Tensor, c: float) -> Tensor:
        ahead = z.softmax(-1) - bandit.mu
        return c * through_softmax(z, torch.where(bandit.reward >= 0, ahead, ahead.clamp_min(0)))

    unit = bandit.reward.sign()  # rewards of -1 and +1
    p, at = (bandit.mu * (unit > 0)).sum(-1), torch.linspace(-1, 1, 9, dtype=torch.float64)

    def positives(c: Tensor) -> Tensor:
        """The share of positives in the sum over the arms of mu |R - c|, for each bandit."""
        size = bandit.mu * (unit - c).abs()
        return (size * (unit > 0)).sum(-1) / size.sum(-1)

    small = (-0.09, 0.09)  # below every |R|: no reward changes its sign
    near_mu = bandit.mu.log() + 0.1 * z.tanh()  # pi / mu < exp(0.2) < 2
    c = torch.linspace(-0.5, 0.5, 9, dtype=torch.float64)  # likewise
    _, runs = random_bandits(400, "++---", generator, low=0.55)
    mu = runs.mu[:, None].expand(-1, len(c), -1)
    shifted = Bandit(mu, runs.reward[:, None] - c[:, None])
    path, of_topr = (ascend(mu.log(), shifted, PRESETS[name], lr=1.0, steps=5000, keep=500) for name in ("tis", "topr"))
    distance, disorder = kl(mu, path.log_softmax(-1)), entropy(path.softmax(-1))  # (time, bandit, baseline)
    distance_of_topr = kl(mu, of_topr.log_softmax(-1))

    changes, corrections = (torch.stack([of(z, *choice) for choice in choices]) for of in (change, correction))
    text = "App. C: grad J(pi, c) = grad J(pi, 0) + c sum of mu (pi/mu - [pi/mu]_0^b) grad log pi"
    yield identity(text, changes, corrections)
    text = "App. C: where no arm has pi > b mu, the baseline changes nothing"
    yield identity(text, torch.stack([change(near_mu, 2.0, c) for c in (-1.0, 1.0)]), torch.zeros(1))
    text = (
        "App. C: KL(mu||pi) after 5,000 steps of TIS at c = -0.5, 0, 0.5: smaller for c < 0, larger for c > 0, "
        "on average"
    )
    yield moves(text, distance[-1, :, ::4], "up")
    yield moves(
        "App. C: the entropy of pi then: larger for c < 0, smaller for c > 0, on average", disorder[-1, :, ::4], "down"
    )
    yield identity(
        "Sec. 3.2, ours: TOPR: the correction is c sum of d grad log pi, with d = pi - mu on T+ "
        "and max(0, pi - mu) on T-",
        torch.stack([gradient_of_objective(z, bandit._replace(reward=bandit.reward - c)) for c in small])
        - gradient_of_objective(z, bandit),
        torch.stack([correction_of_topr(z, c) for c in small]),
    )
    yield moves("Sec. 3.2: TOPR: KL(mu||pi) at the same c, on average", distance_of_topr[-1, :, ::4], "up")
    text = "Eq. 12: rewards -1 and +1: p~ is the positives' share in the sum of mu |R - c|, for c from -1 to 1"
    yield identity(text, torch.stack([effective_proportion(p, c) for c in at]), torch.stack([positives(c) for c in at]))
    text, wanted = "Eq. 12: and the baseline that it gives for a share leads to that share, from 0 to 1", (1 - at) / 2
    reached = torch.stack([positives(baseline_for_proportion(p, share)[:, None]) for share in wanted])
    yield identity(text, reached, wanted[:, None])

    def shown(x: Tensor) -> list[Line]:
        return [
            Line(c, x[i].mean(0), f"{500 * i:,} steps", half_width=2 * x[i].std(0) / math.sqrt(x.shape[1]))
            for i in (1, 4, 10)
        ]

    yield Panel(r"distance from $\mu$, TIS", "baseline c", KL, shown(distance))
    yield Panel("randomness of the policy, TIS", "baseline c", r"entropy of $\pi$ (nats)", shown(disorder))
    yield Panel(r"distance from $\mu$, TOPR", "baseline c", KL, shown(distance_of_topr))


def decomposition(generator: torch.Generator) -> Found:
    """Proposition 3.1: what naive REINFORCE minimises, and that its baseline is a KL penalty."""
    z, bandit = random_bandits(1000, "++---", generator)
    other, _ = random_bandits(1000, "++---", generator)
    c = 2 * torch.rand(1000, generator=generator, dtype=torch.float64) - 1
    shifted, reinforce = bandit._replace(reward=bandit.reward - c[:, None]), PRESETS["reinforce"]

    def loss(z: Tensor) -> Tensor:
        """-sum of mu (R - c) log pi of each bandit, as `topr_loss` has it."""
        rows = zip(z.log_softmax(-1), shifted.mu.log(), shifted.mu * shifted.reward, torch.ones(z.shape), strict=True)
        return torch.stack([topr_loss(*row, reinforce, denominator=1) for row in rows])

    (parts, constant), (parts_of_other, _) = (four_parts(x.log_softmax(-1), bandit, c) for x in (z, other))
    logmu = bandit.mu.log()
    one = Bandit(tensor([0.3, 0.3, 0.2, 0.2]), tensor([1.0, 0.5, -0.5, -1.0]))
    runs = {
        c: ascend(one.mu.log(), one._replace(reward=one.reward - c), reinforce, lr=0.2, steps=3000, keep=10)
        for c in (-1.2, -0.5, 0.0, 0.5)
    }
    target = one.mu * (one.reward + 1.2)
    _, many = random_bandits(400, "++---", generator)
    above_worst = many.reward - many.reward.amin(-1, keepdim=True)
    lowest, beyond = (
        ascend(many.mu.log(), many._replace(reward=above_worst - more), reinforce, lr=1.0, steps=4000, keep=1000)
        for more in (0.0, 0.2)
    )
    end, target_of_lowest = lowest[-1].softmax(-1), many.mu * above_worst
    widened = (beyond.amax(-1) - beyond.amin(-1)).diff(dim=0)
    of_topr = ascend(many.mu.log(), many, PRESETS["topr"], lr=1.0, steps=4000, keep=4000)[-1]
    text = "Prop. 3.1: naive REINFORCE's loss = C + R+ KL(mu_R+||pi) - R- KL(mu_R-||pi) - c KL(mu||pi)"
    yield identity(text, loss(z), parts.sum(0) + constant)
    text = "Prop. 3.1: C does not depend on pi: at another pi, loss minus parts is the same"
    yield identity(text, loss(z) - parts.sum(0), loss(other) - parts_of_other.sum(0))
    text = "Sec. 3.1: at pi = mu the gradient does not depend on c"
    yield identity(text, gradient(logmu, bandit, reinforce), gradient(logmu, shifted, reinforce))
    text = "Sec. 3.1: c below every reward: pi ends at mu (R - c), normalised (c = -1.2, 3,000 steps)"
    yield identity(text, runs[-1.2][-1].softmax(-1), target / target.sum(), within=1e-6)
    text = (
        "Sec. 3.1: c = min R: pi ends at mu (R - c), normalised: the worst arm counts as one without data (4,000 steps)"
    )
    yield identity(text, end, target_of_lowest / target_of_lowest.sum(-1, keepdim=True), within=1e-2)
    text = (
        "Sec. 3.1: c = min R + 0.2: the logits' gap grows in the last quarter as in the one before (90% of it at least)"
    )
    yield always(text, widened[-1] > 0.9 * widened[-2], "bandits")
    text = "Sec. 3.1: TOPR without a baseline ends with a larger expected reward than REINFORCE with c = min R"
    yield always(text, (of_topr.softmax(-1) * many.reward).sum(-1) > (end * many.reward).sum(-1), "bandits")
    factors = (("R^+", r"\mu_{R^+}"), ("-R^-", r"\mu_{R^-}"), ("-c", r"\mu"))
    steps, labels = range(0, 3001, 10), [rf"${factor}\ \mathrm{{KL}}({of} \| \pi)$" for factor, of in factors]
    along = dict(zip(labels, four_parts(runs[0.5].log_softmax(-1), one, 0.5)[0], strict=True))
    far = {f"c = {c:g}": kl(one.mu, run.log_softmax(-1))[1:] for c, run in runs.items()}  # it begins at 0
    yield Panel("the parts at c = 0.5", "step of naive REINFORCE", "part of the loss (nats)", lines(steps, along))
    yield Panel("a KL penalty", "step of naive REINFORCE", KL, lines(steps[1:], far), {"yscale": "log"})


def unbounded(generator: torch.Generator) -> Found:
    """Proposition 3.2: bounded above for a- = 0; not for a- > 0, if mu > 0 on a negative arm and on another one."""
    # An arm of reward 0 adds nothing to the objective: a trajectory without data.
    data = {"only negatives": tensor([-1.0, -0.5, 0.0, 0.0]), "both signs": tensor([1.0, 1.0, -1.0, -1.0])}
    bandit = Bandit(tensor([0.35, 0.25, 0.25, 0.15]).expand(2, -1), torch.stack(list(data.values())))
    steps, keep, bound, choices = 6000, 20, upper_bound(bandit.reward), (0.0, 0.01, 0.1, 0.8, 1.0)
    limits = {a_neg: Limits(1, 1, a_neg, 1) for a_neg in choices}
    paths = {a: ascend(bandit.mu.log(), bandit, limits[a], lr=4.0, steps=steps, keep=keep) for a in choices}
    value = {a: objective(paths[a], bandit, limits[a]) for a in choices}  # (time, data)
    half_width = {a: paths[a].amax(-1) - paths[a].amin(-1) for a in choices}

    z, many = random_bandits(1000, "++---", generator)
    bounds = (3 * torch.rand(99, 3, generator=generator)).tolist()
    free = [Limits(0, math.inf, 0, math.inf), *(Limits(min(a, b), max(a, b), 0, b_neg) for a, b, b_neg in bounds)]
    drawn = torch.stack([objective(4 * z, many, limits) for limits in free])
    text = "Prop. 3.2: a- = 0: J <= max(0, max R), for any pi, mu, R, a+, b+, b-"
    yield always(text, drawn <= upper_bound(many.reward), "J")
    yield always("Prop. 3.2: a- = 0: and along 6,000 steps of TOPR on two sets of data", value[0.0] <= bound, "points")
    quarter = steps // keep // 4
    for a in choices[1:]:
        passed = ((value[a] > bound).int().argmax(0) * keep).max()
        before, last = torch.stack([value[a], half_width[a]], 1)[-1 - 2 * quarter :: quarter].diff(dim=0)
        yield always(
            f"Prop. 3.2: a- = {a:g}{' (naive REINFORCE)' * (a == 1)}: J passes it by step {passed:,}; it and the "
            "logits' gap still grow in the last quarter, as in the quarter before (95% of it at least)",
            (value[a][-1] > bound) & (before > 0) & (last > 0.95 * before),
            "(J and gap, two sets of data)",
        )
    time = range(0, steps + 1, keep)

    def shown(x: dict[float, Tensor], i: int) -> list[Line]:
        return lines(time, {f"$a^-$ = {a:g}": x[a][:, i] for a in choices})

    scale = {"yscale": "symlog"}
    for i, name in enumerate(data):
        drawn = [*shown(value, i), Line([0, steps], [bound[i]] * 2, "max(0, max R)", "limit")]
        yield Panel(f"{name}: the objective", "step", r"$J_{\mathrm{topr}}$ (Eq. 11)", drawn, scale)
    yield Panel("both signs: the logits", "step", "largest − smallest logit", shown(half_width, 1), scale)


def bound(generator: torch.Generator) -> Found:
    """Section 3.1: TOPR maximises a lower bound of J where R >= 0; the log-ratio on negatives gives an upper one."""

    def expected_reward(z: Tensor, bandit: Bandit) -> Tensor:
        """The true objective J(pi), the sum over the arms of pi R."""
        return (z.softmax(-1) * bandit.reward).sum(-1)

    z, bandit = random_bandits(1000, "+++--", generator)
    good, bad = (bandit._replace(reward=sign * bandit.reward.abs()) for sign in (1, -1))
    bounds = (3 * torch.rand(100, 2, generator=generator).sort().values).tolist()
    below = torch.stack([objective(z, good, Limits(a, b, a, b)) for a, b in bounds])
    gap, logmu = expected_reward(z, bandit) - objective(z, bandit), bandit.mu.log()
    yield always("Sec. 3.1: R >= 0: J >= J_topr, for any bounds", below <= expected_reward(z, good) + 1e-12, "cases")
    text = "Sec. 3.1: R <= 0 and the log-ratio on negatives (a- = b- = 1): J <= J_topr"
    yield always(text, objective(z, bad, PRESETS["reinforce"]) >= expected_reward(z, bad) - 1e-12, "bandits")
    at_mu = [objective(logmu, bandit, PRESETS[name]) for name in ("topr", "tis", "reinforce", "off_policy")]
    yield identity("Sec. 3.1: at pi = mu both are equal, for a <= 1 <= b", expected_reward(logmu, bandit), *at_mu)
    shares = [of.double().mean() for of in (gap > 0, gap < 0)]
    told = f"below J in {shares[0]:.1%}, above in {shares[1]:.1%} of 1,000 bandits"
    yield statement("ours: rewards of both signs: TOPR's objective is neither bound", told, bool(min(shares) > 0))
    pi = torch.linspace(0.001, 0.999, 400, dtype=torch.float64)
    two = torch.stack([pi, 1 - pi], -1).log()
    for title, sign in (("R = (1, 0)", 1.0), ("R = (−1, 0)", -1.0)):
        arm = Bandit(tensor([0.4, 0.6]), tensor([sign, 0.0]))
        values = {name: objective(two, arm, PRESETS[name]) for name in ("topr", "tis", "reinforce")}
        drawn = [Line(pi, expected_reward(two, arm), "J", "limit"), *lines(pi, values)]
        yield Panel(rf"{title}, $\mu$ = 0.4", r"$\pi$ of the first arm", "objective", drawn)


def recovery(generator: torch.Generator) -> Found:
    """Section 3.1: a positive that has become improbable is learnt as fast as ever, if a+ > 0."""
    cap, starts, names = 10_000, [10.0**-power for power in range(2, 9)], list(PRESETS)
    mu, reward = torch.full((5,), 0.2, dtype=torch.float64), tensor([1.0, -1.0, -1.0, -1.0, -1.0])
    pi = tensor([[start, *[(1 - start) / 4] * 4] for start in starts])
    paths = {name: ascend(pi.log(), Bandit(mu, reward), PRESETS[name], lr=1.0, steps=cap) for name in names}
    steps = {name: (path.softmax(-1)[..., 0] < 0.5).sum(0).tolist() for name, path in paths.items()}  # cap + 1: never

    fast, slow = ([steps[name][4] for name in of] for of in (("topr", "sft", "reinforce"), ("tis", "off_policy")))
    further = [after - before for before, after in pairwise(steps["topr"])]
    factors = [after / before for before, after in pairwise(steps["tis"]) if after <= cap]

    def told(counts: list[int]) -> str:
        return ", ".join(f"> {cap:,}" if count > cap else f"{count:,}" for count in counts)

    text = "Sec. 3.1: a+ = 1 (TOPR, SFT, naive REINFORCE): back from 1e-6 to 1/2 in at most 100 steps"
    yield statement(text, f"{told(fast)} steps", max(fast) <= 100)
    text = "Sec. 3.1: a+ = 0 (TIS, plain IS): it takes more than 100 times TOPR's steps"
    yield statement(text, f"{told(slow)} steps", min(slow) > 100 * fast[0])
    text = "ours: each further decade of pi costs TOPR about as many steps as the one before: they grow as log(1 / pi)"
    yield statement(
        text, f"from 1e-2 to 1e-8: {told(steps['topr'])}", max(further) - min(further) <= 2 and min(further) > 0
    )
    text = "ours: and TIS about ten times as many: they grow as 1 / pi"
    yield statement(text, f"from 1e-2: {told(steps['tis'][:4])}", all(8 < factor < 12 for factor in factors))
    reached = {name: [count if count <= cap else math.nan for count in steps[name]] for name in names}
    drawn = [*lines(starts, reached), Line([1e-8, 1e-2], [cap, cap], f"not reached in {cap:,} steps", "limit")]
    axes = r"$\pi(\tau^+)$ at the start", r"steps until $\pi(\tau^+) \geq 1/2$"
    yield Panel("the way back from a low probability", *axes, drawn, {"xscale": "log", "yscale": "log"})


def variance(generator: torch.Generator) -> Found:
    """Table 1: the variance of a one-sample gradient as pi moves away from mu, for each member of the family."""
    arms, draws = 20, 200_000
    logmu = torch.linspace(0, -7, arms, dtype=torch.float64).log_softmax(-1)
    bandit = Bandit(logmu.exp(), tensor([1.0, -1.0] * (arms // 2)))
    moved = torch.linspace(0, 2, 41, dtype=torch.float64)  # pi = mu^(1 - t): mu at 0, uniform at 1, 1 / mu at 2
    z = (1 - moved)[:, None] * logmu
    exact = {name: gradient_variance(z, bandit, limits) for name, limits in PRESETS.items()}
    tau = torch.multinomial(bandit.mu, draws, replacement=True, generator=generator)
    at, deviation = 15, []
    for name, limits in PRESETS.items():
        of_arms = through_softmax(z[at], torch.diag(weights(z[at], bandit, limits) * bandit.reward))
        squares = (of_arms[tau] - gradient(z[at], bandit, limits)).square().sum(-1)
        deviation.append(((squares.mean() - exact[name][at]) / (squares.std() / math.sqrt(draws))).abs().item())
    clipped = torch.stack([exact[name] for name in PRESETS if name != "off_policy"])
    growth = exact["off_policy"] / exact["topr"]
    text = f"Table 1: the closed form is the variance of {draws:,} sampled gradients (pi = mu^{1 - moved[at]:.2f})"
    yield statement(text, f"off by {max(deviation):.1f} standard errors at most", max(deviation) < 4)
    yield always("Table 1: b <= 1: at most 2 max R^2, however far pi is", clipped <= 2, "policies")
    text = "Table 1: plain IS: it grows far beyond"
    yield statement(text, f"{growth[-1]:,.0f} times TOPR's where pi is mu turned round", growth[-1].item() > 100)
    drawn, x = lines(kl(z.softmax(-1), logmu), exact), r"$\mathrm{KL}(\pi \| \mu)$ (nats)"
    yield Panel("variance of the gradient of one sample", x, "total variance", drawn, {"yscale": "log"})


def pace(generator: torch.Generator) -> Found:
    """Ours: the share that is fastest at pi = mu, if steps are divided by the gradient's size, as AdamW does.

    There E[grad log pi] = 0, so that shares differ in noise alone. E+, E-: mean squares of a positive's, a negative's.
    """
    z, bandit = random_bandits(1000, "++---", generator)
    unit, at_mu, sft = bandit._replace(reward=bandit.reward.sign()), bandit.mu.log(), PRESETS["sft"]
    a, b, is_positive = *2 * torch.rand(2, 1000, 1, generator=generator, dtype=torch.float64), unit.reward > 0
    arms = [Bandit(bandit.mu, one / bandit.mu) for one in torch.eye(5, dtype=torch.float64)]
    of_arms = torch.stack([gradient_of_loss(at_mu, arm, sft) for arm in arms], 1)  # grad log pi of each arm
    p, square = (bandit.mu * is_positive).sum(-1), bandit.mu * of_arms.square().sum(-1)
    ratio = p / (1 - p) * (square * ~is_positive).sum(-1) / (square * is_positive).sum(-1)  # E- / E+
    shares = torch.linspace(0, 1, 201, dtype=torch.float64)[:, None].expand(-1, 1000)

    def pace_of(share: Tensor, q: Tensor | float) -> Tensor:
        """|E g| / sqrt(E |g|^2) of one sample's gradient g, from data of which a share q is positive."""
        drawn = torch.where(is_positive, (q / p)[:, None], ((1 - q) / (1 - p))[:, None])
        reward = torch.where(is_positive, (share / q)[..., None], ((share - 1) / (1 - q))[..., None])
        norm = torch.einsum("...ba,bak->...bk", bandit.mu * drawn * reward, of_arms).norm(dim=-1)
        return norm / (square * drawn * reward.square()).sum(-1).sqrt()

    of_positives, is_ahead = pace_of(shares[-1], p), 3 * p > (1 - p) * ratio
    runs = (Bandit(bandit.mu, unit.reward - c) for c in (-1.0, -0.5, 0.0))
    distance = [kl(bandit.mu, ascend(at_mu, run, PRESETS["topr"], 0.5, 1000)[-1].log_softmax(-1)) for run in runs]
    weighted = bandit._replace(reward=torch.where(is_positive, a, -b))
    text = (
        "ours: weights a of positives and b of negatives: the gradient is (a + b) g, in one direction for every share"
    )
    yield identity(text, gradient_of_loss(at_mu, weighted), (a + b) * gradient(at_mu, unit, sft))
    text = "Sec. 3.2: c = -1 is SFT: its gradient is twice that of SFT without a baseline, at any pi"
    yield identity(text, gradient_of_loss(z, unit._replace(reward=unit.reward + 1)), 2 * gradient(z, unit, sft))
    own = f"ours: pace |E g| / sqrt(E |g|^2) is largest at p~* = E- / (E+ + E-), p = {p.min():.0%} to {p.max():.0%}"
    composed = "ours: in data composed to a share q = 10%, not p, the odds of p~* are times those of q, over those of p"
    for text, q in ((own, p), (composed, 0.1)):
        odds = ratio * q / (1 - q) * (1 - p) / p
        yield always(text, pace_of(shares, q) <= pace_of(odds / (1 + odds), q) + 1e-12, "shares")
    text = "ours: at E- / (E+ + E-) the pace is sqrt(1 + p E+ / ((1 - p) E-)) times that of positives only"
    yield identity(text, pace_of(ratio / (1 + ratio), p), of_positives * (1 + p / ((1 - p) * ratio)).sqrt())
    text = (
        f"ours: it is above that without a baseline exactly where 3 p E+ > (1 - p) E-, {is_ahead.double().mean():.0%}"
    )
    yield always(text, (pace_of(p, p) > of_positives) == is_ahead, "bandits")
    text = "Sec. 2.2: without negatives (c = -1) pi stays nearest to mu: KL(mu||pi) after 1,000 steps, c = -1, -0.5, 0"
    yield moves(text, torch.stack(distance, -1), "up")
    some, gain = ratio.argsort()[[990, 800, 400, 20]], pace_of(shares, p) / of_positives
    drawn = {f"$E_-/E_+$ = {ratio[i]:.2g}, $p$ = {p[i]:.2f}": gain[:, i] for i in some}
    axes = r"effective share of positives $\tilde p$ (%)", "relative to positives only"
    yield Panel("pace at the start, four bandits", *axes, lines(100 * shares[:, 0], drawn))


def preference(generator: torch.Generator) -> Found:
    """Section 2.4: DPO's objective may rise while the positive becomes less probable, if the negative falls further.

    Arms share parameters, as trajectories of a language model do: z = features @ theta, and pi = mu at the start. A
    positive and a negative arm were drawn, three others were not.
    """
    bandits, steps, lr, beta = 1000, 200, 0.05, 0.5
    features = torch.randn(bandits, 5, 4, generator=generator, dtype=torch.float64)  # (bandits, arms, parameters)
    features[:, 1] = features[:, 0] + 0.5 * features[:, 1]  # the negative resembles the positive
    start, other = torch.randn(2, bandits, 4, 1, generator=generator, dtype=torch.float64)
    logmu = (features @ start)[..., 0].log_softmax(-1)
    reward = tensor([1, -1, 0, 0, 0]).expand(bandits, -1)

    def objective_of_dpo(logp: Tensor) -> Tensor:
        columns = [x[:, :2].flatten() for x in (logp, logmu, reward)]  # a pair of each bandit
        return -dpo_loss(*columns, beta=beta, denominator=2)

    def objective_of_topr(logp: Tensor) -> Tensor:
        return topr_objective((logp - logmu).flatten(), reward.flatten(), PRESETS["topr"]).sum()

    def slope(function: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
        theta = theta.detach().requires_grad_()
        return torch.autograd.grad(function((features @ theta)[..., 0].log_softmax(-1)), theta)[0]

    def climb(function: Callable[[Tensor], Tensor]) -> Tensor:
        """log pi (time, bandits, arms) along gradient ascent."""
        theta, path = start, []
        for _ in range(steps):
            path.append((features @ theta)[..., 0].log_softmax(-1))
            theta = theta + lr * slope(function, theta)
        return torch.stack(path)

    apart = features[:, :1] - features[:, 1:2]  # (bandits, 1, parameters): of the positive, less the negative
    margin_of_other = apart @ (other - start)  # of the log-ratios: softmaxes cancel
    paths = {"DPO": climb(objective_of_dpo), "TOPR": climb(objective_of_topr)}
    margin = paths["DPO"][..., 0] - paths["DPO"][..., 1]
    share = {name: (path[-1, :, 0] < path[0, :, 0]).double().mean().item() for name, path in paths.items()}
    text = (
        "Sec. 2.4: gradient of DPO, from mu to any pi: beta sigmoid(-beta m) (x+ - x-), "
        "m being the difference of log-ratios"
    )
    yield identity(text, slope(objective_of_dpo, other), beta * (-beta * margin_of_other).sigmoid() * apart.mT)
    yield always("Sec. 2.4: DPO's objective rises in every step", margin.diff(dim=0) > 0, "steps")
    yet = "Sec. 2.4: and yet the positive may end less probable than it began (arms that share parameters)"
    less = "ours: with TOPR on the same arms it does so less often"
    for text, name, holds in ((yet, "DPO", share["DPO"] > 0), (less, "TOPR", share["TOPR"] < share["DPO"])):
        yield statement(text, f"in {share[name]:.1%} of {bandits:,} bandits", holds)
    one = (paths["DPO"][0, :, 0] - paths["DPO"][-1, :, 0]).argmax()  # where it falls furthest
    for name, path in paths.items():
        drawn = lines(range(steps), {"positive": path[:, one, 0], "negative": path[:, one, 1]}, "topr reinforce")
        yield Panel(f"one bandit, {name}", "step", r"$\log \pi$ (nats)", drawn, {"ylim": (-12, 0)})


CLAIMS: dict[str, Callable[[torch.Generator], Found]] = {
    claim.__name__: claim
    for claim in (exact, sampled, baseline, decomposition, unbounded, bound, recovery, variance, pace, preference)
}


def check(name: str, seed: int = 0) -> Claim:
    """One of CLAIMS. Its random numbers depend on its name and the seed only, not on the claims checked before.

    >>> all(statement.holds for statement in check("bound").statements)
    True
    """
    found = list(CLAIMS[name](torch.Generator().manual_seed(zlib.crc32(f"{name} {seed}".encode()))))
    return Claim([row for row in found if isinstance(row, Statement)], [row for row in found if isinstance(row, Panel)])


def to_table(claims: dict[str, Claim]) -> Table:
    """The table of some claims, with a row for each statement.

    >>> len(to_table({"bound": check("bound")}).rows)
    4
    """
    rows = [(name, *row) for name, claim in claims.items() for row in claim.statements]
    shown = [[name, source, text, measured, "yes" if holds else "NO"] for name, text, source, measured, holds in rows]
    return Table(["claim", "source", "statement", "measured", "holds"], shown)
