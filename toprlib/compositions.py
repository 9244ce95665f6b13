"""Which samples an iteration trains on (Section 4.3), and the baseline of their rewards.

A reward of 0 or more counts as positive, as in `topr`.
"""

import random
from collections.abc import Callable, Sequence

from toprlib.records import Sample

# (samples, size, rng, share) -> indices into samples, ascending, without repetition.
# size: how many to choose; fewer are chosen if too few samples fit. share: that of positives, for
# `proportion`; the other compositions ignore it.
Composition = Callable[[Sequence[Sample], int, random.Random, float | None], list[int]]
# samples -> a number to subtract from the reward of each
Baseline = Callable[[Sequence[Sample]], list[float]]


# ---- compositions --------------------------------------------------------------------------------
def uniform(
    samples: Sequence[Sample], size: int, rng: random.Random, share: float | None = None
) -> list[int]:
    """`size` samples at random, whatever their rewards.

    >>> samples = [Sample(prompt="?", completion="!", reward=reward) for reward in (-1, 1, -1)]
    >>> uniform(samples, 3, random.Random(0))
    [0, 1, 2]
    """
    return _choose(range(len(samples)), size, rng)


def positives_only(
    samples: Sequence[Sample], size: int, rng: random.Random, share: float | None = None
) -> list[int]:
    """`size` positive samples at random.

    >>> samples = [Sample(prompt="?", completion="!", reward=reward) for reward in (-1, 1, -1)]
    >>> positives_only(samples, 3, random.Random(0))
    [1]
    """
    positives, _ = _split_by_sign(samples)
    return _choose(positives, size, rng)


def anna_karenina(
    samples: Sequence[Sample], size: int, rng: random.Random, share: float | None = None
) -> list[int]:
    """Anna Karenina sampling (Section 4.3): one positive of each problem, then random negatives.

    The positive is the problem's first one.

    >>> samples = [Sample(prompt="?", completion="!", reward=reward) for reward in (-1, 1, 1, -1)]
    >>> anna_karenina(samples, 4, random.Random(0))
    [0, 1, 3]
    """
    positives, negatives = _split_by_sign(samples)
    first_positive: dict[str, int] = {}
    for i in positives:
        first_positive.setdefault(samples[i].prompt, i)
    chosen = _choose(list(first_positive.values()), size, rng)
    return sorted(chosen + _choose(negatives, size - len(chosen), rng))


def proportion(
    samples: Sequence[Sample], size: int, rng: random.Random, share: float | None
) -> list[int]:
    """`size` samples at random, a `share` of them positive; 0 < share < 1.

    With too few samples of one sign, it chooses fewer samples, so that the share stays.

    >>> samples = [Sample(prompt="?", completion="!", reward=reward) for reward in (1, 1, 1, -1)]
    >>> len(proportion(samples, 4, random.Random(0), share=0.5))
    2
    """
    positives, negatives = _split_by_sign(samples)
    size = min(size, int(len(positives) / share), int(len(negatives) / (1 - share)))
    count = round(share * size)
    chosen = _choose(positives, count, rng)
    return sorted(chosen + _choose(negatives, size - count, rng))


def _split_by_sign(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """The indices of the positive samples, and those of the negative ones."""
    positives = [i for i, sample in enumerate(samples) if sample.reward >= 0]
    negatives = [i for i, sample in enumerate(samples) if sample.reward < 0]
    return positives, negatives


def _choose(indices: Sequence[int], size: int, rng: random.Random) -> list[int]:
    return sorted(rng.sample(indices, min(size, len(indices))))


COMPOSITIONS: dict[str, Composition] = {
    "uniform": uniform,
    "positives_only": positives_only,
    "anna_karenina": anna_karenina,
    "proportion": proportion,
}


# ---- baselines -----------------------------------------------------------------------------------
def zero(samples: Sequence[Sample]) -> list[float]:
    """0 for each sample: rewards stay as they are."""
    return [0.0] * len(samples)


def mean_of_all(samples: Sequence[Sample]) -> list[float]:
    """For each sample the mean reward of all samples.

    >>> mean_of_all([Sample(prompt="?", completion="!", reward=reward) for reward in (1, 0, 0.5)])
    [0.5, 0.5, 0.5]
    """
    mean = sum(sample.reward for sample in samples) / len(samples)
    return [mean] * len(samples)


def mean_of_group(samples: Sequence[Sample]) -> list[float]:
    """For each sample the mean reward of the samples of the same prompt.

    >>> rewards = [("a", 1.0), ("a", 0.0), ("b", 5.0)]
    >>> mean_of_group([Sample(prompt=p, completion="!", reward=reward) for p, reward in rewards])
    [0.5, 0.5, 5.0]
    """
    means = {}
    for prompt, rewards in rewards_by_prompt(samples).items():
        means[prompt] = sum(rewards) / len(rewards)
    return [means[sample.prompt] for sample in samples]


BASELINES: dict[str, Baseline] = {
    "zero": zero,
    "mean": mean_of_all,
    "group": mean_of_group,
}


def rewards_by_prompt(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The rewards of each prompt's samples."""
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample.reward)
    return groups
