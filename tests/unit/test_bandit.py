"""toy_bandit.py: the bandit against sums in plain Python, its sections with faults, the command."""

import contextlib
import io
import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from unit_helpers import double, rho

import topr
import toy_bandit as toy
from topr import Limits
from toprlib.plotting import STYLES
from toy_bandit import Bandit, ascend, gradient, linspace, random_bandits

assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def six_bandits():
    z, bandit = random_bandits("+-+--", seed=3)
    return z[:6], Bandit(bandit.mu[:6], bandit.reward[:6])


# ---- the bandit against plain Python -------------------------------------------------------------
def by_loops(pi, mu, reward, limits):
    """Weights, gradient and objective of one bandit (Equations 7 and 11), in Python numbers."""
    weights = []
    masses = []
    objective = 0.0
    for p, m, r in zip(pi, mu, reward, strict=True):
        a, b = (limits.a_pos, limits.b_pos) if r >= 0 else (limits.a_neg, limits.b_neg)
        weight = min(max(p / m, a), b)
        weights.append(weight)
        masses.append(m * weight * r)
        objective += m * r * rho(p / m, a, b)
    gradient = []
    for k, p in enumerate(pi):
        # d log pi_i / d z_k = 1 if i = k, less pi_k
        slopes = [mass * ((i == k) - p) for i, mass in enumerate(masses)]
        gradient.append(sum(slopes))
    return weights, gradient, objective


@pytest.mark.parametrize("limits", toy.FAMILY)
def test_weights_gradient_and_objective_are_sums_over_arms(limits):
    z, bandit = six_bandits()
    pi = z.softmax(-1)
    for row in range(6):
        one = Bandit(bandit.mu[row], bandit.reward[row])
        expected = by_loops(pi[row].tolist(), one.mu.tolist(), one.reward.tolist(), limits)
        weights, gradients, objective = expected
        assert_close(toy.weights(z[row], one, limits), double(*weights))
        assert_close(toy.gradient(z[row], one, limits), double(*gradients))
        assert_close(toy.gradient_of_loss(z[row], one, limits), double(*gradients))
        assert toy.objective(z[row], one, limits).item() == pytest.approx(objective, abs=1e-12)


def test_leading_dimensions_are_many_bandits():
    z, bandit = six_bandits()
    many = z.expand(4, -1, -1)
    for function in (toy.weights, toy.objective, toy.gradient, toy.gradient_of_loss):
        assert_close(function(many, bandit)[2], function(z, bandit))


def test_ascent_follows_the_gradient():
    z, bandit = six_bandits()
    path = ascend(z, bandit, toy.TIS, lr=0.5, steps=2)
    assert path.shape == (3, *z.shape)
    assert torch.equal(path[0], z)
    for before, after in pairwise(path):
        assert_close(after, before + 0.5 * gradient(before, bandit, toy.TIS))


def test_kl_terms_are_sums_over_arms():
    z, bandit = six_bandits()
    c = 0.3
    actual = toy.kl_terms(z, bandit, double(c))
    for row in range(6):
        terms = [0.0, 0.0, 0.0]
        pi = z[row].softmax(-1).tolist()
        mu = bandit.mu[row].tolist()
        reward = bandit.reward[row].tolist()
        for sign, place in ((1, 0), (-1, 1)):
            masses = [m * max(sign * r, 0.0) for m, r in zip(mu, reward, strict=True)]
            total = sum(masses)
            for mass, p in zip(masses, pi, strict=True):
                if mass > 0:
                    terms[place] += sign * mass * math.log(mass / total / p)
        for m, p in zip(mu, pi, strict=True):
            terms[2] -= c * m * math.log(m / p)
        assert actual[:, row].tolist() == pytest.approx(terms, abs=1e-12)


def test_random_bandits():
    z, bandit = random_bandits("+-0", seed=0)
    assert z.shape == bandit.mu.shape == bandit.reward.shape == (1000, 3)
    assert_close(bandit.mu.sum(-1), torch.ones(1000, dtype=torch.float64))
    assert torch.equal(bandit.reward.sign(), double(1, -1, 0).expand(1000, 3))
    size = bandit.reward[:, :2].abs()
    assert 0.1 <= size.min() < 0.11
    assert 0.99 < size.max() <= 1
    # pi and mu are independent of each other.
    correlation = torch.corrcoef(torch.stack([z.flatten(), bandit.mu.log().flatten()]))[0, 1]
    assert abs(correlation) < 0.1
    assert not torch.equal(z, random_bandits("+-0", seed=1)[0])


