"""The numbers in the text of results/README.md are those of the files that it names."""

import re

import numpy as np
import pytest
from docs_helpers import at_rate, read_page

from scripts.make_tables import load
from toprlib.report import Estimate

LOW, HIGH = "lr 3e-05", "lr 0.0001"  # the learning rates, as figures name them


def published(file, key):
    """A number of a file, in points."""
    fields = load(file)["shares"][key]
    return Estimate(100 * fields["mean"], 100 * fields["half_width"])


def fig4_end(rate, arm, metric="correct"):
    """The last point of a line of Figure 4, in each seed, in per cent."""
    return 100 * np.array(load("fig4")["data"][rate][metric][arm]["each"][-1])


def fig4_difference(left, right):
    return Estimate.over_seeds(fig4_end(*left) - fig4_end(*right))


def share_difference(rate, share):
    """A share minus a share of 100 % in Figure 5's set with 10 % positives."""
    data = load("fig5")["data"]
    each = 100 * np.array(data[rate]["10% positive"]["each"])
    share_index = data["p~"].index(share)
    full_index = data["p~"].index(1.0)
    return Estimate.over_seeds(each[share_index] - each[full_index])


def tuned(base, name, method="TOPR"):
    """TOPR less SFT on a set of the study, with rates and share chosen on other seeds."""
    return published(
        "rate_and_share",
        f"base of {base}, {name}: {method}, tuned - SFT, tuned, pass@1, over seeds",
    )


def study_difference(base, left, right, name="10 % positive", lr=1e-4, metric="right"):
    """Two shares at one rate in a set of the study rate_and_share."""
    values = [at_rate((base, name), arm, lr, metric) for arm in (left, right)]
    return Estimate.over_seeds(values[0] - values[1])


def sft_less_topr_at_nearly_equal_rates():
    """SFT at its own rate, 1e-4, less TOPR at three times its own, 9e-5."""
    shares = load("robustness")["shares"]
    sft = shares["SFT on positives, best rate: correct at the end"]["each"]
    topr = shares["TOPR, three times the rate: correct at the end"]["each"]
    return Estimate.over_seeds(100 * (np.array(sft) - np.array(topr)))


def topr_at_1e_4_less_topr_at_3e_5(last=3):
    """TOPR on uniform samples at two rates, in the mean of Figure 8's last iterations."""
    data = load("fig8")["data"]
    low, high = (np.array(data[f"pass@1, {rate}"]["uniform"]["each"]) for rate in (LOW, HIGH))
    return Estimate.over_seeds(100 * (high - low)[-last:].mean(0))


def absolute(estimate):
    return Estimate(abs(estimate.mean), estimate.half_width)


ONLY, AS_MANY = "positives_only", "sft"  # with fewer steps; with as many steps
AT_1_PERCENT = "TOPR - TIS, p~ = 1%"
MEAN = "pass@1, mean of iterations 1 to 3"
ANNA_KARENINA = f"Anna Karenina - uniform: {MEAN}"
AT_3E_5 = f"uniform - positives, as many steps: {MEAN}"
ITS_POSITIVES = f"{AT_3E_5}, own rate"
EQUALLY_MANY = f"uniform - positives only: {MEAN}, own rate"
VOTES = "uniform - positives only: maj@16, mean of iterations 1 to 3"
LAST = "Anna Karenina - uniform: pass@1, last iteration"
ONE_PERCENT = "p~ = 1%, second best rate"
HIGHER = "three times the rate - best rate"
THREE_TIMES = "TOPR - SFT on positives, three times the rate"

