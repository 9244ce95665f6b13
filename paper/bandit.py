"""A softmax bandit: the smallest place where the paper's gradients can be computed exactly.

An arm stands for a trajectory tau. The policy is pi = softmax(z), with one logit for each arm, in float64. Sums over
all arms are exact, so results are the paper's algebra and not estimates of it. Weights, taper and losses are those of
`topr.py`; claims.py compares them with the paper's closed forms (Appendix B).

Names: z (..., K) logits, logp = log pi, mu and reward (..., K). Functions here raise only what topr.py raises.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from topr import PRESETS, Limits, importance_weight, topr_loss, topr_objective

TOPR = PRESETS["topr"]
tensor = partial(torch.tensor, dtype=torch.float64)  # the precision of everything in this file


class Bandit(NamedTuple):
    """Where the data came from: the distribution that drew the arms, and the reward of each arm."""

    mu: Tensor  # (..., K), above 0
    reward: Tensor  # (..., K) after the baseline; for `four_parts` alone, before it


def objective(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """J_topr(pi) = sum over the arms of mu rho(pi/mu) R (Eq. 11): (...,), differentiable in z.

    >>> objective(tensor([0.0, 0.0]), Bandit(mu=tensor([0.25, 0.75]), reward=tensor([1.0, -1.0])))
    tensor(-0.0767, dtype=torch.float64)
    """
    log_ratio = z.log_softmax(-1) - bandit.mu.log()
    return (bandit.mu * topr_objective(log_ratio, bandit.reward, limits)).sum(-1)


def weights(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """[pi/mu]_a^b with the bounds of the sign of each arm's reward (Eq. 7): (..., K).

    >>> weights(tensor([0.0, 0.0]), Bandit(tensor([0.25, 0.75]), tensor([1.0, -1.0])))
    tensor([1.0000, 0.6667], dtype=torch.float64)
    """
    return importance_weight(z.log_softmax(-1) - bandit.mu.log(), *limits.of_sign(bandit.reward))


def gradient(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """Ascent direction in closed form, -pi Delta + mu [pi/mu] R with Delta = sum of mu [pi/mu] R (App. B.1): (..., K).

    >>> gradient(tensor([0.0, 0.0]), Bandit(tensor([0.5, 0.5]), tensor([1.0, -1.0])))
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    return through_softmax(z, bandit.mu * weights(z, bandit, limits) * bandit.reward)


def through_softmax(z: Tensor, coefficient: Tensor) -> Tensor:
    """Sum over the arms of coefficient * grad log pi, with respect to z: (..., K).

    >>> through_softmax(tensor([0.0, 0.0]), tensor([1.0, 0.0]))  # grad log pi of the first arm: one-hot minus pi
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    return coefficient - z.softmax(-1) * coefficient.sum(-1, keepdim=True)


def gradient_of_loss(z: Tensor, bandit: Bandit, limits: Limits = TOPR, length: Tensor | float = 1.0) -> Tensor:
    """`gradient` by autograd of `topr.topr_loss`, a sequence of `length` tokens for each arm, weighed by mu: (..., K).

    length: broadcasts to (..., K). Lengths above 1 divide the arm's part of the gradient (Section 4.2).

    >>> gradient_of_loss(tensor([0.0, 0.0]), Bandit(tensor([0.5, 0.5]), tensor([1.0, -1.0])))
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    z = z.detach().requires_grad_()
    columns = (z.log_softmax(-1), bandit.mu.log(), bandit.mu * bandit.reward, torch.as_tensor(length, dtype=z.dtype))
    topr_loss(*(x.expand(z.shape).flatten() for x in columns), limits, denominator=1).backward()
    return -z.grad


