"""The bandit against sums in plain Python, what the analysis says beyond the sections of toy_bandit.py, the command."""

import math
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from test_topr import rho

import topr
import toy_bandit as toy
from topr import PRESETS, Limits
from toy_bandit import REINFORCE, SFT, TIS, TOPR, Bandit, ascend, gradient, linspace, objective, random_bandits, tensor

close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
Z, SIX = random_bandits("+-+--", seed=3)
Z, SIX = Z[:6], Bandit(SIX.mu[:6], SIX.reward[:6])
CASES = list(zip(Z.softmax(-1).tolist(), SIX.mu.tolist(), SIX.reward.tolist(), strict=True))  # pi, mu, rewards


# ---- the bandit against plain Python ----------------------------------------------------------------------------


@pytest.mark.parametrize("limits", toy.FAMILY)
def test_weights_gradient_and_objective_are_sums_over_the_arms(limits):
    """Equations 7 and 11."""
    clipped, gradients, objectives = [], [], []
    bounds = (limits.a_pos, limits.b_pos), (limits.a_neg, limits.b_neg)
    for pi, mu, reward in CASES:
        arms = [(p, m, r, *bounds[r < 0]) for p, m, r in zip(pi, mu, reward, strict=True)]
        weight = [min(max(p / m, a), b) for p, m, _, a, b in arms]
        mass = [w * m * r for w, (_, m, r, *_) in zip(weight, arms, strict=True)]
        clipped += weight
        gradients += [sum(x * ((i == k) - q) for i, x in enumerate(mass)) for k, q in enumerate(pi)]
        objectives.append(sum(m * r * rho(p / m, a, b) for p, m, r, a, b in arms))
    close(toy.weights(Z, SIX, limits).flatten(), tensor(clipped))
    for function in (gradient, toy.gradient_of_loss):
        close(function(Z, SIX, limits).flatten(), tensor(gradients))
    close(objective(Z, SIX, limits), tensor(objectives))


def test_the_terms_of_proposition_3_1_and_their_constant():
    baselines = tensor([-1.0, -0.5, 0.0, 0.7, 1.0, 0.1])
    for terms, c, (pi, mu, reward) in zip(toy.kl_terms(Z, SIX, baselines).T, baselines, CASES, strict=True):
        expected, constant = [], c * sum(m * math.log(m) for m in mu)
        for sign in (1, -1):
            mass = [max(sign * m * r, 0) for m, r in zip(mu, reward, strict=True)]
            pairs = [(x / sum(mass), p) for x, p in zip(mass, pi, strict=True) if x]
            expected.append(sign * sum(mass) * sum(x * math.log(x / p) for x, p in pairs))
            constant -= sign * sum(mass) * sum(x * math.log(x) for x, _ in pairs)
        expected.append(-c * sum(m * math.log(m / p) for m, p in zip(mu, pi, strict=True)))
        close(terms, tensor(expected))
        loss = -sum(m * (r - c) * math.log(p) for m, r, p in zip(mu, reward, pi, strict=True))
        close(terms.sum() + constant, loss)
    assert toy.kl_terms(Z, Bandit(SIX.mu, SIX.reward.abs()), tensor(0.0))[1:].abs().max() == 0  # no wrong arms


# ---- what the analysis says beyond the sections -----------------------------------------------------------------


@pytest.mark.parametrize("limits", toy.FAMILY)
def test_the_gradient_is_that_of_the_objective_and_lengths_divide_rewards(limits):
    """By autograd and by central differences of Equation 11; Section 4.2 for arms of 1 to 9 tokens."""
    z, bandit = random_bandits("+++---", seed=0)
    closed, moves = gradient(z, bandit, limits), 1e-6 * torch.eye(6, dtype=torch.float64)
    leaf = z.clone().requires_grad_()
    close(torch.autograd.grad(objective(leaf, bandit, limits).sum(), leaf)[0], closed)
    both = [objective(z + move, bandit, limits) - objective(z - move, bandit, limits) for move in moves]
    close(torch.stack(both, -1) / 2e-6, closed, atol=1e-6)
    length = torch.randint(1, 10, z.shape, generator=torch.Generator().manual_seed(0))
    columns = [column.flatten() for column in (bandit.mu.log(), bandit.mu * bandit.reward, length)]
    loss = topr.topr_loss(leaf.log_softmax(-1).flatten(), *columns, limits, denominator=1)
    divided = gradient(z, bandit._replace(reward=bandit.reward / length), limits)
    close(-torch.autograd.grad(loss, leaf)[0], divided)


