"""The bandit against sums in plain Python; the paper's claims about it, and the command that checks them."""

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
import tyro
from test_topr import rho

import toy_bandit
from paper import bandit, claims
from paper.bandit import Bandit, tensor
from topr import PRESETS, Limits

ROOT = Path(toy_bandit.__file__).parent
MEMBERS = [*PRESETS.values(), Limits(0.5, 2, 0.2, 0.8)]


def softmax(z):
    total = sum(map(math.exp, z))
    return [math.exp(x) / total for x in z]


def random_case(seed):
    """z, mu and rewards of both signs, as lists."""
    rng = random.Random(seed)
    z, mu = ([rng.gauss(0, 1.5) for _ in range(5)] for _ in range(2))
    return z, softmax(mu), [rng.uniform(0.1, 1) * sign for sign in (1, -1, 1, -1, -1)]


CASES = [random_case(seed) for seed in range(6)]
Z, MU, REWARD = (tensor(column) for column in zip(*CASES, strict=True))  # the cases as tensors
MANY = Bandit(MU, REWARD)


def near(value):
    return pytest.approx(value, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("limits", MEMBERS)
def test_gradient_objective_and_variance_are_sums_over_the_arms(limits):
    """Eq. 7, Eq. 11, and the variance of single gradients [pi/mu] R grad log pi."""
    gradients, objectives, variances = [], [], []
    for z, mu, reward in CASES:
        pi, singles, values = softmax(z), [], []
        for i, (p, m, r) in enumerate(zip(pi, mu, reward, strict=True)):
            a, b = (limits.a_pos, limits.b_pos) if r >= 0 else (limits.a_neg, limits.b_neg)
            values.append(m * r * rho(p / m, a, b))
            singles.append([min(max(p / m, a), b) * r * ((i == k) - q) for k, q in enumerate(pi)])
        mean = [sum(m * single[k] for m, single in zip(mu, singles, strict=True)) for k in range(len(mu))]
        gradients += mean
        objectives.append(sum(values))
        variances.append(sum(m * math.dist(single, mean) ** 2 for m, single in zip(mu, singles, strict=True)))
    assert bandit.gradient(Z, MANY, limits).flatten().tolist() == near(gradients)
    assert bandit.objective(Z, MANY, limits).tolist() == near(objectives)
    assert bandit.gradient_variance(Z, MANY, limits).tolist() == near(variances)


def test_the_parts_of_proposition_3_1():
    baselines = [-1.0, -0.5, 0.0, 0.7, 1.0, 0.1]
    parts, constant = bandit.four_parts(Z.log_softmax(-1), MANY, tensor(baselines))
    for i, ((z, mu, reward), c) in enumerate(zip(CASES, baselines, strict=True)):
        pi = softmax(z)
        for part, sign in zip(parts[:2, i], (1, -1), strict=True):
            mass = [m * abs(r) * (r * sign > 0) for m, r in zip(mu, reward, strict=True)]
            kl = sum(x / sum(mass) * math.log(x / sum(mass) / p) for x, p in zip(mass, pi, strict=True) if x)
            assert part.item() == near(sign * sum(mass) * kl)
        assert parts[2, i].item() == near(-c * sum(m * math.log(m / p) for m, p in zip(mu, pi, strict=True)))
        loss = -sum(m * (r - c) * math.log(p) for m, r, p in zip(mu, reward, pi, strict=True))
        assert (parts[:, i].sum() + constant[i]).item() == near(loss)
    without_negatives, _ = bandit.four_parts(Z[0].log_softmax(-1), Bandit(MU[0], REWARD[0].abs()), 0.0)
    assert without_negatives[1:].tolist() == [0, 0]


RECORDED = json.loads((ROOT / "results" / "bandit" / "claims.json").read_text(encoding="utf-8"))["claims"]
SLOW = pytest.param("baseline", marks=pytest.mark.slow)  # 5,000 steps of 3,600 bandits


@pytest.mark.parametrize("name", [SLOW, *(name for name in claims.CLAIMS if name != "baseline")])
def test_every_statement_holds_and_has_its_figure(name):
    statements, panels = claims.check(name)
    assert [row.text for row in statements if not row.holds] == []
    for panel in panels:
        assert all([panel.title, panel.xlabel, panel.ylabel])
        assert all(len(line.x) == len(line.y) > 0 for line in panel.lines)
    found = [row._asdict() for row in statements]
    assert found == RECORDED[name]  # alone as after others: no rounding error is among the numbers


def test_a_statement_fails_on_a_difference_a_nan_or_nothing():
    one = tensor([1.0, 2.0])
    assert claims.identity("B: c: d", one, one + 1e-13) == ("c: d", "B", "equal within 1e-12", True)
    assert claims.identity("B: c", one, one, one + 1e-11) == ("c", "B", "differ by 1e-11", False)
    assert not claims.identity("", one, one, tensor([1.0, math.nan])).holds
    assert claims.always("", one > 0, "").holds
    assert not claims.always("", one > 1, "").holds
    assert not claims.always("", one[:0] > 1, "").holds


@pytest.fixture
def main(monkeypatch):
    """The command in this process, which keeps its number of threads; a function of the arguments."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)

    def run(*arguments):
        with pytest.raises(SystemExit) as stop:
            tyro.cli(toy_bandit.main, args=[*map(str, arguments)])
        return stop.value.code

    return run


def test_the_command_checks_what_was_asked_for(tmp_path, main, capfd):
    assert main("bound", "sampled", "--out", tmp_path / "here", "--seed", 3) == 0
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["bound.png", "claims.json", "sampled.png"]
    record = json.loads((tmp_path / "here" / "claims.json").read_text(encoding="utf-8"))
    assert (record["seed"], list(record["claims"])) == (3, ["bound", "sampled"])
    assert record["claims"]["sampled"] != RECORDED["sampled"]  # of seed 0
    told = capfd.readouterr()
    assert "9 statements hold, 0 do not" in told.out
    assert all(row["text"][:30] in told.out for rows in record["claims"].values() for row in rows)
    assert len(told.err) < 1_000  # no progress bar where there is no terminal


def test_a_statement_that_fails_is_shown_and_sets_the_exit_status(tmp_path, main, monkeypatch, capsys):
    wrong = claims.Statement("two is [three]", "-", "it is not", False)
    panel = claims.Panel("a", "b", "c", [claims.Line([0, 1], [0, 1])])
    monkeypatch.setitem(claims.CLAIMS, "bound", lambda generator: [wrong, panel])
    assert main("bound", "--out", tmp_path) == 1
    printed = capsys.readouterr().out
    assert "two is [three]" in printed
    assert "NO" in printed


def test_bad_arguments_are_refused_in_a_line(tmp_path, main, capsys):
    (tmp_path / "file").write_text("")
    told = main("bound", "--out", tmp_path / "file")
    assert re.fullmatch(rf"toy_bandit: --out {tmp_path / 'file'}: .*; choose another folder", told)
    assert main("bounds") == 2
    assert "recovery" in capsys.readouterr().err  # the choices
