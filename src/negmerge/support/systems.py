"""What Windows lacks of the functions for files, in forms that work on every system.

`merge`, `apply`, `inspect` and `convert` use these forms. A function that the system has itself is
used as it is. Nothing else of the package is meant to run on Windows.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

fcntl: Any
resource: Any
try:
    import fcntl
    import resource
except ImportError:  # Windows
    fcntl = resource = None

POSIX = fcntl is not None
"""Whether files can be locked, folders opened and flushed, and open files renamed."""
BINARY: int = getattr(os, "O_BINARY", 0)
"""Flag of `os.open`: bytes are not changed; only Windows has a mode that changes them."""
NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT: int = getattr(os, "O_NONBLOCK", 0)
FOLDER: int = getattr(os, "O_DIRECTORY", 0)
LIBC: Any = ctypes.CDLL(None) if POSIX else object()
"""The library of C; without it, an object without functions."""
HAS_PREAD = hasattr(os, "pread")
_POSITION = threading.Lock()
"""Where reading moves the position of a file, one thread at a time reads or writes."""


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill a buffer with the bytes of a file from an offset on; return how many were read.

    >>> import tempfile
    >>> buffer = bytearray(3)
    >>> with tempfile.TemporaryFile() as file:
    ...     write_at(file.fileno(), memoryview(b"abcdef"), 2)
    ...     read_at(file.fileno(), memoryview(buffer), 4), bytes(buffer)
    6
    (3, b'cde')
    """
    if HAS_PREAD:
        return os.preadv(descriptor, [view], offset)
    with _POSITION:
        os.lseek(descriptor, offset, os.SEEK_SET)
        found = os.read(descriptor, view.nbytes)
    view[: len(found)] = found
    return len(found)


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write bytes to a file at an offset; return how many were written."""
    if HAS_PREAD:
        return os.pwrite(descriptor, data, offset)
    with _POSITION:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, data)
