"""The compiled loop of an adapter: base + s·BA for a range of a tensor, rounded once.

The sum over the rank is computed in float64 in the order of the rank, without fused instructions:
the result does not depend on the range, the threads or a library of matrices. The products of
float32 numbers are exact.
"""

# pyright: basic
# Compiled by numba, whose types the strict checker does not know.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from negmerge.support.jit import compiled, equals_reference


def _plain(left, right, scale, base, first, out):
    """Do the same as `add_low_rank`, with numpy."""
    total = np.zeros((left.shape[0], right.shape[1]))
    for j in range(left.shape[1]):
        total = total + left[:, j : j + 1] * right[j]
    change = (scale * total).reshape(-1)[first : first + out.size]
    out[:] = base.astype(np.float64) + change


def _examples(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((7, 3)), rng.standard_normal((3, 11))
    for first, count in ((0, 77), (5, 40), (12, 9), (33, 11)):
        base = rng.standard_normal(count).astype(dtypes[3])
        yield left, right, 0.7, base, first, np.zeros(count, dtypes[5])


@compiled(equals_reference(_plain, _examples))
def add_low_rank(left, right, scale, base, first, out):
    """Write base + scale · (left @ right) for elements of the product, from number `first` on.

    Args:
        left: a float64 matrix, outputs × rank.
        right: a float64 matrix, rank × inputs.
        base: the elements of the base, float32 or float64.
        out: the elements of the sum.
    """
    columns = right.shape[1]
    total = np.empty(min(columns, out.shape[0]))
    done = 0
    while done < out.shape[0]:
        row, begin = (first + done) // columns, (first + done) % columns
        count = min(columns - begin, out.shape[0] - done)
        some = total[:count]
        some[:] = 0.0
        for j in range(left.shape[1]):
            factor = left[row, j]
            line = right[j, begin : begin + count]
            for k in range(count):
                some[k] += factor * line[k]
        for k in range(count):
            out[done + k] = base[done + k] + scale * some[k]
        done += count
