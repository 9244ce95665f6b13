"""Evaluation on test problems: pass@k, maj@k, mean reward and shares of outcomes (Section 4.2).

A metric of k samples is estimated from the N samples of each question: choose k of them without
replacement, average the metric over the questions, repeat 100 times. The estimate is the mean of
the repeats. With V, the variance of the repeats, its standard error is sqrt(k V / (N - k)).

The interval of ± 2 standard errors shows the variation over samples, not over questions. For k = N,
as for the paper's maj@16 of 16 samples on MATH, the formula is 0 / 0: such an estimate has no
interval.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.table

from toprlib.records import Sample, Task
from toprlib.sampling import graded_text

REPEATS = 100
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


def majority_is_correct(answers: Answers, question: int, samples: Sequence[int]) -> bool:
    """Whether the most frequent answer is correct; in a tie, that which `samples` has first."""
    votes = [answers.votes[question][sample] for sample in samples]
    return vote_is_correct(votes, answers.correct[question, samples], [1] * len(votes))


def vote_is_correct(
    votes: Sequence[Hashable | None], correct: Sequence[bool], weights: Sequence[float]
) -> bool:
    """Whether the answer with the largest sum of weights is correct; of equals, the first.

    votes: None for a sample without an answer, which does not vote.

    >>> vote_is_correct(["7", "8", "8"], [True, False, False], weights=[1, 1, 1])
    False
    """
    sums: dict[Hashable, float] = defaultdict(float)
    for vote, weight in zip(votes, weights, strict=True):
        if vote is not None:
            sums[vote] += weight
    return bool(sums) and bool(correct[votes.index(max(sums, key=sums.get))])


def mean_reward(answers: Answers, question: int, samples: Sequence[int]) -> float:
    """The mean reward of these samples."""
    return answers.rewards[question, samples].mean()


# ---- estimates over all questions ----------------------------------------------------------------
def estimate(score: Score, answers: Answers, k: int, seed: int) -> dict[str, float | None]:
    """The mean over questions of the score of k of their N samples, and its standard error.

    For k = 1 the mean is exact, from all samples.

    >>> one_of_four = Answers(np.array([[True, False, False, False]]))
    >>> value = estimate(any_correct, one_of_four, k=3, seed=0)
    >>> round(value["mean"], 2)  # 3/4, estimated by 100 random choices
    0.78
    """
    questions, n = answers.correct.shape
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(REPEATS):
        all_samples = np.tile(np.arange(n), (questions, 1))  # (Q, N)
        chosen = rng.permuted(all_samples, axis=1)[:, :k]  # (Q, k), each row shuffled on its own
        scores = [score(answers, question, chosen[question]) for question in range(questions)]
        means.append(np.mean(scores))
    mean = float(np.mean(means))
    if k == 1:
        scores = []
        for question in range(questions):
            scores += [score(answers, question, [sample]) for sample in range(n)]
        mean = float(np.mean(scores))
    if k == n:
        return {"mean": mean, "se": None}
    variance = float(np.var(means, ddof=1))
    return {"mean": mean, "se": float(np.sqrt(k * variance / (n - k)))}


# ---- an entry of results.json --------------------------------------------------------------------
def evaluate(
    samples: Sequence[Sample], greedy: Sequence[Sample], task: Task, k: int, seed: int
) -> dict[str, Any]:
    """An entry of results.json: the share of each outcome, and the metrics that the task has.

    samples: graded, question by question, the same number N for each. greedy: one for each
    question, at temperature 0. maj@k is for tasks with `parse`, reward for those with other rewards
    than -1 and +1. Without 1 < k <= N there are no metrics of k samples. A metric is
    {"mean": ..., "se": standard error or None}.

    >>> task = Task("sums", [], [], grade=zip, outcomes=("right", "wrong"))
    >>> graded = [("right", 1.0), ("wrong", -1.0), ("wrong", -1.0), ("wrong", -1.0)]
    >>> samples = [Sample(prompt="?", completion="!", reward=r, outcome=o) for o, r in graded]
    >>> entry = evaluate(samples, samples[:1], task, k=4, seed=0)
    >>> entry["right"], entry["pass@1"]["mean"], entry["greedy"]["mean"], entry["pass@4"]["mean"]
    (0.25, 0.25, 1.0, 1.0)
    """
    answers = to_answers(samples, len(greedy), task)
    questions, n = answers.correct.shape
    counts = Counter(sample.outcome for sample in samples)
    entry = {outcome: counts[outcome] / len(samples) for outcome in task.outcomes}
    entry["pass@1"] = estimate(any_correct, answers, 1, seed)
    entry["greedy"] = estimate(any_correct, to_answers(greedy, len(greedy), task), 1, seed)
    if 1 < k <= n and task.parse is not None:
        entry[f"maj@{k}"] = estimate(majority_is_correct, answers, k, seed)
    if 1 < k <= n:
        entry[f"pass@{k}"] = estimate(any_correct, answers, k, seed)
    if not np.isin(answers.rewards, (-1, 1)).all():
        entry["reward"] = estimate(mean_reward, answers, 1, seed)
    return entry | {"questions": questions, "samples_per_question": n}


def to_answers(samples: Sequence[Sample], questions: int, task: Task) -> Answers:
    """The answers of a test set's samples: question by question, the same number for each."""
    correct = []
    votes = []
    rewards = []
    n = len(samples) // questions
    for start in range(0, len(samples), n):
        question = samples[start : start + n]
        correct.append([sample.outcome == task.outcomes[0] for sample in question])
        rewards.append([sample.reward for sample in question])
        if task.parse is not None:
            texts = [graded_text(one.prompt, one.completion, task.stop) for one in question]
            votes.append([task.parse(text) for text in texts])
    return Answers(np.array(correct), votes, np.array(rewards))


# ---- results as a table --------------------------------------------------------------------------
def to_table(results: dict[str, Any]) -> rich.table.Table:
    """The test results before training and after each iteration of results.json."""
    entries = [results["before"]]
    table = rich.table.Table("", "before")
    for number, iteration in enumerate(results["iterations"], start=1):
        entries.append(iteration["after"])
        table.add_column(f"after iteration {number}")
    for name in entries[0]:
        if name not in COUNTS:
            is_share = name != "reward"  # which is left out where all rewards are -1 and +1
            cells = [format_value(each[name], is_share) if name in each else "" for each in entries]
            table.add_row(name, *cells)
    return table


def format_value(value: float | dict[str, float | None], is_share: bool = True) -> str:
    """A share in percent, or a mean reward; with its interval if it has one.

    >>> format_value(0.25), format_value({"mean": 0.25, "se": 0.01})
    ('25.0 %', '25.0 ± 2.0 %')
    >>> format_value({"mean": -0.75, "se": 0.1}, is_share=False)
    '-0.75 ± 0.20'
    """
    estimate = value if isinstance(value, dict) else {"mean": value, "se": None}
    scale = 100 if is_share else 1
    digits = 1 if is_share else 2
    text = f"{scale * estimate['mean']:.{digits}f}"
    if estimate["se"] is not None:
        text += f" ± {2 * scale * estimate['se']:.{digits}f}"
    return f"{text} %" if is_share else text