# A part of the text, "{}" for the number; digits after the point; the number from the files.
STATEMENTS = [
    ("(Figure 4): by {} points, with SFT at 1e-4", 1, ((HIGH, AS_MANY), (LOW, "topr"))),
    ("ends {} points above TOPR (inconclusive). At equal", 1, ((HIGH, ONLY), (LOW, "topr"))),
    ("inconclusive at equal rates: {} points", 1, ((LOW, "topr"), (LOW, AS_MANY))),
    ("at 3e-5 and {} at 1e-4.", 1, ((HIGH, "topr"), (HIGH, AS_MANY))),
    ("TOPR then ends {} points below *positives only*", 1, ((HIGH, ONLY), (LOW, "topr"))),
    ("and {} points below *as many steps*", 1, ((HIGH, AS_MANY), (LOW, "topr"))),
    ("in maj@16: {} points", 1, ((LOW, "topr", "maj@n"), (HIGH, ONLY, "maj@n"))),
    ("SFT is {} points above TOPR at own", 1, lambda: absolute(published("fig8", ITS_POSITIVES))),
    ("TOPR is {} points above SFT at 3e-5", 1, lambda: published("fig8", AT_3E_5)),
    (
        "and {} points below at 1e-4 (inconclusive)",
        1,
        lambda: absolute(published("fig8", f"{AT_3E_5}, second best rate")),
    ),
    ("at 3e-5, {} points below equally many", 2, lambda: absolute(published("fig8", VOTES))),
    (
        "it can be better: {} points at 3e-5",
        1,
        lambda: study_difference("worded", "10 %", "100 %", lr=3e-5, metric="majority"),
    ),
    (
        "at 66 % TOPR ends {} points below",
        1,
        lambda: study_difference("two_thirds", "sft", "topr", name="natural"),
    ),
    ("After the third iteration alone it is {} and", 1, lambda: published("fig8", LAST)),
    ("and {} points. - **A real", 2, lambda: published("fig8", f"{LAST}, second best rate")),
    ("at 1e-4 TOPR is {} points higher", 1, topr_at_1e_4_less_topr_at_3e_5),
    ("iteration alone {}, inconclusive", 1, lambda: topr_at_1e_4_less_topr_at_3e_5(last=1)),
    ("TOPR ends with {} and", 0, lambda: published("fig5", f"10% positive, {ONE_PERCENT}")),
    ("and {} % right in the sets", 0, lambda: published("fig5", f"50% positive, {ONE_PERCENT}")),
    ("It is {} points below", 1, lambda: absolute(published("fig8", ITS_POSITIVES))),
    ("and {} below *equally many", 1, lambda: absolute(published("fig8", EQUALLY_MANY))),
    ("is inconclusive: {} points at 3e-5", 2, lambda: published("fig8", ANNA_KARENINA)),
    ("minus uniform, {} points", 2, lambda: published("fig8", f"{ANNA_KARENINA}, own rate")),
    ("at 3e-5, {} at 1e-4", 1, lambda: published("fig8", f"{ANNA_KARENINA}, second best rate")),
    ("a share of 50 % gives {} points more", 1, lambda: share_difference(HIGH, 0.5)),
    ("and 20 % gives {} points less", 1, lambda: absolute(share_difference(HIGH, 0.2))),
    ("At 3e-5 a share of 20 % gives {} points more", 1, lambda: share_difference(LOW, 0.2)),
    ("TOPR then ends {} and", 1, lambda: tuned("66 %", "10 % positive")),
    ("and {} points above SFT, on two bases", 1, lambda: tuned("46 %", "10 % positive")),
    ("ends {} points above if 66 % are positive", 2, lambda: tuned("66 %", "natural")),
    ("and {} points above if 46 % are", 1, lambda: tuned("46 %", "natural")),
    (
        "a share of 20 % ends {} points above SFT",
        1,
        lambda: study_difference("two_thirds", "20 %", "100 %"),
    ),
    (
        "ends {} points below SFT on the second base",
        1,
        lambda: absolute(tuned("46 %", "10 % positive", "TOPR without a baseline")),
    ),
    (
        "on natural samples {} points below",
        1,
        lambda: absolute(tuned("66 %", "natural", "TOPR without a baseline")),
    ),
    (
        "and {} points above (inconclusive)",
        1,
        lambda: tuned("46 %", "natural", "TOPR without a baseline"),
    ),
    ("and {} points below it", 1, lambda: study_difference("worded", "100 %", "20 %")),
    (
        "It ends {} points above (inconclusive)",
        1,
        lambda: published("fig6", f"{AT_1_PERCENT}, seeds 8 to 12"),
    ),
    ("and {} points in all thirteen", 1, lambda: published("fig6", AT_1_PERCENT)),
    ("it ends {} points below", 1, lambda: absolute(published("fig6", "TOPR - base, p~ = 1%"))),
    (
        "At own rates, SFT ends {} points above TOPR",
        1,
        lambda: absolute(published("robustness", "TOPR - SFT on positives, best rate")),
    ),
    ("rate, TOPR ends {} points higher", 2, lambda: published("robustness", f"TOPR: {HIGHER}")),
    (
        "SFT has {} points less than at 1e-4",
        1,
        lambda: absolute(published("robustness", f"SFT on positives: {HIGHER}")),
    ),
    ("and PPO {} less", 1, lambda: absolute(published("robustness", f"PPO: {HIGHER}"))),
    ("ends {} points above SFT at 3e-4", 1, lambda: published("robustness", THREE_TIMES)),
    ("SFT at 1e-4 ends {} points above TOPR at 9e-5", 1, sft_less_topr_at_nearly_equal_rates),
    (
        "TOPR ends [{} points above SFT]",
        1,
        lambda: published("room_to_learn", "TOPR - SFT, as many steps: pass@1"),
    ),
    (
        "the lead is {} points",
        1,
        lambda: published("real-llm-solved", "TOPR - positives only, as many steps"),
    ),
]