# ---- the rule of docs/analysis.md ----------------------------------------------------------------
MU, REWARD = random_bandits("++---", seed=0)[1]
IS_RIGHT = REWARD > 0
P = (MU * IS_RIGHT).sum(-1, keepdim=True)  # share of right samples


def squared_gradient():
    """mu |grad log pi|^2 of each arm at pi = mu."""
    slopes = torch.eye(5, dtype=torch.float64) - MU[:, None]  # of each arm in the logits
    return MU * slopes.square().sum(-1)


def ratio_of_squares():
    """E- / E+: the mean squared gradient of a wrong sample over that of a right one."""
    square = squared_gradient()
    of_right = (square * IS_RIGHT).sum(-1, keepdim=True) / P
    of_wrong = (square * ~IS_RIGHT).sum(-1, keepdim=True) / (1 - P)
    return of_wrong / of_right


def mean_and_pace(share, q):
    """The expected gradient of data of which q is right, and its norm over its root mean square.

    share: the effective share of positives.
    """
    reward = torch.where(IS_RIGHT, share / q, -(1 - share) / (1 - q))
    frequency = torch.where(IS_RIGHT, q / P, (1 - q) / (1 - P))  # relative to mu
    mean = gradient(MU.log(), Bandit(MU, frequency * reward))
    root_mean_square = (squared_gradient() * frequency * reward.square()).sum(-1).sqrt()
    return mean, mean.norm(dim=-1) / root_mean_square


def test_shares_differ_in_size_and_not_in_direction():
    of_positives, _ = mean_and_pace(torch.tensor(1.0), P)
    for share in linspace(0, 1, 11):
        mean, _ = mean_and_pace(share, P)
        expected = (share + P / (1 - P) * (1 - share)) * of_positives
        torch.testing.assert_close(mean, expected, rtol=1e-9, atol=1e-12)


def test_fastest_share():
    ratio = ratio_of_squares()
    best = ratio / (1 + ratio)
    odds = ratio * 0.1 / 0.9 * (1 - P) / P  # if samples are chosen so that 10 % are right
    best_of_chosen = odds / (1 + odds)
    _, pace = mean_and_pace(best, P)
    _, pace_of_chosen = mean_and_pace(best_of_chosen, 0.1)
    for share in linspace(0, 1, 51):
        assert (mean_and_pace(share, P)[1] <= pace + 1e-12).all()
        assert (mean_and_pace(share, 0.1)[1] <= pace_of_chosen + 1e-12).all()


def test_pace_of_the_fastest_share():
    ratio = ratio_of_squares()
    _, of_best = mean_and_pace(ratio / (1 + ratio), P)
    _, of_positives = mean_and_pace(torch.tensor(1.0), P)
    expected = of_positives * (1 + P / ((1 - P) * ratio))[:, 0].sqrt()
    assert_close(of_best, expected)
    _, without_baseline = mean_and_pace(P, P)
    is_faster = without_baseline > of_positives
    assert torch.equal(is_faster, ((1 - P) * ratio < 3 * P)[:, 0])


# ---- the sections --------------------------------------------------------------------------------
@pytest.mark.parametrize("name", toy.SECTIONS)
def test_section_holds_for_another_seed(name):
    axes = Figure().subplots()
    toy.SECTIONS[name](axes, seed=1)  # the command's default is 0
    assert axes.get_title()
    assert axes.get_xlabel()
    assert axes.get_ylabel()
    labels = axes.get_legend_handles_labels()[1]
    assert len(labels) == len(axes.lines) == len(set(labels)) >= 2


def scaled_rewards(name, right=1.0, wrong=1.0, rows=None):
    """A function of toy_bandit.py as if rewards were larger; rows: for as many bandits only."""
    function = getattr(toy, name)

    def faulty(z, bandit, *others):
        if rows not in (None, len(z)):
            return function(z, bandit, *others)
        factor = torch.where(bandit.reward < 0, wrong, right)
        return function(z, bandit._replace(reward=factor * bandit.reward), *others)

    return faulty


def scaled_weights(right=1.0, wrong=1.0):
    function = toy.weights

    def faulty(z, bandit, *others):
        return torch.where(bandit.reward < 0, wrong, right) * function(z, bandit, *others)

    return faulty


def ascent_at_half_rate(z, bandit, limits, lr, steps):
    return ascend(z, bandit, limits, lr / 2, steps)


def no_ascent(z, bandit, limits, lr, steps):
    return z.expand(steps + 1, *z.shape)


def objective_that_stays_low(z, bandit, limits=toy.TOPR):
    return OBJECTIVE(z, bandit, limits) - 1e4


def share_before_the_baseline(p, c):
    return p.expand(len(c), -1)


