"""Verdicts on the paper's claims."""

import pytest

from figures import claims
from figures.claims import find_number, judge

FILE = {
    "runs": 3,
    "learning_rates": {"TOPR": {"1e-05": 0.5, "3e-05": 0.75}},
    "shares": {"gain": {"mean": 0.5, "half_width": 0.125, "each": [0.25, 0.75]}},
    "numbers": {"rate": {"mean": 0.3, "half_width": None, "each": [0.3]}},
}
CLAIM = {"figure": "fig1", "key": "gain", "expected": "> 0", "short": "gain", "claim": "It rises"}


def load(name):
    return {"fig1": FILE, "fig2": FILE | {"runs": 0}}[name]


@pytest.mark.parametrize(
    ("mean", "half_width", "expected", "verdict"),
    [
        (3.0, 1.0, "> 0", "reproduced"),
        (3.0, 1.0, "> 2", "inconclusive"),  # touches the bound
        (3.0, 1.0, "< 0", "contradicted"),
        (-3.0, 1.0, "within 2", "inconclusive"),
        (-3.0, 0.5, "within 2", "contradicted"),
        (0.0, 1.0, "within 2", "reproduced"),
        (0.0, 9.0, "within 2", "inconclusive"),
        (3.0, None, "> 0", "inconclusive"),  # a single seed
    ],
)
def test_a_verdict_says_where_the_whole_interval_lies(mean, half_width, expected, verdict):
    number = {"mean": mean, "half_width": half_width, "each": []}
    assert judge(CLAIM | {"number": number, "expected": expected}, load)["verdict"] == verdict


def test_numbers_are_judged_in_their_units():
    gain = {"mean": 50.0, "half_width": 12.5, "each": [25.0, 75.0]}
    assert find_number(load, "fig1", "gain") == gain
    assert find_number(load, "fig1", "rate") == {"mean": 0.3, "half_width": None, "each": [0.3]}
    assert find_number(load, "fig1", "no such") is None
    assert find_number(load, "fig2", "rate")["half_width"] == 0  # needs no runs: exact


MET = ("fig1", "rate", "> 0.2", "met")
UNMET = ("fig1", "rate", "> 0.4", "unmet")
UNKNOWN = ("fig1", "no such", "> 0", "unknown")


@pytest.mark.parametrize(
    ("changes", "verdict", "missing"),
    [
        ({"key": "no such"}, "not run", ""),
        ({"needs": [MET]}, "reproduced", ""),
        ({"needs": [MET, UNMET]}, "precondition not met", " (missing: unmet)"),
        ({"needs": [UNMET, UNKNOWN]}, "not run", ""),
    ],
)
def test_a_claim_needs_its_number_and_its_preconditions(changes, verdict, missing):
    judged = judge(CLAIM | changes, load)
    assert (judged["verdict"], judged["missing"]) == (verdict, missing)


def test_the_table_has_numbers_with_units_rates_and_unusual_seeds():
    judged = [
        judge(CLAIM | {"paper": 4.2, "rate": "TOPR"}, load),
        judge(CLAIM | {"over": "places", "unit": "%"}, load),
        judge(CLAIM | {"unit": "", "within": [40, 60]}, load),
    ]
    rows = claims.claims_table(judged, load).splitlines()[2:5]
    name = "[Figure 1](README.md#figure-1)"
    verdict = "**reproduced**"
    assert rows == [
        f"| {name} | It rises (paper: 4.2) | 50.0 ± 12.5 (3e-5, 2 seeds) | {verdict} |",
        f"|  | It rises | 50.0 ± 12.5 % (2 places) | {verdict} |",
        f"|  | It rises | 25.00, 75.00 (2 seeds) | {verdict} |",
    ]
    line = "- **reproduced:** gain: 50.0 ± 12.5; gain: 50.0 ± 12.5 %"
    assert claims.numbers_list(judged[:2], "fig1") == line
    assert claims.number_text(judge(CLAIM | {"key": ""}, load)) == "needs GPUs"


def test_every_claim_s_number_is_published():
    for claim in claims.load_results("claims"):
        judged = judge(claim, claims.load_results)
        assert (judged["verdict"] == "not run") == (not claim["key"]), claim["id"]
