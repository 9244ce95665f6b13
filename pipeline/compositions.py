"""Which of the samples an iteration trains on (Section 4.3), and the baseline that is subtracted from their rewards."""

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipeline.records import Sample

if TYPE_CHECKING:
    from topr import Limits


def anna_karenina(samples: Sequence[Sample], size: int, rng: random.Random, share: float | None) -> list[int]:
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

    choose: Callable[..., list[int]]  # (samples, how many, random numbers, --proportion) -> indices, in order
    draws: str = "n"  # the setting that says how many samples of each problem are drawn


COMPOSITIONS = {
    "uniform": Composition(lambda samples, size, rng, share: _some(range(len(samples)), size, rng)),
    "positives_only": Composition(lambda samples, size, rng, share: _some(_of_sign(samples, True), size, rng)),
    "anna_karenina": Composition(anna_karenina, draws="candidates"),
    "proportion": Composition(proportion),
}


def group_mean(samples: Sequence[Sample]) -> list[float]:
    """For each sample the mean reward of those of the same prompt.

    >>> group_mean([Sample(prompt=x, completion="!", reward=r) for x, r in (("a", 1.0), ("a", 0.0), ("b", 5.0))])
    [0.5, 0.5, 5.0]
    """
    means = {prompt: sum(rewards) / len(rewards) for prompt, rewards in rewards_of_groups(samples).items()}
    return [means[sample.prompt] for sample in samples]


BASELINES: dict[str, Callable[[Sequence[Sample]], list[float]]] = {  # what each sample's baseline is counted from
    "zero": lambda samples: [0.0] * len(samples),
    "mean": lambda samples: [sum(sample.reward for sample in samples) / len(samples)] * len(samples),
    "group": group_mean,
}


def rewards_of_groups(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The rewards of each prompt's samples."""
    groups: dict[str, list[float]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample.reward)
    return groups


def note_on_signs(
    method: str, limits: "Limits | None", baseline_from: str, rewards: Sequence[float], learnt: Sequence[float]
) -> str | None:
    """A warning if all rewards have one sign after the baseline, or most changed sign; else None.

    rewards, learnt: before and after the baseline. The note has the share of each sign and the setting that mends it.
    limits: the method's, None for a method with a loss of its own.
    """
    size, low, high = len(learnt), min(rewards), max(rewards)
    positive, negative = sum(reward > 0 for reward in learnt), sum(reward < 0 for reward in learnt)
    turned = 100 * sum(before * after < 0 for before, after in zip(rewards, learnt, strict=True)) / size
    if not (positive or negative):
        fault = f"nothing is left for {method} to learn from"
    elif not negative:
        learns = "is supervised training on" if limits and limits.a_pos == limits.b_pos else "learns from"
        fault = f"without negatives {method} {learns} the positives"
    elif not positive:
        fault = f"without positives {method} only makes less probable what was drawn"
    elif low < 0 < high and turned > 50:
        fault = f"the baseline gave {turned:.1f} % the other sign, of which {method} learns the contrary"
    else:
        return None
    if low == high:
        mend = f"all rewards are {low:g}, which no baseline can tell apart: take other problems or draw more"
    else:
        c, origin = 0.0 if low < 0 < high else (low + high) / 2, "--baseline-from zero "
        option = f"{origin if baseline_from != 'zero' else ''}--baseline {c:g}"
        mend = f"{option}, between the smallest reward, {low:g}, and the largest, {high:g}, gives both signs"
    counts = {"positive": positive, "zero": size - positive - negative, "negative": negative}
    shares = ", ".join(f"{100 * count / size:.1f} % {name}" for name, count in counts.items())
    return f"after the baseline the rewards are {shares}: {fault}; {mend}"
