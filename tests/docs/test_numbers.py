"""Numbers of README.md and results/README.md, computed again from the files of results/."""

import json
import math
from itertools import product
from statistics import mean, stdev

import pandas as pd
import pytest
from helpers import ROOT

RESULTS = ROOT / "results"
EXPERIMENT_A = pd.read_csv(RESULTS / "fair_a.csv").replace({"arm": " [0-9]+%"}, "", regex=True)
EXPERIMENT_B = pd.read_csv(RESULTS / "fair_b.csv")
EXPERIMENT_B["arm"] += EXPERIMENT_B["rate"].map(" {:g}".format)
FAIR = pd.concat([EXPERIMENT_A, EXPERIMENT_B])
# 97.5 % quantile for n values, of a table
STUDENT_T = {3: 4.303, 5: 2.776, 6: 2.571, 10: 2.262, 13: 2.179}


def with_interval(values):
    """The mean of values of seeds, and half of its 95 % interval."""
    values = list(values)
    half_width = STUDENT_T[len(values)] * stdev(values) / math.sqrt(len(values))
    return f"{mean(values):.1f} ± {half_width:.1f}"


def in_fair(set_name, base, first, second, metric="pass@1", seeds=range(10)):
    """An arm of an experiment minus another, in points, for each seed."""
    rows = FAIR.query("set == @set_name and base == @base and seed in @seeds")
    values = {arm: of_arm.set_index("seed")[metric] for arm, of_arm in rows.groupby("arm")}
    return 100 * (values[first] - values[second])


def in_figure(name, key):
    """The seeds' values of a share of a figure, in percent."""
    content = json.loads((RESULTS / f"{name}.json").read_text())
    return [100 * value for value in content["shares"][key]["each"]]


def of_rates(method, rate):
    """Accuracy on held-out problems, in percent."""
    rates = json.loads((RESULTS / "rates.json").read_text())["data"][method]
    return round(100 * rates["mean"][rates["lr"].index(rate)], 1)


RARE = ("rare", "worded"), ("rare", "two_thirds")
NATURAL = ("natural", "worded"), ("natural", "two_thirds")
METHODS = ("naive REINFORCE", "PPO", "DPO")


def lead(place, other="SFT, repeated", **choices):
    """TOPR with its recommended share minus another arm. choices: metric, seeds."""
    return in_fair(*place, "TOPR, share", other, **choices)


def further(place, other="SFT, repeated"):
    """The mean of TOPR with its share minus another arm in the two further seeds."""
    return f"{mean(lead(place, other, seeds=(60, 61))):.1f}"


PLACES = (*RARE, *NATURAL)
LEADS = [with_interval(lead(place)) for place in PLACES]
LEADS_IN_POINTS = [-mean(lead(place)) for place in PLACES]
LEADS_OVER_ONCE = [with_interval(lead(place, "SFT")) for place in PLACES]
WITHOUT_BASELINE = [with_interval(in_fair(*place, "TOPR", "SFT")) for place in PLACES]
COLLAPSE = of_rates("topr", 1e-4) - of_rates("reinforce", 1e-4)
PAIRS_OF_B = (  # of arms, each with its rate
    ("TOPR, share 50% 1e-05", "SFT, repeated 1e-05"),
    ("TOPR, share 50% 1e-05", "SFT, repeated 0.0001"),
    ("TOPR, share 20% 1e-05", "TOPR, share 80% 1e-05"),
    ("TOPR, share 20% 0.0001", "TOPR, share 80% 0.0001"),
    ("TOPR, share 50% 1e-05", "TOPR, share 50% 0.0001"),
    ("TOPR, share 50% 0.0001", "SFT, repeated 0.0001"),
)
LEADS_OF_B = []  # on both bases, for each pair
for first, second in PAIRS_OF_B:
    LEADS_OF_B.append([with_interval(in_fair(*place, first, second)) for place in RARE])
FIGURES = {  # a claim's numbers in the table of results/README.md -> figure and keys
    "at own rates {}, {}, {}": ("fig1", *[f"TOPR - {other}, own rates" for other in METHODS]),
    "{}; {}": ("fig3", *[f"{arm} - base, one rate: invalid" for arm in ("TOPR", METHODS[0])]),
    "{} at 3e-5; {}": ("fig4", *[f"TOPR - positives only{rate}" for rate in ("", ", own rate")]),
    "| {} | precondition": ("fig4", "TOPR - positives only: maj@16"),
    "a tenth right: {} at 3e-5, {} at 1e-4; half right: {}, {} |": (
        "fig5",
        *[
            f"{set_name} positive: p~ = 20% - p~ = 80%{rate}"
            for set_name, rate in product(("10%", "50%"), ("", ", second best rate"))
        ],
    ),
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
    "10 minus 80 %: {} |": ("fig9", "p~ = 10% - p~ = 80%: weight of the three hardest buckets"),
    "| {}; {} | reproduced, from": (
        "table2",
        "checker, TOPR - base: verifier accuracy",
        "checker, TOPR - no verifier: weighted self-consistency",
    ),
}
TEXTS = [  # page, and a text that it must have
    ("README.md", f"by {min(LEADS_IN_POINTS):.1f} to {max(LEADS_IN_POINTS):.1f} points"),
    ("README.md", f"TOPR leads by {LEADS_OF_B[0][1]} on the stronger base."),
    ("README.md", f"leads SFT's one pass at 1e-4, by {LEADS_OF_B[1][1]}."),
    ("results/README.md", f"naive REINFORCE ends {COLLAPSE:.1f} points below TOPR"),
    ("results/README.md", f"wrong answers help on the stronger base**, by {LEADS_OF_B[0][1]}"),
    ("results/README.md", f"two further seeds have {further(RARE[1], 'SFT')} against"),
    ("results/fair.md", f"The new seeds have {further(RARE[1], 'SFT')}."),
    ("docs/in_your_trainer.md", " | ".join(LEADS[:2])),
    ("docs/in_your_trainer.md", " | ".join(LEADS[2:])),
    ("docs/in_your_trainer.md", " | ".join(LEADS_OF_B[0])),
]
for leads in (LEADS, LEADS_OF_B[0], LEADS_OVER_ONCE, WITHOUT_BASELINE):
    TEXTS.append(("results/README.md", " | ".join(leads)))
for leads in LEADS_OF_B:
    TEXTS += [("results/fair.md", each) for each in leads]
for text, (figure, *keys) in FIGURES.items():
    numbers = [with_interval(in_figure(figure, key)) for key in keys]
    TEXTS.append(("results/README.md", text.format(*numbers)))
for place in PLACES:  # of the table of predictions and outcomes
    for metric in ("pass@1", "maj@16"):
        TEXTS.append(("results/fair.md", with_interval(lead(place, metric=metric))))
    for differences in (in_fair(*place, "SFT, repeated", "SFT"), lead(place, "TOPR")):
        TEXTS.append(("results/fair.md", with_interval(differences)))


@pytest.mark.parametrize(("page", "text"), TEXTS)
def test_numbers_of_pages_are_those_of_the_files(page, text):
    content = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert text in content
