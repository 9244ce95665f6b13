"""Verdicts on the paper's claims."""

import math

import pytest

from figures.claims import (
    CONTRADICTED,
    INCONCLUSIVE,
    NOT_MET,
    NOT_RUN,
    REPRODUCED,
    expected_range,
    find_number,
    forest,
    judge_claim,
    judge_interval,
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


def test_a_number_is_shown_with_its_unit_and_its_learning_rate():
    assert number_text(judge_claim(CLAIM, load), load) == "50.0 ± 12.5 points"
    at_rate = judge_claim(CLAIM | {"rate": "TOPR"}, load)
    assert number_text(at_rate, load) == "50.0 ± 12.5 points at 3e-5"
    plain = judge_claim(CLAIM | {"unit": "", "key": "rate"}, load)
    assert number_text(plain, load) == "0.30"


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
