"""The statistics that rules use, each defined once.

Definitions are written with operators and `where`: the same lines run on numpy arrays (in an
accumulator, and in the check of compiled code), on torch tensors (on a GPU), and compiled, number
by number (`folds.py`).
"""

# pyright: basic
# The same lines take numpy arrays, torch tensors and numbers.
from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
from numba.extending import overload

A = Any  # a numpy array, a torch tensor, or a number in compiled code


def where(condition: A, one: A, two: A) -> A:
    """Return `one` where a condition holds, else `two`.

    >>> where(np.array([True, False]), np.array([1.0, 2.0]), np.inf)
    array([ 1., inf])
    """
    if isinstance(condition, np.ndarray):
        return np.where(condition, one, two)
    import torch

    return torch.where(condition, one, two)


@overload(where, strict=False)
def _where(condition: A, one: A, two: A) -> Callable[..., A]:
    return lambda condition, one, two: one if condition else two


@dataclass(frozen=True)
class Statistic:
    """A number for each element, computed from the changes of that element in the members.

    >>> squares = Statistic("squares", lambda delta: delta * delta)
    >>> squares.over(np.array([[1.0, 2.0], [3.0, 0.0]]), np.zeros(1))
    array([10.,  4.])

    Args:
        name: the name in a saved accumulator, which cannot keep two statistics of one name.
        value: the value of one member: a function of its change, or of its change and its limit
            (`Rule.limits`).
        join: joins two values; a sum if not given.
        start: the value before the first member.
        count: whether it counts members: integers from 0 to n.
        all_members: whether it needs all members at once. Then `value` is a function of the
            changes, a row for each member, and of the limits; the statistic needs a fold written by
            hand (`folds.compiled_fold`), and an accumulator cannot keep it.
    """

    name: str
    value: Callable[..., A]
    join: Callable[[A, A], A] = operator.add
    start: float = 0.0
    count: bool = False
    all_members: bool = False

    @property
    def limited(self) -> bool:
        """Whether the statistic depends on the limits of members."""
        return isinstance(self.value, FunctionType) and self.value.__code__.co_argcount == 2

    def value_of(self, delta: A, limit: A) -> A:
        """Return the value of one member."""
        return self.value(delta, limit) if self.limited else self.value(delta)

    def over(self, deltas: A, limits: A) -> A:
        """Return the statistic of all members.

        Args:
            deltas: the changes, a row of float64 for each member.
            limits: a number for each member, or one for all.
        """
        if self.all_members:
            return self.value(deltas, limits)
        found: A = int(self.start) if self.count else self.start
        for k, delta in enumerate(deltas):
            found = self.join(found, self.value_of(delta, limits[min(k, len(limits) - 1)]))
        return found


def _nearer(one: A, two: A) -> A:
    return where((abs(two) < abs(one)) | ((two == -one) & (two > 0)), two, one)


def _active(deltas: A, limits: A) -> A:
    distance = abs(TOTAL.over(deltas, limits) / len(deltas) - deltas)
    return (abs(deltas) >= limits[0] * distance).sum(0)


TOTAL = Statistic("total", lambda d: d)
SQUARES = Statistic("squares", lambda d: d * d)
POSITIVE = Statistic("positive", lambda d: d > 0, count=True)
NEGATIVE = Statistic("negative", lambda d: d < 0, count=True)
LOW = Statistic("low", lambda d: d, lambda a, b: where(b < a, b, a), np.inf)
HIGH = Statistic("high", lambda d: d, lambda a, b: where(b > a, b, a), -np.inf)
NEAREST = Statistic("nearest", lambda d: d, _nearer, np.inf)
"""The change nearest to zero; the positive one of +a and −a."""
GAIN = Statistic("gain", lambda d, t: d * ((d >= t) & (d > 0)))
LOSS = Statistic("loss", lambda d, t: d * ((-d >= t) & (d < 0)))
GAINS = Statistic("gains", lambda d, t: (d >= t) & (d > 0), count=True)
LOSSES = Statistic("losses", lambda d, t: (-d >= t) & (d < 0), count=True)
ACTIVE = Statistic("active", _active, count=True, all_members=True)
"""The number of members with |change| ≥ limits[0] · |mean − change|."""
