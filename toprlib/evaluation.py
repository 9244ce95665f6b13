"""Evaluation: pass@k, maj@k and shares of outcomes, with the paper's intervals; log pi of held-out samples.

For a K: draw K of a question's N samples without replacement, average over the questions, repeat 100 times; the
mean of the repeats is reported, and from their variance V the standard error sqrt(K V / (N - K)) (Section 4.2). +- 2
standard errors tell how far another draw of samples would move the number, not another set of questions. For K = N, as
in the paper's maj@16 of 16 samples on MATH, the formula is 0 / 0: the estimate has no interval.

Held-out samples take no engine: log pi - log mu should rise for positives, and fall for negatives (Section 3).
"""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from toprlib.records import Encoded, Example, InputError, Sample, Task
from toprlib.report import Estimate, Table
from toprlib.sampling import named


class Answers(NamedTuple):
    """What evaluation needs of Q questions with N samples each."""

    correct: np.ndarray  # (Q, N) bool
    votes: Sequence[
        Sequence[Hashable | None]
    ] = ()  # Q lists of N answers, None for one that cannot be read
    rewards: np.ndarray | None = None  # (Q, N)


# (answers, question, samples) -> how good these samples of the question are, together
Score = Callable[[Answers, int, Sequence[int]], float]


def estimate(score: Score, answers: Answers, k: int, seed: int, repeats: int = 100) -> Estimate:
    """The mean over questions of the score of k of their N samples. InputError unless 1 <= k <= N.

    >>> one_of_four = Answers(np.array([[True, False, False, False]]))
    >>> round(estimate(METRICS["pass@k"].score, one_of_four, k=3, seed=0).mean, 2)  # 3/4, by 100 random draws
    0.78
    """
    questions, n = answers.correct.shape
    if not 1 <= k <= n:
        raise InputError(f"K = {k}: must be at least 1 and at most the {n} samples per question")
    rng = np.random.default_rng(seed)
    means = []
    for _ in range(repeats):
        drawn = rng.permuted(np.tile(np.arange(n), (questions, 1)), axis=1)[:, :k]
        means.append(
            np.mean([score(answers, question, drawn[question]) for question in range(questions)])
        )
    variance = float(np.var(means, ddof=1))
    return Estimate(
        float(np.mean(means)), None if k == n else 2 * float(np.sqrt(k * variance / (n - k)))
    )


def wins(
    answers: Answers, question: int, samples: Sequence[int], weights: Sequence[float] | None = None
) -> bool:
    """Whether the most frequent answer is correct, or that with the largest sum of weights (Section 4.4).

    Samples without an answer do not vote; a tie goes to the answer that comes first among the samples.

    >>> answers = Answers(np.array([[True, False, False]]), [[7, 8, 8]])
    >>> wins(answers, 0, [0, 1, 2]), wins(answers, 0, [0, 1, 2], weights=[0.75, 0.25, 0.25])
    (False, True)
    """
    sums: dict[Hashable, float] = {}
    first: dict[Hashable, int] = {}
    for i, weight in zip(
        samples, np.ones(len(samples)) if weights is None else weights, strict=True
    ):
        vote = answers.votes[question][i]
        if vote is not None:
            sums[vote] = sums.get(vote, 0.0) + weight
            first.setdefault(vote, i)
    return bool(sums) and bool(answers.correct[question, first[max(sums, key=sums.__getitem__)]])


def _is_solved(answers: Answers, question: int, samples: Sequence[int]) -> bool:
    return bool(answers.correct[question, samples].any())


class Metric(NamedTuple):
    """A number of a test set, and how people see it."""

    score: Score  # the number is its mean over questions
    meaning: str  # for docs/runs.md
    suits: Callable[[Task], bool] = lambda task: True  # the tasks that have it
    label: str = ""  # in the table and the picture; by default its name
    in_percent: bool = True


