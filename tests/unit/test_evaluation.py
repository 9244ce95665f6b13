"""Metrics against an enumeration of all choices of samples, and the paper's intervals."""

import math
from collections import Counter
from itertools import permutations
from statistics import fmean, pvariance
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprlib import evaluation
from toprlib.evaluation import (
    any_correct,
    estimate,
    evaluate,
    majority_is_correct,
    mean_reward,
    to_answers,
    to_table,
)
from toprlib.records import Sample, Task

# A completion is a letter. r: the right answer; w and x: wrong ones; "-": no answer at all.
REWARDS = {"r": 1.0, "w": -1.0, "x": -0.5, "-": -2.0}
QUESTIONS = ("rrwwx-", "r-----", "wwwxx-", "rxwwr-", "rrrrrw")
OUTCOMES = ("right", "wrong", "silent")


def parse(text):
    return None if text == "-" else text


def make_task(**functions):
    return Task("letters", [], [], grade=zip, outcomes=OUTCOMES, **functions)


def make_samples(*questions, rewards=REWARDS):
    """Graded samples; the outcome says whether one is correct, whatever the reward."""
    samples = []
    for letter in "".join(questions):
        outcome = {"r": "right", "-": "silent"}.get(letter, "wrong")
        fields = {"reward": rewards[letter], "outcome": outcome}
        samples.append(Sample(prompt="?", completion=letter, **fields))
    return samples


def make_answers(*questions):
    return to_answers(make_samples(*questions), len(questions), make_task(parse=parse))


# ---- scores and estimates ------------------------------------------------------------------------
def most_frequent(letters):
    """The most frequent answer; of several, the one that comes first."""
    counts = Counter(letter for letter in letters if letter != "-")
    return max(counts, key=counts.get) if counts else None


ORACLES = [  # a score, and the same of some letters in their order
    (any_correct, lambda letters: "r" in letters),
    (majority_is_correct, lambda letters: most_frequent(letters) == "r"),
    (mean_reward, lambda letters: fmean(REWARDS[letter] for letter in letters)),
]


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(("score", "oracle"), ORACLES)
def test_an_estimate_is_that_of_all_ordered_choices(monkeypatch, score, oracle, k):
    """Questions are sampled independently, so that variances add up."""
    monkeypatch.setattr(evaluation, "REPEATS", 4000)
    means = []
    variances = []
    for question in QUESTIONS:
        scores = [oracle(letters) for letters in permutations(question, k)]
        means.append(fmean(scores))
        variances.append(pvariance(scores))
    variance = sum(variances) / len(QUESTIONS) ** 2
    actual = estimate(score, make_answers(*QUESTIONS), k, seed=0)
    error = 1e-12 if k == 1 else 4 * math.sqrt(variance / 4000)
    assert actual["mean"] == pytest.approx(fmean(means), abs=error)
    assert actual["se"] == pytest.approx(math.sqrt(k * variance / (6 - k)), rel=0.06)


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("wrw", False),
        ("rw", True),  # a tie
        ("wr", False),
        ("-", False),
        ("-r", True),
        ("wrrw", False),  # the answer that came first, even if another had two votes earlier
        ("-rwrw", True),
        ("xwrrw", False),
    ],
)
def test_a_tie_goes_to_the_answer_that_came_first(letters, expected):
    samples = range(len(letters))
    assert majority_is_correct(make_answers(letters), 0, samples) is expected
    backwards = make_answers(letters[::-1])
    assert majority_is_correct(backwards, 0, samples[::-1]) is expected


def test_the_first_outcome_is_correct_whatever_the_reward():
    rewards = {"r": -3.0, "w": 2.0, "-": 0.0}
    samples = make_samples("rw", "-w", rewards=rewards)
    answers = to_answers(samples, 2, make_task())
    assert answers.correct.tolist() == [[True, False], [False, False]]
    assert answers.rewards.tolist() == [[-3.0, 2.0], [0.0, 2.0]]
    assert answers.votes == []


