"""Random numbers that depend on what they are for, never on what was drawn before.

A counter-based generator: the numbers for one sample in one epoch are a hash of (seed, epoch,
sample). A resumed training sees what the uninterrupted one saw, in any order, on any worker.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seed_of(*parts: object) -> int:
    """A 63-bit seed from anything that has a name.

    >>> seed_of("order", 0, 1) == seed_of("order", 0, 1) != seed_of("order", 0, 2)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draws(seed: int, samples: NDArray[Any], count: int) -> NDArray[np.uint64]:
    """`count` uniform 64-bit numbers for each sample: splitmix64 at (seed, sample, k).

    >>> one, two = draws(7, np.array([3, 5]), 2), draws(7, np.array([5]), 2)
    >>> bool((one[1] == two[0]).all())
    True
    """
    with np.errstate(over="ignore"):
        start = _mix(np.asarray(samples).astype(np.uint64) + _mix(np.uint64(seed)))
        return _mix(start[:, None] + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64))


def _mix(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