METRICS = {  # @k: of --k samples, left out where a question has fewer; else of one, the mean of all, and in curve.png
    "pass@1": Metric(_is_solved, "share of correct samples"),
    "maj@k": Metric(
        wins,
        "share of questions whose most frequent answer among k samples is correct; of tasks with `parse`",
        suits=lambda task: task.parse is not None,
    ),
    "pass@k": Metric(_is_solved, "share of questions with a correct one among k samples"),
    "reward": Metric(
        lambda answers, question, samples: answers.rewards[question, samples].mean(),
        "mean reward; of tasks with `reward` or `batch_reward`",
        suits=lambda task: task.grade is None,
        label="mean reward",
        in_percent=False,
    ),
}


def parts_of(entry: Mapping[str, Any]) -> tuple[list[str], dict[str, Metric]]:
    """The outcomes, and the metrics, in an entry of results.json, by their names there.

    >>> entry = {"right": 0.25, "wrong": 0.75, "maj@4": {"mean": 0.5, "se": None}, "questions": 4}
    >>> outcomes, metrics = parts_of(entry)
    >>> outcomes, [*metrics]
    (['right', 'wrong'], ['maj@4'])
    """
    by_name = {
        name: METRICS.get(name) or METRICS.get(re.sub(r"@\d+$", "@k", name)) for name in entry
    }
    metrics = {name: metric for name, metric in by_name.items() if metric}
    counts = {"samples_seen", "questions", "samples_per_question"}
    return [name for name in entry if name not in metrics.keys() | counts], metrics


def collect(samples: Sequence[Sample], task: Task) -> Answers:
    """The answers of a test set's samples, which come question by question, equally many for each."""
    questions = [
        list(question) for _, question in groupby(samples, key=lambda sample: sample.problem_id)
    ]
    correct = np.array(
        [[sample.outcome == task.outcomes[0] for sample in question] for question in questions]
    )
    rewards = np.array([[sample.reward for sample in question] for question in questions])
    return Answers(
        correct, [_votes(question, task) for question in questions] if task.parse else (), rewards
    )


def _votes(samples: Sequence[Sample], task: Task) -> list[Hashable | None]:
    """The answer of each sample, as the first of those that are the same."""
    votes: list[Hashable | None] = []
    for sample in samples:
        text = task.visible(sample.completion)
        with named(task.parse, sample.problem_id, text):
            answer = task.parse(text)
            hash(answer)  # TypeError where it cannot vote
        firsts = (first for first in votes if first is not None and task.same(first, answer))
        votes.append(None if answer is None else next(firsts, answer))
    return votes


def evaluate(samples: Sequence[Sample], task: Task, k: int, seed: int) -> dict[str, Any]:
    """An entry of results.json: shares of outcomes, and the mean and the standard error of each metric of the task."""
    answers, estimates = collect(samples, task), {}
    questions, n = answers.correct.shape
    for name, metric in METRICS.items():
        if not metric.suits(task):
            continue
        if not name.endswith(
            "@k"
        ):  # the mean over all samples is what draws of one sample estimate: one number
            each = [
                [metric.score(answers, question, [i]) for i in range(n)]
                for question in range(questions)
            ]
            estimates[name] = (
                estimate(metric.score, answers, 1, seed)
                ._replace(mean=float(np.mean(each)))
                .record()
            )
        elif 1 < k <= n:
            estimates[name.replace("@k", f"@{k}")] = estimate(
                metric.score, answers, k, seed
            ).record()
    counts = Counter(sample.outcome for sample in samples)
    shares = {outcome: counts[outcome] / len(samples) for outcome in task.outcomes}
    return shares | estimates | {"questions": questions, "samples_per_question": n}


MEASURED = {
    "log_ratio": "log pi - log mu, nats",
    "log_ratio_per_token": "log pi - log mu, nats per token",
    "logp_per_token": "log pi, nats per token",
}
SIGNS = ("positive", "negative")


@dataclass(frozen=True)
class Scored:
    """A held-out sample under a model: a line of test-STEP.jsonl."""

    prompt: int  # the index of its prompt among the held-out ones
    reward: float  # after the baseline
    length: int  # of the completion, in tokens
    logp: float  # log pi(y|x) of this model, in nats
    logmu: float  # log mu(y|x): of the model that training begins with, or of the samples with --trust-logmu


