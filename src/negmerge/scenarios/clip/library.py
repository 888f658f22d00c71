"""The library `open_clip`: imported on first use, and called without its own output."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from negmerge.support.terminal import without_stdin


def open_clip() -> Any:
    """Return the library; importing it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import open_clip as library
    return library


@contextmanager
def quiet() -> Iterator[None]:
    """Silence log lines, warnings and questions of libraries for the block."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), without_stdin():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
