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

from negmerge.checkpoints.dtypes import Bytes
from negmerge.checkpoints.fingerprint import BLOCK, KEYS, LOW, PHI, Words, mix
from negmerge.support.jit import compiled_as_python

register_jitable(mix)


def _blocks(dtypes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    raw = np.random.default_rng(0).integers(0, 256, (2, 3 * BLOCK), np.uint8)
    yield raw, 1, 2, 7, np.array([3, 2**64 - 1], np.uint64)


@compiled_as_python(_blocks)
def add_checksums(raw: Bytes, first: int, last: int, number: int, sums: Words) -> None:
    """For each row of bytes, add the checksum of the blocks `first` … `last` to `sums`.

    `number` is the number of the first of these blocks in its tensor.
    """
    words = raw.view(np.uint64)
    for k in range(words.shape[0]):
        for block in range(first, last):
            some = words[k, block * 512 : block * 512 + 512]
            inner = np.uint64(0)
            for i in range(512):
                x = some[i] + KEYS[i]
                inner += (x & LOW) * (x >> np.uint64(32))
            sums[k] += mix(inner + np.uint64(number + block - first + 1) * PHI)
