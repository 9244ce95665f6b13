"""The analysis of arXiv 2503.14286, checked on a bandit, where every gradient is an exact sum.

    python toy_bandit.py                  # all sections: statements, numbers and pictures
    python toy_bandit.py proposition_3_2  # one of them

An arm stands for a completion (the paper's trajectory tau). mu is the policy that sampled the data.
pi = softmax(z) is the policy in training, with a logit in z for each arm. Sums over all arms take
the place of samples. Weight, taper and loss are those of topr.py.

Each section is a function. Its docstring is the statement, which its body checks and draws. A false
statement ends the program with exit status 1. The tools of the sections are at the end of the file.
"""

import inspect
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import topr
from topr import TABLE_1, Limits

TOPR = TABLE_1["topr"]
TIS = TABLE_1["tis"]
SFT = TABLE_1["sft"]
REINFORCE = TABLE_1["reinforce"]
# Table 1, and bounds of which each one clips some ratios.
FAMILY = (*TABLE_1.values(), Limits(0.5, 2, 0.2, 0.8))

tensor = partial(torch.tensor, dtype=torch.float64)
linspace = partial(torch.linspace, dtype=torch.float64)
is_near = partial(torch.isclose, rtol=1e-9, atol=1e-12)  # equal up to rounding


# ---- the bandit ----------------------------------------------------------------------------------
class Bandit(NamedTuple):
    """The data: the policy that sampled it, and rewards. Leading dimensions are many bandits."""

    mu: Tensor  # (..., K)
    reward: Tensor  # (..., K) after the baseline; 0 for an arm without data


# Two right arms and two wrong ones.
FOUR_ARMS = Bandit(tensor([0.35, 0.25, 0.25, 0.15]), tensor([1.0, 1.0, -1.0, -1.0]))


