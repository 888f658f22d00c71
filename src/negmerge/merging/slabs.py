"""Memory for results, which later results use again.

A system clears every page before it gives it to a process, and a virtual machine may have to get
the page from its host first: writing to new memory can take longer than reading all models. Here
the memory of results that nothing refers to any more is kept for the next merge. The system is told
that it may take the pages (`MADV_FREE`) and does so if it needs them.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

SLAB = 64 << 20
"""Arrays are multiples of this size, for which the system uses huge pages."""
MOST_KEPT = 2 << 30
"""The number of bytes that are kept at most."""

_LOCK = RLock()
"""Reentrant: the garbage collector may end an array, and so call `_keep`, at any time."""
_PRIVATE: dict[str, Any] = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
)
"""On Windows, memory that belongs to no file is always private."""
_kept: defaultdict[int, list[mmap.mmap]] = defaultdict(list)


def new_slab(nbytes: int = SLAB) -> NDArray[np.uint8]:
    """Return an array of at least some bytes; its content is undefined.

    >>> new_slab().size == SLAB
    True
    """
    size = -(-nbytes // SLAB) * SLAB
    with _LOCK:
        memory = _kept[size].pop() if _kept[size] else None
    if memory is None:
        memory = mmap.mmap(-1, size, **_PRIVATE)
        _advise(memory, "MADV_HUGEPAGE")
    slab = np.frombuffer(memory, np.uint8)
    # Every view of the array refers to the array, so that it ends with the last of them.
    weakref.finalize(slab, _keep, memory).atexit = False
    return slab


def _keep(memory: mmap.mmap) -> None:
    with _LOCK:
        if sum(size * len(some) for size, some in list(_kept.items())) + len(memory) <= MOST_KEPT:
            _advise(memory, "MADV_FREE")
            _kept[len(memory)].append(memory)


def _advise(memory: mmap.mmap, advice: str) -> None:
    if hasattr(mmap, advice):  # not on every system
        memory.madvise(getattr(mmap, advice))


class Room:
    """A place for results of unknown size, one after the other in slabs."""

    def __init__(self) -> None:
        self._slab = np.empty(0, np.uint8)

    def free(self, count: int, dtype: Any) -> NDArray[Any]:
        """Return an array for at most `count` numbers; `take` keeps the first of them."""
        nbytes = count * np.dtype(dtype).itemsize
        if self._slab.size < nbytes:
            self._slab = new_slab(nbytes)
        return self._slab[:nbytes].view(dtype)

    def take(self, nbytes: int) -> None:
        """Keep the first bytes of the last array; the others are free again."""
        self._slab = self._slab[-(-nbytes // 64) * 64 :]
