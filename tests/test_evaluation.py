"""The metrics against an enumeration of all draws, and the paper's interval."""

import math
from collections import Counter
from itertools import permutations
from statistics import fmean, pvariance

import numpy as np
import pytest

from pipeline.evaluation import (
    METRICS,
    Answers,
    Scored,
    collect,
    estimate,
    evaluate,
    evaluate_held_out,
    to_table,
    wins,
)
from pipeline.records import InputError, Sample, Task

REWARDS = {
    "r": 1.0,
    "w": -1.0,
    "x": -0.5,
    "-": -2.0,
}  # r: a right answer, w and x wrong ones, -: none at all
QUESTIONS = ("rrwwx-", "r-----", "wwwxx-", "rwxwr-", "rrrrrw")

ORACLES = {  # a metric's score of the letters that were drawn, in their order
    "pass@1": lambda drawn: "r" in drawn,
    "maj@k": lambda drawn: (
        ([*Counter(letter for letter in drawn if letter != "-").most_common(1), "-"][0][0]) == "r"
    ),
    "pass@k": lambda drawn: "r" in drawn,
    "reward": lambda drawn: fmean(REWARDS[letter] for letter in drawn),
}


def answers_of(*questions):
    return Answers(
        np.array([[letter == "r" for letter in question] for question in questions]),
        [[None if letter == "-" else letter for letter in question] for question in questions],
        np.array([[REWARDS[letter] for letter in question] for question in questions]),
    )


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", METRICS)
def test_a_metric_and_its_interval_are_those_of_all_draws(name, k):
    """In order, because a tie goes to the answer that was drawn first; questions are drawn independently."""
    scores = [
        [ORACLES[name](drawn) for drawn in permutations(question, k)] for question in QUESTIONS
    ]
    variance, repeats = sum(map(pvariance, scores)) / len(QUESTIONS) ** 2, 4000
    found = estimate(METRICS[name].score, answers_of(*QUESTIONS), k, 0, repeats)
    assert found.mean == pytest.approx(
        fmean(map(fmean, scores)), abs=4 * math.sqrt(variance / repeats)
    )
    assert found.half_width == pytest.approx(2 * math.sqrt(k * variance / (6 - k)), rel=0.06)


def test_a_tie_goes_to_the_first_of_the_samples():
    assert [wins(answers_of("rw"), 0, samples) for samples in ([0, 1], [1, 0])] == [True, False]
    scored = [Scored(0, *of, -1.0) for of in ((1.0, 2, -4.0), (-1.0, 2, -4.0), (-1.0, 2, -4.2))]
    assert (
        evaluate_held_out(scored)["ranked"]["mean"] == 0.5
    )  # a positive is not ahead of a negative that is alike


def test_all_samples_have_an_estimate_and_no_interval():
    """The paper's maj@16 from 16 samples on MATH: a count by hand, and nothing that could be drawn otherwise."""
    answers = answers_of(
        "r" * 9 + "w" * 7, "r" * 7 + "w" * 9, "r" * 4 + "w" * 3 + "x" * 3 + "-" * 6
    )
    for name, mean in (("maj@k", 2 / 3), ("pass@k", 1)):
        assert estimate(METRICS[name].score, answers, 16, seed=0) == (pytest.approx(mean), None, ())
        for k in (0, 17):
            with pytest.raises(
                InputError, match=f"K = {k}: must be at least 1 and at most the 16 samples"
            ):
                estimate(METRICS[name].score, answers, k, seed=0)


def test_an_entry_of_results_has_the_metrics_of_the_task_and_the_table_shows_them(capsys):
    outcomes = ("right", "wrong")
    samples = [
        Sample(
            problem_id=q, prompt="?", completion=x, reward=REWARDS[x], outcome=outcomes[x != "r"]
        )
        for q in ("rrrrw", "rw--x")
        for x in q
    ]
    votes = Task(
        "a", [], [], outcomes=outcomes, parse=lambda text: None if text == "-" else text, grade=str
    )
    found = evaluate(samples, votes, 5, seed=0)
    assert {
        *outcomes,
        "pass@1",
        "maj@5",
        "pass@5",
        "questions",
        "samples_per_question",
    } <= found.keys()
    assert "reward" not in found
    assert found["pass@1"]["mean"] == found["right"] == 0.5
    variance = (pvariance([1, 1, 1, 1, 0]) + pvariance([1, 0, 0, 0, 0])) / 4
    assert found["pass@1"]["se"] == pytest.approx(math.sqrt(variance / 4), rel=0.3)
    assert found["pass@5"] == {"mean": 1, "se": None}
    assert found == evaluate(samples, votes, 5, seed=0) != evaluate(samples, votes, 5, seed=1)

    rewarded = evaluate(samples, Task("b", [], [], outcomes=outcomes, reward=str), 6, seed=0)
    assert not [
        name for name in rewarded if name.startswith("maj") or name.endswith("@6")
    ]  # of five samples
    assert rewarded["reward"]["mean"] == pytest.approx(fmean(sample.reward for sample in samples))

    to_table({"before": found | {"reward": rewarded["reward"]}, "iterations": []}).print()
    rows = [
        [cell.strip() for cell in line.split("│")[1:3]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert ["wrong", "50.0 %"] in rows
    assert ["pass@5", "100.0 %"] in rows  # of five samples: without an interval
    half = {"right": 200 * found["pass@1"]["se"], "mean reward": 2 * rewarded["reward"]["se"]}
    assert ["right", f"50.0 ± {half['right']:.1f} %"] in rows  # and no row pass@1
    assert ["mean reward", f"{rewarded['reward']['mean']:.3f} ± {half['mean reward']:.3f}"] in rows
    assert not any(row[:1] == ["pass@1"] for row in rows)


def test_what_stands_behind_the_stop_string_does_not_vote():
    task = Task("sums", [], [], grade=str, stop=("Q:",), parse=str.strip)
    samples = [
        Sample(problem_id="1", prompt="", completion=text, reward=1.0, outcome="correct")
        for text in ("7", "7 Q:")
    ]
    assert collect(samples, task).votes == [["7", "7"]]
