"""The rate of members that an attack finds at a low rate of false alarms, with its interval."""

from __future__ import annotations

import numpy as np

from negmerge.errors import ValueRangeError
from negmerge.evaluation.attacks.ranks import ROUNDING, Scores, checked, share_found
from negmerge.evaluation.metrics import Measured

LEAST = 10
"""The least number of non-members above the threshold; fewer say almost nothing about the rate."""


def resolvable(fpr: float, others: int) -> bool:
    """Return whether a false-positive rate can be measured with a number of non-members.

    >>> resolvable(0.01, 1000), resolvable(0.01, 999)
    (True, False)
    """
    return fpr * others + ROUNDING >= LEAST


def tpr_at(members: Scores, others: Scores, fpr: float) -> float | None:
    """Return the largest percentage of members found while at most a share of others is.

    The attack takes the samples above a threshold for members. The rate of false alarms is never
    above `fpr`, also with equal numbers. None if the rate is not resolvable: `fpr` is below 10 / n
    for n others.

    >>> others = np.arange(1000.0)
    >>> tpr_at(np.array([989.0, 989.5, 2000.0, 0.0]), others, 0.01), tpr_at(others, others, 0.001)
    (50.0, None)

    Args:
        members: the numbers of samples that were trained on; higher means rather a member.
        others: those of samples of the same distribution that were not.
        fpr: the false-positive rate as a share.
    """
    ours, theirs = checked("members", members), checked("non-members", others)
    _check_rate(fpr)
    if not resolvable(fpr, len(theirs)):
        return None
    return 100 * share_found(ours, np.sort(theirs), fpr)


def tpr_interval(
    members: Scores, others: Scores, fpr: float, seed: int = 0, draws: int = 1000
) -> Measured | None:
    """Return `tpr_at` with a 95 % interval: both sets are drawn again with replacement.

    Unlike the interval of a share, it contains the uncertainty of the threshold.

    >>> found = tpr_interval(np.arange(500.0) + 600, np.arange(1000.0), 0.05)
    >>> found.value, found.low < found.value < found.high
    (30.0, True)
    """
    value = tpr_at(members, others, fpr)
    if value is None:
        return None
    ours, theirs = checked("members", members), checked("non-members", others)
    rng = np.random.default_rng(seed)
    found = [
        share_found(rng.choice(ours, len(ours)), np.sort(rng.choice(theirs, len(theirs))), fpr)
        for _ in range(draws)
    ]
    low, high = np.quantile(found, [0.025, 0.975])
    return Measured(value, min(100 * float(low), value), max(100 * float(high), value), len(ours))


def _check_rate(fpr: float) -> None:
    if not 0 < fpr <= 1:
        raise ValueRangeError(f"false-positive rate: got {fpr:g}; wanted a share above 0, up to 1")
