"""toy_bandit.py: the bandit against sums in plain Python, its sections with errors, the command."""

import ast
import math
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

import toy_bandit as toy
from topr import Limits
from toy_bandit import Bandit, ascend, gradient, linspace, random_bandits, tensor

assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def six_bandits():
    z, bandit = random_bandits("+-+--", seed=3)
    return z[:6], Bandit(bandit.mu[:6], bandit.reward[:6])


# ---- the bandit against plain Python -------------------------------------------------------------
def taper_of(ratio, a, b):
    clipped = min(max(ratio, a), b)
    return clipped * (1 + math.log(ratio / clipped)) if clipped > 0 else 0.0


def by_loops(pi, mu, reward, limits):
    """Weights, gradient and objective of one bandit (Equations 7 and 11), in Python numbers."""
    weights = []
    masses = []
    objective = 0.0
    for p, m, r in zip(pi, mu, reward, strict=True):
        a, b = (limits.a_pos, limits.b_pos) if r >= 0 else (limits.a_neg, limits.b_neg)
        weights.append(min(max(p / m, a), b))
        masses.append(m * weights[-1] * r)
        objective += m * r * taper_of(p / m, a, b)
    gradient = []
    for k, p in enumerate(pi):
        # d log pi_i / d z_k = 1 if i = k, less pi_k
        slopes = [mass * ((i == k) - p) for i, mass in enumerate(masses)]
        gradient.append(sum(slopes))
    return weights, gradient, objective


@pytest.mark.parametrize("limits", toy.FAMILY)
def test_weights_gradient_and_objective_are_sums_over_arms(limits):
    z, bandit = six_bandits()
    many = z.expand(4, -1, -1)
    for row, pi in enumerate(z.softmax(-1)):
        arms = [x.tolist() for x in (pi, bandit.mu[row], bandit.reward[row])]
        weights, gradients, objective = by_loops(*arms, limits)
        assert_close(toy.weights(many, bandit, limits)[2, row], tensor(weights))
        assert_close(toy.gradient(many, bandit, limits)[2, row], tensor(gradients))
        assert_close(toy.gradient_of_loss(many, bandit, limits)[2, row], tensor(gradients))
        assert_close(toy.objective(many, bandit, limits)[2, row], tensor(objective))


def test_ascent_follows_the_gradient():
    z, bandit = six_bandits()
    path = ascend(z, bandit, toy.TIS, lr=0.5, steps=2)
    assert path.shape == (3, *z.shape)
    assert torch.equal(path[0], z)
    for before, after in pairwise(path):
        assert_close(after, before + 0.5 * gradient(before, bandit, toy.TIS))


def test_kl_terms_are_sums_over_arms():
    z, bandit = six_bandits()
    for row, pi in enumerate(z.softmax(-1).tolist()):
        mu = bandit.mu[row].tolist()
        masses = [m * r for m, r in zip(mu, bandit.reward[row].tolist(), strict=True)]
        total = {True: sum(x for x in masses if x > 0), False: sum(x for x in masses if x < 0)}
        terms = [0.0, 0.0, 0.0]
        for m, mass, p in zip(mu, masses, pi, strict=True):
            terms[0 if mass > 0 else 1] += mass * math.log(mass / total[mass > 0] / p)
            terms[2] -= 0.3 * m * math.log(m / p)
        assert_close(toy.kl_terms(z, bandit, tensor(0.3))[:, row], tensor(terms))


def test_distance_after_training_is_that_of_mu_from_pi():
    """KL(mu || pi) by its sum, after the same training on rewards of 1 and -1 less the baseline."""
    _, bandit = six_bandits()
    c = 0.25
    [actual] = toy.distance_after_training(bandit, tensor([c]), toy.TOPR)
    rewards = bandit._replace(reward=bandit.reward.sign() - c)
    logp = ascend(bandit.mu.log(), rewards, toy.TOPR, lr=1.0, steps=2000)[-1].log_softmax(-1)
    expected = (bandit.mu * (bandit.mu.log() - logp)).sum(-1).mean()
    assert_close(actual, expected)


def test_random_bandits():
    z, bandit = random_bandits("+-0", seed=0)
    assert z.shape == bandit.mu.shape == bandit.reward.shape == (1000, 3)
    assert_close(bandit.mu.sum(-1), torch.ones(1000, dtype=torch.float64))
    assert torch.equal(bandit.reward.sign(), tensor([1, -1, 0]).expand(1000, 3))
    size = bandit.reward[:, :2].abs()
    assert 0.1 <= size.min() < 0.11
    assert 0.99 < size.max() <= 1
    # pi and mu are independent of each other.
    correlation = torch.corrcoef(torch.stack([z.flatten(), bandit.mu.log().flatten()]))[0, 1]
    assert abs(correlation) < 0.1


