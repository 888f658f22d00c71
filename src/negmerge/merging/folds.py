"""Folds: functions that compute the statistics of a strip from all members.

A fold is a function that numba compiles into the loop of a rule (`loop.py`). It returns whether all
values and changes are finite. `fold_for` returns the fold of any statistics: one written by hand
(`fast_folds.py`), or one composed from the definitions of the statistics.
"""

# pyright: basic, reportCallIssue=false, reportReturnType=false
# numba compiles most of this module; the strict checker does not know the types of numba.
from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from negmerge.errors import OptionError
from negmerge.merging.statistics import Statistic

STRIP = 2048
"""The number of elements that are folded at a time."""
Array = NDArray[Any]
State = tuple[Array, ...]
"""The statistics of a strip: an array of `STRIP` numbers for each."""
Fold = Callable[..., bool]
Statistics = tuple[Statistic, ...]
FOLDS: dict[Statistics, Fold] = {}
"""The folds written by hand, by their statistics."""


def compiled_fold(*statistics: Statistic) -> Callable[[Fold], Fold]:
    """Register a fold written by hand, which `fold_for` prefers to a composed one.

    A fold takes `rows`, an array of models (the base first) × strips × elements; `s`, the index of
    a strip; `limits`, one for each member or one for all; `state`, the statistics to write; `flags`
    and `edges`, a strip of bytes and three strips of the format of the rows as working memory.
    """

    def register(fold: Fold) -> Fold:
        FOLDS[statistics] = register_jitable(fold)
        return fold

    return register


def fold_for(statistics: Statistics) -> Fold:
    """Return a registered fold, or one that passes over the members once per statistic."""
    if statistics in FOLDS:
        return FOLDS[statistics]
    fold: Fold = _check_changes
    for j, statistic in enumerate(statistics):
        if statistic.all_members:
            raise OptionError(
                f"statistic {statistic.name!r}: needs all members at once (all_members=True) and "
                "cannot be compiled from its definition; write a fold and register it with "
                "compiled_fold (docs/extend.md)"
            )
        fold = _with_statistic(fold, j, statistic)
    return fold


@register_jitable
def _check_changes(rows, s, limits, state, flags, edges):
    """Return whether all changes are finite."""
    infinite = np.int64(0)
    for k in range(1, rows.shape[0]):
        for i in range(STRIP):
            delta = np.float64(rows[k, s, i]) - np.float64(rows[0, s, i])
            infinite |= np.int64(0) if abs(delta) < np.inf else np.int64(1)
    return infinite == 0


def _with_statistic(before: Fold, j: int, statistic: Statistic) -> Fold:
    """Return a fold that calls another fold and then computes statistic j."""
    start, join, value = statistic.start, jitable(statistic.join), jitable(statistic.value)
    part = value if statistic.limited else register_jitable(lambda delta, limit: value(delta))

    @register_jitable
    def fold(rows, s, limits, state, flags, edges):
        all_finite = before(rows, s, limits, state, flags, edges)
        found = state[j]
        for i in range(STRIP):
            found[i] = start
        for k in range(1, rows.shape[0]):
            limit = limits[min(k, limits.shape[0]) - 1]
            for i in range(STRIP):
                delta = np.float64(rows[k, s, i]) - np.float64(rows[0, s, i])
                found[i] = join(found[i], part(delta, limit))
        return all_finite

    return fold


@register_jitable
def finite(values):
    """Return whether all numbers of a strip are finite."""
    infinite = np.int64(0)
    for i in range(STRIP):
        infinite |= np.int64(0) if abs(values[i]) < np.inf else np.int64(1)
    return infinite == 0


def jitable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function that compiled code can call; a built-in function itself.

    numba compiles a function once, with the values of its global names at that moment; a new copy
    is compiled with the current values.
    """
    if not isinstance(function, FunctionType):
        return function
    code, names = function.__code__, function.__globals__
    copy = FunctionType(code, names, None, function.__defaults__, function.__closure__)
    return register_jitable(copy)
