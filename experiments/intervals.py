"""Means over seeds: Student's t intervals, and Holm's correction for several questions."""

from collections.abc import Sequence

import mpmath
import numpy as np


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, half the width of its 95 % interval, and the p-value of a mean of 0.

    values: at least two.

    >>> mean, half_width, p = interval([1.0, 3.0])
    >>> mean, round(half_width, 3), round(p, 3)
    (2.0, 12.706, 0.295)
    """
    mean = float(np.mean(values))
    standard_error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    if standard_error == 0:
        return mean, 0.0, float(mean == 0)
    degrees = len(values) - 1

    def two_sided_p(t: float) -> float:
        share = degrees / (degrees + t**2)
        return float(mpmath.betainc(degrees / 2, 0.5, 0, share, regularized=True))

    bounds = (1.9, 12.8)  # of the quantile: 1.96 for infinitely many values, 12.71 for two
    quantile = mpmath.findroot(lambda t: two_sided_p(t) - 0.05, bounds, "anderson")
    return mean, float(quantile) * standard_error, two_sided_p(mean / standard_error)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several questions, so that one of them below 0.05 is rarely an accident.

    >>> holm([0.03, 0.01, 0.04])
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_values)
    not_smaller = len(p_values) - np.arange(len(p_values))  # so many p-values, itself included
    corrected = np.maximum.accumulate(np.array(p_values)[order] * not_smaller).clip(max=1)
    return corrected[np.argsort(order)].tolist()
