"""Which of the samples an iteration trains on (Section 4.3): pure functions from samples to their numbers, in order.

Where a rule asks for more samples of a kind than were drawn, it takes those there are.
"""

import random
from collections.abc import Sequence
from typing import Literal

from pipeline.records import Sample

Composition = Literal["uniform", "positives_only", "anna_karenina", "proportion"]


def uniform(samples: Sequence[Sample], size: int, rng: random.Random) -> list[int]:
    """`size` samples at random.

    >>> uniform(some_samples("+--+"), 4, random.Random(0))
    [0, 1, 2, 3]
    """
    return _some(range(len(samples)), size, rng)


def positives_only(samples: Sequence[Sample], size: int, rng: random.Random) -> list[int]:
    """`size` of the positives at random.

    >>> positives_only(some_samples("+--+"), 4, random.Random(0))
    [0, 3]
    """
    return _some(_of_sign(samples, True), size, rng)


def anna_karenina_size(problems: int) -> int:
    """Examples for so many problems, as many a problem as the paper's 50,000 for GSM8K's 7,473.

    >>> anna_karenina_size(128)
    857
    """
    return -(-50_000 * problems // 7_473)


def anna_karenina(samples: Sequence[Sample], size: int, rng: random.Random) -> list[int]:
    """Each problem's first positive and, up to `size`, negatives at random: each unhappy one is unhappy in its own way.

    >>> anna_karenina(some_samples("-+-+-"), 3, random.Random(1))
    [0, 1, 4]
    """
    first: dict[str, int] = {}
    for i in _of_sign(samples, True):
        first.setdefault(samples[i].prompt, i)
    positives = _some(list(first.values()), size, rng)
    return sorted(positives + _some(_of_sign(samples, False), size - len(positives), rng))


def proportion(samples: Sequence[Sample], size: int, share: float, rng: random.Random) -> list[int]:
    """`size` samples at random of which a share is positive; fewer where there are not enough of a sign.

    >>> proportion(some_samples("++------"), 8, 0.5, random.Random(0))
    [0, 1, 2, 4]
    """
    positives, negatives = _of_sign(samples, True), _of_sign(samples, False)
    size = min(size, int(len(positives) / share), int(len(negatives) / (1 - share)))
    chosen = round(share * size)
    return sorted(_some(positives, chosen, rng) + _some(negatives, size - chosen, rng))


def some_samples(signs: str) -> list[Sample]:
    """Samples of one prompt with the given signs of reward, to try the functions above on.

    >>> [sample.reward for sample in some_samples("+-")]
    [1.0, -1.0]
    """
    return [Sample(prompt="?", completion="!", reward=float(f"{sign}1")) for sign in signs]


def _of_sign(samples: Sequence[Sample], is_positive: bool) -> list[int]:
    return [i for i, sample in enumerate(samples) if (sample.reward >= 0) == is_positive]


def _some(numbers: Sequence[int], size: int, rng: random.Random) -> list[int]:
    return sorted(rng.sample(numbers, min(size, len(numbers))))
