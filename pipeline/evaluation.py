"""Evaluation: pass@k, maj@k and the share of each outcome, with the paper's intervals (Section 4.2).

For a K: draw K of a question's N samples without replacement, average over the questions, repeat 100 times; the
mean of the repeats is reported, and from their variance V the standard error sqrt(K V / (N - K)). Intervals are
+- 2 standard errors. They tell how far another draw of samples would move the number, not another set of questions.
For K = N, as in the paper's maj@16 of 16 samples on MATH, the formula is 0 / 0: the estimate has no interval.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.grading import named
from pipeline.records import InputError, Sample, Task


class Estimate(NamedTuple):
    """A share between 0 and 1 and its standard error, None where there is none."""

    mean: float
    se: float | None


class Answers(NamedTuple):
    """What evaluation needs of Q questions with N samples each."""

    correct: np.ndarray  # (Q, N) bool
    votes: list[list[Hashable | None]]  # Q lists of N answers, None where there is none to read; empty without any


def standard_error(variance: float, k: int, n: int) -> float | None:
    """sqrt(k V / (n - k)): variance V over repeats, k samples drawn out of n (Section 4.2). None for k = n.

    >>> round(standard_error(0.18, k=1, n=64), 6)
    0.053452
    """
    return None if k == n else float(np.sqrt(k * variance / (n - k)))


def pass_at_k(answers: Answers, k: int, seed: int, repeats: int = 100) -> Estimate:
    """The share of questions with a correct one among k samples.

    >>> correct = np.array([[True, False, False, False]])
    >>> round(pass_at_k(Answers(correct, [[]]), k=3, seed=0).mean, 2)  # 3/4, by 100 random draws
    0.78
    """
    return _estimate(lambda question, drawn: answers.correct[question, drawn].any(), answers, k, seed, repeats)


def maj_at_k(answers: Answers, k: int, seed: int, repeats: int = 100) -> Estimate:
    """The share of questions whose most frequent answer among k samples is correct.

    Samples without an answer do not vote; a tie goes to the answer drawn first, which is a random one.

    >>> answers = Answers(np.array([[True, True, True, False]]), [[7, 7, 7, 8]])
    >>> maj_at_k(answers, k=3, seed=0).mean
    1.0
    """

    def is_won(question: int, drawn: np.ndarray) -> bool:
        return wins(answers, question, drawn.tolist(), np.ones(len(drawn)))

    return _estimate(is_won, answers, k, seed, repeats)


def wins(answers: Answers, question: int, samples: Sequence[int], weights: Sequence[float]) -> bool:
    """Whether the answer with the largest sum of weights is correct: weighted self-consistency (Section 4.4).

    Samples without an answer do not vote; a tie goes to the answer that comes first among the samples.

    >>> answers = Answers(np.array([[True, False, False]]), [[7, 8, 8]])
    >>> wins(answers, 0, [0, 1, 2], [1, 1, 1]), wins(answers, 0, [0, 1, 2], [0.75, 0.25, 0.25])
    (False, True)
    """
    sums: dict[Hashable, float] = {}
    first: dict[Hashable, int] = {}
    for i, weight in zip(samples, weights, strict=True):
        vote = answers.votes[question][i]
        if vote is not None:
            sums[vote] = sums.get(vote, 0.0) + weight
            first.setdefault(vote, i)
    return bool(sums) and bool(answers.correct[question, first[max(sums, key=sums.__getitem__)]])


def over_questions(values: Sequence[float]) -> Estimate:
    """The mean of a value for each question, and its standard error: how far other questions would move it.

    InputError for a single question, which has no standard error.

    >>> over_questions([1.0, 2.0, 3.0])
    Estimate(mean=2.0, se=0.5773502691896258)
    """
    each = np.asarray(values, dtype=float)
    if len(each) < 2:
        raise InputError(f"{len(each)} test problem: has no interval; take at least 2")
    return Estimate(float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each))))


def _estimate(score: Callable[[int, np.ndarray], bool], answers: Answers, k: int, seed: int, repeats: int) -> Estimate:
    questions, n = answers.correct.shape
    if not 1 <= k <= n:
        raise InputError(f"K = {k}: must be at least 1 and at most the {n} samples per question")
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(repeats):
        drawn = rng.permuted(np.tile(np.arange(n), (questions, 1)), axis=1)[:, :k]
        means.append(np.mean([score(question, drawn[question]) for question in range(questions)]))
    return Estimate(float(np.mean(means)), standard_error(float(np.var(means, ddof=1)), k, n))


def mean_reward(rewards: np.ndarray, seed: int, repeats: int = 100) -> Estimate:
    """The mean reward of Q questions with N samples each, (Q, N), with the standard error of draws of one sample.

    >>> mean_reward(np.array([[0.5, 0.5], [1.0, 1.0]]), seed=0)
    Estimate(mean=0.75, se=0.0)
    """

    def mean(question: int, drawn: np.ndarray) -> float:
        return rewards[question, drawn].mean()

    return _estimate(mean, Answers(rewards, []), 1, seed, repeats)._replace(mean=float(rewards.mean()))


def collect(samples: Sequence[Sample], task: Task) -> Answers:
    """The answers of a test set's samples, which come question by question, equally many for each."""
    questions = _by_question(samples)
    correct = np.array([[sample.outcome == task.outcomes[0] for sample in question] for question in questions])
    if task.parse is None:
        return Answers(correct, [])
    return Answers(correct, [_joined([_answer(sample, task) for sample in question], task) for question in questions])


