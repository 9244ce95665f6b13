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
    if np.ptp(values) == 0:  # then rounding may make the standard error 1e-17
        return mean, 0.0, float(mean == 0)
    degrees = len(values) - 1

    def two_sided_p(t: float) -> float:
        share = degrees / (degrees + t**2)
        return float(mpmath.betainc(degrees / 2, 0.5, 0, share, regularized=True))

    bounds = (1.9, 12.8)  # the quantile lies between 1.96 (many values) and 12.71 (two)
    quantile = mpmath.findroot(lambda t: two_sided_p(t) - 0.05, bounds, "anderson")
    return mean, float(quantile) * standard_error, two_sided_p(mean / standard_error)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm-corrected p-values, in the given order.

    If no question has an effect, any of them is below 0.05 with a probability of at most 5 %.

    >>> holm([0.03, 0.01, 0.04])
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_values)
    not_smaller = len(p_values) - np.arange(len(p_values))  # so many p-values, itself included
    corrected = np.maximum.accumulate(np.array(p_values)[order] * not_smaller).clip(max=1)
    return corrected[np.argsort(order)].tolist()
