"""The bandit against sums written out in plain Python, and the claims and the command that are made with it."""

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import toy_bandit as bandit
from paper import claims as toy_bandit
from topr import PRESETS, Limits
from toy_bandit import Bandit, tensor

ROOT = Path(bandit.__file__).parent
MEMBERS = [*PRESETS.values(), Limits(0.5, 2, 0.2, 0.8)]


# ---- the paper's formulas on lists of numbers --------------------------------------------------------------------


def softmax(z):
    total = sum(map(math.exp, z))
    return [math.exp(x) / total for x in z]


def weight(ratio, reward, limits):
    a, b = limits[:2] if reward >= 0 else limits[2:]
    return min(max(ratio, a), b)


def rho(x, reward, limits):
    a, b = limits[:2] if reward >= 0 else limits[2:]
    if b == 0:
        return 0.0
    return a * (1 + math.log(x / a)) if x < a else b * (1 + math.log(x / b)) if x > b else x


def score(pi, arm):
    """grad log pi(arm): one-hot minus pi."""
    return [(i == arm) - p for i, p in enumerate(pi)]


def single_gradients(z, mu, reward, limits):
    """[pi/mu] R grad log pi of every arm (Eq. 7)."""
    pi = softmax(z)
    return [
        [weight(p / m, r, limits) * r * s for s in score(pi, i)]
        for i, (p, m, r) in enumerate(zip(pi, mu, reward, strict=True))
    ]


def expectation(mu, rows):
    return [sum(m * row[k] for m, row in zip(mu, rows, strict=True)) for k in range(len(mu))]


@pytest.fixture(params=range(6))
def case(request):
    """z, mu and rewards of both signs, as lists."""
    rng = random.Random(request.param)
    z, mu = ([rng.gauss(0, 1.5) for _ in range(5)] for _ in range(2))
    return z, softmax(mu), [rng.uniform(0.1, 1) * sign for sign in (1, -1, 1, -1, -1)]


def make(case):
    z, mu, reward = case
    return tensor(z), Bandit(tensor(mu), tensor(reward))


def near(value, within=1e-12):
    return pytest.approx(value, rel=within, abs=within)


# ---- functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", MEMBERS)
def test_every_way_to_the_gradient_is_equation_7(case, limits):
    z, mu, reward = case
    expected = expectation(mu, single_gradients(z, mu, reward, limits))
    for function in (bandit.gradient, bandit.gradient_of_loss, bandit.gradient_of_objective):
        assert function(*make(case), limits).tolist() == near(expected)
    assert bandit.gradient_by_differences(*make(case), limits).tolist() == near(expected, within=1e-6)


@pytest.mark.parametrize("limits", MEMBERS)
def test_the_objective_is_equation_11(case, limits):
    z, mu, reward = case
    expected = sum(m * rho(p / m, r, limits) * r for p, m, r in zip(softmax(z), mu, reward, strict=True))
    assert bandit.objective(*make(case), limits).item() == near(expected)


@pytest.mark.parametrize("limits", MEMBERS)
def test_the_variance_is_that_of_single_gradients(case, limits):
    z, mu, reward = case
    rows = single_gradients(z, mu, reward, limits)
    mean = expectation(mu, rows)
    expected = sum(
        m * sum((x - y) ** 2 for x, y in zip(row, mean, strict=True)) for m, row in zip(mu, rows, strict=False)
    )
    assert bandit.gradient_variance(*make(case), limits).item() == near(expected)
    sampled = bandit.sampled_gradients(*make(case), limits, torch.tensor([3, 0, 3]))
    assert sampled.flatten().tolist() == near([*rows[3], *rows[0], *rows[3]])


def test_the_expected_reward_is_that_under_pi(case):
    z, _, reward = case
    assert bandit.expected_reward(*make(case)).item() == near(
        sum(p * r for p, r in zip(softmax(z), reward, strict=True))
    )


def test_divergence_and_entropy(case):
    z, mu, _ = case
    pi = softmax(z)
    expected = sum(m * math.log(m / p) for m, p in zip(mu, pi, strict=True))
    assert bandit.kl(tensor(mu), tensor(pi).log()).item() == near(expected)
    assert bandit.entropy(tensor(pi)).item() == near(-sum(p * math.log(p) for p in pi))


@pytest.mark.parametrize("c", [-1.0, -0.5, 0.0, 0.7])
def test_the_parts_of_proposition_3_1(case, c):
    z, mu, reward = case
    pi = softmax(z)
    parts, constant = bandit.four_parts(tensor(pi).log(), make(case)[1], c)
    for part, sign in zip(parts[:2], (1, -1), strict=True):
        mass = [m * abs(r) * (r * sign > 0) for m, r in zip(mu, reward, strict=True)]
        kl = sum(x / sum(mass) * math.log(x / sum(mass) / p) for x, p in zip(mass, pi, strict=True) if x)
        assert part.item() == near(sign * sum(mass) * kl)
    assert parts[2].item() == near(-c * sum(m * math.log(m / p) for m, p in zip(mu, pi, strict=True)))
    loss = -sum(m * (r - c) * math.log(p) for m, r, p in zip(mu, reward, pi, strict=True))
    assert (parts.sum() + constant).item() == near(loss)


def test_without_rewards_of_a_sign_its_part_is_zero():
    parts, _ = bandit.four_parts(tensor([0.9, 0.1]).log(), Bandit(tensor([0.5, 0.5]), tensor([1.0, 2.0])), 0.0)
    assert parts[1:].tolist() == [0, 0]


