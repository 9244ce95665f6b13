"""Evaluation on test problems: pass@k, maj@k, mean reward and shares of outcomes (Section 4.2).

A metric of k samples is estimated from the N samples of each question: choose k of them without
replacement, average the metric over the questions, repeat 100 times. The estimate is the mean of
the repeats. With V, the variance of the repeats, its standard error is sqrt(k V / (N - k)).

The interval of ± 2 standard errors shows the variation over samples, not over questions. For k = N,
as for the paper's maj@16 of 16 samples on MATH, the formula is 0 / 0: such an estimate has no
interval.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from toprlib.grading import describe_errors
from toprlib.records import InputError, Sample, Task
from toprlib.report import Estimate, Table

COUNTS = ("samples_seen", "questions", "samples_per_question")  # numbers of an entry, no metrics


class Answers(NamedTuple):
    """The samples of Q questions, N each, as the metrics use them."""

    correct: np.ndarray  # (Q, N) bool
    # Q lists of N answers, None for a sample without an answer; empty if nobody votes
    votes: Sequence[Sequence[Hashable | None]] = ()
    rewards: np.ndarray | None = None  # (Q, N)


# (answers, index of a question, indices of some of its samples) -> how good these are together
Score = Callable[[Answers, int, Sequence[int]], float]


# ---- scores of one question ----------------------------------------------------------------------
def any_correct(answers: Answers, question: int, samples: Sequence[int]) -> bool:
    """Whether at least one of these samples is correct.

    >>> answers = Answers(np.array([[True, False, False]]))
    >>> any_correct(answers, 0, [0, 1]), any_correct(answers, 0, [1, 2])
    (True, False)
    """
    return bool(answers.correct[question, samples].any())


def majority_is_correct(
    answers: Answers, question: int, samples: Sequence[int], weights: Sequence[float] | None = None
) -> bool:
    """Whether the most frequent answer is correct, or the one with the most weight (Section 4.4).

    Samples without an answer do not vote. In a tie, the answer that comes first among `samples`
    wins. weights: one for each of `samples`; by default all are 1.

    >>> answers = Answers(np.array([[True, False, False]]), [["7", "8", "8"]])
    >>> majority_is_correct(answers, 0, [0, 1, 2])
    False
    >>> majority_is_correct(answers, 0, [0, 1, 2], weights=[0.75, 0.25, 0.25])
    True
    """
    weights = [1.0] * len(samples) if weights is None else weights
    total_weights: dict[Hashable, float] = {}
    first_samples: dict[Hashable, int] = {}
    for sample, weight in zip(samples, weights, strict=True):
        answer = answers.votes[question][sample]
        if answer is not None:
            total_weights[answer] = total_weights.get(answer, 0.0) + weight
            first_samples.setdefault(answer, sample)
    if not total_weights:
        return False
    winner = max(total_weights, key=total_weights.__getitem__)  # of equals, the first
    return bool(answers.correct[question, first_samples[winner]])


def mean_reward(answers: Answers, question: int, samples: Sequence[int]) -> float:
    """The mean reward of these samples."""
    return answers.rewards[question, samples].mean()


class Metric(NamedTuple):
    """A metric of a test set."""

    score: Score  # of one question; the metric is its mean over the questions
    meaning: str  # for the documentation


METRICS = {
    "pass@1": Metric(any_correct, "share of correct samples"),
    "maj@k": Metric(
        majority_is_correct,
        "share of questions whose most frequent answer among k samples is correct; "
        "for tasks with `parse`",
    ),
    "pass@k": Metric(any_correct, "share of questions with a correct one among k samples"),
    "reward": Metric(mean_reward, "mean reward; for tasks with `reward` or `batch_reward`"),
}


# ---- estimates over all questions ----------------------------------------------------------------
def estimate(score: Score, answers: Answers, k: int, seed: int, repeats: int = 100) -> Estimate:
    """The mean over questions of the score of k of their N samples, with the paper's interval.

    Raises InputError unless 1 <= k <= N.

    >>> one_of_four = Answers(np.array([[True, False, False, False]]))
    >>> value = estimate(any_correct, one_of_four, k=3, seed=0)
    >>> round(value.mean, 2)  # 3/4, estimated by 100 random choices
    0.78
    """
    questions, n = answers.correct.shape
    if not 1 <= k <= n:
        fix = f"must be at least 1 and at most the {n} samples of a question"
        raise InputError(f"{k}: {fix}", option="--k")
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(repeats):
        all_samples = np.tile(np.arange(n), (questions, 1))  # (Q, N)
        chosen = rng.permuted(all_samples, axis=1)[:, :k]  # (Q, k), each row shuffled on its own
        scores = [score(answers, question, chosen[question]) for question in range(questions)]
        means.append(np.mean(scores))
    mean = float(np.mean(means))
    if k == n:
        return Estimate(mean)
    variance = float(np.var(means, ddof=1))
    standard_error = float(np.sqrt(k * variance / (n - k)))
    return Estimate(mean, 2 * standard_error)


def estimate_of_one(score: Score, answers: Answers, seed: int) -> Estimate:
    """The mean score of single samples: exact, from all samples; its interval is the paper's."""
    questions, n = answers.correct.shape
    scores = np.empty((questions, n))
    for question in range(questions):
        for sample in range(n):
            scores[question, sample] = score(answers, question, [sample])
    return estimate(score, answers, 1, seed)._replace(mean=float(np.mean(scores)))


