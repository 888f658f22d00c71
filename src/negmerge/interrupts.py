"""Interrupts that wait: none falls between making a file and noting that it is there."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 3.0
"""Seconds after an interrupt in which others are ignored: the process is clearing up to exit. After
that an interrupt counts again, for a library may have swallowed the first."""

_depth, _pending, _last = 0, False, -inf


def listen() -> None:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt, outside of blocks that must be whole."""
    global _last
    _last = -inf
    for number in SIGNALS:
        signal.signal(number, _interrupt)


def ignore() -> None:
    """Ignore SIGINT and SIGTERM from here on: the process has nothing to do but to exit."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let an interrupt wait until the end of the block.

    >>> with undisturbed():
    ...     pass
    """
    global _depth, _pending
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _pending and not _depth:
            _pending = False
            _raise()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _pending
    if _depth:
        _pending = True
    else:
        _raise()


def _raise() -> None:
    global _last
    if time.monotonic() - _last >= PATIENCE:
        _last = time.monotonic()
        raise KeyboardInterrupt
