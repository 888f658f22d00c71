"""The memory that a merge may use; results that do not fit are stored on disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError, OptionError
from negmerge.merging.slabs import Room
from negmerge.support.files import write_fully

TILES = 6 << 20
"""The memory for the rows of one worker; it does not grow with the pool."""
AROUND = 12 << 20
"""The other memory of one worker: statistics, buffers, and results that are not written yet."""
LARGE = 256 << 20
"""A larger result of one tensor is stored on disk, even if no limit was given."""

ZEROS = 1 << 20
"""The bytes that are written at once where the system cannot reserve space on a disk."""
STATUS = Path("/proc/self/status")
"""Where Linux reports the memory of this process."""


class Budget:
    """The memory that is left for a merge.

    >>> Budget(None).workers(8)
    8

    Args:
        limit: the bytes that the whole process may use, or None.
        folder: the folder for results that do not fit, or None to keep all results in memory.
    """

    def __init__(self, limit: int | None, folder: Path | None = None) -> None:
        self.folder = folder
        self.left: int | None = None
        self._room = Room()
        self._large = LARGE
        if limit is None:
            return
        used = anonymous_memory()
        self.left = limit - used - AROUND
        if self.left < TILES + AROUND:
            least = used + TILES + 2 * AROUND
            raise OptionError(
                f"max-memory: {limit / 1e6:.0f} MB is too little; "
                f"this merge needs at least {least / 1e6:.0f} MB"
            )
        self._large = min(LARGE, (self.left - TILES - AROUND) // 2)

    def workers(self, wanted: int) -> int:
        """Return the number of workers that there is memory for, at most the wanted number."""
        return wanted if self.left is None else min(wanted, self.left // (TILES + AROUND))

    def is_large(self, nbytes: int) -> bool:
        """Return whether a result of a number of bytes is stored on disk."""
        return self.folder is not None and nbytes > self._large

    def allocate(self, count: int, dtype: Any) -> NDArray[Any]:
        """Return an array in memory, or on disk if it is large; its content is undefined."""
        nbytes = count * np.dtype(dtype).itemsize
        if self.folder is None:
            piece = self._room.free(count, dtype)
            self._room.take(nbytes)
            return piece
        if not self.is_large(nbytes):
            return np.empty(count, dtype)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                # If the space is not reserved, a full disk kills a process that maps the file.
                _reserve(file.fileno(), nbytes)
                return np.memmap(file, dtype, "r+", shape=(count,))
        except OSError as error:
            raise FileError(
                f"{self.folder}: cannot store {nbytes / 1e6:.0f} MB of results on this disk during "
                f"the merge: {error.strerror}; free some space, or name an output on another disk"
            ) from error


def _reserve(descriptor: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    for start in range(0, nbytes, ZEROS):  # macOS
        write_fully(descriptor, bytes(min(ZEROS, nbytes - start)))


def anonymous_memory() -> int:
    """Return the bytes of memory of this process that no file backs."""
    for line in STATUS.read_text().splitlines() if STATUS.exists() else ():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OptionError(
        "max-memory: this system does not report how much memory is in use; remove this option"
    )
