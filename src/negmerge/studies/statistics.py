"""Means, paired differences, and the smallest difference that a number of pairs can detect.

Intervals have a level of 95 %, tests are two-sided, and the power of a test is its probability to
find a difference that exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, log10, sqrt
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.stats import nct, rankdata, t, wilcoxon

LEVEL, POWER = 0.05, 0.8
EXACT = 50
"""The largest number of differences for which the choices of signs are counted."""
MOST_PAIRS = 10_000
"""The largest number of pairs that `pairs_needed` returns."""
HUGE = 1e100
"""Values above it are divided by the largest one before they are squared."""
MOST_PLACES = 300
"""The largest number of decimal places that a difference is rounded to: 10**309 is infinite."""
LARGEST = 1e4
"""The largest effect of which the power is computed; two or three pairs find any larger one."""


@dataclass(frozen=True)
class Mean:
    """The mean of some values; the deviation and the interval need two values or more."""

    n: int
    mean: float
    std: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class PairedTest:
    """The tests of paired differences against zero.

    Args:
        mean: the mean difference with its interval.
        t_p: the p-value of the t test; None for one pair.
        wilcoxon_p: the p-value of Wilcoxon's signed-rank test; None for one pair.
    """

    mean: Mean
    t_p: float | None
    wilcoxon_p: float | None


def mean_of(values: ArrayLike) -> Mean:
    """The mean, the standard deviation, and the t interval of the mean.

    >>> mean_of([1.0, 2.0, 3.0])
    Mean(n=3, mean=2.0, std=1.0, low=-0.48..., high=4.48...)
    >>> mean_of([5.0])
    Mean(n=1, mean=5.0, std=None, low=None, high=None)
    """
    found = np.asarray(values, np.float64)
    n, mean = len(found), float(found.mean())
    if n < 2:
        return Mean(n, mean, None, None, None)
    std = _deviation(found)
    half = float(t.ppf(1 - LEVEL / 2, n - 1)) * std / sqrt(n)
    return Mean(n, mean, std, mean - half, mean + half)


def _deviation(values: NDArray[np.float64]) -> float:
    """The standard deviation; exactly 0 for equal values, whose mean may be rounded.

    >>> _deviation(np.array([1e200, 3e200]))  # the squares are too large for float64
    1.414...e+200
    """
    if not np.ptp(values):
        return 0.0
    largest = float(np.abs(values).max())
    unit = largest if largest > HUGE else 1.0
    return float((values / unit).std(ddof=1)) * unit


def differences(ours: ArrayLike, theirs: ArrayLike) -> NDArray[np.float64]:
    """Paired differences, without the rounding errors of the subtraction.

    Tests that rank the differences must see that two of them are equal, or zero.

    >>> differences([0.3, 100.3], [0.1 + 0.2, 100.1 + 0.2]).tolist()
    [0.0, 0.0]
    """
    both = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    largest = max(float(np.abs(values).max(initial=0.0)) for values in both)
    places = min(12 - ceil(log10(largest)), MOST_PLACES) if largest else 0
    return np.round(both[0] - both[1], places) + 0.0  # no -0


def paired_test(found: ArrayLike) -> PairedTest:
    """Test paired differences against zero.

    >>> test = paired_test([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> round(test.t_p, 4), test.wilcoxon_p
    (0.0132, 0.0625)
    >>> paired_test([0.0, 0.0]).t_p
    1.0
    """
    values = np.asarray(found, np.float64)
    mean = mean_of(values)
    if mean.std is None:
        return PairedTest(mean, None, None)
    return PairedTest(mean, t_test(mean), signed_rank_test(values))


def t_test(mean: Mean) -> float:
    """The two-sided p-value of a t test that a mean is zero.

    Without any scatter the p-value is 1 for a mean of zero, and 0 for any other.
    """
    if not mean.std:
        return float(mean.mean == 0)
    return float(2 * t.sf(abs(mean.mean) / (mean.std / sqrt(mean.n)), mean.n - 1))


def signed_rank_test(values: NDArray[np.float64]) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test; zeros are left out.

    Up to 50 differences the p-value is exact, also with ties, where scipy's is not; beyond, it is a
    normal approximation.

    >>> signed_rank_test(np.array([1.0, 2.0, 2.0, 0.0])), signed_rank_test(np.zeros(3))
    (0.25, 1.0)
    """
    found = values[values != 0]
    if not len(found):
        return 1.0
    if len(found) > EXACT:
        tested: Any = wilcoxon(found)
        return float(tested.pvalue)
    ranks = np.rint(2 * rankdata(np.abs(found))).astype(int)  # ties have halves
    counts = np.ones(1)  # of the choices of signs, by twice the sum of the positive ranks
    for rank in ranks:
        counts = np.append(counts, np.zeros(rank)) + np.append(np.zeros(rank), counts)
    smaller = min(ranks[found > 0].sum(), ranks[found < 0].sum())
    return min(1.0, float(2 * counts[: smaller + 1].sum() / counts.sum()))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction of the p-values of several tests; tests without a p-value do not count.

    >>> holm([0.01, 0.04, 0.03, None])
    [0.03, 0.06, 0.06, None]
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[place] = largest
    return corrected


def power_of(effect: float, n: int, level: float = LEVEL) -> float:
    """The power of a two-sided paired t test.

    >>> round(power_of(0.5, 34), 4)
    0.8078

    Args:
        effect: the true difference, divided by the standard deviation of the differences.
        n: the number of pairs, two or more.
    """
    limit, centre = float(t.ppf(1 - level / 2, n - 1)), abs(effect) * sqrt(n)
    # The lower tail is the upper tail of the opposite effect; nct.cdf gives NaN there.
    return float(nct.sf(limit, n - 1, centre) + nct.sf(limit, n - 1, -centre))


def detectable(std: float, n: int, level: float = LEVEL) -> float:
    """The difference that a paired t test of n pairs finds with a probability of 80 %.

    >>> round(detectable(2.0, 12), 3)
    1.777

    Args:
        std: the standard deviation of the differences.
    """
    return std * _detectable_effect(n, level)


@cache
def _detectable_effect(n: int, level: float) -> float:
    high = 1.0
    while power_of(high, n, level) < POWER:
        high *= 2
    found: Any = brentq(lambda effect: power_of(effect, n, level) - POWER, 0.0, high)
    return float(found)


def pairs_needed(mean: float, std: float, level: float = LEVEL) -> int | None:
    """The number of pairs with which a t test finds a difference with a probability of 80 %.

    >>> pairs_needed(0.5, 1.0), pairs_needed(0.0, 1.0)
    (34, None)

    Args:
        mean, std: the true difference and the standard deviation of the differences.

    Returns:
        None if there is no difference, or if more than `MOST_PAIRS` are needed.
    """
    if not std:
        return 2 if mean else None
    effect = min(abs(mean) / std, LARGEST)
    low, high = 1, 2
    while power_of(effect, high, level) < POWER:
        if high == MOST_PAIRS:
            return None
        low, high = high, min(2 * high, MOST_PAIRS)
    while high - low > 1:  # the power grows with the number of pairs
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(effect, middle, level) >= POWER else (middle, high)
    return high
