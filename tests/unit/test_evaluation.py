"""Metrics against an enumeration of all choices of samples, and the paper's intervals."""

import math
from collections import Counter
from itertools import chain, permutations
from statistics import fmean, pvariance

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprlib.evaluation import (
    METRICS,
    Answers,
    any_correct,
    estimate,
    evaluate,
    format_entry,
    majority_is_correct,
    to_answers,
    to_table,
)
from toprlib.records import InputError, Sample, Task

# A completion is a letter. r: the right answer; w and x: wrong ones; "-": no answer at all.
REWARDS = {"r": 1.0, "w": -1.0, "x": -0.5, "-": -2.0}
QUESTIONS = ("rrwwx-", "r-----", "wwwxx-", "rxwwr-", "rrrrrw")
OUTCOMES = ("right", "wrong", "silent")


def make_answers(*questions):
    correct = []
    votes = []
    rewards = []
    for question in questions:
        correct.append([letter == "r" for letter in question])
        votes.append([None if letter == "-" else letter for letter in question])
        rewards.append([REWARDS[letter] for letter in question])
    return Answers(np.array(correct), votes, np.array(rewards))


def make_samples(*questions):
    """Graded samples; the outcome says whether one is correct, whatever the reward."""
    samples = []
    for number, question in enumerate(questions):
        for letter in question:
            outcome = {"r": "right", "-": "silent"}.get(letter, "wrong")
            fields = {"reward": REWARDS.get(letter, -1.0), "outcome": outcome}
            sample = Sample(problem_id=f"q{number}", prompt="?", completion=letter, **fields)
            samples.append(sample)
    return samples


def make_task(**functions):
    return Task("letters", [], [], outcomes=OUTCOMES, **functions)


def parse(text):
    return None if text == "-" else text


# ---- scores and estimates ------------------------------------------------------------------------
def most_frequent(letters):
    """The most frequent answer; of several, the one that comes first."""
    counts = Counter(letter for letter in letters if letter != "-")
    return max(counts, key=counts.get) if counts else None


# The score of some letters in their order
ORACLES = {
    "pass@1": lambda letters: "r" in letters,
    "maj@k": lambda letters: most_frequent(letters) == "r",
    "pass@k": lambda letters: "r" in letters,
    "reward": lambda letters: fmean(REWARDS[letter] for letter in letters),
}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", METRICS)
def test_an_estimate_is_that_of_all_ordered_choices(name, k):
    """Questions are sampled independently, so that variances add up."""
    means = []
    variances = []
    for question in QUESTIONS:
        scores = [ORACLES[name](letters) for letters in permutations(question, k)]
        means.append(fmean(scores))
        variances.append(pvariance(scores))
    variance = sum(variances) / len(QUESTIONS) ** 2
    repeats = 4000
    actual = estimate(METRICS[name].score, make_answers(*QUESTIONS), k, seed=0, repeats=repeats)
    assert actual.mean == pytest.approx(fmean(means), abs=4 * math.sqrt(variance / repeats))
    assert actual.half_width == pytest.approx(2 * math.sqrt(k * variance / (6 - k)), rel=0.06)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_its_closed_form(k):
    """1 - C(n - c, k) / C(n, k) for c correct ones of n samples (Chen et al. 2021)."""
    questions = ("r-----", "rrw---", "------")
    expected = 0.0
    for question in questions:
        wrong = 6 - question.count("r")
        expected += (1 - math.comb(wrong, k) / math.comb(6, k)) / 3
    actual = estimate(any_correct, make_answers(*questions), k, seed=0, repeats=4000)
    assert actual.mean == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("k", [0, 7])
def test_a_k_that_does_not_fit_the_samples_is_refused(k):
    with pytest.raises(InputError) as caught:
        estimate(any_correct, make_answers(*QUESTIONS), k, seed=0)
    assert caught.value.option == "--k"


@pytest.mark.parametrize(
    ("samples", "weights", "expected"),
    [
        ([0, 1, 2], None, False),  # w twice
        ([0, 1], None, True),  # a tie: r comes first
        ([1, 0], None, False),  # a tie: w comes first
        ([3], None, False),  # nobody votes
        ([3, 0], None, True),  # one sample votes
        ([0, 1, 2], [0.9, 0.5, 0.3], True),
        ([0, 1, 2], [0.7, 0.5, 0.3], False),  # 0.8 together
        ([2, 1, 0], [0.3, 0.5, 0.9], True),  # weights belong to samples, not to places
        ([0, 3], [0.1, 5.0], True),
    ],
)
def test_the_majority_is_weighted(samples, weights, expected):
    assert majority_is_correct(make_answers("rww-"), 0, samples, weights) is expected