def gradient_of_objective(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """`gradient` by autograd of the objective (Eq. 11): (..., K).

    >>> gradient_of_objective(tensor([0.0, 0.0]), Bandit(tensor([0.5, 0.5]), tensor([1.0, -1.0])))
    tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    z = z.detach().requires_grad_()
    return torch.autograd.grad(objective(z, bandit, limits).sum(), z)[0]


def ascend(z: Tensor, bandit: Bandit, limits: Limits, lr: float, steps: int, keep: int = 1) -> Tensor:
    """Gradient ascent by the closed form: z at the start and after every `keep` steps, (steps // keep + 1, ..., K).

    >>> ascend(tensor([0.0, 0.0]), Bandit(tensor([0.5, 0.5]), tensor([1.0, -1.0])), PRESETS["topr"], lr=1.0, steps=1)
    tensor([[ 0.0000,  0.0000],
            [ 0.5000, -0.5000]], dtype=torch.float64)
    """
    path = [z]
    for done in range(1, steps + 1):
        z = z + lr * gradient(z, bandit, limits)
        if done % keep == 0:
            path.append(z)
    return torch.stack(path)


def gradient_variance(z: Tensor, bandit: Bandit, limits: Limits = TOPR) -> Tensor:
    """Total variance E|g|^2 - |E g|^2 of g = [pi/mu] R grad log pi of one arm drawn from mu: (...,).

    >>> gradient_variance(tensor([0.0, 0.0]), Bandit(tensor([0.5, 0.5]), tensor([1.0, 0.0])))
    tensor(0.1250, dtype=torch.float64)
    """
    pi, coefficient = z.softmax(-1), weights(z, bandit, limits) * bandit.reward
    norm2 = 1 - 2 * pi + pi.square().sum(-1, keepdim=True)  # of grad log pi, one-hot minus pi
    return (bandit.mu * coefficient.square() * norm2).sum(-1) - gradient(z, bandit, limits).square().sum(-1)


def upper_bound(reward: Tensor) -> Tensor:
    """B = max(0, max R) over the arms: if a- = 0, J_topr never exceeds it (Prop. 3.2; the proof uses rho(x) <= x).

    >>> upper_bound(tensor([[-1.0, 0.5], [-1.0, -0.5]])).tolist()
    [0.5, 0.0]
    """
    return reward.amax(-1).clamp_min(0)


def four_parts(logp: Tensor, bandit: Bandit, c: Tensor | float) -> tuple[Tensor, Tensor]:
    """Proposition 3.1: the loss of naive REINFORCE with baseline c is the sum of three parts and a constant.

    Returns the parts (3, ...): R+ KL(mu_R+ || pi), -R- KL(mu_R- || pi) and -c KL(mu || pi), and the constant (...),
    C = R+ H(mu_R+) - R- H(mu_R-) - c H(mu). Here R+- = sum over T+- of mu |R|, and mu_R+- = mu |R| / R+-.

    >>> one = Bandit(tensor([0.5, 0.5]), tensor([1.0, -1.0]))
    >>> parts, constant = four_parts(tensor([0.25, 0.75]).log(), one, c=0.5)
    >>> parts  # 1/2 log 4, -1/2 log(4/3), and -1/4 log(4/3)
    tensor([ 0.6931, -0.1438, -0.0719], dtype=torch.float64)
    """
    parts, constant = [], -c * entropy(bandit.mu)
    for sign in (1, -1):
        mass = bandit.mu * (sign * bandit.reward).clamp_min(0)
        total = mass.sum(-1)
        share = mass / total[..., None].clamp_min(1e-300)  # without rewards of this sign the part is 0, not 0 / 0
        parts.append(sign * total * kl(share, logp))
        constant = constant + sign * total * entropy(share)
    return torch.stack([*parts, -c * kl(bandit.mu, logp)]), constant


def kl(p: Tensor, logq: Tensor) -> Tensor:
    """KL(p || q) over the last dimension, in nats; 0 log 0 = 0.

    >>> kl(tensor([1.0, 0.0]), tensor([0.5, 0.5]).log())  # log 2
    tensor(0.6931, dtype=torch.float64)
    """
    return (torch.xlogy(p, p) - p * logq).sum(-1)


def entropy(p: Tensor) -> Tensor:
    """Entropy over the last dimension, in nats.

    >>> entropy(tensor([0.5, 0.5]))  # log 2
    tensor(0.6931, dtype=torch.float64)
    """
    return -torch.xlogy(p, p).sum(-1)


def random_bandits(number: int, signs: str, generator: torch.Generator, low: float = 0.1) -> tuple[Tensor, Bandit]:
    """Logits z (number, K) and bandits with rewards of the K signs: mu a softmax of normals, |reward| in [low, 1].

    >>> z, bandit = random_bandits(2, "+-", torch.Generator().manual_seed(0))
    >>> z.shape, bandit.reward.sign().tolist()
    (torch.Size([2, 2]), [[1.0, -1.0], [1.0, -1.0]])
    """
    shape = (number, len(signs))
    z, logits = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    size = low + (1 - low) * torch.rand(shape, generator=generator, dtype=torch.float64)
    return 1.5 * z, Bandit(logits.softmax(-1), size * tensor([1.0 if sign == "+" else -1.0 for sign in signs]))
