"""Accuracy: the percentage of correct answers on each set."""

from __future__ import annotations

from functools import partial
from math import sqrt

from negmerge.errors import ValueRangeError
from negmerge.evaluation.metrics import Measured, Metric, Observed, metrics
from negmerge.evaluation.observations import Observations

Z = 1.959963984540054  # the quantile of a two-sided 95 % interval


def accuracy(found: Observations) -> float:
    """Return the percentage of correct answers.

    >>> import numpy as np
    >>> accuracy(Observations({"correct": np.array([True, True, True, False])}))
    75.0
    """
    if not len(found):
        raise ValueRangeError("accuracy: the set is empty; wanted at least one sample")
    return 100 * int(found["correct"].sum()) / len(found)


def interval(percent: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a percentage of n samples.

    >>> [round(x, 2) for x in interval(100.0, 1000)]
    [99.62, 100.0]
    """
    share = percent / 100
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    # Rounding must not put 0 or 100 % outside the interval.
    low, high = max(100 * (middle - half), 0.0), min(100 * (middle + half), 100.0)
    return min(low, percent), max(high, percent)


def share(percent: float, n: int) -> Measured:
    """Return a percentage of n samples with its interval."""
    return Measured(percent, *interval(percent, n), n)


def _accuracy(name: str, found: Observed) -> Measured:
    return share(accuracy(found[name]), len(found[name]))


for _set in ("retain", "forget", "test", "holdout"):
    metrics.register(
        f"acc_{_set}",
        Metric(
            name=f"acc_{_set}",
            label=f"accuracy on the {_set} set",
            short=_set,
            better="lower" if _set == "forget" else "higher",
            sets=(_set,),
            columns=("correct",),
            value=partial(_accuracy, _set),
            in_gap=_set != "holdout",
            reported=_set != "holdout",
            interval=interval,
        ),
    )
