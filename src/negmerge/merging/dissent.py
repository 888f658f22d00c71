"""Counting how often the signs of members agree, and where a single one disagrees with all."""

# pyright: basic, reportCallIssue=false
# numba compiles the loop; the strict checker does not know the types of numba.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.merging.folds import STRIP
from negmerge.merging.tiles import Segment, TileReader
from negmerge.support.jit import compiled_as_python

EXACT = 1 << 22
"""Models of at most this number of elements are counted whole, larger ones every 256th strip."""


def sample_dissent(
    reader: TileReader, segment: Segment, elements: int
) -> tuple[NDArray[np.int64], int]:
    """Count the elements of a segment where each member alone disagrees, in a sample of strips.

    Returns:
        A count for each member; the pairs of members that change an element in the same direction,
        and the pairs that change it; and the number of sampled elements.
    """
    n = len(reader.inputs.members)
    counts, sampled = np.zeros(n + 2, np.int64), 0
    every = 1 if elements <= EXACT else 256
    unused = np.zeros(n + 1, np.uint64)
    if n < 2:
        return counts, sampled
    first = segment.start + -segment.strip % every * STRIP
    for start in range(first, segment.stop, every * STRIP):
        size = min(STRIP, segment.stop - start)
        rows = reader.read(segment.info.name, start, size, unused)
        count_dissent(rows, size, counts)
        sampled += size
    return counts, sampled


def _members(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    yield rng.integers(0, 4, (5, 300)).astype(dtypes[0]), 290, np.arange(6)


@compiled_as_python(_members)
def count_dissent(rows, count, counts):
    """Add, for each member, the number of elements where only this member disagrees.

    The last two places count pairs of members: those that agree, and all that are not zero.
    """
    n = rows.shape[0] - 1
    for i in range(count):
        base = rows[0, i]
        positive = negative = not_up = not_down = 0
        for k in range(1, n + 1):
            if rows[k, i] > base:
                positive += 1
            else:
                not_up = k
            if rows[k, i] < base:
                negative += 1
            else:
                not_down = k
        counts[n] += positive * (positive - 1) // 2 + negative * (negative - 1) // 2
        counts[n + 1] += (positive + negative) * (positive + negative - 1) // 2
        if positive == n - 1:
            counts[not_up - 1] += 1
        if negative == n - 1:
            counts[not_down - 1] += 1