def weights(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """[pi/mu]_a^b with the bounds of each reward's sign (Equation 7): (..., K).

    >>> weights(tensor([0.0, 0.0]), Bandit(tensor([0.25, 0.75]), tensor([1.0, -1.0])))
    tensor([1.0000, 0.6667], dtype=torch.float64)
    """
    log_ratio = z.log_softmax(-1) - bandit.mu.log()
    return topr.importance_weight(log_ratio, *limits.bounds_for(bandit.reward))


def objective(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """J_topr(pi) = sum over arms of mu rho(pi/mu) R, where rho is the taper (Equation 11): (...,).

    >>> objective(tensor([0.0, 0.0]), Bandit(tensor([0.5, 0.5]), tensor([1.0, -0.5])))
    tensor(0.2500, dtype=torch.float64)
    """
    log_ratio = z.log_softmax(-1) - bandit.mu.log()
    return (bandit.mu * topr.topr_objective(log_ratio, bandit.reward, limits)).sum(-1)


def gradient(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """The gradient of J_topr in z, in closed form (Appendix B.1): (..., K).

    mu [pi/mu] R - pi Delta, where Delta = sum over arms of mu [pi/mu] R.

    >>> gradient(tensor([0.0, 0.0]), Bandit(tensor([0.5, 0.5]), tensor([1.0, -1.0])))
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    mass = bandit.mu * weights(z, bandit, limits) * bandit.reward  # (..., K)
    delta = mass.sum(-1, keepdim=True)  # (..., 1)
    return mass - z.softmax(-1) * delta


def gradient_of_loss(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """The same gradient by autograd of `topr.topr_loss`: (..., K).

    Each arm is a completion of one token. Its share mu of the data is a factor of its reward.
    """
    z = z.detach().requires_grad_()
    token_logp = z.log_softmax(-1).flatten()[:, None]  # (bandits * K, 1)
    token_logmu = bandit.mu.log().expand(z.shape).flatten()[:, None]  # (bandits * K, 1)
    reward = (bandit.mu * bandit.reward).expand(z.shape).flatten()  # (bandits * K,)
    mask = torch.ones_like(token_logp)
    # The denominator is 1: the objective is a sum over arms, not a mean.
    topr.topr_loss(token_logp, token_logmu, reward, mask, limits, denominator=1).backward()
    return -z.grad


def ascend(z: Tensor, bandit: Bandit, limits: Limits, lr: float, steps: int) -> Tensor:
    """Gradient ascent on J_topr: z at the start and after every step, (steps + 1, ..., K).

    >>> bandit = Bandit(tensor([0.5, 0.5]), tensor([1.0, -1.0]))
    >>> ascend(tensor([0.0, 0.0]), bandit, TOPR, lr=0.2, steps=1)[-1]
    tensor([ 0.1000, -0.1000], dtype=torch.float64)
    """
    path = [z]
    for _ in range(steps):
        path.append(path[-1] + lr * gradient(path[-1], bandit, limits))
    return torch.stack(path)


# ---- the sections --------------------------------------------------------------------------------
def appendix_b1(ax: Axes, seed: int = 0) -> None:
    """Appendix B.1. The gradient in an arm's logit is mu [pi/mu] R - pi Delta, where
    Delta = sum of mu [pi/mu] R.

    Without negatives (SFT) Delta is larger, and every arm loses pi Delta. So negatives widen the
    gap between the gradients of a right arm and of a wrong one wherever pi(wrong) < pi(right).
    """
    z, bandit = random_bandits("+++---", seed)
    closed_form = torch.stack([gradient(z, bandit, limits) for limits in FAMILY])
    autograd = torch.stack([gradient_of_loss(z, bandit, limits) for limits in FAMILY])
    statement = "closed form = autograd of topr_loss, with six choices of bounds"
    check(statement, is_near(closed_form, autograd))

    pi = z.softmax(-1)
    change = gradient(z, bandit) - gradient(z, bandit, SFT)  # by negatives
    # Of all pairs of a right and a wrong arm: (bandits, 3, 3)
    lead = pi[:, :3, None] - pi[:, None, 3:]
    added = change[:, :3, None] - change[:, None, 3:]
    check("the gap is wider where pi(wrong) < pi(right)", added[lead > 0] > 0)
    share = (added[lead < 0] > 0).double().mean()
    print(f"  where pi(wrong) > pi(right), it is wider in {share:.0%} of the pairs")

    x = lead[:30].flatten()  # more points would hide each other
    ax.plot(x, added[:30].flatten(), "o", markersize=4, label="a right and a wrong arm")
    ax.axhline(color="black", linewidth=0.8)
    ax.set(title="B.1: the gap", xlabel="pi(right) - pi(wrong)", ylabel="added by negatives")


def appendix_b2(ax: Axes, seed: int = 0) -> None:
    """Appendix B.2. One positive and one negative arm were sampled, others were not. The gradients
    in the arms' logits:

    right    w+ R+ (1 - pi+) - w- R- pi+     is raised by the negative
    wrong   -w+ R+ pi- + w- R- (1 - pi-)     is lowered by it
    unseen  -pi (w+ R+ + w- R-)              is smaller in size with the negative if
                                             |w- R-| < 2 w+ R+
    """
    z, bandit = random_bandits("+-00", seed)
    pi = z.softmax(-1)  # (bandits, 4)
    # Each arm was sampled once: it counts 1, not mu.
    sampled = bandit._replace(reward=bandit.reward / bandit.mu)
    weight = torch.stack([weights(z, sampled, limits) for limits in FAMILY])  # (6, bandits, 4)
    right, wrong = (weight * bandit.reward)[..., :2].split(1, -1)  # w+ R+ and w- R-
    of_right = right * (1 - pi[:, :1]) - wrong * pi[:, :1]
    of_wrong = -right * pi[:, 1:2] + wrong * (1 - pi[:, 1:2])
    of_unseen = -pi[:, 2:] * (right + wrong)
    closed_form = torch.cat([of_right, of_wrong, of_unseen], -1)  # (6, bandits, 4)
    autograd = torch.stack([gradient_of_loss(z, sampled, limits) for limits in FAMILY])
    statement = "these are the gradients of topr_loss, with six choices of bounds"
    check(statement, is_near(closed_form, autograd))

    size = linspace(0, 3, 31)  # of w- R-, where w+ R+ = 1 and pi = mu
    reward = tensor([4.0, 0.0, 0.0, 0.0]).repeat(31, 1)
    reward[:, 1] = -4 * size
    of_arms = gradient_of_loss(torch.zeros_like(reward), Bandit(tensor([0.25] * 4), reward))
    unseen = of_arms[:, 2].abs()
    check("the condition of unseen arms", (unseen[1:] < unseen[0]) == (size[1:] < 2))
    ax.plot(size, of_arms[:, :3], label=["right arm", "wrong arm", "unseen arms"])
    ax.set(title="B.2: unseen arms", xlabel="|w- R-| / (w+ R+)", ylabel="gradient in the logit")


def appendix_c(ax: Axes, seed: int = 0) -> None:
    """Appendix C. With a = 0 and one b for both signs, a baseline c adds
    c sum of (pi - b mu)_+ grad log pi to grad J.

    So c < 0 pulls pi back to mu, like a KL penalty, and c > 0 pushes it away. Equation 12: with
    rewards of -1 and 1, c turns a share p of positives into the effective share
    p~ = p (1 - c) / (1 + (1 - 2p) c).
    """
    z, bandit = random_bandits("++---", seed)
    c = linspace(-1, 1, 9)[:, None, None]
    pi = z.softmax(-1)  # (bandits, 5)
    shifted = bandit._replace(reward=bandit.reward - c)  # (9, bandits, 5)
    for b in (0.5, 1.0, 2.0):
        limits = Limits(0, b, 0, b)
        change = gradient(z, shifted, limits) - gradient(z, bandit, limits)
        excess = (pi - b * bandit.mu).clamp_min(0)
        # In the logits, grad log pi of an arm is its unit vector less pi.
        expected = c * (excess - pi * excess.sum(-1, keepdim=True))
        check(f"b = {b:g}: c adds this term", is_near(change, expected))
    p = bandit.mu[:, :2].sum(-1)  # (bandits,) the first two arms are right
    size = bandit.mu * (bandit.reward.sign() - c).abs()  # (9, bandits, 5)
    share = size[..., :2].sum(-1) / size.sum(-1)  # (9, bandits)
    p_tilde = topr.effective_proportion(p, c[..., 0])
    check("p~ is the positives' share of all mu |R - c|", is_near(p_tilde, share))
    check("c is the baseline for p~", is_near(topr.baseline_for_proportion(p, share), c[..., 0]))

    c = linspace(-0.5, 0.5, 5)
    distances = torch.stack([distance_after_training(bandit, c, limits) for limits in (TOPR, TIS)])
    print_table("c KL:TOPR KL:TIS", c, *distances)
    check("KL(mu || pi) after 2,000 steps rises with c, on average", distances.diff() > 0)
    ax.plot(c, distances.T, label=["TOPR", "TIS"])
    ax.set(title="C: a soft KL penalty", xlabel="baseline c", ylabel="KL(mu || pi) in nats")


def proposition_3_2(ax: Axes, seed: int = 0) -> None:
    """Proposition 3.2. If a- = 0, J_topr <= max(0, max R), whatever pi, mu and R. If a- > 0 and an
    R < 0, J_topr has no upper bound.

    rho(x) <= x bounds what positives add; a tapered negative adds at most 0. With a- > 0 a wrong
    arm whose pi goes to 0 adds -mu |R| a- (1 + log(pi / (a- mu))), which goes to infinity: the
    objective grows although the reward does not.
    """
    z, bandit = random_bandits("++---", seed)
    bounded = (TOPR, TIS, SFT, TABLE_1["off_policy"], Limits(0.5, 2, 0, 0.8))
    values = torch.stack([objective(4 * z, bandit, limits) for limits in bounded])
    check("a- = 0: J <= max(0, max R)", values <= bandit.reward.amax(-1).clamp_min(0))

    lr = 4.0
    growth = "J is above max R, and each step adds lr |gradient|^2 to it"
    values = []
    pushes = []
    for limits in (TOPR, Limits(1, 1, 0.01, 1), Limits(1, 1, 0.1, 1), REINFORCE):
        path = ascend(FOUR_ARMS.mu.log(), FOUR_ARMS, limits, lr, steps=3000)  # (3001, 4)
        value = objective(path, FOUR_ARMS, limits)  # (3001,)
        push = gradient(path, FOUR_ARMS, limits)  # (3001, 4)
        if limits.a_neg > 0:
            expected = lr * push.square().sum(-1)[:-1]  # to first order in lr
            grows = torch.isclose(value.diff(), expected, rtol=1e-6) & (value[1:] > 1)
            check(f"a- = {limits.a_neg}: {growth}", grows[-100:])
        values.append(value)
        pushes.append(push[:, 2])  # the gradient in the logit of a wrong arm

    steps = [0, 10, 100, 3000]
    at_steps = [value[steps] for value in values]
    print_table("step J:TOPR a-=0.01 a-=0.1 REINFORCE", tensor(steps), *at_steps)
    print_table("step push:TOPR REINFORCE", tensor(steps), pushes[0][steps], pushes[-1][steps])
    labels = ["a- = 0: TOPR", "a- = 0.01", "a- = 0.1", "a- = 1: naive REINFORCE"]
    # The distance to the bound: on the scale of J itself, a- = 0 and a- = 0.01 look alike.
    ax.plot(torch.stack(values, -1) - 1, label=labels)
    ax.axhline(color="black", linewidth=0.8, label="max R")
    ax.set_yscale("symlog", linthresh=0.1)
    ax.set(title="3.2: only TOPR stays below max R", xlabel="step", ylabel="J_topr - max R")
    ax.set(xscale="log", xlim=(1, 3000), ylim=(-1, 3000))


def proposition_3_1(ax: Axes, seed: int = 0) -> None:
    """Proposition 3.1. What naive REINFORCE minimises with a baseline c is a constant and three KL
    terms:

    -sum of mu (R - c) log pi
        = C + R+ KL(mu_R+ || pi) - R- KL(mu_R- || pi) - c KL(mu || pi)

    R+-: sum of mu |R| over the arms of a sign; mu_R+-: mu |R| / R+-. The term with R- has no lower
    bound.
    """
    z, bandit = random_bandits("++---", seed)
    c = linspace(-1, 1, 1000)  # one for each bandit
    leaf = z.clone().requires_grad_()
    [of_terms] = torch.autograd.grad(kl_terms(leaf, bandit, c).sum(), leaf)
    shifted = bandit._replace(reward=bandit.reward - c[:, None])
    of_objective = gradient_of_loss(z, shifted, REINFORCE)  # minus the gradient of the loss
    statement = "the terms have the gradient of topr_loss: C does not depend on pi"
    check(statement, is_near(-of_terms, of_objective))

    shifted = FOUR_ARMS._replace(reward=FOUR_ARMS.reward + 0.5)  # c = -0.5
    path = ascend(FOUR_ARMS.mu.log(), shifted, REINFORCE, lr=0.2, steps=1000)
    terms = kl_terms(path, FOUR_ARMS, tensor(-0.5))  # (3, 1001)
    columns = torch.stack([*terms, terms.sum(0)])
    print_table("step R+_term R-_term c_term sum", linspace(0, 1000, 5), *columns[:, ::250])
    check("the sum falls by 2 nats in each 250 steps", columns[3, 250::250].diff() < -2)
    labels = ["R+ KL(mu_R+ || pi)", "-R- KL(mu_R- || pi)", "0.5 KL(mu || pi)", "sum"]
    ax.plot(columns.T, label=labels)
    ax.set(title="3.1: naive REINFORCE, c = -0.5", xlabel="step", ylabel="part of the loss (nats)")


def way_back(ax: Axes, seed: int = 0) -> None:
    """Section 3.1. A right arm whose pi is almost 0 is likely again within 100 steps if a+ = 1, not
    if a+ = 0.

    With a+ = 1 its weight is 1, however small pi is. In TIS a+ is 0 and the weight is pi/mu:
    the way back takes about 0.45/pi steps.
    """
    z, bandit = random_bandits("+----", seed)
    check("TOPR's weight of a right arm is 1", weights(z, bandit)[:, 0] == 1)

    bandit = Bandit(tensor([0.2] * 5), tensor([1.0, -1.0, -1.0, -1.0, -1.0]))
    start = tensor([1e-2, 1e-4, 1e-6])  # pi of the right arm
    others = (1 - start) / 4
    z = torch.stack([start, others, others, others, others], -1).log()  # (starts, 5)
    methods = (TOPR, SFT, REINFORCE, TIS)
    paths = [ascend(z, bandit, limits, lr=1.0, steps=1000) for limits in methods]
    pi = torch.stack(paths).softmax(-1)[..., 0]  # (methods, steps, starts)
    print_table("start steps:TOPR SFT REINFORCE TIS", start, *(pi < 0.5).sum(1))
    check("a+ = 1: back within 100 steps", pi[:3, 100] > 0.5)
    check("a+ = 0 (TIS): not within 1,000 from 1e-4 and from 1e-6", pi[3, 1000, 1:] < 0.5)
    ax.plot(pi[:, :201, 2].T, label=["TOPR", "SFT", "naive REINFORCE", "TIS"])
    ax.set(title="The way back from 1e-6", xlabel="step", ylabel="pi(right)", yscale="log")


# ---- tools of the sections -----------------------------------------------------------------------
def check(statement: str, is_true: Tensor) -> None:
    """Print a statement with the number of cases; SystemExit unless it is true in all of them."""
    counts = f"{statement}: {is_true.sum():,} of {is_true.numel():,}"
    if is_true.numel() == 0 or not is_true.all():
        raise SystemExit(f"toy_bandit.py: this statement is false: {counts}")
    print(f"  {counts}")


def print_table(names: str, *columns: Tensor) -> None:
    """Print columns of numbers, (N,) each, under their names."""
    print("".join(f"{name:>11}" for name in names.split()))
    for row in torch.stack(columns, -1).tolist():
        print("".join(f"{number:11.4g}" for number in row))


def random_bandits(signs: str, seed: int) -> tuple[Tensor, Bandit]:
    """Random logits z, (1000, K), and 1,000 random bandits with K arms.

    signs: those of the K rewards, whose sizes are in [0.1, 1]; "0" for an arm without data.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (1000, len(signs))
    z = 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    size = 0.1 + 0.9 * torch.rand(shape, generator=generator, dtype=torch.float64)
    number_of_sign = {"+": 1, "-": -1, "0": 0}
    sign = tensor([number_of_sign[sign] for sign in signs])  # (K,)
    return z, Bandit(mu=logits.softmax(-1), reward=size * sign)


def distance_after_training(bandit: Bandit, c: Tensor, limits: Limits) -> Tensor:
    """KL(mu || pi) after 2,000 steps from pi = mu, mean of 100 bandits, for each baseline: (C,)."""
    mu = bandit.mu[:100].expand(len(c), -1, -1)  # (C, 100, 5)
    reward = bandit.reward[:100].sign() - c[:, None, None]
    end = ascend(mu.log(), Bandit(mu, reward), limits, lr=1.0, steps=2000)[-1]
    return kl(mu, end.log_softmax(-1)).mean(-1)


def kl(p: Tensor, logq: Tensor) -> Tensor:
    """KL(p || q) in nats, where 0 log 0 = 0: (..., K) -> (...,)."""
    return (torch.xlogy(p, p) - p * logq).sum(-1)


def kl_terms(z: Tensor, bandit: Bandit, c: Tensor) -> Tensor:
    """The three terms of Proposition 3.1, with rewards before the baseline c: (3, ...).

    R+ KL(mu_R+ || pi), -R- KL(mu_R- || pi) and -c KL(mu || pi). Rewards have both signs.
    """
    logp = z.log_softmax(-1)
    terms = []
    for sign in (1, -1):
        mass = bandit.mu * (sign * bandit.reward).clamp_min(0)  # (..., K)
        total = mass.sum(-1, keepdim=True)  # (..., 1)
        terms.append(sign * total[..., 0] * kl(mass / total, logp))
    return torch.stack([*terms, -c * kl(bandit.mu, logp)])


# ---- the command ---------------------------------------------------------------------------------
SECTIONS = (appendix_b1, appendix_b2, appendix_c, proposition_3_2, proposition_3_1, way_back)
STYLES = {  # lines differ in their dashes too, not in color alone
    "color": ["#0072B2", "#D55E00", "#009E73", "black"],
    "linestyle": ["-", "--", "-.", ":"],
}


def main(arguments: list[str] | None = None) -> None:
    """State, check and draw all sections, or the named one; SystemExit if a statement is false."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    sections = {section.__name__: section for section in SECTIONS}
    parser.add_argument("name", nargs="?", choices=sections, help="a section (default: all)")
    parser.add_argument("--out", type=Path, default="runs/bandit", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random bandits")
    options = parser.parse_args(arguments)
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed {options.seed}: choose one from 0 to 2**63 - 1")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {error}; choose another folder")

    torch.set_num_threads(1)  # the tensors are small: a second thread would mostly wait
    for name in [options.name] if options.name else sections:
        print(f"\n{inspect.getdoc(sections[name])}\n")
        figure = Figure(figsize=(4.5, 4.0), dpi=150, layout="constrained")
        ax = figure.add_subplot()
        ax.set_prop_cycle(**STYLES)
        sections[name](ax, options.seed)
        # Below the axes the legend covers no line.
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2, frameon=False)
        file = options.out / f"{name}.png"
        figure.savefig(file)
        print(f"\n{file}")


if __name__ == "__main__":
    main()
