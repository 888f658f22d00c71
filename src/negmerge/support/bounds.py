"""Limits for programs inside files of others: patterns of names, templates of chats.

Such a program may never end, or ask for all memory. Both must be one line of error, not a machine
that hangs.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from negmerge.errors import FileError
from negmerge.support.reading import read_text
from negmerge.support.systems import POSIX, resource

SECONDS = 10.0
"""The processor time that a block may take; the time on the clock depends on the machine."""
MEMORY = 1 << 30
"""The bytes that a block may take beside those that the process has already."""


@contextmanager
def bounded(seconds: float = SECONDS, memory: int = MEMORY) -> Iterator[None]:
    """Raise `TimeoutError` or `MemoryError` if a block takes too long or too much memory.

    Only the main thread can be interrupted: in others there are no limits, nor on Windows. That of
    memory needs Linux.

    >>> with bounded(0.05):
    ...     while True:
    ...         pass
    Traceback (most recent call last):
    TimeoutError: takes longer than 0.05 s
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"takes longer than {seconds:g} s")

    if not POSIX or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    left, again = signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        with _less_memory(memory):
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, left, again)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _less_memory(more: int) -> Iterator[None]:
    limits, lowered = resource.getrlimit(resource.RLIMIT_AS), False
    # Another system may not tell the size of a process, or refuse the limit.
    with suppress(FileError, OSError, ValueError):
        pages = int(read_text("/proc/self/statm", 1 << 10).split()[0])
        wanted = pages * resource.getpagesize() + more
        if limits[0] == resource.RLIM_INFINITY or wanted < limits[0]:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, limits[1]))
            lowered = True
    try:
        yield
    finally:
        if lowered:
            resource.setrlimit(resource.RLIMIT_AS, limits)