def test_what_negatives_add_to_the_gap_in_closed_form():
    """Appendix B.1: (pi+ - pi-) N + mu- w- |R-|, N = sum over T- of mu w |R|. To be above 0 it needs pi- < pi+."""
    z, bandit = random_bandits("+++---", seed=0)
    pi, lost = z.softmax(-1), -(bandit.mu * toy.weights(z, bandit) * bandit.reward).clamp_max(0)
    added = [x[:, :3, None] - x[:, None, 3:] for x in (gradient(z, bandit) - gradient(z, bandit, SFT), pi)]
    close(added[0], added[1] * lost.sum(-1)[:, None, None] + lost[:, None, 3:])
    assert 0.15 < (added[0] < 0)[added[1] < 0].double().mean() < 0.25


def test_a_negative_raises_the_right_arm_lowers_its_own_and_gives_back_to_those_that_were_not_drawn():
    """Appendix B.2, with plain IS: they move less exactly where |w- R-| < 2 w+ R+."""
    limits, (z, bandit) = PRESETS["off_policy"], random_bandits("+-00", seed=0)
    drawn = bandit._replace(reward=bandit.reward / bandit.mu)
    both, only = (toy.gradient_of_loss(z, Bandit(bandit.mu, r), limits) for r in (drawn.reward, drawn.reward.relu()))
    right, wrong = (toy.weights(z, drawn, limits) * bandit.reward)[:, :2].unbind(-1)
    assert torch.equal((both.abs() < only.abs())[:, 2], -wrong < 2 * right)
    assert ((both - only)[:, :2].sign() == tensor([1.0, -1.0])).all()


def test_the_correction_of_a_baseline_in_topr_is_two_sided_on_the_positives():
    """Section 3.2, beside Appendix C, for baselines below every |R|, so that no sign changes."""
    z, bandit = random_bandits("++---", seed=0)
    pi, ahead = z.softmax(-1), z.softmax(-1) - bandit.mu
    ahead = torch.where(bandit.reward >= 0, ahead, ahead.clamp_min(0))
    for c in (-0.09, 0.09):
        change = gradient(z, bandit._replace(reward=bandit.reward - c)) - gradient(z, bandit)
        close(change, c * (ahead - pi * ahead.sum(-1, keepdim=True)))


@pytest.mark.parametrize("limits", [TIS, TOPR])
def test_on_long_runs_the_lower_the_baseline_the_nearer_is_pi_to_mu_and_the_more_random(limits):
    """Appendix C, Sections 3.2 and 2.2, on average over bandits; at c = -1 no negatives are left."""
    z, bandit = random_bandits("++---", seed=0)
    unit = bandit._replace(reward=bandit.reward.sign())
    close(gradient(z, unit._replace(reward=unit.reward + 1)), 2 * gradient(z, unit, SFT))
    mu = unit.mu[:400, None].expand(-1, 4, -1)
    shifted = Bandit(mu, unit.reward[:400, None] - tensor([-1.0, -0.5, 0.0, 0.5])[:, None])
    logp = ascend(mu.log(), shifted, limits, lr=1.0, steps=1000)[-1].log_softmax(-1)
    for rising in (toy.kl(mu, logp), (logp.exp() * logp).sum(-1)):  # the distance, and the entropy with a minus
        assert (rising.diff().mean(0) > 2 * rising.diff().std(0) / 400**0.5).all()


def test_naive_reinforce_converges_only_without_negatives():
    """Section 3.1: to mu (R - c), normalised, where c <= min R. Above that the logits' gap grows without end."""
    bandit = Bandit(*(column[:200] for column in random_bandits("++---", seed=0)[1]))
    start, above_least = bandit.mu.log(), bandit.reward - bandit.reward.amin(-1, keepdim=True)
    for more, within in ((0.2, 1e-6), (0.0, 1e-2)):
        target = bandit.mu * (above_least + more)
        end = ascend(start, Bandit(bandit.mu, above_least + more), REINFORCE, lr=1.0, steps=4000)[-1].softmax(-1)
        close(end, target / target.sum(-1, keepdim=True), atol=within)
    of_topr = ascend(start, bandit, TOPR, lr=1.0, steps=4000)[-1].softmax(-1)
    assert ((of_topr - end) * bandit.reward).sum(-1).min() > 0
    path = ascend(start, Bandit(bandit.mu, above_least - 0.2), REINFORCE, lr=1.0, steps=4000)[::1000]
    widened = (path.amax(-1) - path.amin(-1)).diff(dim=0)
    assert (widened[-1] > 0.9 * widened[-2]).all()
    close(*(gradient(start, Bandit(bandit.mu, bandit.reward - c), REINFORCE) for c in (0.0, 0.7)))  # at pi = mu


