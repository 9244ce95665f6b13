"""Means over seeds: Student's t intervals, and Holm's correction for several questions."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import ttest_1samp


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, half the width of its 95 % interval, and the p-value of a mean of 0.

    values: at least two.

    >>> mean, half_width, p = interval([1.0, 3.0])
    >>> mean, round(half_width, 3), round(p, 3)
    (2.0, 12.706, 0.295)
    """
    mean = float(np.mean(values))
    if np.ptp(values) < 1e-9:  # equal, but for rounding
        return mean, 0.0, float(abs(mean) < 1e-9)
    test = ttest_1samp(values, 0)
    low, high = test.confidence_interval(0.95)
    return mean, float(high - low) / 2, float(test.pvalue)


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
