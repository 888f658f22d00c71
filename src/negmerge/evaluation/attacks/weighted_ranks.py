"""AUC and TPR of scores with weights, which a bootstrap over models and examples needs.

A weight is how often a score was drawn. The scores are sorted once; each draw costs one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.evaluation.attacks.margins import Floats
from negmerge.evaluation.attacks.ranks import ROUNDING


class WeightedRanks:
    """Scores of members and others in order.

    >>> ranks = WeightedRanks(np.array([3.0, 2.0, 1.5, 1.0, 2.0]), np.array([1, 1, 1, 0, 0], bool))
    >>> ranks.auc(np.ones(5)), ranks.auc(np.array([1, 0, 0, 1, 1]))
    (0.75, 1.0)
    """

    def __init__(self, scores: Floats, member: NDArray[np.bool_]) -> None:
        distinct, self._place = np.unique(scores, return_inverse=True)
        self._size, self._member = len(distinct), member.astype(np.float64)

    def _totals(self, weights: NDArray[Any]) -> tuple[Floats, Floats]:
        """Return the weights of members and of others at each distinct score, the lowest first."""
        own = weights * self._member
        members = np.bincount(self._place, own, minlength=self._size)
        others = np.bincount(self._place, weights - own, minlength=self._size)
        return members.astype(np.float64), others.astype(np.float64)

    def auc(self, weights: NDArray[Any]) -> float:
        """Return the share of pairs in which the member has the higher score; NaN without pairs."""
        members, others = self._totals(weights)
        below = np.cumsum(others) - others / 2
        pairs = members.sum() * others.sum()
        return float(members @ below / pairs) if pairs else np.nan

    def tprs(self, weights: NDArray[Any], fprs: Sequence[float]) -> list[float]:
        """Return the largest share of members at each rate of false alarms or below."""
        members, others = self._totals(weights)
        if not members.sum() or not others.sum():
            return [np.nan for _ in fprs]
        # What lies above each threshold; the first threshold is above all scores.
        found = np.concatenate([[0.0], np.cumsum(members[::-1])]) / members.sum()
        false = np.concatenate([[0.0], np.cumsum(others[::-1])])
        allowed = np.asarray(fprs) * others.sum() + ROUNDING
        return [float(found[k - 1]) for k in np.searchsorted(false, allowed, "right")]
