"""TOPR on a bandit, where every gradient is an exact sum: Appendices B and C, Propositions 3.1 and 3.2, Section 3.1.

    python toy_bandit.py                    # all sections below: statements, numbers to look at, and bandit.png
    python toy_bandit.py proposition_3_2    # one of them, and proposition_3_2.png

An arm stands for a trajectory tau, that is, for a completion. mu drew the data; pi = softmax(z) is in training, with a
logit in z for each arm; sums over all arms take the place of samples. Weight, taper and loss are those of topr.py. A
section's docstring is its statement, its body the check, its axes the picture. A false statement ends the program.
"""

import inspect
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import topr
from topr import PRESETS, Limits

TOPR, TIS, SFT, REINFORCE, PLAIN_IS = (
    PRESETS[name] for name in ("topr", "tis", "sft", "reinforce", "off_policy")
)
FAMILY = (
    *PRESETS.values(),
    Limits(0.5, 2, 0.2, 0.8),
)  # Table 1, and a choice in which all four bounds act
STYLES = {
    "color": ["#0072B2", "#D55E00", "#009E73", "black", "grey"],
    "linestyle": ["-", "--", "-.", ":", (0, (9, 3))],
}
tensor, linspace = (
    partial(torch.tensor, dtype=torch.float64),
    partial(torch.linspace, dtype=torch.float64),
)
is_near = partial(torch.isclose, rtol=1e-9, atol=1e-12)  # equal, up to rounding


class Bandit(NamedTuple):
    """The data: the distribution that drew the arms, and each arm's reward. Leading dimensions are many bandits."""

    mu: Tensor  # (..., K)
    reward: Tensor  # (..., K) after the baseline; 0 for an arm without data


FOUR_ARMS = Bandit(
    mu=tensor([0.35, 0.25, 0.25, 0.15]), reward=tensor([1.0, 1.0, -1.0, -1.0])
)  # two right, two wrong