# ---- entries of results.json ---------------------------------------------------------------------
def majority_bounds(question):
    """Whether r wins the vote; 0 and 1 if it depends on the order of the samples."""
    counts = Counter(letter for letter in question if letter != "-")
    winners = [letter for letter in counts if counts[letter] == max(counts.values())]
    return winners == ["r"], "r" in winners


samples_of_questions = st.integers(2, 6).flatmap(
    lambda n: st.lists(st.text("rwx-", min_size=n, max_size=n), min_size=1, max_size=3)
)


@given(samples_of_questions)
def test_an_entry_of_all_samples_is_a_mean_over_questions(questions):
    """Of N samples there is one choice of N: every mean is known, and has no interval."""
    n = len(questions[0])
    rewards = REWARDS | {"r": 0.5}
    samples = make_samples(*questions, rewards=rewards)
    with mock.patch.object(evaluation, "REPEATS", 2):  # all repeats are equal
        entry = evaluate(samples, samples[::n], make_task(parse=parse), k=n, seed=0)
    letters = "".join(questions)
    for outcome, of_outcome in {"right": "r", "wrong": "wx", "silent": "-"}.items():
        expected = fmean(letter in of_outcome for letter in letters)
        assert entry[outcome] == pytest.approx(expected)
    assert entry["pass@1"]["mean"] == pytest.approx(entry["right"])
    greedy = fmean(question[0] == "r" for question in questions)
    assert entry["greedy"]["mean"] == pytest.approx(greedy)
    if set(letters) != {"w"}:  # whose rewards are all -1
        assert entry["reward"]["mean"] == pytest.approx(fmean(rewards[x] for x in letters))
    solved = fmean("r" in question for question in questions)
    assert entry[f"pass@{n}"] == {"mean": pytest.approx(solved), "se": None}
    bounds = [majority_bounds(question) for question in questions]
    lowest, highest = [fmean(values) for values in zip(*bounds, strict=True)]
    assert lowest - 1e-9 <= entry[f"maj@{n}"]["mean"] <= highest + 1e-9
    assert entry[f"maj@{n}"]["se"] is None


@pytest.mark.parametrize(
    ("k", "functions", "rewards", "expected"),
    [
        (3, {}, {"r": 1.0, "w": -1.0}, ["pass@1", "greedy", "pass@3"]),
        (3, {"parse": parse}, {"r": 1.0, "w": -1.0}, ["pass@1", "greedy", "maj@3", "pass@3"]),
        (3, {}, {"r": 1.0, "w": 0.0}, ["pass@1", "greedy", "pass@3", "reward"]),
        (1, {"parse": parse}, {"r": 2.0, "w": -1.0}, ["pass@1", "greedy", "reward"]),
        (4, {"parse": parse}, {"r": 2.0, "w": -1.0}, ["pass@1", "greedy", "reward"]),
    ],
)
def test_an_entry_has_the_metrics_of_its_task(k, functions, rewards, expected):
    samples = make_samples("rrw", "wwr", rewards=rewards)
    greedy = make_samples("r", "w", rewards=rewards)
    entry = evaluate(samples, greedy, make_task(**functions), k, seed=0)
    assert [*entry] == [*OUTCOMES, *expected, "questions", "samples_per_question"]
    assert entry["greedy"] == {"mean": 0.5, "se": None}
    assert (entry["questions"], entry["samples_per_question"]) == (2, 3)


def test_the_table_leaves_a_metric_out_where_an_entry_has_none():
    """All rewards are -1 and +1 after training, but not before."""
    entries = []
    for rewards in ({"r": 1.0, "w": 0.0}, {"r": 1.0, "w": -1.0}):
        samples = make_samples("rw", rewards=rewards)
        entries.append(evaluate(samples, samples[:1], make_task(), k=1, seed=0))
    table = to_table({"before": entries[0], "iterations": [{"after": entries[1]}]})
    names, *columns = [list(column.cells) for column in table.columns]
    row = names.index("reward")
    assert [column[row] for column in columns] == ["0.50 ± 1.00", ""]
