"""Interrupts that wait: none falls between making a file and noting that it is there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_depth, _pending = 0, False


def listen() -> None:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt, outside of blocks that must be whole."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)


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
            raise KeyboardInterrupt


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    global _pending
    if _depth:
        _pending = True
    else:
        raise KeyboardInterrupt
