"""How much memory a merge may use, and where large results wait when that is not enough."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError, OptionError

TILES = 6 << 20
"""Memory for the rows of one worker; it does not grow with the pool."""
AROUND = 12 << 20
"""What a worker needs besides: state, scratch, and results that wait for their turn."""
LARGE = 256 << 20
"""A tensor whose result is larger waits on disk, also when no limit was given."""

SLAB = 64 << 20
"""Results that stay in memory are cut from pieces of this size, which the system backs with huge
pages; in arrays of a few megabytes each, small pages at their ends cost a tenth of a merge."""


class Budget:
    """The memory left for a merge.

    >>> Budget(None).workers(8)
    8

    limit: bytes the whole process may use, or None; folder: where results too large for it wait,
        or None to keep them in memory.
    """

    def __init__(self, limit: int | None, folder: Path | None = None) -> None:
        self.folder = folder
        self.limit = limit
        self.slab = np.empty(0, np.uint8)
        self.large = LARGE
        if limit is None:
            return
        used = anonymous_memory()
        self.left = limit - used - AROUND
        if self.left < TILES + AROUND:
            least = used + TILES + 2 * AROUND
            raise OptionError(
                f"max-memory {limit / 1e6:.0f} MB is too little: "
                f"this merge needs at least {least / 1e6:.0f} MB"
            )
        self.large = min(LARGE, max(0, self.left - TILES - AROUND) // 2)

    def workers(self, wanted: int) -> int:
        """How many workers fit."""
        if self.limit is None:
            return wanted
        return max(1, min(wanted, self.left // (TILES + AROUND)))

    def is_large(self, nbytes: int) -> bool:
        """Whether a result has to wait on disk."""
        return self.folder is not None and nbytes > self.large

    def allocate(self, count: int, dtype: Any) -> NDArray[Any]:
        """An array in memory, or on disk if it is too large; its content is undefined."""
        nbytes = count * np.dtype(dtype).itemsize
        if self.folder is None and nbytes <= SLAB:
            room = -(-nbytes // 64) * 64
            if self.slab.size < room:
                self.slab = np.empty(SLAB, np.uint8)
            piece, self.slab = self.slab[:nbytes], self.slab[room:]
            return piece.view(dtype)
        if not self.is_large(nbytes):
            return np.empty(count, dtype)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                # Without its room reserved, a map kills the process when the disk fills up.
                os.posix_fallocate(file.fileno(), 0, nbytes)
                return np.memmap(file, dtype, "r+", shape=(count,))
        except OSError as error:
            raise FileError(
                f"{self.folder}: {nbytes / 1e6:.0f} MB of results have to wait on this disk: "
                f"{error.strerror}; free some room, or name an output on another disk"
            ) from error


def anonymous_memory() -> int:
    """Bytes of memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OptionError("max-memory: this system does not tell how much memory is in use")
