"""Numbers of README.md and results/README.md, computed again from the files of results/.

Each row has a text with {} for the numbers, and what computes them. The text must occur.
"""

import json
import math
from statistics import mean, stdev

import pandas as pd
import pytest
from test_links import ROOT

RESULTS = ROOT / "results"
FAIR = pd.read_csv(RESULTS / "fair_a.csv")
STUDENT_T = {3: 4.303, 5: 2.776, 10: 2.262, 13: 2.179}  # 97.5 % quantile for n values, of a table
STUDIES = pd.read_csv(RESULTS / "studies" / "settings.csv")


def with_interval(values):
    """The mean of values of seeds, and half of its 95 % interval."""
    values = list(values)
    half_width = STUDENT_T[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.1f} ± {half_width:.1f}"


def in_fair(set_name, base, first, second, metric="pass@1", seeds=range(10)):
    """An arm of experiment A minus another, in points, for each seed."""
    rows = FAIR.query("set == @set_name and base == @base and seed in @seeds")
    values = {arm: of_arm.set_index("seed")[metric] for arm, of_arm in rows.groupby("arm")}
    return 100 * (values[first] - values[second])


def in_figure(name, key):
    """The seeds' values of a share of a figure, in percent."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    return [100 * value for value in content["shares"][key]["each"]]


def of_shares(rate):
    """Shares of 20 minus 80 % at a rate, in sets with a tenth right, for two bases x five seeds."""
    rows = STUDIES[STUDIES["setting"].str.endswith("10 % positive") & (STUDIES["rate"] == rate)]
    values = rows.pivot(index=["setting", "seed"], columns="arm", values="pass@1")
    return 100 * (values["20 %"] - values["80 %"])


def of_rates(method, rate):
    """Accuracy on held-out problems, in percent."""
    rates = json.loads((RESULTS / "rates.json").read_text())["data"][method]
    return f"{100 * rates['mean'][rates['lr'].index(rate)]:.1f}"


RARE = ("rare", "worded"), ("rare", "two_thirds")
NATURAL = ("natural", "worded"), ("natural", "two_thirds")
SHARE = {("rare", "worded"): 50, ("rare", "two_thirds"): 50, ("natural", "worded"): 70}
METHODS = ("naive REINFORCE", "PPO", "DPO")


def share_arm(place):
    """TOPR with the recommended share."""
    return f"TOPR, share {SHARE.get(place, 90)}%"


def lead(place, other="SFT, repeated", **choices):
    """TOPR with its recommended share minus another arm. choices: metric, seeds."""
    return in_fair(*place, share_arm(place), other, **choices)


def of_places(places, other):
    """The leads of some places."""
    return [with_interval(lead(place, other)) for place in places]


def further(place, other="SFT, repeated"):
    """The mean of TOPR with its share minus another arm in the two further seeds."""
    return f"{mean(lead(place, other, seeds=(60, 61))):.1f}"


LEADS = of_places((*RARE, *NATURAL), "SFT, repeated")
LEADS_IN_POINTS = [-mean(lead(place)) for place in (*RARE, *NATURAL)]
FIGURES = {  # a claim's numbers in the table of results/README.md -> figure and keys
    "at own rates {}, {}, {}": ("fig1", *[f"TOPR - {other}, own rates" for other in METHODS]),
    "{}; {}": ("fig3", *[f"{arm} - base, one rate: invalid" for arm in ("TOPR", METHODS[0])]),
    "{} at 3e-5; {}": ("fig4", *[f"TOPR - positives only{rate}" for rate in ("", ", own rate")]),
    "| {} | precondition": ("fig4", "TOPR - positives only: maj@16"),
    "one pass {}, after four {}": (
        "fig6",
        *[f"TOPR - TIS, p~ = 1%{when}" for when in (", after one pass", "")],
    ),
    "with SGD TOPR ends {} above, with AdamW {}": (
        "fig7",
        *[f"{name}, 60% negative, clipped at 100: TOPR - plain IS" for name in ("sgd", "adamw")],
    ),
    "(4.2) | {} |": ("fig8", "Anna Karenina - uniform: pass@1, mean of iterations 1 to 3"),
    "all of them right | {} at one rate; {} at own rates": (
        "fig8",
        *[
            f"uniform - positives only: pass@1, mean of iterations 1 to 3{rate}"
            for rate in ("", ", own rate")
        ],
    ),
    "weight | {} |": ("fig9", "p~ = 10% - p~ = 80%: weight of the three hardest buckets"),
    "| {}; {} | reproduced, from": (
        "table2",
        "checker, TOPR - base: verifier accuracy",
        "checker, TOPR - no verifier: weighted self-consistency",
    ),
}
TEXTS = [  # page, and a text that it must have
    ("README.md", f"by {min(LEADS_IN_POINTS):.1f} to {max(LEADS_IN_POINTS):.1f} points"),
    ("docs/in_your_trainer.md", f"by {LEADS[0][1:]} and {LEADS[1][1:]} points on two bases"),
    ("docs/in_your_trainer.md", f"by {LEADS[2][1:]} and {LEADS[3][1:]} points on all samples"),
    (
        "results/README.md",
        f"{LEADS[0]} on the weaker base. On the stronger one it is {LEADS[1]}",
    ),
    ("results/README.md", f"the differences are {LEADS[2]} and {LEADS[3]}."),
    ("results/README.md", "by {} and {} where".format(*of_places(RARE, "SFT"))),
    ("README.md", f"keeps {of_rates('topr', 3e-4)} %, TIS {of_rates('tis', 3e-4)} %."),
    ("results/README.md", f"keeps {of_rates('topr', 3e-4)} % right, and TIS, the next,"),
    ("results/README.md", f"{of_rates('tis', 3e-4)} %. SFT is more stable still, with"),
    ("results/README.md", f"still, with {of_rates('sft', 3e-4)} %. At SFT's best rate TOPR has"),
    (
        "results/README.md",
        f"{of_rates('topr', 1e-4)} %, and naive REINFORCE {of_rates('reinforce', 1e-4)} %",
    ),
    ("results/README.md", f"the second lead is {further(RARE[1], 'SFT')}."),
    ("results/fair.md", "{} and {} where a tenth".format(*map(further, RARE))),
    ("results/fair.md", "{} and {} on all samples".format(*map(further, NATURAL))),
    ("results/fair.md", f"TOPR leads SFT once by {further(RARE[1], 'SFT')}"),
    (
        "results/README.md",
        f"{with_interval(of_shares(1e-5))} at 1e-5; {with_interval(of_shares(1e-4))} at 1e-4",
    ),
]
for text, (figure, *keys) in FIGURES.items():
    numbers = [with_interval(in_figure(figure, key)) for key in keys]
    TEXTS.append(("results/README.md", text.format(*numbers)))
for place in (*RARE, *NATURAL):  # of the table of predictions and outcomes
    for metric in ("pass@1", "maj@16"):
        TEXTS.append(("results/fair.md", with_interval(lead(place, metric=metric))))
    for differences in (in_fair(*place, "SFT, repeated", "SFT"), lead(place, "TOPR")):
        TEXTS.append(("results/fair.md", with_interval(differences)))


@pytest.mark.parametrize(("page", "text"), TEXTS)
def test_numbers_of_pages_are_those_of_the_files(page, text):
    content = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert text in content