# ---- the fastest share: docs/analysis.md ---------------------------------------------------------
MU, REWARD = random_bandits("++---", seed=0)[1]
IS_RIGHT = REWARD > 0
P = (MU * IS_RIGHT).sum(-1, keepdim=True)  # share of right samples
# mu |grad log pi|^2 of each arm at pi = mu
SQUARED = MU * (torch.eye(5, dtype=torch.float64) - MU[:, None]).square().sum(-1)
# E- / E+: the mean squared gradient of a wrong sample over that of a right one
RATIO = (SQUARED * ~IS_RIGHT).sum(-1, keepdim=True) / (1 - P)
RATIO = RATIO / ((SQUARED * IS_RIGHT).sum(-1, keepdim=True) / P)


def mean_and_pace(share, q):
    """The expected gradient of data of which q is right, and its norm over its root mean square.

    share: the effective share of positives.
    """
    reward = torch.where(IS_RIGHT, share / q, -(1 - share) / (1 - q))
    frequency = torch.where(IS_RIGHT, q / P, (1 - q) / (1 - P))  # relative to mu
    mean = gradient(MU.log(), Bandit(MU, frequency * reward))
    root_mean_square = (SQUARED * frequency * reward.square()).sum(-1).sqrt()
    return mean, mean.norm(dim=-1) / root_mean_square


def test_fastest_share():
    odds = RATIO * 0.1 / 0.9 * (1 - P) / P  # if samples are chosen so that 10 % are right
    _, pace = mean_and_pace(RATIO / (1 + RATIO), P)
    _, pace_of_chosen = mean_and_pace(odds / (1 + odds), 0.1)
    for share in linspace(0, 1, 51):
        assert (mean_and_pace(share, P)[1] <= pace + 1e-12).all()
        assert (mean_and_pace(share, 0.1)[1] <= pace_of_chosen + 1e-12).all()
    _, of_positives = mean_and_pace(torch.tensor(1.0), P)
    assert_close(pace, of_positives * (1 + P / ((1 - P) * RATIO))[:, 0].sqrt())


# ---- the sections --------------------------------------------------------------------------------
def with_rewards(name, right, wrong):
    """A function of toy_bandit.py that gets other rewards than its caller passes."""
    function = getattr(toy, name)

    def changed(z, bandit, *others):
        factor = torch.where(bandit.reward < 0, wrong, right)
        return function(z, bandit._replace(reward=factor * bandit.reward), *others)

    return changed


FAULTS = [  # section, what it uses, the same with an error that makes a statement of it false
    ("appendix_b1", "gradient", with_rewards("gradient", 1, 1.01)),
    ("appendix_b1", "SFT", Limits(1, 1, 2, 2)),
    ("appendix_b2", "gradient_of_loss", with_rewards("gradient_of_loss", 1, 1.01)),
    ("appendix_c", "gradient", with_rewards("gradient", 1.01, 1)),
    ("appendix_c", "topr.effective_proportion", lambda p, c: p.expand(len(c), -1)),
    ("appendix_c", "topr.baseline_for_proportion", lambda p, share: share),
    ("proposition_3_1", "kl_terms", with_rewards("kl_terms", 1, 1.01)),
    ("proposition_3_1", "ascend", lambda z, *_, lr, steps: z.expand(steps + 1, *z.shape)),
    ("proposition_3_2", "objective", with_rewards("objective", 1.01, 1)),
    ("way_back", "TIS", toy.TOPR),
]


@pytest.mark.parametrize(("section", "ingredient", "fault"), FAULTS)
def test_section_with_an_error_fails(section, ingredient, fault, monkeypatch):
    monkeypatch.setattr(f"toy_bandit.{ingredient}", fault)
    with pytest.raises(SystemExit, match="is false"):
        getattr(toy, section)(Figure().subplots())


@pytest.mark.parametrize("is_true", [[], [True, False]])
def test_check_fails_in_any_case_and_without_cases(is_true):
    with pytest.raises(SystemExit, match="is false"):
        toy.check("this", torch.tensor(is_true, dtype=torch.bool))


def test_the_command_draws_each_section(tmp_path):
    toy.main(["--out", str(tmp_path / "new"), "--seed", "1"])  # the default is 0
    names = {path.stem for path in (tmp_path / "new").glob("*.png")}
    assert names == {section.__name__ for section in toy.SECTIONS}


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["way"], ["--out", toy.__file__]])
def test_a_wrong_argument_is_an_error(arguments):
    with pytest.raises(SystemExit) as stop:
        toy.main(arguments)
    assert stop.value.code == 2


def test_the_file_needs_torch_and_matplotlib_alone():
    roots = set()
    for node in ast.walk(ast.parse(Path(toy.__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {name.name.split(".")[0] for name in node.names}
        if isinstance(node, ast.ImportFrom):
            roots.add(node.module.split(".")[0])
    assert roots - sys.stdlib_module_names == {"matplotlib", "topr", "torch"}