@pytest.mark.parametrize(
    ("letters", "expected"), [("rwwr", True), ("wrrw", False), ("-rwrw", True), ("xwrrw", False)]
)
def test_a_tie_goes_to_the_answer_that_came_first(letters, expected):
    """Even if another answer reached its number of votes earlier."""
    samples = range(len(letters))
    assert majority_is_correct(make_answers(letters), 0, samples) is expected


# ---- answers -------------------------------------------------------------------------------------
def test_the_first_outcome_is_correct_whatever_the_reward():
    samples = [
        Sample(problem_id="1", prompt="", completion="a", reward=-3.0, outcome="right"),
        Sample(problem_id="1", prompt="", completion="b", reward=2.0, outcome="wrong"),
        Sample(problem_id="2", prompt="", completion="c", reward=1.0, outcome="silent"),
        Sample(problem_id="2", prompt="", completion="d", reward=0.0, outcome="wrong"),
    ]
    answers = to_answers(samples, make_task(reward=len))
    assert answers.correct.tolist() == [[True, False], [False, False]]
    assert answers.rewards.tolist() == [[-3.0, 2.0], [1.0, 0.0]]
    assert answers.votes == []


def test_what_follows_a_stop_string_does_not_vote():
    task = Task("sums", [], [], grade=str, stop=("Q:",), parse=str.strip)
    samples = []
    for text in ("7", "7 Q:", "7 Q: 8"):
        fields = {"problem_id": "1", "prompt": "", "reward": 1.0, "outcome": "correct"}
        samples.append(Sample(completion=text, **fields))
    assert to_answers(samples, task).votes == [["7", "7", "7"]]


def test_answers_vote_together_if_the_task_says_that_they_are_the_same():
    """Each becomes the first one that is the same, within its own question."""
    task = make_task(grade=str, parse=parse, same=lambda a, b: a.lower() == b.lower())
    answers = to_answers(make_samples("wWx-X", "XxwWW"), task)
    assert answers.votes == [["w", "w", "x", None, "x"], ["X", "X", "w", "w", "w"]]


def test_an_answer_between_two_others_votes_with_the_first():
    """As with a tolerance, where 2 is the same as 1 and as 3, which are not the same."""
    task = make_task(grade=str, parse=int, same=lambda a, b: abs(a - b) <= 1)
    assert to_answers(make_samples("132"), task).votes == [[1, 3, 1]]


@pytest.mark.parametrize(
    ("function", "error"), [(lambda text: [text], TypeError), (lambda text: 1 / 0, ArithmeticError)]
)
def test_an_error_in_parse_names_the_problem(function, error):
    """An answer that cannot be hashed cannot vote."""
    with pytest.raises(error) as caught:
        to_answers(make_samples("rw"), make_task(grade=str, parse=function))
    [note] = caught.value.__notes__
    assert "q0" in note


# ---- entries of results.json ---------------------------------------------------------------------
def majority_bounds(question):
    """Whether r wins the vote; 0 and 1 if it depends on the order of the samples."""
    counts = Counter(letter for letter in question if letter != "-")
    winners = [letter for letter in counts if counts[letter] == max(counts.values())]
    return winners == ["r"], "r" in winners


letters = st.sampled_from("rwx-")
samples_of_questions = st.integers(2, 6).flatmap(
    lambda n: st.lists(st.lists(letters, min_size=n, max_size=n), min_size=1, max_size=3)
)


@given(samples_of_questions)
def test_an_entry_of_all_samples_is_a_mean_over_questions(questions):
    """Of N samples there is one choice of N: every mean is known, and has no interval."""
    n = len(questions[0])
    task = make_task(batch_reward=len, parse=parse)
    entry = evaluate(make_samples(*questions), task, k=n, seed=0)
    all_letters = list(chain.from_iterable(questions))
    shares = {"right": "r", "wrong": "wx", "silent": "-"}
    for outcome, of_outcome in shares.items():
        count = sum(letter in of_outcome for letter in all_letters)
        assert entry[outcome] == pytest.approx(count / len(all_letters))
    for name in ("pass@1", "reward"):
        scores = [ORACLES[name](letter) for letter in all_letters]
        assert entry[name]["mean"] == pytest.approx(fmean(scores))
        of_one = estimate(METRICS[name].score, make_answers(*questions), 1, seed=0)
        assert entry[name]["se"] == of_one.to_json()["se"]
    solved = fmean("r" in question for question in questions)
    assert entry[f"pass@{n}"] == {"mean": pytest.approx(solved), "se": None}
    bounds = [majority_bounds(question) for question in questions]
    lowest, highest = [fmean(values) for values in zip(*bounds, strict=True)]
    assert lowest - 1e-9 <= entry[f"maj@{n}"]["mean"] <= highest + 1e-9
    assert entry[f"maj@{n}"]["se"] is None


