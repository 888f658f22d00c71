"""Attacks that rank samples by one number: AUC with its interval, TPR at a low FPR, PrivLeak."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import ValueRangeError
from negmerge.evaluation.metrics import Measured
from negmerge.evaluation.metrics.accuracy import Z, share

Scores = NDArray[np.floating[Any]]
"""A number of each sample; higher means rather a member of the training set."""

RESOLVED = 1000
"""The least number of non-members for a false-positive rate of 1 %: ten of them lie above the
threshold, fewer say almost nothing about it."""
ROUNDING = 1e-9  # 0.01 · 1000 must not be below 10


def auc(members: Scores, others: Scores) -> Measured:
    """Return the AUC as a percentage: how often a member has the higher number of a pair.

    Equal numbers count half; 50 % is chance. The interval is DeLong's (1988), from the variances of
    the share of others below each member, and of members above each other: it needs no random
    numbers, only a sort, and agrees with a bootstrap over both sets. Where no variance is left,
    such as at an AUC of 100 %, it would have no width; then it is the interval of a share of as
    many samples as the smaller set has, because so many pairs without a common sample exist.

    >>> found = auc(np.array([3.0, 2.0, 1.5]), np.array([1.0, 2.0]))
    >>> round(found.value, 2), auc(np.arange(20) + 20, np.arange(20)).low < 90
    (75.0, True)

    Args:
        members: the numbers of samples that were trained on.
        others: those of samples of the same distribution that were not.
    """
    ours, theirs = checked("members", members), checked("non-members", others)
    below = _placements(ours, theirs)
    value = float(below.mean())
    if min(len(ours), len(theirs)) > 1:
        above = 1 - _placements(theirs, ours)
        half = Z * sqrt(_variance(below) + _variance(above))
        if half > 0:
            low, high = max(value - half, 0.0), min(value + half, 1.0)
            return Measured(100 * value, 100 * low, 100 * high, len(ours))
    return Measured(*_ends(share(100 * value, min(len(ours), len(theirs)))), len(ours))


def _ends(found: Measured) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _placements(of: NDArray[np.float64], among: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each number the share of the others that are below it; equal ones count half."""
    ordered = np.sort(among)
    left, right = np.searchsorted(ordered, of, "left"), np.searchsorted(ordered, of, "right")
    return (left + right) / (2 * len(among))


def _variance(placements: NDArray[np.float64]) -> float:
    """Return the variance of the mean of placements."""
    if np.ptp(placements) == 0:  # the rounding of a mean must not leave a variance
        return 0.0
    return float(placements.var(ddof=1)) / len(placements)


def tpr(members: Scores, others: Scores) -> Measured | None:
    """Return the percentage of members found at a false-positive rate of at most 1 %.

    The threshold is a number of a non-member: the rate is never above 1 %, also with equal numbers.
    The interval is that of a share of the members; the threshold is taken as given. None with fewer
    than 1000 non-members.

    >>> others = np.arange(1000.0)
    >>> tpr(np.array([989.0, 989.5, 2000.0, 0.0]), others).value, tpr(others, others[:999])
    (50.0, None)
    """
    ours, theirs = checked("members", members), checked("non-members", others)
    if len(theirs) < RESOLVED:
        return None
    return share(100 * share_found(ours, np.sort(theirs), 0.01), len(ours))


def share_found(members: NDArray[np.float64], ordered: NDArray[np.float64], fpr: float) -> float:
    """Return the largest share of members above a threshold that at most `fpr` of others exceed.

    >>> share_found(np.array([1.0, 4.5, 9.0]), np.arange(10.0), 0.5)
    0.6666666666666666

    Args:
        ordered: the numbers of the others, the lowest first.
        fpr: the false-positive rate as a share.
    """
    allowed = int(fpr * len(ordered) + ROUNDING)
    if allowed >= len(ordered):
        return 1.0
    return float((members > ordered[-1 - allowed]).mean())


def best_threshold(members: Scores, others: Scores) -> float:
    """Return the number above which samples are taken for members with the fewest errors.

    The errors of both sets count alike, whatever their sizes.

    >>> best_threshold(np.array([5.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    3.0
    """
    ours, theirs = checked("members", members), checked("non-members", others)
    places = np.unique(np.concatenate([ours, theirs]))
    missed = np.searchsorted(np.sort(ours), places, "right") / len(ours)
    passed = np.searchsorted(np.sort(theirs), places, "right") / len(theirs)
    return float(places[np.argmax(passed - missed)])


def privacy_leakage(auc: float, reference: float) -> float:
    """Return PrivLeak of MUSE: 100 · ((1 - AUC) - (1 - AUC_ref)) / (1 - AUC_ref).

    0 for a model that leaks as much as the retrained one; negative if it leaks more, positive if
    the forget set stands out as less known than unseen data.

    >>> privacy_leakage(0.75, 0.5)
    -50.0

    Args:
        auc: of the unlearned model, from 0 to 1.
        reference: that of the retrained model, below 1.
    """
    if not (0 <= auc <= 1 and 0 <= reference < 1):
        raise ValueRangeError(
            f"PrivLeak: got the AUC {auc:g} and the reference {reference:g}; wanted shares from 0 "
            "to 1, the reference below 1"
        )
    return 100 * ((1 - auc) - (1 - reference)) / (1 - reference)


def checked(name: str, scores: Scores) -> NDArray[np.float64]:
    found = scores.astype(np.float64)
    if not len(found) or np.isnan(found).any():
        raise ValueRangeError(
            f"attack: the numbers of {name} are {'NaN' if len(found) else 'missing'}; wanted at "
            "least one sample, and numbers"
        )
    return found
