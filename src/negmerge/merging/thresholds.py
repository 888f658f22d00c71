"""The exact k-th largest magnitude of vectors that do not fit into memory: a first pass of a rule.

A sample of strips gives two bounds of the threshold. A pass over the files counts the magnitudes
above the bounds and at them, and collects those between them, which are few. If they are too many
for the memory, they are counted in `BINS` ranges of equal width instead, and a second pass looks
only at the range that has the threshold. Only vectors that are made to defeat the sample need more
passes. The result is exact in every case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from threading import local
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.merging.first_pass import Changes, FirstPass, Floats
from negmerge.merging.folds import STRIP
from negmerge.merging.magnitudes import Counts, gather, magnitudes
from negmerge.merging.tiles import Segment, segments

SMALL = 1 << 20
"""All magnitudes are collected of vectors with at most this number of elements."""
MARGIN = 0.0025
"""Half the distance between the bounds, as a share of all elements."""
MOST = 8 << 20
"""The number of magnitudes of all vectors together that are collected."""
BINS = 1 << 16
INFINITE = np.float64(np.inf).view(np.uint64).item()


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
        searches = [
            Search(k + 1, *bounds, max(4096, MOST // changes.width))
            for bounds in _bounds(changes, k + 1)
        ]
        _search(changes, searches, None)
        while any(search.found is None for search in searches):
            _search(changes, searches, segments(changes.tensors))
        return np.array([search.found for search in searches])


@dataclass
class Search:
    """The search for the `rank`-th largest magnitude of one vector between two bounds.

    Magnitudes are compared by the bits of their float64 numbers, which have the same order.

    Args:
        low: the bits of the lower bound; the threshold may be equal to a bound.
        high: the bits of the upper bound.
        room: the number of magnitudes that may be collected in one pass.
    """

    rank: int
    low: int
    high: int
    room: int
    found: float | None = None
    counts: Counts = field(default_factory=lambda: np.zeros(3, np.int64))
    """The magnitudes above the upper bound, at the upper bound, and at the lower bound."""
    between: list[NDArray[np.uint64]] = field(default_factory=list[NDArray[np.uint64]])
    """The bits of the magnitudes between the bounds, unless there are too many."""
    bins: Counts | None = None
    """The number of magnitudes in each of the ranges between the bounds, if there are too many."""

    @property
    def shift(self) -> int:
        """The binary logarithm of the width of a bin."""
        return max(0, (self.high - self.low).bit_length() - (BINS.bit_length() - 1))

    def add(self, counts: Counts, between: Floats) -> None:
        """Add the counts of a range of elements, and its magnitudes between the bounds."""
        self.counts += counts
        self.between.append(between.view(np.uint64))
        self.room -= between.size
        if self.room < 0 and self.bins is None:
            self.bins = np.zeros(BINS, np.int64)
        if self.bins is not None:
            for bits in self.between:
                places = (bits - np.uint64(self.low)) >> np.uint64(self.shift)
                np.add.at(self.bins, places.astype(np.int64), 1)
            self.between.clear()

    def conclude(self, room: int) -> None:
        """Find the threshold after a pass, or narrower bounds for the next pass."""
        above, at_high, at_low = map(int, self.counts)
        bits = np.concatenate(self.between) if self.between else np.empty(0, np.uint64)
        inside = bits.size if self.bins is None else int(self.bins.sum())
        rank = self.rank - above
        if rank <= 0:
            self.low, self.high = self.high, INFINITE
        elif rank <= at_high:
            self.found = _number(self.high)
        elif rank <= at_high + inside:
            self._inside(bits, rank - at_high)
        elif rank <= at_high + inside + at_low or self.low == 0:
            # NaN is not counted; a tensor with NaN is refused when it is merged.
            self.found = _number(self.low)
        else:
            self.low, self.high = 0, self.low
        self.counts = np.zeros(3, np.int64)
        self.between, self.bins, self.room = [], None, room

    def _inside(self, bits: NDArray[np.uint64], rank: int) -> None:
        if self.bins is None:
            place = bits.size - rank
            self.found = _number(int(np.partition(bits, place)[place]))
            return
        index = int(np.searchsorted(np.cumsum(self.bins[::-1]), rank))
        first = self.low + ((BINS - 1 - index) << self.shift)
        if self.shift == 0:
            self.found = _number(first)
            return
        # The bounds themselves are not in the bin, except that the lowest bin begins at the bound.
        self.low, self.high = max(self.low, first - 1), min(self.high, first + (1 << self.shift))


def _number(bits: int) -> float:
    return float(np.uint64(bits).view(np.float64))


@dataclass(frozen=True)
class _Gather:
    """Counts the magnitudes of a range and collects those between bounds; see `gather`.

    An object and no closure, so that processes on other machines can get it.
    """

    mean: bool
    wanted: NDArray[np.bool_]
    low: Floats
    high: Floats

    def __call__(self, rows: NDArray[Any], size: int) -> tuple[Counts, list[Floats]]:
        width = self.wanted.size
        counts, sizes = np.zeros((width, 3), np.int64), np.zeros(width, np.int64)
        between = _room(width * size).reshape(width, size)
        gather(rows, self.mean, size, self.wanted, self.low, self.high, counts, between, sizes)
        return counts, [between[g, : sizes[g]].copy() for g in range(width)]


_OWN = local()


def _room(count: int) -> Floats:
    """Return an array of undefined content, the same memory for each call of a thread.

    The system clears new memory, which would take a tenth of the time of a merge.
    """
    if getattr(_OWN, "room", np.empty(0)).size < count:
        _OWN.room = np.empty(count)
    return _OWN.room[:count]


def _search(changes: Changes, searches: list[Search], work: list[Segment] | None) -> None:
    """Do one pass over the vectors for all searches that have not ended.

    Only the first pass is reported as progress: it has no explicit `work`.
    """
    low = np.array([search.low for search in searches], np.uint64).view(np.float64)
    high = np.array([search.high for search in searches], np.uint64).view(np.float64)
    wanted = np.array([search.found is None for search in searches])
    for counts, between in changes.each(_Gather(changes.mean, wanted, low, high), work):
        for search, own, some in zip(searches, counts, between, strict=True):
            search.add(own, some)
    for search in searches:
        if search.found is None:
            search.conclude(max(4096, MOST // changes.width))


def _bounds(changes: Changes, rank: int) -> list[tuple[int, int]]:
    """Return the bits of two bounds for each vector, from a sample of strips."""
    if changes.elements <= SMALL:
        return [(0, INFINITE)] * changes.width
    strips = changes.elements // STRIP
    every = max(2, -(-strips // min(256, max(64, 4096 // changes.width))))
    sample = [
        Segment(s.info, start, min(start + STRIP, s.stop))
        for s in segments(changes.tensors)
        for j, start in enumerate(range(s.start, s.stop, STRIP))
        if (s.strip + j) % every == 0
    ]
    values = np.concatenate(
        list(changes.each(partial(_magnitudes, changes.mean, changes.width), sample)), axis=1
    )
    size = values.shape[1]
    share = rank / changes.elements
    first = max(0, int((share - MARGIN) * size) - 1)
    last = min(size - 1, int((share + MARGIN) * size) + 1)
    places = [size - 1 - last, size - 1 - first]
    values.partition(places, axis=1)
    low = values[:, places[0]].copy() if last < size - 1 else np.zeros(changes.width)
    high = values[:, places[1]].copy() if first > 0 else np.full(changes.width, np.inf)
    # NaN is replaced: it has no place in the order.
    low, high = (
        np.nan_to_num(low, nan=0.0, posinf=np.inf),
        np.nan_to_num(high, nan=np.inf, posinf=np.inf),
    )
    return list(zip(low.view(np.uint64).tolist(), high.view(np.uint64).tolist(), strict=True))


def _magnitudes(mean: bool, width: int, rows: NDArray[Any], size: int) -> Floats:
    """Return a row for each member, or one for the mean."""
    values = np.empty((width, size))
    for g in range(width):
        magnitudes(rows, mean, g, 0, values[g])
    return values
