"""Evaluation: pass@k, maj@k and the share of each outcome, with the paper's intervals (Section 4.2).

For a K: draw K of a question's N samples without replacement, average over the questions, repeat 100 times; the
mean of the repeats is reported, and from their variance V the standard error sqrt(K V / (N - K)). Intervals are
+- 2 standard errors. They tell how far another draw of samples would move the number, not another set of questions.
For K = N, as in the paper's maj@16 of 16 samples on MATH, the formula is 0 / 0: the estimate has no interval.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, get_args

import numpy as np
from rich.console import Console
from rich.table import Table

from pipeline.records import InputError, Outcome, Sample, Task


class Estimate(NamedTuple):
    """A share between 0 and 1 and its standard error, None where there is none."""

    mean: float
    se: float | None


class Answers(NamedTuple):
    """What evaluation needs of Q questions with N samples each."""

    correct: np.ndarray  # (Q, N) bool
    votes: list[list[Hashable | None]]  # Q lists of N answers, None where there is none to read


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


def collect(samples: Sequence[Sample], task: Task) -> Answers:
    """The answers of a test set's samples, which come question by question, equally many for each."""
    by_question: dict[str | None, list[Sample]] = {}
    for sample in samples:
        by_question.setdefault(sample.problem_id, []).append(sample)
    correct = np.array([[s.outcome == "correct" for s in question] for question in by_question.values()])
    answers = [[task.parse(task.visible(s.completion)) for s in question] for question in by_question.values()]
    return Answers(correct, [_joined(of_question, task) for of_question in answers])


def _joined(answers: Sequence[Hashable | None], task: Task) -> list[Hashable | None]:
    """Each answer as the first of those that are the same."""
    joined: list[Hashable | None] = []
    for answer in answers:
        firsts = (first for first in joined if first is not None and task.same(first, answer))
        joined.append(None if answer is None else next(firsts, answer))
    return joined


def outcome_shares(samples: Sequence[Sample]) -> dict[str, float]:
    """The share of correct, incorrect and invalid samples.

    >>> outcome_shares([Sample(prompt="?", completion="!", reward=-1.0, outcome="invalid")])
    {'correct': 0.0, 'incorrect': 0.0, 'invalid': 1.0}
    """
    counts = Counter(sample.outcome for sample in samples)
    return {outcome: counts[outcome] / len(samples) for outcome in get_args(Outcome)}


def evaluate(samples: Sequence[Sample], task: Task, ks: Sequence[int], seed: int) -> dict:
    """An entry of results.json: shares of outcomes; pass@1; maj@k and pass@k for each k of `ks`, as mean and se."""
    answers, shares = collect(samples, task), outcome_shares(samples)
    # The mean over all samples is what draws of one sample estimate: one quantity, one number.
    estimates = {"pass@1": pass_at_k(answers, 1, seed)._replace(mean=shares["correct"])}
    for k in ks:
        estimates |= {f"maj@{k}": maj_at_k(answers, k, seed), f"pass@{k}": pass_at_k(answers, k, seed)}
    questions, n = answers.correct.shape
    return (
        shares
        | {name: estimate._asdict() for name, estimate in estimates.items()}
        | {"questions": questions, "samples_per_question": n}
    )


def print_table(results: dict) -> None:
    """Before and after each iteration: the outcomes, and pass@k and maj@k with +- 2 standard errors, in percent.

    correct is pass@1, and stands once.
    """
    after = [entry["after"] for entry in results["iterations"]]
    names = ["after"] if len(after) == 1 else [f"after iteration {i}" for i in range(1, len(after) + 1)]
    table = Table("", "before", *names)
    for name, value in results["before"].items():
        entries = [entry["pass@1" if name == "correct" else name] for entry in (results["before"], *after)]
        if name in ("incorrect", "invalid"):
            table.add_row(name, *(f"{100 * e:.1f} %" for e in entries))
        elif name == "correct" or (isinstance(value, dict) and name != "pass@1"):
            table.add_row(name, *(f"{100 * e['mean']:.1f}{_half_width(e['se'])} %" for e in entries))
    Console().print(table)


def _half_width(se: float | None) -> str:
    return "" if se is None else f" ± {200 * se:.1f}"