def weights(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """[pi/mu]_a^b, with the bounds of each reward's sign (Eq. 7): (..., K).

    >>> weights(tensor([0.0, 0.0]), Bandit(tensor([0.25, 0.75]), tensor([1.0, -1.0])))
    tensor([1.0000, 0.6667], dtype=torch.float64)
    """
    return topr.importance_weight(
        z.log_softmax(-1) - bandit.mu.log(), *limits.of_sign(bandit.reward)
    )


def objective(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """J_topr(pi) = sum over the arms of mu rho(pi/mu) R, where rho is the taper (Eq. 11): (...,)."""
    return (
        bandit.mu * topr.topr_objective(z.log_softmax(-1) - bandit.mu.log(), bandit.reward, limits)
    ).sum(-1)


def gradient(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """Of J_topr in z, in closed form: mu [pi/mu] R - pi Delta, Delta = sum of mu [pi/mu] R (App. B.1): (..., K).

    >>> gradient(tensor([0.0, 0.0]), Bandit(tensor([0.5, 0.5]), tensor([1.0, -1.0])))
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    mass = bandit.mu * weights(z, bandit, limits) * bandit.reward
    return mass - z.softmax(-1) * mass.sum(-1, keepdim=True)


def gradient_of_loss(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """The same by autograd of `topr.topr_loss`, given each arm as a sequence of one token, weighed by mu: (..., K)."""
    z = z.detach().requires_grad_()
    columns = (z.log_softmax(-1), bandit.mu.log(), bandit.mu * bandit.reward, torch.ones_like(z))
    topr.topr_loss(
        *(column.expand(z.shape).flatten() for column in columns), limits, denominator=1
    ).backward()
    return -z.grad


def ascend(z: Tensor, bandit: Bandit, limits: Limits, lr: float, steps: int) -> Tensor:
    """Gradient ascent: z at the start and after every step, (steps + 1, ..., K)."""
    path = [z]
    for _ in range(steps):
        path.append(path[-1] + lr * gradient(path[-1], bandit, limits))
    return torch.stack(path)


def random_bandits(signs: str, seed: int) -> tuple[Tensor, Bandit]:
    """Logits z (1000, K), and bandits whose K rewards have these signs, "0" for no data, and sizes in [0.1, 1]."""
    generator, shape = torch.Generator().manual_seed(seed), (1000, len(signs))
    z, logits = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    size = 0.1 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return 1.5 * z, Bandit(
        logits.softmax(-1), size * tensor([{"+": 1, "-": -1, "0": 0}[sign] for sign in signs])
    )


def kl(p: Tensor, logq: Tensor) -> Tensor:
    """KL(p || q) in nats, where 0 log 0 = 0: (...,)."""
    return (torch.xlogy(p, p) - p * logq).sum(-1)


def kl_terms(z: Tensor, bandit: Bandit, c: Tensor) -> Tensor:
    """R+ KL(mu_R+ || pi), -R- KL(mu_R- || pi), -c KL(mu || pi) of Proposition 3.1, R before the baseline: (3, ...)."""
    logp, mass = (
        z.log_softmax(-1),
        [bandit.mu * (sign * bandit.reward).clamp_min(0) for sign in (1, -1)],
    )
    right, wrong = (
        x.sum(-1) * kl(x / x.sum(-1, keepdim=True).clamp_min(1e-300), logp) for x in mass
    )
    return torch.stack([right, -wrong, -c * kl(bandit.mu, logp)])


class FalseStatement(SystemExit):
    """A statement that is not true in all cases, or that has none: ends the program with a line and exit status 1."""


def holds(text: str, is_true: Tensor) -> None:
    """Print a statement and in how many cases it is true; FalseStatement unless that is all of them."""
    counted = f"{text}: {is_true.sum():,} of {is_true.numel():,}"
    if is_true.numel() == 0 or not is_true.all():
        raise FalseStatement(f"toy_bandit.py: this does not hold: {counted}")
    print(f"  {counted}")


def show(names: str, *columns: Tensor) -> None:
    """Print columns of numbers under their names."""
    for row in (names.split(), *torch.stack(columns, -1).tolist()):
        print("".join(f"{x:>11}" if isinstance(x, str) else f"{x:11.4g}" for x in row))


def appendix_b1(ax: Axes, seed: int = 0) -> None:
    """Appendix B.1. The gradient in an arm's logit is mu [pi/mu] R - pi Delta, where Delta = sum of mu [pi/mu] R.

    Without negatives (SFT) Delta is larger, and every arm pays pi Delta for it. So negatives widen the gap between the
    gradients of a right arm and of a wrong one wherever pi(wrong) < pi(right).
    """
    z, bandit = random_bandits("+++---", seed)
    closed, by_loss = (
        torch.stack([of(z, bandit, limits) for limits in FAMILY])
        for of in (gradient, gradient_of_loss)
    )
    holds(
        "closed form = autograd of topr_loss, with six choices of bounds", is_near(closed, by_loss)
    )
    changes = z.softmax(-1), gradient(z, bandit) - gradient(z, bandit, SFT)
    ahead, added = (
        x[:, :3, None] - x[:, None, 3:] for x in changes
    )  # (bandits, right arms, wrong arms)
    holds("the gap is wider where pi(wrong) < pi(right)", added[ahead > 0] > 0)
    print(
        f"  where pi(wrong) > pi(right), it is wider in {(added[ahead < 0] > 0).double().mean():.0%} of the pairs"
    )
    for name, marker, chosen in (
        ("pi(wrong) < pi(right)", "o", ahead > 0),
        ("elsewhere", "x", ahead < 0),
    ):
        ax.plot(ahead[:30][chosen[:30]], added[:30][chosen[:30]], marker, markersize=4, label=name)
    ax.set(
        title="B.1: what negatives add to the gap",
        xlabel="pi(right) - pi(wrong)",
        ylabel="added to the gap",
    )


def appendix_b2(ax: Axes, seed: int = 0) -> None:
    """Appendix B.2. One positive and one negative were drawn, other arms were not. The gradients in their logits:

    right    w+ R+ (1 - pi+) - w- R- pi+     is raised by the negative
    wrong   -w+ R+ pi- + w- R- (1 - pi-)     is lowered by it
    unseen  -pi (w+ R+ + w- R-)              has a smaller size with the negative where |w- R-| < 2 w+ R+
    """
    z, bandit = random_bandits("+-00", seed)
    drawn, pi = (
        bandit._replace(reward=bandit.reward / bandit.mu),
        z.softmax(-1),
    )  # drawn once: it counts 1, not mu
    weight, by_loss = (
        torch.stack([of(z, drawn, limits) for limits in FAMILY])
        for of in (weights, gradient_of_loss)
    )
    right, wrong = (weight * bandit.reward)[..., :2].split(1, -1)  # w+ R+ and w- R-
    of_right = right * (1 - pi[:, :1]) - wrong * pi[:, :1]
    of_wrong = -right * pi[:, 1:2] + wrong * (1 - pi[:, 1:2])
    closed = torch.cat([of_right, of_wrong, -pi[:, 2:] * (right + wrong)], -1)
    holds(
        "these are the gradients of topr_loss, with six choices of bounds", is_near(closed, by_loss)
    )
    size = linspace(0, 3, 31)  # of w- R-, where w+ R+ = 1 and pi = mu
    reward = torch.stack([torch.ones(31), -size, 0 * size, 0 * size], -1) / 0.25
    of_arms = gradient_of_loss(torch.zeros_like(reward), Bandit(tensor([0.25] * 4), reward))
    holds(
        "the condition of unseen arms",
        (of_arms[1:, 2].abs() < of_arms[0, 2].abs()) == (size[1:] < 2),
    )
    ax.plot(size, of_arms[:, :3], label=["right arm", "wrong arm", "unseen arms"])
    ax.set(
        title="B.2: one right, one wrong arm drawn",
        xlabel="|w- R-| / (w+ R+)",
        ylabel="gradient in the logit",
    )


def appendix_c(ax: Axes, seed: int = 0) -> None:
    """Appendix C. With a = 0 and one b for both signs, a baseline c adds c sum of (pi - b mu)_+ grad log pi to grad J.

    So c < 0 holds pi near mu, like a KL penalty, and c > 0 drives it away. Equation 12: with rewards of -1 and 1, c
    turns a share p of positives into the effective share p~ = p (1 - c) / (1 + (1 - 2p) c).
    """
    z, bandit = random_bandits("++---", seed)
    c, pi = linspace(-1, 1, 9)[:, None, None], z.softmax(-1)
    for b in (0.5, 1.0, 2.0):
        limits, ahead = Limits(0, b, 0, b), (pi - b * bandit.mu).clamp_min(0)
        change = gradient(z, bandit._replace(reward=bandit.reward - c), limits) - gradient(
            z, bandit, limits
        )
        holds(
            f"b = {b:g}: c adds this",
            is_near(change, c * (ahead - pi * ahead.sum(-1, keepdim=True))),
        )
    p, size = bandit.mu[:, :2].sum(-1), bandit.mu * (bandit.reward.sign() - c).abs()
    share = size[..., :2].sum(-1) / size.sum(-1)  # counted
    holds(
        "p~ is the positives' share of all mu |R - c|",
        is_near(topr.effective_proportion(p, c[..., 0]), share),
    )
    holds("c is the baseline for p~", is_near(topr.baseline_for_proportion(p, share), c[..., 0]))
    c, mu = linspace(-0.5, 0.5, 5)[:, None, None], bandit.mu[:100].expand(5, -1, -1)
    unit = Bandit(mu, bandit.reward[:100].sign() - c)
    ends = [ascend(mu.log(), unit, limits, lr=1.0, steps=2000)[-1] for limits in (TOPR, TIS)]
    distances = kl(mu, torch.stack(ends).log_softmax(-1)).mean(-1)  # of TOPR and TIS, for each c
    show("c KL:TOPR KL:TIS", c.flatten(), *distances)
    holds("KL(mu || pi) after 2,000 steps rises with c, on average", distances.diff() > 0)
    ax.plot(c.flatten(), distances.T, label=["TOPR", "TIS"])
    ax.set(
        title="C: a baseline is a soft KL penalty",
        xlabel="baseline c",
        ylabel="KL(mu || pi) in nats",
    )


def proposition_3_1(ax: Axes, seed: int = 0) -> None:
    """Proposition 3.1. What naive REINFORCE minimises with a baseline c is a constant and three KL terms:

    -sum of mu (R - c) log pi = C + R+ KL(mu_R+ || pi) - R- KL(mu_R- || pi) - c KL(mu || pi)
    R+-: sum of mu |R| over the arms of a sign; mu_R+-: mu |R| / R+-. The term with R- has no lower bound.
    """
    z, bandit = random_bandits("++---", seed)
    c, leaf = linspace(-1, 1, 1000), z.clone().requires_grad_()
    [slope] = torch.autograd.grad(kl_terms(leaf, bandit, c).sum(), leaf)
    of_loss = gradient_of_loss(z, bandit._replace(reward=bandit.reward - c[:, None]), REINFORCE)
    holds(
        "the terms have the gradient of topr_loss: C does not depend on pi",
        is_near(-slope, of_loss),
    )
    shifted = FOUR_ARMS._replace(reward=FOUR_ARMS.reward + 0.5)  # c = -0.5
    terms = kl_terms(
        ascend(FOUR_ARMS.mu.log(), shifted, REINFORCE, lr=0.2, steps=1000), FOUR_ARMS, tensor(-0.5)
    )
    columns = torch.stack([*terms, terms.sum(0)])
    show("step R+_term R-_term c_term sum", linspace(0, 1000, 5), *columns[:, ::250])
    holds("the sum falls by 2 nats in each 250 steps", columns[3, 250::250].diff() < -2)
    ax.plot(
        columns.T, label=["R+ KL(mu_R+ || pi)", "-R- KL(mu_R- || pi)", "0.5 KL(mu || pi)", "sum"]
    )
    ax.set(title="3.1: naive REINFORCE, c = -0.5", xlabel="step", ylabel="part of the loss (nats)")


def proposition_3_2(ax: Axes, seed: int = 0) -> None:
    """Proposition 3.2. If a- = 0, J_topr <= max(0, max R), whatever pi, mu and R. If a- > 0, J_topr has no bound.

    rho(x) <= x bounds what positives add; a tapered negative adds at most 0. With a- > 0 a wrong arm whose pi goes to 0
    adds -mu |R| a- (1 + log(pi / (a- mu))), which goes to infinity: the objective pays for what cannot be improved.
    """
    z, bandit = random_bandits("++---", seed)
    values = [
        objective(4 * z, bandit, limits)
        for limits in (TOPR, TIS, SFT, PLAIN_IS, Limits(0.5, 2, 0, 0.8))
    ]
    holds("a- = 0: J <= max(0, max R)", torch.stack(values) <= bandit.reward.amax(-1).clamp_min(0))
    steps, runs = [0, 10, 100, 3000], []
    for limits in (TOPR, Limits(1, 1, 0.01, 1), Limits(1, 1, 0.1, 1), REINFORCE):
        path = ascend(FOUR_ARMS.mu.log(), FOUR_ARMS, limits, lr=4.0, steps=3000)
        value, push = objective(path, FOUR_ARMS, limits), gradient(path, FOUR_ARMS, limits)
        runs.append((value, path.softmax(-1), weights(path, FOUR_ARMS, limits), push))
        if limits.a_neg > 0:
            grows = torch.isclose(value.diff(), 4 * push.square().sum(-1)[:-1], rtol=1e-6) & (
                value[1:] > 1
            )
            holds(
                f"a- = {limits.a_neg}: J is above max R, and each step adds lr |push|^2 to it",
                grows[-100:],
            )
    print(f"{'TOPR':>66}{'naive REINFORCE':>33}")
    both = (x[steps].flatten() for run in (runs[0], runs[-1]) for x in run[1:])
    at, arms = tensor(steps).repeat_interleave(4), (x.repeat(4) for x in FOUR_ARMS)
    show("step mu R" + 2 * " pi weight push", at, *arms, *both)
    show("step J:TOPR a-=0.01 a-=0.1 REINFORCE", tensor(steps), *(run[0][steps] for run in runs))
    labels = ["a- = 0: TOPR", "a- = 0.01", "a- = 0.1", "a- = 1: naive REINFORCE", "max R"]
    ax.plot(torch.stack([*(run[0] for run in runs), torch.ones(3001)], -1), label=labels)
    ax.set(
        title="3.2: TOPR's objective is bounded",
        xlabel="step",
        ylabel="J_topr",
        xscale="log",
        yscale="log",
    )


def way_back(ax: Axes, seed: int = 0) -> None:
    """Section 3.1. A right arm that pi has all but forgotten comes back within 100 steps if a+ = 1, not if a+ = 0.

    With a+ = 1 its weight is 1, however small pi is. In TIS a+ is 0 and the weight pi/mu: it takes about 0.45/pi steps.
    """
    z, bandit = random_bandits("+----", seed)
    holds("TOPR's weight of a right arm is 1", weights(z, bandit)[:, 0] == 1)
    bandit, start = (
        Bandit(tensor([0.2] * 5), tensor([1.0] + [-1.0] * 4)),
        tensor([1e-2, 1e-4, 1e-6]),
    )
    z = torch.stack([start] + [(1 - start) / 4] * 4, -1).log()
    paths = [
        ascend(z, bandit, limits, lr=1.0, steps=1000) for limits in (TOPR, SFT, REINFORCE, TIS)
    ]
    pi = torch.stack(paths).softmax(-1)[..., 0]  # (methods, steps, starts)
    show("start steps:TOPR SFT REINFORCE TIS", start, *(pi < 0.5).sum(1))
    holds("a+ = 1: back within 100 steps", pi[:3, 100] > 0.5)
    holds("a+ = 0 (TIS): not within 1,000 from 1e-4 and from 1e-6", pi[3, 1000, 1:] < 0.5)
    ax.plot(pi[:, :201, 2].T, label=["TOPR", "SFT", "naive REINFORCE", "TIS"])
    ax.set(
        title="Section 3.1: the way back from 1e-6", xlabel="step", ylabel="pi(right)", yscale="log"
    )


def main(arguments: list[str] | None = None) -> None:
    """State, check and draw all sections, or the one that is named; exit status 1 where a statement does not hold."""
    in_order = (appendix_b1, appendix_b2, appendix_c, proposition_3_1, proposition_3_2, way_back)
    sections = {section.__name__: section for section in in_order}
    parser = ArgumentParser(
        usage=SUPPRESS, description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "name",
        nargs="?",
        choices=sections,
        metavar="NAME",
        help=f"a section: {', '.join(sections)}",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bandit"), metavar="DIR", help="folder of the picture"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random bandits")
    options = parser.parse_args(arguments)
    file = options.out / f"{options.name or 'bandit'}.png"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()  # where this is not allowed, say so at once
    except OSError as error:
        raise SystemExit(
            f"toy_bandit.py: --out {options.out}: {error.strerror}; choose another folder"
        ) from None
    torch.set_num_threads(1)  # the tensors are small: a second thread would mostly wait
    names, rows, columns = ([options.name], 1, 1) if options.name else (sections, 3, 2)
    figure = Figure(figsize=(4.5 * columns, 3.5 * rows), layout="constrained")
    for name, ax in zip(names, figure.subplots(rows, columns, squeeze=False).flat, strict=False):
        print(f"\n{inspect.getdoc(sections[name])}\n")
        ax.set_prop_cycle(**STYLES)  # lines differ in their dashes, not in colour alone
        sections[name](ax, options.seed)
        ax.legend()
    figure.savefig(file, dpi=150 if options.name else 100)
    print(f"\n{file}")


if __name__ == "__main__":
    main()
