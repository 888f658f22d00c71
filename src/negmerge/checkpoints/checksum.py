"""The checksum of `fingerprint.py` in a compiled loop, for several models at once.

A separate module, so that reading one model does not import numba.
"""

# pyright: basic
# Compiled by numba, whose types the strict checker does not know.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from negmerge.checkpoints.fingerprint import KEYS, LOW, PHI, Words, mix
from negmerge.support.jit import compiled_as_python

register_jitable(mix)


def _blocks(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    words = np.random.default_rng(0).integers(0, 2**64, (2, 3, 512), np.uint64)
    yield words, 1, 2, 7, KEYS, np.array([3, 2**64 - 1], np.uint64)


@compiled_as_python(_blocks)
def add_checksums(
    words: Words, first: int, last: int, number: int, keys: Words, sums: NDArray[np.uint64]
) -> None:
    """For each row, add the checksum of some of its blocks to `sums`.

    Args:
        words: rows of blocks of 512 64-bit words.
        first: the first block.
        last: the block after the last one.
        number: the number of the first block in its tensor.
        keys: `fingerprint.KEYS`.
        sums: the checksum of each row.
    """
    for k in range(words.shape[0]):
        for block in range(first, last):
            some = words[k, block]
            inner = np.uint64(0)
            for i in range(512):
                x = some[i] + keys[i]
                inner += (x & LOW) * (x >> np.uint64(32))
            sums[k] += mix(inner + np.uint64(number + block - first + 1) * PHI)
