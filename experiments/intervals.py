"""Means over seeds: Student's t intervals, and Holm's correction for several questions."""

from collections.abc import Sequence
from typing import NamedTuple

import mpmath
import numpy as np


class Interval(NamedTuple):
    """A mean, half the width of its 95 % interval, and the p-value of a mean of 0."""

    mean: float
    half_width: float
    p: float

    def __str__(self) -> str:
        """In points.

        >>> str(Interval(0.0123, 0.004, 0.01))
        '1.2 ± 0.4'
        """
        return f"{100 * self.mean:.1f} ± {100 * self.half_width:.1f}"


def interval(values: Sequence[float]) -> Interval:
    """The interval of a mean by Student's t, from at least two values.

    >>> str(interval([0.01, 0.03]))
    '2.0 ± 12.7'
    """
    mean = float(np.mean(values))
    standard_error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    degrees = len(values) - 1
    if standard_error == 0:
        return Interval(mean, 0.0, float(mean == 0))
    half_width = t_quantile(degrees) * standard_error
    return Interval(mean, half_width, two_sided_p(mean / standard_error, degrees))


def two_sided_p(t: float, degrees: int) -> float:
    """The probability that Student's t is at least as far from 0 as `t`.

    >>> round(two_sided_p(2.776, degrees=4), 3)
    0.05
    """
    share = degrees / (degrees + t**2)
    return float(mpmath.betainc(degrees / 2, 0.5, 0, share, regularized=True))


def t_quantile(degrees: int) -> float:
    """The t whose two-sided p is 0.05.

    >>> round(t_quantile(2), 3)
    4.303
    """
    bounds = (1.9, 12.8)  # the t of infinitely many degrees is 1.96
    return float(mpmath.findroot(lambda t: two_sided_p(t, degrees) - 0.05, bounds, "anderson"))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's p-values of several questions: below 0.05, an answer is significant among them.

    >>> holm([0.03, 0.01, 0.04])
    [0.06, 0.03, 0.06]
    """
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(np.argsort(p_values)):
        largest = max(largest, p_values[index] * (len(p_values) - rank))
        corrected[index] = min(largest, 1.0)
    return corrected
