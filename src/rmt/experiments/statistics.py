"""The few statistics that the experiments report: means with intervals, and how surprising a difference is.

Seeds are few, so everything rests on Student's t distribution. Runs with the same seed see the same tokens in the same
order, which makes differences between models at equal seeds steadier than the losses themselves: they are compared in
pairs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95


def mean_and_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and half the width of its confidence interval (None for a single value)."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, t_quantile(CONFIDENCE, len(values) - 1) * error


def paired_p_value(first: Sequence[float], second: Sequence[float]) -> float | None:
    """How often a difference at least as large would come from chance: a two-sided paired t-test."""
    differences = np.subtract(first, second)
    if len(differences) < 2:
        return None
    deviation = float(np.std(differences, ddof=1))
    if deviation == 0:
        return 1.0 if not differences.any() else 0.0
    t = float(np.mean(differences)) / (deviation / math.sqrt(len(differences)))
    return 1 - t_within(abs(t), len(differences) - 1)


def t_within(t: float, freedom: int) -> float:
    """The probability that Student's t lies between -t and t, from its density over the angle atan(t / sqrt(n))."""
    angles = np.linspace(0.0, math.atan(t / math.sqrt(freedom)), 20_001)
    half = np.trapezoid(np.cos(angles) ** (freedom - 1), angles)
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return min(1.0, 2 * constant * float(half))


@functools.cache
def t_quantile(confidence: float, freedom: int) -> float:
    """The t within which the given share of the distribution lies, by bisection."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_within(middle, freedom) < confidence else (low, middle)
    return high


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values corrected for having made several tests (Holm's method)."""
    order = np.argsort(p_values)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