def test_the_objective_is_bounded_exactly_where_negatives_are_not_held_up():
    """Proposition 3.2: for any bounds with a- = 0; for a- > 0, with or without a right arm, it grows on."""
    z, bandit = random_bandits("++---", seed=0)
    for a, b, b_neg in (3 * torch.rand(99, 3, generator=torch.Generator().manual_seed(0))).tolist():
        assert (objective(4 * z, bandit, Limits(min(a, b), max(a, b), 0, b_neg)) <= bandit.reward.amax(-1)).all()
    mu, reward = toy.FOUR_ARMS
    data, bound = Bandit(mu.expand(2, -1), torch.stack([reward, tensor([-1.0, -0.5, 0.0, 0.0])])), tensor([1.0, 0.0])
    for a in (0, 0.01, 0.1, 1):
        limits = Limits(1, 1, a, 1)
        values = objective(ascend(data.mu.log(), data, limits, lr=4.0, steps=3000), data, limits)
        before, last = values[[1500, 2250, 3000]].diff(dim=0)
        assert ((values[-1] > bound) & (before > 0) & (last > 0.95 * before) if a else values <= bound).all()
        if a == 0:  # on four arms only the right ones are left, of which mu has 0.6
            close(values[-1], tensor([0.6 * (1 + math.log(1 / 0.6)), 0]), atol=1e-3)


def test_the_objective_is_a_lower_bound_of_the_expected_reward_without_negatives():
    """Section 3.1. That of naive REINFORCE is an upper bound with negatives alone; at pi = mu all are equal."""
    z, bandit = random_bandits("+++--", seed=0)
    good, bad = (bandit._replace(reward=sign * bandit.reward.abs()) for sign in (1, -1))
    pi = z.softmax(-1)
    for a, b in (3 * torch.rand(100, 2, generator=torch.Generator().manual_seed(0)).sort().values).tolist():
        assert (objective(z, good, Limits(a, b, a, b)) <= (pi * good.reward).sum(-1) + 1e-12).all()
    assert (objective(z, bad, REINFORCE) >= (pi * bad.reward).sum(-1) - 1e-12).all()
    for name in ("topr", "tis", "reinforce", "off_policy"):
        close(objective(bandit.mu.log(), bandit, PRESETS[name]), (bandit.mu * bandit.reward).sum(-1))
    assert 0.85 < (objective(z, bandit) < (pi * bandit.reward).sum(-1)).double().mean() < 0.95  # neither, with both


@pytest.mark.parametrize("name", PRESETS)
def test_the_way_back_takes_steps_as_log_1_over_pi_or_as_1_over_pi(name):
    """Section 3.1, from 1e-2 down to 1e-8: about nine steps more for each decade, or ten times as many."""
    bandit, start = Bandit(tensor([0.2] * 5), tensor([1.0, -1.0, -1.0, -1.0, -1.0])), 10 ** -linspace(2, 8, 7)
    z = torch.stack([start, *[(1 - start) / 4] * 4], -1).log()
    pi = ascend(z, bandit, PRESETS[name], lr=1.0, steps=5500).softmax(-1)[..., 0]
    steps = (pi < 0.5).sum(0).tolist()
    if PRESETS[name].a_pos:
        assert {after - before for before, after in pairwise(steps)} <= {8, 9, 10}
        assert steps[-1] < 100
    else:
        assert all(8 < after / before < 12 for before, after in pairwise(steps[:3]))
        assert steps[3:] == [5501] * 4  # not there yet


def test_at_mu_all_shares_pull_in_one_direction_and_the_pace_is_largest_at_one():
    """The rule of docs/rewards.md, by sums over arms; E+ and E- are the mean squares of the gradients."""
    mu, reward = random_bandits("++---", seed=0)[1]
    is_right, of_arms = reward > 0, torch.eye(5, dtype=torch.float64) - mu[:, None]  # grad log pi of each arm
    square, p = mu * of_arms.square().sum(-1), (mu * is_right).sum(-1, keepdim=True)
    of_right, of_wrong = ((square * which).sum(-1, keepdim=True) for which in (is_right, ~is_right))
    ratio = of_wrong / (1 - p) / (of_right / p)  # E- / E+

    def step(share, q):  # the expected gradient in data of which a share q is right, and it over its root mean square
        signed = torch.where(is_right, share / q, -(1 - share) / (1 - q))
        drawn = torch.where(is_right, q / p, (1 - q) / (1 - p))
        mean = gradient(mu.log(), Bandit(mu, drawn * signed))
        return mean, mean.norm(dim=-1) / (square * drawn * signed.square()).sum(-1).sqrt()

    best, (of_positives, pace_of_positives) = ratio / (1 + ratio), step(torch.tensor(1.0), p)
    odds = ratio * 0.1 / 0.9 * (1 - p) / p  # of the best share where 10 % are right, and not p
    for share in linspace(0, 1, 51):
        close(step(share, p)[0], (share + p / (1 - p) * (1 - share)) * of_positives, rtol=1e-9)
        assert (step(share, p)[1] <= step(best, p)[1] + 1e-12).all()
        assert (step(share, 0.1)[1] <= step(odds / (1 + odds), 0.1)[1] + 1e-12).all()
    close(step(best, p)[1], pace_of_positives * (1 + p / ((1 - p) * ratio))[:, 0].sqrt())
    assert torch.equal(step(p, p)[1] > pace_of_positives, (3 * p > (1 - p) * ratio)[:, 0])


