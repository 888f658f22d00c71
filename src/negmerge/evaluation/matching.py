"""The metrics of a method at a stated level of forgetting, interpolated along λ.

Methods that forget to a different degree cannot be compared by what they retain. The rows of a
sweep of λ give every metric at the same forget level.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from negmerge.evaluation.criteria import Row
from negmerge.evaluation.metrics import metric_of

EVALUATIONS = 4
"""The largest number of λ that are measured in addition to a sweep."""
NEAR = 0.1
"""No more λ are measured if the forget metric of a measured one is this near to the level, as a
share of the distance of the original."""


@dataclass(frozen=True)
class Level:
    """A level of the forget metric.

    Args:
        metric: the name of the forget metric.
        lower: whether forgetting lowers the metric.
    """

    metric: str
    value: float
    lower: bool = True

    def excess(self, row: Row) -> float:
        """Return how much more than the level a model knows; negative if it knows less.

        >>> Level("acc_forget", 60.0).excess({"acc_forget": 75.0})
        15.0
        """
        difference = row[self.metric] - self.value
        return difference if self.lower else -difference


def crossing(rows: Iterable[Row], level: Level) -> tuple[Row, Row] | None:
    """Return the neighbouring rows between which the forget metric first reaches the level.

    None if it does not reach the level, or if already the first row knows less.
    """
    ordered = in_order(rows)
    if ordered and level.excess(ordered[0]) == 0:
        return ordered[0], ordered[0]
    for low, high in pairwise(ordered):
        if level.excess(low) <= 0:
            return None
        if level.excess(high) <= 0:
            return low, high
    return None


def at_level(rows: Iterable[Row], level: Level) -> Row | None:
    """Return λ and every metric where the forget metric first reaches the level.

    The values are interpolated between two neighbouring λ, never extrapolated; None if the forget
    metric does not reach the level.

    >>> rows = [dict(scale=s, acc_forget=f, acc_retain=r)
    ...         for s, f, r in ((0.0, 100.0, 99.0), (0.5, 80.0, 98.0), (1.0, 40.0, 90.0))]
    >>> at_level(rows, Level("acc_forget", 60.0))
    {'scale': 0.75, 'acc_forget': 60.0, 'acc_retain': 94.0}
    >>> at_level(rows, Level("acc_forget", 30.0)) is None
    True

    Args:
        rows: the rows of a sweep, in any order.
    """
    found = crossing(rows, level)
    if found is None:
        return None
    low, high = found
    above, below = level.excess(low), level.excess(high)
    share = above / (above - below) if above else 0.0
    row = {name: (1 - share) * low[name] + share * high[name] for name in low if name in high}
    return row | {level.metric: level.value}


def why_missing(rows: Iterable[Row], level: Level) -> str:
    """Say why the rows of a sweep do not give the metrics at a level.

    >>> why_missing([{"scale": 0.0, "acc_forget": 50.0}], Level("acc_forget", 60.0))
    'the original has forget 50.00 % and so is beyond the level 60.00 %'
    """
    ordered, metric = in_order(rows), metric_of(level.metric)
    if level.metric not in ordered[0]:
        return f"the sweep of λ has no {level.metric}"
    wanted = metric.text(level.value)
    if level.excess(ordered[0]) < 0:
        own = metric.text(ordered[0][level.metric])
        return f"the original has {metric.short} {own} and so is beyond the level {wanted}"
    nearest = min(ordered, key=level.excess)
    return (
        f"the level {wanted} was not reached up to λ = {ordered[-1]['scale']:g}; nearest: "
        f"{metric.short} {metric.text(nearest[level.metric])} at λ = {nearest['scale']:g}"
    )


def refine(
    rows: Iterable[Row],
    level: Level,
    measure: Callable[[float], Row | None],
    evaluations: int = EVALUATIONS,
) -> list[Row]:
    """Measure a few more λ, so that the interpolation to a level is short.

    Each λ is the one where a straight line between the two neighbours has the level. While the
    level is not reached, λ is doubled instead. The first λ that reaches the level stays between the
    neighbours that the given rows have.

    >>> def measure(scale):
    ...     return {"scale": scale, "acc_forget": 100 - 60 * scale**2}
    >>> level = Level("acc_forget", 60.0)
    >>> rows = refine([measure(0.0), measure(1.0)], level, measure)
    >>> [round(row["scale"], 3) for row in rows]
    [0.0, 0.667, 0.8, 1.0]
    >>> round(at_level(rows, level)["scale"], 3)  # the curve itself has the level at 0.816
    0.815

    Args:
        rows: the rows of a sweep.
        measure: returns the row of a λ, or None if the outputs of the model are not finite.
        evaluations: the largest number of λ to measure.

    Returns:
        All rows, in the order of λ.
    """
    found = in_order(rows)
    if not found or level.metric not in found[0] or level.excess(found[0]) <= 0:
        return found
    near = NEAR * level.excess(found[0])
    for _ in range(evaluations):
        pair = crossing(found, level)
        if pair is None:
            scale = 2 * found[-1]["scale"]
        elif min(abs(level.excess(row)) for row in pair) <= near:
            break
        else:
            between = at_level(pair, level)
            assert between is not None
            scale = between["scale"]
        if scale in {row["scale"] for row in found} or (row := measure(scale)) is None:
            break
        found = in_order([*found, row])
    return found


def matched_gap(row: Row, reference: Mapping[str, float], forget: str) -> float | None:
    """Return the mean distance to the retrained model over the metrics other than the forget one.

    The metrics are those of Avg. Gap, and those that stand for one on the samples that choose λ,
    such as the held-out accuracy for the test accuracy; None without any.

    >>> row = {"scale": 0.4, "acc_forget": 90.0, "acc_retain": 97.0, "acc_holdout": 88.0}
    >>> retrained = {"acc_forget": 90.0, "acc_retain": 99.0, "acc_holdout": 89.0}
    >>> matched_gap(row, retrained, "acc_forget")
    1.5
    """
    names = [name for name in compared_metrics(reference) if name != forget and name in row]
    gaps = [abs(row[name] - reference[name]) for name in names]
    return sum(gaps) / len(gaps) if gaps else None


def compared_metrics(names: Iterable[str]) -> list[str]:
    """Return the metrics of Avg. Gap, and those that are measured only to choose λ.

    >>> compared_metrics(["acc_retain", "acc_forget", "acc_holdout", "loss_retain"])
    ['acc_retain', 'acc_forget', 'acc_holdout']
    """
    found = ((name, metric_of(name)) for name in names)
    return [name for name, metric in found if metric.in_gap or not metric.reported]


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Return rows in the order of λ."""
    return sorted(rows, key=lambda row: row["scale"])
