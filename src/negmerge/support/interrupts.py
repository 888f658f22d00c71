"""Interrupts (SIGINT, SIGTERM) that can be delayed during a block.

A file is created and recorded for removal in one such block.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 3.0
"""Seconds after an interrupt during which further ones are ignored, because the process is cleaning
up. Later interrupts are raised again: a library may have suppressed the first one."""

_depth, _pending, _last = 0, False, -inf


def raise_interrupts() -> None:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM, after the end of `delay_interrupts` blocks."""
    global _last
    _last = -inf
    for number in SIGNALS:
        signal.signal(number, _interrupt)


def ignore_interrupts() -> None:
    """Ignore SIGINT and SIGTERM from now on, while the process exits."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay interrupts until the end of the block; only the main thread receives any."""
    global _depth, _pending
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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