# ---- the sections, and the command ------------------------------------------------------------------------------


def scaled(ingredient, of_wrong=1.01, of_right=1.0, rows=None):
    """An ingredient's name, and the ingredient as if rewards were larger; weights, which know signs alone, larger."""
    function = getattr(toy, ingredient)

    def wrong(z, bandit, *others):
        factor = torch.where(bandit.reward < 0, of_wrong, of_right) if rows in (None, len(z)) else 1.0
        if ingredient == "weights":
            return factor * function(z, bandit, *others)
        return function(z, bandit._replace(reward=factor * bandit.reward), *others)

    return ingredient, wrong


FAULTS = {  # each of which makes a section's statements false: what it uses, one per cent too large, and more
    "appendix_b1": [*map(scaled, ("gradient", "gradient_of_loss", "weights")), ("SFT", Limits(1, 1, 2, 2))],
    "appendix_b2": [*map(scaled, ("gradient_of_loss", "weights")), scaled("gradient_of_loss", 1.1, rows=31)],
    "appendix_c": [
        *map(scaled, ("gradient", "weights")),
        ("topr.effective_proportion", lambda p, c: p.expand(len(c), -1)),
        ("topr.baseline_for_proportion", lambda p, share: share),
        ("kl", lambda p, logq: (p * logq).sum(-1)),
    ],
    "proposition_3_1": [
        *map(scaled, ("gradient_of_loss", "kl_terms")),
        ("ascend", lambda z, *_, steps, **__: z.expand(steps + 1, -1)),
    ],
    "proposition_3_2": [*map(scaled, ("gradient", "objective", "weights")), scaled("objective", 1.0, of_right=1.01)],
    "way_back": [
        scaled("weights", 1.0, of_right=1.01),
        ("ascend", lambda *of, lr, steps: ascend(*of, lr / 2, steps)),
        ("TIS", TOPR),
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_section_holds_with_other_random_numbers_and_draws_itself(name):
    for seed in (1, 2):  # and 0, below
        axes = Figure().subplots()
        getattr(toy, name)(axes, seed)
        assert all([axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), axes.get_legend_handles_labels()[1]])


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_a_section_ends_with_a_false_statement_where_something_is_wrong(name, fault, monkeypatch):
    ingredient, wrong = fault
    monkeypatch.setattr(f"toy_bandit.{ingredient}", wrong)
    with pytest.raises(toy.FalseStatement, match="does not hold"):
        getattr(toy, name)(Figure().subplots())


def test_a_statement_without_cases_or_of_a_nan_is_false():
    for is_true in (tensor([]) > 0, toy.is_near(tensor([1.0, math.nan]), tensor([1.0, math.nan]))):
        with pytest.raises(toy.FalseStatement):
            toy.holds("", is_true)


def test_the_command_states_and_draws_everything_or_one_section(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process
    toy.main(["--out", str(tmp_path / "new" / "folder")])
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("Appendix B.1", "B.2", "Appendix C", "Proposition 3.1", "naive REINFORCE"))
    toy.main(["way_back", "--out", str(tmp_path), "--seed", "3"])
    assert "Proposition" not in capsys.readouterr().out
    pictures = {path.relative_to(tmp_path).as_posix(): path.stat().st_size for path in tmp_path.rglob("*.png")}
    assert pictures.keys() == {"new/folder/bandit.png", "way_back.png"}
    assert min(pictures.values()) > 10_000


def test_bad_arguments_are_refused_in_a_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=f"^toy_bandit.py: --out {tmp_path / 'file'}: .*; choose another folder$"):
        toy.main(["way_back", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as stop:
        toy.main(["way"])
    [line] = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert all(name in line for name in FAULTS)


def test_a_false_statement_ends_the_program_even_without_asserts(tmp_path):
    code = "import topr; topr.effective_proportion = lambda p, c: p; import toy_bandit; toy_bandit.main()"
    command = [sys.executable, "-O", "-c", code, "appendix_c", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(toy.__file__).parent, capture_output=True, text=True, check=False)
    [line] = done.stderr.splitlines()
    assert (done.returncode, "does not hold" in line) == (1, True)