def to_scored(
    rows: Sequence[Sequence[Encoded]],
    examples: Sequence[Sequence[Example]],
    before: Sequence[Scored] | None,
) -> list[Scored]:
    """Held-out samples, of which `examples` have log pi by a model where others have log mu.

    before: the same samples scored by the initial model, whose log pi is log mu where the samples' own is not trusted;
    None where the model is that one.
    """
    prompts: dict[tuple[int, ...], int] = {}
    scored = []
    for i, ([one], [example]) in enumerate(zip(rows, examples, strict=True)):
        logmu = before[i].logmu if before else example.logmu
        if one.token_logmu is not None:
            logmu = float(np.sum(one.token_logmu, dtype=np.float32))
        prompt = prompts.setdefault(tuple(one.prompt_ids), len(prompts))
        scored.append(Scored(prompt, one.reward, len(one.completion_ids), example.logmu, logmu))
    return scored


def evaluate_held_out(scored: Sequence[Scored]) -> dict[str, Any]:
    """An entry of results.json: for each sign the number of samples, and means of MEASURED over them.

    Standard errors are those of independent samples. ranked: the share of pairs, a positive and a negative of a prompt,
    in which the positive has the higher log pi per token, as the mean over prompts; None without such a pair.

    >>> scored = [Scored(0, 1.0, 2, logp=-1.0, logmu=-2.0), Scored(0, -1.0, 4, logp=-9.0, logmu=-5.0)]
    >>> entry = evaluate_held_out(scored)
    >>> entry["positive"]["log_ratio_per_token"], entry["negative"]["log_ratio"]["mean"], entry["ranked"]["mean"]
    ({'mean': 0.5, 'se': None}, -4.0, 1.0)
    """
    prompt, reward, length, logp, logmu = np.array([astuple(one) for one in scored]).T
    measured = dict(
        zip(MEASURED, (logp - logmu, (logp - logmu) / length, logp / length), strict=True)
    )
    signs = dict(zip(SIGNS, (reward >= 0, reward < 0), strict=True))
    entry: dict[str, Any] = {
        name: {"samples": int(chosen.sum())}
        | {key: _mean(values[chosen]) for key, values in measured.items()}
        for name, chosen in signs.items()
    }
    logp = measured["logp_per_token"]
    pairs = [[logp[(prompt == one) & sign] for sign in signs.values()] for one in np.unique(prompt)]
    return entry | {
        "ranked": _mean([np.greater.outer(*pair).mean() for pair in pairs if all(map(len, pair))])
    }


def _mean(values: Sequence[float]) -> dict[str, float | None] | None:
    return Estimate.over_samples(values).record() if len(values) else None


def shown(entry: Mapping[str, Any]) -> dict[str, str]:
    """The rows of an entry of results.json, with +- 2 standard errors. Of problems, the first outcome is pass@1."""
    if "ranked" in entry:  # of held-out samples
        values = {
            f"{sign}s: {label}": (entry[sign][key], 1, 3)
            for sign in SIGNS
            for key, label in MEASURED.items()
        }
        values["positive ahead of negative, of a prompt's pairs"] = entry["ranked"], 100, 1, " %"
        return {
            name: Estimate.read(value).text(*how) if value else "-"
            for name, (value, *how) in values.items()
        }
    outcomes, metrics = parts_of(entry)
    rows = {name: Estimate(entry[name]).text(100, 1, " %") for name in outcomes}
    for name, metric in metrics.items():
        label = outcomes[0] if name == "pass@1" else metric.label or name
        rows[label] = Estimate.read(entry[name]).text(
            *((100, 1, " %") if metric.in_percent else (1, 3))
        )
    return rows


def to_table(results: Mapping[str, Any], names: Sequence[str] = ()) -> Table:
    """Results before and after each iteration, which may have names."""
    after = [iteration["after"] for iteration in results["iterations"]]
    names = names or (
        ["after"] if len(after) == 1 else [f"after iteration {i + 1}" for i in range(len(after))]
    )
    columns = [shown(entry) for entry in (results["before"], *after)]
    rows = [[label, *(column[label] for column in columns)] for label in columns[0]]
    return Table(
        ["held-out samples" if "ranked" in results["before"] else "", "before", *names], rows
    )