def test_ascent_adds_gradients_and_keeps_what_was_asked(case):
    z, one = make(case)
    by_hand = [z]
    for _ in range(6):
        by_hand.append(by_hand[-1] + 0.3 * bandit.gradient(by_hand[-1], one, PRESETS["tis"]))
    path = bandit.ascend(z, one, PRESETS["tis"], lr=0.3, steps=6, keep=3)
    assert path.tolist() == torch.stack(by_hand[::3]).tolist()


def test_steps_to_half_counts_each_start_and_stops_at_the_cap(case):
    _, one = make(case)
    starts = tensor([[math.log(start / (1 - start) * 4), 0, 0, 0, 0] for start in (0.6, 0.2, 0.02, 1e-9)])
    counts = bandit.steps_to_half(starts, one, PRESETS["off_policy"], cap=300)
    for start, count in zip(starts, counts, strict=True):
        z, done = start, 0
        while z.softmax(-1)[0] < 0.5 and done <= 300:
            z, done = z + bandit.gradient(z, one, PRESETS["off_policy"]), done + 1
        assert count == done
    assert counts[0] == 0
    assert counts[-1] == 301


def test_bandits_are_drawn_with_the_signs_asked_for():
    z, many = bandit.random_bandits(200, "+--", torch.Generator().manual_seed(0))
    assert z.shape == (200, 3)
    assert many.mu.sum(-1).tolist() == near([1.0] * 200)
    assert many.reward.sign().unique(dim=0).tolist() == [[1, -1, -1]]
    assert 0.1 <= many.reward.abs().min() <= many.reward.abs().max() <= 1


def test_upper_bound_is_never_negative():
    assert bandit.upper_bound(tensor([[-1.0, -2.0], [0.5, 3.0]])).tolist() == [0, 3]


# ---- two arms, by hand -------------------------------------------------------------------------------------------


def test_v15_a_lone_negative_is_let_go_of_by_topr_and_pushed_forever_by_others():
    arms = Bandit(tensor([0.5, 0.5]), tensor([-1.0, 0.0]))
    gaps = {}
    for a_neg in (0.0, 0.8, 1.0):
        path = bandit.ascend(arms.mu.log(), arms, Limits(1, 1, a_neg, 1), lr=1.0, steps=4000, keep=2000)
        gaps[a_neg] = (path[:, 1] - path[:, 0]).tolist()
        force = bandit.gradient(path[-1], arms, Limits(1, 1, a_neg, 1)).abs().max().item()
        # pi(tau-) is far below a-: all of the weight a- is left, through mu = 1/2; TOPR's has gone with pi.
        assert force == pytest.approx(a_neg / 2, abs=1e-3)
    assert gaps[0.0][2] - gaps[0.0][1] < 1
    assert gaps[0.8][2] - gaps[0.8][1] == pytest.approx(2000 * 0.8, rel=1e-6)
    assert gaps[1.0][2] - gaps[1.0][1] == pytest.approx(2000, rel=1e-6)


# ---- claims ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", toy_bandit.CLAIMS)
def test_every_statement_holds_and_has_its_figure(name):
    statements, panels = toy_bandit.check(name)
    assert [row.text for row in statements if not row.holds] == []
    for panel in panels:
        assert panel.title
        assert panel.xlabel
        assert panel.ylabel
        for line in panel.lines:
            assert len(line.x) == len(line.y) > 0


def test_a_statement_fails_on_a_difference_a_nan_or_nothing():
    one = tensor([1.0, 2.0])
    assert toy_bandit.identity("", "", one, one + 1e-13).holds
    assert not toy_bandit.identity("", "", one, one, one + 1e-11).holds
    assert not toy_bandit.identity("", "", one, one, tensor([1.0, math.nan])).holds
    assert toy_bandit.always("", "", one > 0, "").holds
    assert not toy_bandit.always("", "", one > 1, "").holds
    assert not toy_bandit.always("", "", one[:0] > 1, "").holds


def test_a_claim_is_the_same_alone_and_differs_by_seed():
    measured = [[row.measured for row in toy_bandit.check("variance", seed).statements] for seed in (0, 0, 1)]
    assert measured[0] == measured[1] != measured[2]


# ---- the command -------------------------------------------------------------------------------------------------


def command(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "toy_bandit.py"), *map(str, arguments)], capture_output=True, text=True
    )


def test_the_command_checks_what_was_asked_for(tmp_path):
    done = command("bound", "sampled", "--out", tmp_path / "here", "--seed", 3)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["bound.png", "claims.json", "sampled.png"]
    record = json.loads((tmp_path / "here" / "claims.json").read_text(encoding="utf-8"))
    assert record["seed"] == 3
    assert list(record["claims"]) == ["bound", "sampled"]
    assert "9 statements hold, 0 do not" in done.stdout
    assert all(row["text"][:30] in done.stdout for rows in record["claims"].values() for row in rows)


def test_a_statement_that_fails_is_shown_and_sets_the_exit_status(tmp_path, monkeypatch, capsys):
    wrong = toy_bandit.Statement("two is [three]", "-", "it is not", False)
    panel = toy_bandit.Panel("a", "b", "c", [toy_bandit.Line([0, 1], [0, 1])])
    monkeypatch.setitem(toy_bandit.CLAIMS, "bound", lambda generator: toy_bandit.Claim([wrong], [panel]))
    monkeypatch.setattr(sys, "argv", ["toy_bandit.py", "bound", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        toy_bandit.main()
    assert stop.value.code == 1
    printed = capsys.readouterr().out
    assert "two is [three]" in printed
    assert "NO" in printed


def test_bad_arguments_are_refused_in_a_line(tmp_path):
    (tmp_path / "file").write_text("")
    done = command("bound", "--out", tmp_path / "file")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(f"toy_bandit: --out {tmp_path / 'file'}: ")
    assert "Traceback" not in done.stderr
    done = command("bounds")
    assert done.returncode == 2
    assert "recovery" in done.stderr  # the choices