def share_as_baseline(p, share):
    return share


def kl_without_entropy(p, logq):
    return (p * logq).sum(-1)


OBJECTIVE = toy.objective
FAULTS = [  # section, what it uses, the same with a fault that makes a statement of it false
    ("appendix_b1", "gradient", scaled_rewards("gradient", wrong=1.01)),
    ("appendix_b1", "gradient_of_loss", scaled_rewards("gradient_of_loss", wrong=1.01)),
    ("appendix_b1", "weights", scaled_weights(wrong=1.01)),
    ("appendix_b1", "SFT", Limits(1, 1, 2, 2)),
    ("appendix_b2", "gradient_of_loss", scaled_rewards("gradient_of_loss", wrong=1.01)),
    ("appendix_b2", "weights", scaled_weights(wrong=1.01)),
    ("appendix_b2", "gradient_of_loss", scaled_rewards("gradient_of_loss", wrong=1.1, rows=31)),
    ("appendix_c", "gradient", scaled_rewards("gradient", wrong=1.01)),
    ("appendix_c", "weights", scaled_weights(wrong=1.01)),
    ("appendix_c", "topr.effective_proportion", share_before_the_baseline),
    ("appendix_c", "topr.baseline_for_proportion", share_as_baseline),
    ("appendix_c", "kl", kl_without_entropy),
    ("proposition_3_1", "gradient_of_loss", scaled_rewards("gradient_of_loss", wrong=1.01)),
    ("proposition_3_1", "kl_terms", scaled_rewards("kl_terms", wrong=1.01)),
    ("proposition_3_1", "ascend", no_ascent),
    ("proposition_3_2", "gradient", scaled_rewards("gradient", wrong=1.01)),
    ("proposition_3_2", "objective", scaled_rewards("objective", wrong=1.01)),
    ("proposition_3_2", "objective", scaled_rewards("objective", right=1.01)),
    ("proposition_3_2", "objective", objective_that_stays_low),
    ("proposition_3_2", "weights", scaled_weights(wrong=1.01)),
    ("way_back", "weights", scaled_weights(right=1.01)),
    ("way_back", "ascend", ascent_at_half_rate),
    ("way_back", "TIS", toy.TOPR),
    ("way_back", "SFT", toy.TIS),
    ("way_back", "REINFORCE", toy.TIS),
]


@pytest.mark.parametrize(("section", "ingredient", "fault"), FAULTS)
def test_section_with_a_fault_fails(section, ingredient, fault, monkeypatch):
    monkeypatch.setattr(f"toy_bandit.{ingredient}", fault)
    with pytest.raises(toy.CheckFailed):
        toy.SECTIONS[section](Figure().subplots())