def _by_question(samples: Sequence[Sample]) -> list[list[Sample]]:
    by_question: dict[str | None, list[Sample]] = {}
    for sample in samples:
        by_question.setdefault(sample.problem_id, []).append(sample)
    return list(by_question.values())


def _answer(sample: Sample, task: Task) -> Hashable | None:
    text = task.visible(sample.completion)
    with named(task.parse, sample.problem_id, text):
        answer = task.parse(text)
        hash(answer)  # TypeError where it cannot vote
        return answer


def _joined(answers: Sequence[Hashable | None], task: Task) -> list[Hashable | None]:
    """Each answer as the first of those that are the same."""
    joined: list[Hashable | None] = []
    for answer in answers:
        firsts = (first for first in joined if first is not None and task.same(first, answer))
        joined.append(None if answer is None else next(firsts, answer))
    return joined


def outcome_shares(samples: Sequence[Sample], outcomes: Sequence[str]) -> dict[str, float]:
    """The share of each outcome among the samples.

    >>> outcome_shares([Sample(prompt="?", completion="!", reward=-1.0, outcome="wrong")], ("right", "wrong"))
    {'right': 0.0, 'wrong': 1.0}
    """
    counts = Counter(sample.outcome for sample in samples)
    return {outcome: counts[outcome] / len(samples) for outcome in outcomes}


def evaluate(samples: Sequence[Sample], task: Task, ks: Sequence[int], seed: int) -> dict:
    """An entry of results.json: shares of outcomes; pass@1; maj@k and pass@k for each k of `ks`, as mean and se.

    So is the mean reward, as `reward`, of a task that has a reward of its own; maj@k needs its `parse`.
    """
    answers, shares = collect(samples, task), outcome_shares(samples, task.outcomes)
    # The mean over all samples is what draws of one sample estimate: one quantity, one number.
    estimates = {"pass@1": pass_at_k(answers, 1, seed)._replace(mean=shares[task.outcomes[0]])}
    for k in ks:
        estimates |= {f"maj@{k}": maj_at_k(answers, k, seed)} if task.parse else {}
        estimates |= {f"pass@{k}": pass_at_k(answers, k, seed)}
    if task.grade is None:
        rewards = np.array([[sample.reward for sample in question] for question in _by_question(samples)])
        estimates |= {"reward": mean_reward(rewards, seed)}
    questions, n = answers.correct.shape
    return (
        shares
        | {name: estimate._asdict() for name, estimate in estimates.items()}
        | {"questions": questions, "samples_per_question": n}
    )


def outcomes_of(entry: Mapping[str, Any]) -> list[str]:
    """The outcomes in an entry of results.json: shares stand there as plain numbers with a point.

    >>> outcomes_of({"right": 0.25, "wrong": 0.75, "pass@1": {"mean": 0.25, "se": 0.1}, "questions": 4})
    ['right', 'wrong']
    """
    return [name for name, value in entry.items() if isinstance(value, float)]


def print_table(results: dict) -> None:
    """Before and after each iteration, with +- 2 standard errors: outcomes, pass@k and maj@k in percent; mean reward.

    The first outcome, correct, is pass@1, and stands once.
    """
    from rich.console import Console
    from rich.table import Table

    entries = [results["before"], *(entry["after"] for entry in results["iterations"])]
    names = ["after"] if len(entries) == 2 else [f"after iteration {i}" for i in range(1, len(entries))]
    table = Table("", "before", *names)
    right, *others = outcomes_of(entries[0])
    for name, value in entries[0].items():
        if name in others:
            table.add_row(name, *(f"{100 * e[name]:.1f} %" for e in entries))
        elif name == "reward":
            table.add_row("mean reward", *(with_interval(e[name], 1, 3) for e in entries))
        elif name == right or (isinstance(value, dict) and name != "pass@1"):
            found = [e["pass@1" if name == right else name] for e in entries]
            table.add_row(name, *(f"{with_interval(e, 100, 1)} %" for e in found))
    Console().print(table)


def with_interval(estimate: Mapping[str, float | None], unit: float, digits: int) -> str:
    """The mean of an estimate times `unit`, with +- 2 standard errors if it has any.

    >>> with_interval({"mean": 0.5, "se": 0.01}, unit=100, digits=1)
    '50.0 ± 2.0'
    """
    mean, se = estimate["mean"], estimate["se"]
    return f"{unit * mean:.{digits}f}" + ("" if se is None else f" ± {2 * unit * se:.{digits}f}")
