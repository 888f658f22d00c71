"""Every statistic of the folds in plain numpy: for accumulators, and to prove compiled code by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def _nearer(one: Array, two: Array) -> Array:
    closer = (abs(two) < abs(one)) | ((two == -one) & (two > 0))
    return np.where(closer, two, one)


@dataclass(frozen=True)
class Statistic:
    """How one statistic starts, what a member gives to it, and how two of them join."""

    dtype: str
    start: float
    of: Callable[[Array, float], Array]
    join: Callable[[Array, Array], Array]


STATISTICS = {
    "total": Statistic("F64", 0, lambda d, _: d, np.add),
    "positive": Statistic("I16", 0, lambda d, _: d > 0, np.add),
    "negative": Statistic("I16", 0, lambda d, _: d < 0, np.add),
    "low": Statistic("F64", np.inf, lambda d, _: d, np.minimum),
    "high": Statistic("F64", -np.inf, lambda d, _: d, np.maximum),
    "nearest": Statistic("F64", np.inf, lambda d, _: d, _nearer),
    "gain": Statistic("F64", 0, lambda d, t: d * ((d >= t) & (d > 0)), np.add),
    "loss": Statistic("F64", 0, lambda d, t: d * ((-d >= t) & (d < 0)), np.add),
    "gains": Statistic("I16", 0, lambda d, t: (d >= t) & (d > 0), np.add),
    "losses": Statistic("I16", 0, lambda d, t: (-d >= t) & (d < 0), np.add),
}
NUMPY = {"F64": np.float64, "I16": np.int16}


def _total(deltas: Array) -> Array:
    return statistic("total", deltas, np.zeros(1))


def _active(deltas: Array, limits: Array) -> Array:
    distance = abs(_total(deltas) / len(deltas) - deltas)
    return (abs(deltas) >= limits[0] * distance).sum(0)


def _agreed(deltas: Array, _: Array) -> Array:
    return _total(deltas) * ((deltas > 0).all(0) | (deltas < 0).all(0))


def _farthest(deltas: Array, _: Array) -> Array:
    low, high = deltas.min(0), deltas.max(0)
    return high * (high >= -low) + low * (high < -low)


OF_ALL: dict[str, Callable[[Array, Array], Array]] = {
    "active": _active,
    "agreed": _agreed,
    "farthest": _farthest,
}
"""Statistics for which all members must be seen at once."""


def statistic(name: str, deltas: Array, limits: Array) -> Array:
    """One statistic of all members.

    >>> statistic("positive", np.array([[1.0, -1.0], [2.0, 0.0]]), np.zeros(1))
    array([2, 0], dtype=int16)

    deltas: a row of float64 for each member; limits: as the folds take them.
    """
    if name in OF_ALL:
        return OF_ALL[name](deltas, limits)
    kind = STATISTICS[name]
    found = np.full(deltas.shape[1], kind.start, NUMPY[kind.dtype])
    for delta, limit in zip(deltas, np.broadcast_to(limits, len(deltas)), strict=True):
        found = kind.join(found, kind.of(delta, limit))
    return found
