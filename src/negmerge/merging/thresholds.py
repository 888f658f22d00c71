"""The exact k-th largest magnitude of vectors that do not fit into memory: a first pass of a rule.

A sample of strips gives two bounds of the threshold. One pass over the files counts the magnitudes
above the upper bound and collects those between the bounds. If the threshold is not between the
bounds, or too many magnitudes are (many equal magnitudes, a bad sample), it is found digit by
digit: its 16-bit digits are counted, from the highest, in one pass each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.merging.first_pass import Changes, FirstPass, Floats
from negmerge.merging.folds import STRIP
from negmerge.merging.tiles import Segment, segments
from negmerge.support.jit import compiled_as_python

SMALL = 1 << 20
"""All magnitudes are collected of vectors with at most this number of elements."""
MARGIN = 0.003
"""Half the distance between the bounds, as a share of all elements."""


@dataclass(frozen=True)
class Threshold(FirstPass):
    """The (k+1)-th largest magnitude of a vector, k = ⌊density · elements⌋.

    Args:
        density: the share of elements whose magnitudes are above the threshold.
    """

    density: float

    def find(self, changes: Changes) -> Floats:
        k = int(self.density * changes.elements)
        if k >= changes.elements:
            return np.zeros(changes.width)
        rank = k + 1
        low, high = _bounds(changes, rank)
        above, inside = _collect(changes, low, high)
        least = np.zeros(changes.width)
        missed: list[int] = []
        for g, values in enumerate(inside):
            if values is None or not above[g] < rank <= above[g] + values.size:
                missed.append(g)
                continue
            place = values.size - (rank - above[g])
            least[g] = np.partition(values, place)[place]
        if missed:
            least[missed] = _by_digits(changes, rank, missed)
        return least


def _bounds(changes: Changes, rank: int) -> tuple[Floats, Floats]:
    if changes.elements <= SMALL:
        return np.zeros(changes.width), np.full(changes.width, np.inf)
    strips = changes.elements // STRIP
    every = max(1, strips // 256)
    sample = [
        Segment(s.info, start, min(start + STRIP, s.stop))
        for s in segments(changes.tensors)
        for j, start in enumerate(range(s.start, s.stop, STRIP))
        if (s.strip + j) % every == 0
    ]
    values = np.concatenate(list(changes.each(partial(_magnitudes, changes), sample)), axis=1)
    size = values.shape[1]
    share = rank / changes.elements
    first = max(0, int((share - MARGIN) * size) - 1)
    last = min(size - 1, int((share + MARGIN) * size) + 1)
    places = [size - 1 - last, size - 1 - first]
    values.partition(places, axis=1)
    low = values[:, places[0]].copy() if last < size - 1 else np.zeros(changes.width)
    high = values[:, places[1]].copy() if first > 0 else np.full(changes.width, np.inf)
    return low, high


def _collect(
    changes: Changes, low: Floats, high: Floats
) -> tuple[NDArray[np.int64], list[Floats | None]]:
    """Count the magnitudes above the bounds, and collect those between; None if too many."""
    above = np.zeros(changes.width, np.int64)
    inside: list[list[Floats]] = [[] for _ in range(changes.width)]
    most = max(SMALL, int(changes.elements * MARGIN * 4))

    def run(rows: NDArray[Any], size: int) -> tuple[NDArray[np.int64], list[Floats]]:
        counts, sizes = np.zeros(changes.width, np.int64), np.zeros(changes.width, np.int64)
        found = np.empty((changes.width, size + 1))
        gather(rows, changes.mean, size, low, high, counts, found, sizes)
        return counts, [found[g, : sizes[g]].copy() for g in range(changes.width)]

    total = np.zeros(changes.width, np.int64)
    for counts, found in changes.each(run):
        above += counts
        for g, values in enumerate(found):
            total[g] += values.size
            inside[g].append(values)
            if total[g] > most:
                inside[g].clear()
    return above, [
        np.concatenate(values) if total[g] <= most else None for g, values in enumerate(inside)
    ]


def _by_digits(changes: Changes, rank: int, missed: list[int]) -> Floats:
    """Find thresholds by counting the 16-bit digits of their float64 bits, highest first."""
    prefixes = dict.fromkeys(missed, 0)
    ranks = dict.fromkeys(missed, rank)
    for shift in (48, 32, 16, 0):

        def run(rows: NDArray[Any], size: int, shift: int = shift) -> NDArray[np.int64]:
            values = _magnitudes(changes, rows, size)
            counts = np.zeros((len(missed), 1 << 16), np.int64)
            for row, g in enumerate(missed):
                bits = values[g].view(np.uint64)
                count_digits(bits, np.uint64(prefixes[g]), np.uint64(shift), counts[row])
            return counts

        counts = np.zeros((len(missed), 1 << 16), np.int64)
        for found in changes.each(run, segments(changes.tensors)):
            counts += found
        for row, g in enumerate(missed):
            from_top = np.cumsum(counts[row][::-1])
            # NaN is not counted; a tensor with NaN is refused when it is merged.
            digit = (1 << 16) - 1 - min(int(np.searchsorted(from_top, ranks[g])), (1 << 16) - 1)
            ranks[g] -= int(from_top[-1] - np.cumsum(counts[row])[digit])
            prefixes[g] = (prefixes[g] << 16) | digit
    return np.array([prefixes[g] for g in missed], np.uint64).view(np.float64)


def _magnitudes(changes: Changes, rows: NDArray[Any], size: int) -> Floats:
    """Return a row for each member, or one for the mean."""
    values = np.empty((changes.width, size))
    for g in range(changes.width):
        magnitudes(rows, changes.mean, g, 0, values[g])
    return values


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
    rows = _rows(dtypes)
    size = rows.shape[1]
    for mean, width in ((False, 3), (True, 1)):
        low, high = np.full(width, 0.5), np.full(width, 1.0)
        above, sizes = np.zeros(width, np.int64), np.zeros(width, np.int64)
        yield rows, mean, size, low, high, above, np.zeros((width, size + 1)), sizes


@compiled_as_python(_tiles)
def gather(
    rows: NDArray[Any],
    mean: bool,
    size: int,
    low: Floats,
    high: Floats,
    above: NDArray[np.int64],
    inside: Floats,
    sizes: NDArray[np.int64],
) -> None:
    """Count the magnitudes above `high`, and write those from `low` to `high` to `inside`.

    Args:
        rows: the models, the base first.
        mean: whether the only vector is the mean.
        above: the counts of each vector, which are increased.
        inside: a row for each vector, longer than `size` by one.
        sizes: the number of magnitudes written to each row.
    """
    strip = np.empty(STRIP)
    for g in range(inside.shape[0]):
        least, most = low[g], high[g]
        at = 0
        for start in range(0, size, STRIP):
            some = strip[: min(STRIP, size - start)]
            magnitudes(rows, mean, g, start, some)
            count = 0
            for i in range(some.shape[0]):
                count += some[i] > most
            above[g] += count
            for i in range(some.shape[0]):
                # Without a branch: always written, and overwritten by the next one if outside.
                inside[g, at] = some[i]
                at += (some[i] >= least) & (some[i] <= most)
        sizes[g] = at


def _digits(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    values = abs(np.random.default_rng(0).standard_normal(500))
    bits = np.append(values, [0.0, 5e-324, np.inf, np.nan]).view(np.uint64)
    counts = np.zeros(1 << 16, np.int64)
    yield bits, np.uint64(0), np.uint64(48), counts
    yield bits, bits[0] >> np.uint64(48), np.uint64(32), counts


@compiled_as_python(_digits)
def count_digits(
    bits: NDArray[np.uint64], prefix: np.uint64, shift: np.uint64, counts: NDArray[np.int64]
) -> None:
    """Count the 16-bit digits, `shift` bits from the end, of float64 numbers with a `prefix`."""
    infinite = np.uint64(0x7FF0000000000000)
    for i in range(bits.shape[0]):
        if bits[i] <= infinite and (shift == 48 or bits[i] >> (shift + np.uint64(16)) == prefix):
            counts[(bits[i] >> shift) & np.uint64(0xFFFF)] += 1
