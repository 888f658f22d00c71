"""Compiled twins of the numpy loops of `apply`, for models that are worth the start of numba.

Loading numba takes longer than all of a small application in numpy; on a large model, or in a
process that merges anyway, its loops win. Both give the same bytes.
"""

# pyright: basic, reportCallIssue=false, reportReturnType=false
# Compiled by numba, whose types the strict checker does not know.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import copysign
from typing import Any

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from negmerge import fingerprint
from negmerge.jit import compiled, twin

Singles = NDArray[np.float32]


def _blocks(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    words = np.random.default_rng(0).integers(0, 2**64, 3 * 512, np.uint64)
    yield words, 5, fingerprint.KEYS


@compiled(twin(fingerprint.checksum, _blocks))
def checksum(words: NDArray[np.uint64], first: int, keys: NDArray[np.uint64]) -> Any:
    """As `fingerprint.checksum`."""
    low, half, phi = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(0x9E3779B97F4A7C15)
    total = np.uint64(0)
    for block in range(words.shape[0] // 512):
        some = words[block * 512 : block * 512 + 512]
        inner = np.uint64(0)
        for i in range(512):
            x = some[i] + keys[i]
            inner += (x & low) * (x >> half)
        z = inner + np.uint64(first + block + 1) * phi
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        total += z ^ (z >> np.uint64(31))
    return total


@register_jitable
def differ(one: Any, two: Any) -> bool:
    """Whether two numbers have other bits."""
    return one != two or copysign(1.0, one) != copysign(1.0, two)


def _add_sparse(
    base: Singles, bits: NDArray[np.uint8], values: Singles, scale: float
) -> tuple[Any, Any]:
    """`add_sparse` in numpy."""
    where = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    old = base[where]
    base[where] = old.astype(np.float64) + scale * values.astype(np.float64)
    changed = np.count_nonzero(base[where].view(np.uint32) != old.view(np.uint32))
    return changed, bool(np.isfinite(base[where]).all())


def _sparse(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    base, bits = _base(), np.arange(250, dtype=np.uint8)
    values = _values(int(np.bitwise_count(bits).sum()))
    yield base, bits, values, -0.45
    yield base, bits, values * np.float32(1e37), 1e3


def _base() -> Singles:
    base = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    base[:4] = [0.0, -0.0, 1e30, -1e-42]
    return base


def _values(count: int) -> Singles:
    values = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    values[::7] *= np.float32(1e-12)  # rounds away
    return values


@compiled(twin(_add_sparse, _sparse))
def add_sparse(
    base: Singles, bits: NDArray[np.uint8], values: Singles, scale: float
) -> tuple[Any, Any]:
    """Add scale · values where bits are set, in float64, rounded once.

    Returns how many elements changed, and whether all are finite.
    """
    changed, at = 0, 0
    finite = True
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


def _add_dense(base: Singles, values: Singles, scale: float) -> tuple[Any, Any]:
    """`add_dense` in numpy."""
    bits = np.packbits(values != 0, bitorder="little")
    return _add_sparse(base, bits, values[values != 0], scale)


def _dense(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    values = _values(2000)
    values[::3] = 0
    yield _base(), values, -0.45
    yield _base(), values * np.float32(1e37), 1e3


@compiled(twin(_add_dense, _dense))
def add_dense(base: Singles, values: Singles, scale: float) -> tuple[Any, Any]:
    """Add scale · values where they are not zero; returns as `add_sparse`."""
    changed = 0
    finite = True
    for i in range(base.shape[0]):
        old = base[i]
        new = np.float32(np.float64(old) + scale * np.float64(values[i]))
        if values[i] != 0:
            base[i] = new
            changed += differ(new, old)
            finite &= abs(new) < np.inf
    return changed, finite
