"""Verdicts on the paper's claims."""

import math

import pytest

from figures.claims import (
    CONTRADICTED,
    INCONCLUSIVE,
    NOT_MET,
    NOT_RUN,
    REPRODUCED,
    ClaimResult,
    claims_table,
    details_text,
    expected_range,
    find_number,
    forest,
    judge_claim,
    judge_interval,
    margin,
    narrow_verdicts,
    number_text,
)
from toprlib.report import Estimate

FILE = {
    "runs": 3,
    "learning_rates": {"TOPR": {"1e-05": 0.5, "3e-05": 0.75}},
    "shares": {"gain": {"mean": 0.5, "half_width": 0.125, "each": [0.25, 0.75]}},
    "numbers": {"rate": {"mean": 0.3, "half_width": None, "each": [0.3]}},
}
CLAIM = {
    "id": "a",
    "figure": "fig1",
    "key": "gain",
    "expected": "> 0",
    "short": "gain",
    "claim": "",
}


def load(name):
    return {"fig1": FILE, "fig2": FILE | {"runs": 0}}[name]


@pytest.mark.parametrize(
    ("estimate", "expected", "verdict"),
    [
        (Estimate(3.0, 1.0), "> 0", REPRODUCED),
        (Estimate(3.0, 1.0), "> 2", INCONCLUSIVE),  # touches the bound
        (Estimate(3.0, 1.0), "< 0", CONTRADICTED),
        (Estimate(-3.0, 1.0), "within 2", INCONCLUSIVE),
        (Estimate(-3.0, 0.5), "within 2", CONTRADICTED),
        (Estimate(0.0, 1.0), "within 2", REPRODUCED),
        (Estimate(0.0, 9.0), "within 2", INCONCLUSIVE),
        (Estimate(3.0), "> 0", INCONCLUSIVE),  # a single seed
    ],
)
def test_a_verdict_says_where_the_whole_interval_lies(estimate, expected, verdict):
    assert judge_interval(estimate, expected) == verdict


def test_ranges_are_open_and_two_sided_where_no_difference_is_expected():
    assert expected_range("< 16") == (-math.inf, 16)
    assert expected_range("within 0.5") == (-0.5, 0.5)


def test_shares_are_judged_in_percentage_points_and_numbers_as_they_are():
    assert find_number(load, "fig1", "gain") == Estimate(50.0, 12.5, (25.0, 75.0))
    assert find_number(load, "fig1", "rate") == Estimate(0.3, None, (0.3,))
    assert find_number(load, "fig1", "no such") is None


def test_a_number_of_a_figure_without_runs_is_exact():
    assert find_number(load, "fig2", "rate").half_width == 0
    claim = CLAIM | {"figure": "fig2", "key": "rate", "expected": "within 1"}
    assert judge_claim(claim, load).verdict == REPRODUCED


@pytest.mark.parametrize(
    ("changes", "verdict", "missing"),
    [
        ({}, REPRODUCED, ""),
        ({"key": ""}, NOT_RUN, ""),
        ({"key": "no such"}, NOT_RUN, ""),
        ({"needs": [("fig1", "rate", "> 0.2", "met")]}, REPRODUCED, ""),
        ({"needs": [("fig1", "rate", "> 0.4", "unmet")]}, NOT_MET, "unmet"),
        (
            {
                "needs": [
                    ("fig1", "rate", "> 0.2", "met"),
                    ("fig1", "rate", "> 0.4", "first"),
                    ("fig1", "rate", "> 0.5", "second"),
                ]
            },
            NOT_MET,
            "first",
        ),
        (
            {"needs": [("fig1", "rate", "> 0.4", "unmet"), ("fig1", "no such", "> 0", "unknown")]},
            NOT_RUN,
            "",
        ),
    ],
)
def test_a_claim_needs_its_number_and_its_preconditions(changes, verdict, missing):
    result = judge_claim(CLAIM | changes, load)
    assert (result.verdict, result.missing) == (verdict, missing)
    assert (result.estimate is None) == (verdict == NOT_RUN)