def test_an_entry_has_shares_metrics_and_counts_in_this_order():
    samples = make_samples("rrrw-", "rwwx-")
    entry = evaluate(samples, make_task(grade=str, parse=parse), k=4, seed=0)
    names = [*OUTCOMES, "pass@1", "maj@4", "pass@4", "questions", "samples_per_question"]
    assert [*entry] == names
    assert (entry["questions"], entry["samples_per_question"]) == (2, 5)
    # 4 of 5 samples always have an r of the first question, and four times in five of the second
    assert entry["pass@4"]["mean"] == pytest.approx(0.9, abs=0.05)
    variance = (pvariance([1, 1, 1, 0, 0]) + pvariance([1, 0, 0, 0, 0])) / 4
    assert entry["pass@1"]["se"] == pytest.approx(math.sqrt(variance / 4), rel=0.3)


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ({"grade": str}, ["pass@1", "pass@3"]),
        ({"grade": str, "parse": parse}, ["pass@1", "maj@3", "pass@3"]),
        ({"reward": len}, ["pass@1", "pass@3", "reward"]),
        ({"batch_reward": len, "parse": parse}, ["pass@1", "maj@3", "pass@3", "reward"]),
    ],
)
def test_a_task_has_the_metrics_that_its_functions_allow(functions, expected):
    entry = evaluate(make_samples("rrw", "wx-"), make_task(**functions), k=3, seed=0)
    assert [name for name, value in entry.items() if isinstance(value, dict)] == expected


@pytest.mark.parametrize("k", [1, 4])
def test_there_are_no_metrics_of_one_sample_or_of_more_than_there_are(k):
    entry = evaluate(make_samples("rrw", "wx-"), make_task(reward=len, parse=parse), k, seed=0)
    metrics = [name for name, value in entry.items() if isinstance(value, dict)]
    assert metrics == ["pass@1", "reward"]
    assert entry["reward"]["mean"] == pytest.approx((1 + 1 - 1 - 1 - 0.5 - 2) / 6)


def test_the_seed_decides_which_samples_are_chosen():
    task = make_task(grade=str, parse=parse)
    first, same, other = (evaluate(make_samples(*QUESTIONS), task, 3, s) for s in (0, 0, 1))
    assert first == same
    assert first["maj@3"] != other["maj@3"]


# ---- tables --------------------------------------------------------------------------------------
def make_entry(share):
    """An entry whose numbers differ from each other and depend on the share."""
    return {
        "right": share,
        "wrong": 1 - share,
        "pass@1": {"mean": share, "se": 0.01},
        "maj@4": {"mean": share + 0.2, "se": 0.02},
        "pass@4": {"mean": share + 0.3, "se": None},
        "reward": {"mean": share - 1, "se": 0.0125},
        "questions": 9,
        "samples_per_question": 4,
    }


def test_an_entry_is_shown_with_two_standard_errors():
    actual = format_entry({"samples_seen": 64, **make_entry(0.25)})
    assert actual == {
        "right": "25.0 ± 2.0 %",
        "wrong": "75.0 %",
        "maj@4": "45.0 ± 4.0 %",
        "pass@4": "55.0 %",
        "mean reward": "-0.750 ± 0.025",
    }


def test_a_table_has_a_column_for_each_iteration():
    iterations = [{"after": make_entry(0.5)}, {"after": make_entry(0.625)}]
    table = to_table({"before": make_entry(0.25), "iterations": iterations})
    assert table.head == ["", "before", "after iteration 1", "after iteration 2"]
    assert table.rows[0] == ["right", "25.0 ± 2.0 %", "50.0 ± 2.0 %", "62.5 ± 2.0 %"]
    assert table.rows[-1][1:] == ["-0.750 ± 0.025", "-0.500 ± 0.025", "-0.375 ± 0.025"]
    assert len(table.rows) == 5


def test_one_iteration_is_just_after():
    table = to_table({"before": make_entry(0.25), "iterations": [{"after": make_entry(0.5)}]})
    assert table.head == ["", "before", "after"]


def test_a_run_without_training_has_one_column():
    assert to_table({"before": make_entry(0.25), "iterations": []}).head == ["", "before"]
