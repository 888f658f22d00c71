"""The limit of a metric that a criterion keeps, and how much of it a row leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan

from negmerge.errors import OptionError
from negmerge.evaluation.scores import Scores

Row = dict[str, float]
"""`scale`, and every metric measured at that λ; all metrics are NaN if the outputs of the model are
not finite at that λ."""

LEAST_MARGIN = -1e-9
"""Exactly the limit is allowed, despite rounding."""


@dataclass(frozen=True)
class Limit:
    """A limit of one metric: a λ with a worse value is not allowed.

    Args:
        metric: the name of the limited metric.
        value: takes the row of λ = 0; returns the limit.
        lower: whether smaller values of the metric are better.
    """

    metric: str
    value: Callable[[Row], float]
    lower: bool = False

    @property
    def bound(self) -> str:
        """The column of a row with the worse end of the 95 % interval of the metric."""
        return f"{self.metric}.{'high' if self.lower else 'low'}"

    def bound_of(self, scores: Scores) -> Row:
        """Return the worse end of the 95 % interval by the name of its column."""
        if self.metric not in scores.intervals:
            raise OptionError(
                f"search.confidence: {self.metric} has no interval; set search.confidence to null"
            )
        return {self.bound: scores.intervals[self.metric][1 if self.lower else 0]}

    def margin(self, row: Row, zero: Row) -> float:
        """Return how much better than the limit a row is, in the unit of the metric.

        >>> share_limit("acc_retain", 0.95).margin({"acc_retain": 97.0}, {"acc_retain": 100.0})
        2.0

        A row that has the end of the interval is compared by it: `search.confidence`.
        """
        own, limit = row.get(self.bound, row[self.metric]), self.value(zero)
        return limit - own if self.lower else own - limit

    def allows(self, row: Row, zero: Row) -> bool:
        """Return whether the limit allows a row; exactly the limit is allowed."""
        return self.margin(row, zero) >= LEAST_MARGIN

    def left(self, row: Row, zero: Row) -> float | None:
        """Return the share that a row leaves of what may be lost: 1 at λ = 0, 0 at the limit.

        >>> share_limit("acc_retain", 0.95).left({"acc_retain": 96.0}, {"acc_retain": 100.0})
        0.2

        None if nothing may be lost. The distance of the end of an interval from the value is not
        counted as lost: it is there at the smallest λ, too.
        """
        budget = abs(zero[self.metric] - self.value(zero))
        budget -= abs(row[self.metric] - row.get(self.bound, row[self.metric]))
        return self.margin(row, zero) / budget if budget > -LEAST_MARGIN else None


def share_limit(metric: str, share: float, lower: bool = False) -> Limit:
    """Return the limit that keeps a share of the value of the original model.

    Args:
        share: the share to keep, above 0 and at most 1.
        lower: whether smaller values are better; then the value may be at most that of the original
            divided by the share.
    """

    def value(zero: Row) -> float:
        return zero[metric] / share if lower else share * zero[metric]

    return Limit(metric, value, lower)


def is_finite(row: Row) -> bool:
    """Return whether the outputs of the model were finite at the λ of a row."""
    return not any(map(isnan, row.values()))


def metrics_of(row: Row) -> Row:
    """Return a row without the end of an interval, which is no metric.

    >>> metrics_of({"scale": 0.5, "acc_retain": 9.0, "acc_retain.low": 8.0})
    {'scale': 0.5, 'acc_retain': 9.0}
    """
    bounds = {f"{name}.{end}" for name in row for end in ("low", "high")}
    return {name: value for name, value in row.items() if name not in bounds}