@pytest.fixture(scope="module")
def table_of_arms():
    """The rows of Proposition 3.2: step mu R, then pi weight push of TOPR and of REINFORCE."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        toy.proposition_3_2(Figure().subplots())
    lines = printed.getvalue().splitlines()
    [heading] = [line for line in lines if "naive REINFORCE" in line]
    assert heading.split() == ["TOPR", "naive", "REINFORCE"]
    start = lines.index(heading) + 2  # after the names of the columns
    rows = []
    for line in lines[start : start + 16]:
        rows.append([float(word) for word in line.split()])
    return rows


def test_both_methods_start_at_mu(table_of_arms):
    """The weights are 1, the push is mu (R - 0.2)."""
    arms = torch.stack(toy.FOUR_ARMS, dim=1).tolist()
    for row, (mu, reward) in zip(table_of_arms[:4], arms, strict=True):
        half = [mu, 1.0, mu * (reward - 0.2)]
        assert row == pytest.approx([0, mu, reward, *half, *half])


def test_only_reinforce_keeps_pushing(table_of_arms):
    """At a pi of almost 0 its push is mu R, as the weight is 1."""
    for step, mu, reward, *columns in table_of_arms[-2:]:  # the wrong arms
        pi, weight, push = columns[:3]
        assert step == 3000
        assert pi < 1e-4
        assert weight == pytest.approx(pi / mu, rel=1e-3)
        assert abs(push) < 1e-4
        assert columns[3:] == [0, 1, mu * reward]


def draw_alone(name, folder, monkeypatch):
    """The axes of a picture of one section, as the command draws it."""
    figures = []
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    toy.main([name, "--out", str(folder)])
    [figure] = figures
    figure.draw_without_rendering()
    [axes] = figure.axes
    return axes


def test_the_picture_of_proposition_3_2_separates_its_lines(tmp_path, monkeypatch):
    axes = draw_alone("proposition_3_2", tmp_path, monkeypatch)
    lines = {line.get_label(): line for line in axes.lines}
    to_axes = axes.transData - axes.transAxes
    ends = {}
    for label, line in lines.items():
        x, y = line.get_data()
        _, ends[label] = to_axes.transform((float(x[-1]), float(y[-1])))
    assert ends["a- = 0: TOPR"] < ends["max R"] - 0.1  # of the height of the axes
    assert ends["a- = 0.01"] > ends["max R"] + 0.1
    assert ends["a- = 0.1"] > ends["a- = 0.01"] + 0.1
    assert ends["a- = 1: naive REINFORCE"] > ends["a- = 0.1"] + 0.1
    assert lines["a- = 1: naive REINFORCE"].get_color() == STYLES["reinforce"].colour


@pytest.mark.parametrize("name", ["proposition_3_2", "way_back"])
def test_a_legend_covers_no_line(name, tmp_path, monkeypatch):
    axes = draw_alone(name, tmp_path, monkeypatch)
    assert not axes.get_legend().get_window_extent().overlaps(axes.get_window_extent())


# ---- statements ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "is_true",
    [
        torch.tensor([], dtype=torch.bool),
        torch.tensor([True, False]),
        toy.is_near(double(1, math.nan), double(1, math.nan)),
    ],
)
def test_check_fails_in_any_case_and_without_cases(is_true):
    with pytest.raises(toy.CheckFailed) as stop:
        toy.check("this", is_true)
    assert isinstance(stop.value.code, str)  # printed, with exit status 1


# ---- the command ---------------------------------------------------------------------------------
def section_of(name):
    def section(ax, seed):
        print(f"{name} {seed}")
        ax.plot([0, 1], label=name)

    section.__doc__ = f"Statement of {name}."
    return section


@pytest.fixture
def short_sections(monkeypatch):
    """As many sections as there are, which only print and draw their names."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of this process
    monkeypatch.setattr(toy, "SECTIONS", {name: section_of(name) for name in toy.SECTIONS})


def test_command_makes_one_picture_of_all_sections(short_sections, tmp_path, monkeypatch, capsys):
    figures = []

    def save(figure, file, dpi):
        figures.append(figure)
        Path(file).write_text("a picture")

    monkeypatch.setattr(Figure, "savefig", save)
    toy.main(["--out", str(tmp_path / "new" / "folder")])
    printed = capsys.readouterr().out
    places = []
    for name in toy.SECTIONS:
        places += [printed.index(f"Statement of {name}."), printed.index(f"{name} 0")]
    assert places == sorted(places)
    [figure] = figures
    legends = [axes.get_legend().texts[0].get_text() for axes in figure.axes]
    assert legends == list(toy.SECTIONS)
    assert (tmp_path / "new" / "folder" / "bandit.png").exists()


def test_command_makes_one_section(short_sections, tmp_path, capsys):
    toy.main(["appendix_c", "--out", str(tmp_path), "--seed", "3"])
    printed = capsys.readouterr().out
    assert "appendix_c 3" in printed
    assert "way_back" not in printed
    assert [file.name for file in tmp_path.iterdir()] == ["appendix_c.png"]
    assert (tmp_path / "appendix_c.png").read_bytes().startswith(b"\x89PNG")


def test_command_names_a_folder_that_it_cannot_use(short_sections, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as stop:
        toy.main(["way_back", "--out", str(tmp_path / "file")])
    [line] = stop.value.code.splitlines()
    assert "--out" in line
    assert str(tmp_path / "file") in line
    assert "way_back" not in capsys.readouterr().out


def test_command_names_its_sections(capsys):
    with pytest.raises(SystemExit) as stop:
        toy.main(["way"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert all(name in error for name in toy.SECTIONS)


@pytest.mark.parametrize("seed", ["-1", str(10**30), "x"])
def test_seed_that_torch_does_not_take_is_refused(short_sections, tmp_path, capsys, seed):
    with pytest.raises(SystemExit) as stop:
        toy.main(["appendix_c", "--out", str(tmp_path / "out"), "--seed", seed])
    assert stop.value.code == 2
    assert "--seed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_false_statement_ends_the_program_without_asserts_too(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(topr, "effective_proportion", lambda p, c: p)
    source = Path(toy.__file__).read_text(encoding="utf-8")
    program = {"__name__": "toy_bandit.py"}
    exec(compile(source, toy.__file__, "exec", optimize=2), program)  # as python -OO does
    with pytest.raises(SystemExit) as stop:
        program["main"](["appendix_c", "--out", str(tmp_path)])
    assert type(stop.value).__name__ == "CheckFailed"