@pytest.mark.parametrize(("text", "digits", "source"), STATEMENTS)
def test_numbers_in_the_text_are_those_of_the_files(text, digits, source):
    estimate = source() if callable(source) else fig4_difference(*source)
    words = " ".join(read_page("results/README.md").split())
    assert text.format(estimate.text(digits=digits)) in words


def test_held_out_accuracies_of_robustness_are_those_of_the_file():
    section = read_page("results/README.md").partition("\n## Robustness")[2].partition("\n## ")[0]
    tried = load("robustness")["learning_rates"]
    [head] = re.findall(r"^\| learning rate.*\|$", section, re.MULTILINE)
    names = head.strip("| ").split(" | ")[1:]
    assert set(names) == set(tried)
    rows = re.findall(r"^\| (\d+e-\d+|0\.\d+) \| (.*) \|$", section, re.MULTILINE)
    assert [float(lr) for lr, _ in rows] == [3e-6, 1e-5, 3e-5, 1e-4, 3e-4]
    for lr, cells in rows:
        shown = [float(share) for share in re.findall(r"[\d.]+(?= %)", cells)]
        expected = [100 * tried[name][f"{float(lr):g}"] for name in names]
        assert shown == pytest.approx(expected, abs=0.05 + 1e-9)


@pytest.mark.parametrize("rate", [LOW, HIGH])
@pytest.mark.parametrize("arm", [ONLY, AS_MANY])
def test_sft_has_the_better_vote_at_both_rates(rate, arm):
    vote = fig4_difference((rate, "topr", "maj@n"), (rate, arm, "maj@n"))
    assert vote.mean + vote.half_width < 0


@pytest.mark.parametrize("arm", [ONLY, AS_MANY])
def test_the_vote_is_inconclusive_at_own_rates(arm):
    vote = fig4_difference((LOW, "topr", "maj@n"), (HIGH, arm, "maj@n"))
    assert abs(vote.mean) < vote.half_width


def test_one_of_six_votes_of_figure_8_is_significant():
    significant = []
    for other in ("positives only", "positives, as many steps"):
        for rate in ("", ", second best rate", ", own rate"):
            key = f"uniform - {other}: maj@16, mean of iterations 1 to 3{rate}"
            vote = published("fig8", key)
            if abs(vote.mean) > vote.half_width:
                significant.append(key)
    assert significant == [VOTES]


def test_one_difference_in_accuracy_is_significant_at_equal_rates():
    significant = []
    for rate in (LOW, HIGH):
        for arm in (ONLY, AS_MANY):
            lead = fig4_difference((rate, "topr"), (rate, arm))
            if abs(lead.mean) > lead.half_width:
                significant.append((rate, arm, lead.mean > 0))
    assert significant == [(LOW, ONLY, True)]


def test_range_over_five_base_models():
    gains = load("curve")["data"]["TOPR - positives, as many steps"]
    means = 100 * np.array(gains["mean"])
    half_widths = 100 * np.array(gains["half_width"])
    words = " ".join(read_page("results/README.md").split())
    assert f"TOPR at 3e-5 ends {means.min():.1f} to {means.max():.1f} points above SFT" in words
    assert (means > half_widths).sum() == 4