def test_a_number_is_shown_with_its_unit_unless_that_is_points():
    assert number_text(judge_claim(CLAIM, load)) == "50.0 ± 12.5"
    in_percent = judge_claim(CLAIM | {"unit": "%"}, load)
    assert number_text(in_percent) == "50.0 ± 12.5 %"
    plain = judge_claim(CLAIM | {"unit": "", "key": "rate"}, load)
    assert number_text(plain) == "0.30"


def test_learning_rate_and_unusual_number_of_seeds_stand_beside_a_number():
    assert details_text(judge_claim(CLAIM, load), load) == " (2 seeds)"
    at_rate = judge_claim(CLAIM | {"rate": "TOPR", "over": "places"}, load)
    assert details_text(at_rate, load) == " (3e-5, 2 places)"
    not_tuned = judge_claim(CLAIM | {"rate": "no such", "key": "rate"}, load)
    assert details_text(not_tuned, load) == ""


def test_the_table_names_a_figure_once_and_the_paper_s_number():
    claims = [CLAIM | {"claim": "It rises", "paper": 4.2}, CLAIM | {"claim": "Again"}]
    rows = claims_table([judge_claim(claim, load) for claim in claims], load, "README.md").rows
    assert rows == [
        [
            "[Figure 1](README.md#figure-1)",
            "It rises (paper: 4.2)",
            "50.0 ± 12.5 (2 seeds)",
            f"**{REPRODUCED}**",
        ],
        ["", "Again", "50.0 ± 12.5 (2 seeds)", f"**{REPRODUCED}**"],
    ]


@pytest.mark.parametrize("key", ["no such", ""])
def test_the_table_has_claims_without_a_number(key):
    result = judge_claim(CLAIM | {"key": key, "rate": "TOPR"}, load)
    [row] = claims_table([result], load, "README.md").rows
    assert row[2:] == ["not run yet" if key else "needs GPUs", f"**{NOT_RUN}**"]
    assert narrow_verdicts([result], limit=100) == []


@pytest.mark.parametrize(
    ("mean", "half_width", "expected", "distance"),
    [
        (3.0, 1.0, "> 0", 2),
        (-3.0, 1.0, "> 0", 2),
        (0.5, 1.0, "< 0", 0.5),
        (-1.0, 0.75, "within 2", 0.25),
        (2.5, 0.25, "within 2", 0.25),
    ],
)
def test_margin_is_the_distance_to_another_verdict(mean, half_width, expected, distance):
    result = ClaimResult({"expected": expected}, Estimate(mean, half_width), REPRODUCED)
    assert margin(result) == distance


def test_narrow_verdicts_are_definite_and_in_points():
    near = CLAIM | {"expected": "> 37"}
    results = [
        judge_claim(near, load),
        judge_claim(CLAIM, load),
        judge_claim(near | {"expected": "> 38"}, load),
        judge_claim(near | {"unit": "%"}, load),
    ]
    assert narrow_verdicts(results, limit=0.5) == results[:1]


def test_the_picture_mirrors_what_the_paper_expects_below_zero():
    falls = judge_claim(CLAIM | {"expected": "< 0"}, load)
    with_paper = judge_claim(CLAIM | {"id": "b", "paper": 4.2}, load)
    [panel] = forest([falls, with_paper])
    by_label = {line.label: line for line in panel.lines}
    assert list(by_label[CONTRADICTED].x) == [-50]
    assert list(by_label[CONTRADICTED].y) == [0]
    assert by_label[CONTRADICTED].each == [[-25, -75]]
    assert list(by_label[REPRODUCED].x) == [50]
    assert list(by_label[REPRODUCED].y) == [-1]
    assert by_label[REPRODUCED].each == [[25, 75]]
    assert list(by_label["the paper's"].x) == [4.2]
    assert list(by_label["the paper's"].y) == [-1]
