"""Compiled magnitudes of changes: computed, counted and gathered between two bounds."""

# pyright: basic, reportCallIssue=false
# numba compiles most of this module; the strict checker does not know the types of numba.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.merging.fast_folds import bits_of, count_bits, lowest_bit
from negmerge.merging.first_pass import Floats
from negmerge.merging.folds import STRIP
from negmerge.support.jit import compiled, compiled_as_python, equals_reference

Counts = NDArray[np.int64]


def _rows(dtypes: Sequence[Any]) -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal((4, 400)).astype(dtypes[0])


def _members(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    rows = _rows(dtypes)
    yield rows, False, 2, 100, np.zeros(200)
    yield rows, True, 0, 100, np.zeros(200)


@compiled_as_python(_members, error_model="numpy")
def magnitudes(rows: NDArray[Any], mean: bool, g: int, start: int, out: Floats) -> None:
    """Write the magnitudes of the changes of member g, or of the mean of all members.

    Rows are the models, the base first; the first element is `start`.
    """
    size = out.shape[0]
    base = rows[0, start : start + size]
    if not mean:
        member = rows[g + 1, start : start + size]
        for i in range(size):
            out[i] = abs(np.float64(member[i]) - np.float64(base[i]))
        return
    out[:] = 0.0
    n = rows.shape[0] - 1
    for k in range(1, n + 1):
        member = rows[k, start : start + size]
        for i in range(size):
            out[i] += np.float64(member[i]) - np.float64(base[i])
    for i in range(size):
        out[i] = abs(out[i] / n)


def _tiles(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    rows = np.tile(_rows(dtypes), (1, 7))
    rows[:, :50] = rows[:, 50:100]  # equal magnitudes, some of them at the bounds
    size = rows.shape[1] - 3
    for mean, width in ((False, 3), (True, 1)):
        some = np.zeros(200)
        magnitudes(rows, mean, 0, 0, some)
        low, high = np.sort(some)[[60, 130]]
        wanted = np.arange(width) != 1
        counts, sizes = np.ones((width, 3), np.int64), np.zeros(width, np.int64)
        bounds = np.full(width, low), np.full(width, high)
        yield rows, mean, size, wanted, *bounds, counts, np.zeros((width, size)), sizes


def _gather(rows, mean, size, wanted, low, high, counts, between, sizes):
    """Do the same as `gather`, with numpy."""
    for g in np.flatnonzero(wanted):
        values = np.empty(size)
        magnitudes.py_func(rows, mean, g, 0, values)
        found = values[(values > low[g]) & (values < high[g])]
        counts[g] += [(values > high[g]).sum(), (values == high[g]).sum(), (values == low[g]).sum()]
        between[g, : found.size], sizes[g] = found, found.size


@compiled(equals_reference(_gather, _tiles))
def gather(
    rows: NDArray[Any],
    mean: bool,
    size: int,
    wanted: NDArray[np.bool_],
    low: Floats,
    high: Floats,
    counts: Counts,
    between: Floats,
    sizes: Counts,
) -> None:
    """Count the magnitudes above and at the bounds, and write those between them to `between`.

    Args:
        rows: the models, the base first.
        mean: whether the only vector is the mean.
        wanted: the vectors to look at.
        counts: for each vector, the magnitudes above `high`, at `high` and at `low`; they are
            increased.
        between: a row of `size` numbers for each vector.
        sizes: the number of magnitudes written to each row.
    """
    strip = np.empty(STRIP)
    reached, exceeded = np.zeros(STRIP, np.uint8), np.zeros(STRIP, np.uint8)
    for g in range(between.shape[0]):
        if not wanted[g]:
            continue
        least, most = low[g], high[g]
        # Differences in the format of the rows are off by less than two steps: twice as fast, and
        # only those near the bounds are computed in float64.
        below, beyond = rows.dtype.type(least), rows.dtype.type(most)
        for _ in range(2):
            below = np.nextafter(below, rows.dtype.type(0.0))
            beyond = np.nextafter(beyond, rows.dtype.type(np.inf))
        at = 0
        for start in range(0, size, STRIP):
            count = min(STRIP, size - start)
            base, member = rows[0, start : start + count], rows[g + 1, start : start + count]
            if mean:
                magnitudes(rows, mean, g, start, strip[:count])
                for i in range(count):
                    reached[i] = strip[i] >= least
                    exceeded[i] = strip[i] > most
            else:
                for i in range(count):
                    magnitude = abs(member[i] - base[i])
                    reached[i] = magnitude >= below
                    exceeded[i] = magnitude > beyond
            for i in range(count, STRIP):
                reached[i] = exceeded[i] = 0
            for first in range(0, STRIP, 64):
                over = bits_of(exceeded, first)
                counts[g, 0] += np.int64(count_bits(over))
                rest = bits_of(reached, first) & ~over
                while rest:
                    i = np.uint64(first) + lowest_bit(rest)
                    value = strip[i] if mean else abs(np.float64(member[i]) - np.float64(base[i]))
                    counts[g, 0] += value > most
                    counts[g, 1] += value == most
                    counts[g, 2] += value == least
                    between[g, at] = value
                    at += (value > least) & (value < most)
                    rest &= rest - np.uint64(1)
        sizes[g] = at
