"""Which of the samples an iteration trains on (Section 4.3), and the baseline that is subtracted from their rewards."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from toprlib.records import Sample


def anna_karenina(
    samples: Sequence[Sample], size: int, rng: random.Random, share: float | None
) -> list[int]:
    """Anna Karenina sampling (Section 4.3): one positive per problem, the first, filled up with random negatives."""
    first: dict[str, int] = {}
    for i in _of_sign(samples, True):
        first.setdefault(samples[i].prompt, i)
    positives = _some(list(first.values()), size, rng)
    return sorted(positives + _some(_of_sign(samples, False), size - len(positives), rng))


def proportion(samples: Sequence[Sample], size: int, rng: random.Random, share: float) -> list[int]:
    """`size` samples at random of which a share is positive; fewer where there are not enough of a sign."""
    positives, negatives = _of_sign(samples, True), _of_sign(samples, False)
    size = min(size, int(len(positives) / share), int(len(negatives) / (1 - share)))
    chosen = round(share * size)
    return sorted(_some(positives, chosen, rng) + _some(negatives, size - chosen, rng))


def _of_sign(samples: Sequence[Sample], is_positive: bool) -> list[int]:
    return [i for i, sample in enumerate(samples) if (sample.reward >= 0) == is_positive]


def _some(numbers: Sequence[int], size: int, rng: random.Random) -> list[int]:
    return sorted(rng.sample(numbers, min(size, len(numbers))))


class Composition(NamedTuple):
    """How the samples of an iteration are chosen, and how many of each problem are drawn to choose from."""

    choose: Callable[
        ..., list[int]
    ]  # (samples, how many, random numbers, --proportion) -> indices, in order
    draws: str = "n"  # the setting that says how many samples of each problem are drawn


COMPOSITIONS = {
    "uniform": Composition(lambda samples, size, rng, share: _some(range(len(samples)), size, rng)),
    "positives_only": Composition(
        lambda samples, size, rng, share: _some(_of_sign(samples, True), size, rng)
    ),
    "anna_karenina": Composition(anna_karenina, draws="candidates"),
    "proportion": Composition(proportion),
}


def group_mean(samples: Sequence[Sample]) -> list[float]:
    """For each sample the mean reward of those of the same prompt.

    >>> group_mean([Sample(prompt=x, completion="!", reward=r) for x, r in (("a", 1.0), ("a", 0.0), ("b", 5.0))])
    [0.5, 0.5, 5.0]
    """
    means = {
        prompt: sum(rewards) / len(rewards)
        for prompt, rewards in rewards_of_groups(samples).items()
    }
    return [means[sample.prompt] for sample in samples]


BASELINES: dict[
    str, Callable[[Sequence[Sample]], list[float]]
] = {  # what each sample's baseline is counted from
    "zero": lambda samples: [0.0] * len(samples),
    "mean": lambda samples: (
        [sum(sample.reward for sample in samples) / len(samples)] * len(samples)
    ),
    "group": group_mean,
}


def rewards_of_groups(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The rewards of each prompt's samples."""
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample.reward)
    return groups
