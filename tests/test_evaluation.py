"""pass@k and maj@k against closed forms, and the paper's interval."""

import re
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import evaluation
from pipeline.evaluation import Answers
from pipeline.records import InputError, Sample, Task


def answers_of(*questions):
    """Questions as strings: r a right answer, w and x wrong ones, - none at all."""
    correct = np.array([[letter == "r" for letter in question] for question in questions])
    return Answers(correct, [[None if letter == "-" else letter for letter in question] for question in questions])


@given(st.integers(0, 8), st.integers(1, 7))
def test_pass_at_k_estimates_the_closed_form(right, k):
    found = evaluation.pass_at_k(answers_of("r" * right + "w" * (8 - right)), k, seed=0, repeats=2000)
    assert found.mean == pytest.approx(1 - comb(8 - right, k) / comb(8, k), abs=0.05)


@pytest.mark.parametrize(
    ("question", "k", "expected"),
    [
        ("rrrw", 3, 1),  # two of three at least
        ("wwwr", 3, 0),
        ("r----", 1, 0.2),  # what is not drawn cannot win
        ("r--------", 8, 8 / 9),  # those without an answer do not vote
        ("---", 2, 0),
        ("rwxwr", 4, 0.5),  # the draw without x ties; without an r or a w one side wins
    ],
)
def test_maj_at_k(question, k, expected):
    assert evaluation.maj_at_k(answers_of(question), k, seed=0, repeats=2000).mean == pytest.approx(expected, abs=0.05)


def test_a_tie_goes_to_a_random_side():
    assert evaluation.maj_at_k(answers_of("rrrrwwwwx"), 2, seed=1, repeats=3000).mean == pytest.approx(4 / 9, abs=0.05)


def test_v21_standard_error():
    assert evaluation.standard_error(0.18, k=1, n=64) == pytest.approx(0.053452, abs=1e-6)


@pytest.mark.parametrize("k", [0, 17])
def test_k_must_be_among_the_numbers_of_samples(k):
    with pytest.raises(InputError, match=f"K = {k}: must be at least 1 and at most the 16 samples"):
        evaluation.pass_at_k(answers_of("r" * 16), k, seed=0)


def test_all_samples_have_an_estimate_and_no_interval():
    """The paper's maj@16 from 16 samples on MATH: a count by hand, and nothing that could be drawn otherwise."""
    answers = answers_of("r" * 9 + "w" * 7, "r" * 7 + "w" * 9, "r" * 4 + "w" * 3 + "x" * 3 + "-" * 6)
    assert evaluation.maj_at_k(answers, 16, seed=0) == (pytest.approx(2 / 3), None)
    assert evaluation.pass_at_k(answers, 16, seed=0) == (1, None)
    tied = evaluation.maj_at_k(answers_of("rrww"), 4, seed=0, repeats=2000)
    assert tied.mean == pytest.approx(0.5, abs=0.05)
    assert tied.se is None


@pytest.mark.slow
def test_the_interval_covers_the_truth():
    """With fresh samples each time, pass@1 lies within 2 standard errors of the truth about 95% of the time."""
    rng = np.random.default_rng(0)
    chances = rng.random(40)
    covered = 0
    for trial in range(200):
        correct = rng.random((40, 32)) < chances[:, None]
        found = evaluation.pass_at_k(Answers(correct, [[]] * 40), 1, seed=trial)
        # The mean over 100 repeats has an error of its own, which the paper's formula leaves out: use all samples.
        covered += abs(correct.mean() - chances.mean()) < 2 * found.se
    assert 0.90 <= covered / 200 <= 0.99


def test_same_seed_same_estimate():
    answers = answers_of("rwwrwrwwrw", "rrrrwwwwww")
    assert evaluation.pass_at_k(answers, 2, seed=5) == evaluation.pass_at_k(answers, 2, seed=5)
    assert evaluation.pass_at_k(answers, 2, seed=5) != evaluation.pass_at_k(answers, 2, seed=6)


def test_correct_and_pass_at_1_are_one_number(capsys):
    samples = [
        Sample(
            problem_id=problem,
            prompt="?",
            completion=text,
            reward=1.0,
            outcome="correct" if text == "r" else "incorrect",
        )
        for problem, texts in (("a", "rrrrw"), ("b", "rwwww"))
        for text in texts
    ]
    task = Task("letters", [], [], parse=str, grade=str)
    found = evaluation.evaluate(samples, task, [2, 5], seed=0)
    assert found["pass@1"]["mean"] == found["correct"] == 0.5
    assert found["maj@5"] == {"mean": 0.5, "se": None}
    evaluation.print_table({"before": found, "iterations": []})
    printed = capsys.readouterr().out
    assert printed.count("50.0 ±") == 1
    assert re.search(r"maj@5 +│ 50\.0 % ", printed)  # of five samples: without an interval
    assert "pass@1" not in printed