# ---- an entry of results.json --------------------------------------------------------------------
def evaluate(samples: Sequence[Sample], task: Task, k: int, seed: int) -> dict[str, Any]:
    """An entry of results.json: the share of each outcome, and the metrics that the task has.

    samples: graded, question by question, the same number N for each. maj@k is for tasks with
    `parse`, reward for tasks that have no `grade`. Without 1 < k <= N there are no metrics of k
    samples. A metric is {"mean": ..., "se": standard error or None}.

    >>> task = Task("sums", [], [], grade=str, outcomes=("right", "wrong"))
    >>> graded = [("right", 1.0), ("wrong", -1.0), ("wrong", -1.0), ("wrong", -1.0)]
    >>> samples = [Sample(prompt="?", completion="!", reward=r, outcome=o) for o, r in graded]
    >>> entry = evaluate(samples, task, k=4, seed=0)
    >>> entry["right"], entry["pass@1"]["mean"], entry["pass@4"]
    (0.25, 0.25, {'mean': 1.0, 'se': None})
    """
    answers = to_answers(samples, task)
    questions, n = answers.correct.shape
    counts = Counter(sample.outcome for sample in samples)
    entry: dict[str, Any] = {}
    for outcome in task.outcomes:
        entry[outcome] = counts[outcome] / len(samples)
    for name in _metrics_of(task, k, n):
        score = METRICS[name].score
        if name.endswith("@k"):
            entry[name.replace("@k", f"@{k}")] = estimate(score, answers, k, seed).to_json()
        else:
            entry[name] = estimate_of_one(score, answers, seed).to_json()
    return entry | {"questions": questions, "samples_per_question": n}


def _metrics_of(task: Task, k: int, n: int) -> list[str]:
    """The names in METRICS that apply to a task with n samples of each question."""
    names = ["pass@1"]
    if 1 < k <= n:
        names += ["maj@k", "pass@k"] if task.parse else ["pass@k"]
    if task.grade is None:
        names.append("reward")
    return names


def to_answers(samples: Sequence[Sample], task: Task) -> Answers:
    """The answers of a test set's samples: question by question, the same number for each.

    Raises what the task's `parse` raises, with a note that names the problem and the text.
    """
    correct = []
    votes = []
    rewards = []
    for _, group in groupby(samples, key=attrgetter("problem_id")):
        question = list(group)
        correct.append([sample.outcome == task.outcomes[0] for sample in question])
        rewards.append([sample.reward for sample in question])
        if task.parse is not None:
            votes.append(_parse_votes(question, task))
    return Answers(np.array(correct), votes, np.array(rewards))


def _parse_votes(question: list[Sample], task: Task) -> list[Hashable | None]:
    """The answer of each sample; answers that are the same according to the task become equal."""
    votes: list[Hashable | None] = []
    distinct: list[Hashable] = []
    for sample in question:
        text = task.graded_text(sample.completion)
        with describe_errors(sample.problem_id, text):
            answer = task.parse(text)
            hash(answer)  # a vote is the key of a dict; TypeError here, where the text is known
        if answer is not None:
            equals = (earlier for earlier in distinct if task.same(earlier, answer))
            first = next(equals, None)  # a comparison can be slow, so it stops at the first match
            if first is None:
                distinct.append(answer)
            else:
                answer = first
        votes.append(answer)
    return votes


# ---- results as a table --------------------------------------------------------------------------
def split_entry(entry: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The names of the outcomes and of the metrics in an entry of results.json.

    >>> split_entry({"right": 0.25, "wrong": 0.75, "maj@4": {"mean": 0.5, "se": None}})
    (['right', 'wrong'], ['maj@4'])
    """
    metrics = [name for name, value in entry.items() if isinstance(value, dict)]
    outcomes = [name for name in entry if name not in metrics and name not in COUNTS]
    return outcomes, metrics


def format_entry(entry: dict[str, Any]) -> dict[str, str]:
    """The rows of an entry of results.json as text, by their labels.

    pass@1 is the share of the first outcome, with an interval, and has no row of its own.

    >>> format_entry({"right": 0.25, "wrong": 0.75, "pass@1": {"mean": 0.25, "se": 0.01}})
    {'right': '25.0 ± 2.0 %', 'wrong': '75.0 %'}
    """
    outcomes, metrics = split_entry(entry)
    rows = {name: Estimate(entry[name]).text(100, unit=" %") for name in outcomes}
    for name in metrics:
        value = Estimate.from_json(entry[name])
        if name == "reward":
            rows["mean reward"] = value.text(digits=3)
        else:
            label = outcomes[0] if name == "pass@1" else name
            rows[label] = value.text(100, unit=" %")
    return rows


def to_table(results: dict[str, Any]) -> Table:
    """The test results before training and after each iteration, from the content of results.json.

    >>> entries = [{"right": share, "wrong": 1 - share} for share in (0.25, 0.5)]
    >>> print(to_table({"before": entries[0], "iterations": [{"after": entries[1]}]}).markdown())
    |  | before | after |
    |---|---|---|
    | right | 25.0 % | 50.0 % |
    | wrong | 75.0 % | 50.0 % |
    """
    iterations = results["iterations"]
    head = ["", "before"]
    columns = [format_entry(results["before"])]
    for number, iteration in enumerate(iterations, start=1):
        head.append("after" if len(iterations) == 1 else f"after iteration {number}")
        columns.append(format_entry(iteration["after"]))
    rows = []
    for label in columns[0]:
        rows.append([label] + [column[label] for column in columns])
    return Table(head, rows)
