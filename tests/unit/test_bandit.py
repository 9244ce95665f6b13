"""The bandit against sums in plain Python, what the analysis says beyond the sections of toy_bandit.py, the command."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from test_topr import rho

import topr
import toy_bandit as toy
from topr import Limits
from toy_bandit import TOPR, Bandit, ascend, gradient, linspace, objective, random_bandits, tensor

close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
Z, SIX = random_bandits("+-+--", seed=3)
Z, SIX = Z[:6], Bandit(SIX.mu[:6], SIX.reward[:6])
CASES = list(
    zip(Z.softmax(-1).tolist(), SIX.mu.tolist(), SIX.reward.tolist(), strict=True)
)  # pi, mu, rewards


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


# ---- what the analysis says beyond the sections -----------------------------------------------------------------


def test_at_mu_all_shares_pull_in_one_direction_and_the_pace_is_largest_at_one():
    """The rule of docs/analysis.md, by sums over arms; E+ and E- are the mean squares of the gradients."""
    mu, reward = random_bandits("++---", seed=0)[1]
    assert 0.1 <= reward.abs().min() < 0.11 < 0.99 < reward.abs().max() <= 1
    is_right, of_arms = (
        reward > 0,
        torch.eye(5, dtype=torch.float64) - mu[:, None],
    )  # grad log pi of each arm
    square, p = mu * of_arms.square().sum(-1), (mu * is_right).sum(-1, keepdim=True)
    of_right, of_wrong = ((square * which).sum(-1, keepdim=True) for which in (is_right, ~is_right))
    ratio = of_wrong / (1 - p) / (of_right / p)  # E- / E+

    def step(
        share, q
    ):  # the expected gradient in data of which a share q is right, and it over its root mean square
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
        factor = (
            torch.where(bandit.reward < 0, of_wrong, of_right) if rows in (None, len(z)) else 1.0
        )
        if ingredient == "weights":
            return factor * function(z, bandit, *others)
        return function(z, bandit._replace(reward=factor * bandit.reward), *others)

    return ingredient, wrong


LOW = "objective", lambda *of: objective(*of) - 1e4  # grows as it should, and stays below max R
FAULTS = {  # each of which makes a section's statements false: what it uses, one per cent too large, and more
    "appendix_b1": [
        *map(scaled, ("gradient", "gradient_of_loss", "weights")),
        ("SFT", Limits(1, 1, 2, 2)),
    ],
    "appendix_b2": [
        *map(scaled, ("gradient_of_loss", "weights")),
        scaled("gradient_of_loss", 1.1, rows=31),
    ],
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
    "proposition_3_2": [
        *map(scaled, ("gradient", "objective", "weights")),
        scaled("objective", 1.0, 1.01),
        LOW,
    ],
    "way_back": [
        scaled("weights", 1.0, of_right=1.01),
        ("ascend", lambda *of, lr, steps: ascend(*of, lr / 2, steps)),
        ("TIS", TOPR),
        ("SFT", toy.TIS),
        ("REINFORCE", toy.TIS),
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_section_holds_with_other_random_numbers_and_draws_itself(name):
    axes = Figure().subplots()
    getattr(toy, name)(axes, seed=1)  # the command's is 0
    assert all(
        [
            axes.get_title(),
            axes.get_xlabel(),
            axes.get_ylabel(),
            axes.get_legend_handles_labels()[1],
        ]
    )


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults]
)
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
    assert all(
        word in printed
        for word in ("Appendix B.1", "B.2", "Appendix C", "Proposition 3.1", "naive REINFORCE")
    )
    toy.main(["way_back", "--out", str(tmp_path), "--seed", "3"])
    assert "Proposition" not in capsys.readouterr().out
    pictures = {
        path.relative_to(tmp_path).as_posix(): path.stat().st_size
        for path in tmp_path.rglob("*.png")
    }
    assert pictures.keys() == {"new/folder/bandit.png", "way_back.png"}
    assert min(pictures.values()) > 10_000


def test_bad_arguments_are_refused_in_a_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        SystemExit, match=f"^toy_bandit.py: --out {tmp_path / 'file'}: .*; choose another folder$"
    ):
        toy.main(["way_back", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as stop:
        toy.main(["way"])
    [line] = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2
    assert all(name in line for name in FAULTS)


def test_a_false_statement_ends_the_program_even_without_asserts(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(topr, "effective_proportion", lambda p, c: p)
    program = {"__name__": "toy_bandit.py"}
    exec(compile(Path(toy.__file__).read_text(), toy.__file__, "exec", optimize=2), program)
    with pytest.raises(SystemExit, match=r"^toy_bandit.py: this does not hold: .*$"):
        program["main"](["appendix_c", "--out", str(tmp_path)])
