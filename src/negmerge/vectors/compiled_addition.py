"""θ + s·τ for float32 in compiled loops, which give the same bytes as `addition.py`."""

# pyright: basic, reportCallIssue=false, reportReturnType=false
# Compiled by numba, whose types the strict checker does not know.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import copysign
from typing import Any

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from negmerge.support.jit import compiled_as_python

Singles = NDArray[np.float32]


@register_jitable
def differ(one, two):
    """Whether two numbers have different bits."""
    return one != two or copysign(1.0, one) != copysign(1.0, two)


def _sparse(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    base, bits = _base(), np.arange(0, 240, 4, dtype=np.uint8)
    values = _values(int(np.bitwise_count(bits).sum()))
    yield base, bits, values, -0.45
    yield base, bits, values * np.float32(1e37), 1e3


def _base() -> Singles:
    base = np.random.default_rng(0).standard_normal(480).astype(np.float32)
    base[:4] = [0.0, -0.0, 1e30, -1e-42]
    return base


def _values(count: int) -> Singles:
    values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    values[::7] *= np.float32(1e-12)  # too small to change the base
    return values


@compiled_as_python(_sparse)
def add_sparse(base, bits, values, scale):
    """Add scale · values in place where bits are set, in float64, rounded once.

    Returns:
        The number of changed numbers, and whether all sums are finite.
    """
    changed, at, finite = 0, 0, True
    for j in range(bits.shape[0]):
        byte = bits[j]
        if byte:
            for i in range(8):
                if byte & (1 << i):
                    old = base[8 * j + i]
                    new = np.float32(np.float64(old) + scale * np.float64(values[at]))
                    at += 1
                    base[8 * j + i] = new
                    changed += differ(new, old)
                    finite &= abs(new) < np.inf
    return changed, finite


def _dense(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    values = _values(480)
    values[::3] = 0
    yield _base(), values, -0.45
    yield _base(), values * np.float32(1e37), 1e3


@compiled_as_python(_dense)
def add_dense(base, values, scale):
    """Add scale · values in place where values are not zero; returns what `add_sparse` returns."""
    changed, finite = 0, True
    for i in range(base.shape[0]):
        old = base[i]
        new = np.float32(np.float64(old) + scale * np.float64(values[i]))
        if values[i] != 0:
            base[i] = new
            changed += differ(new, old)
            finite &= abs(new) < np.inf
    return changed, finite
