"""Starting numba quickly, for commands that run once."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

from negmerge import plugins

SLOW = ("scipy", "cffi")
"""Libraries that numba imports when it starts, if they are installed: for linear algebra and for
functions in C, which no function of this package uses."""


def start_compiler() -> None:
    """Let numba start without the libraries that it would import for features of no use here.

    They take longer to import than a merge of some gigabytes. Libraries that are imported already
    stay. A rule of a plug-in may use these features: with plug-ins numba starts as it always does.

    >>> start_compiler()
    """
    if plugins.any_loaded() or entry_points(group="negmerge.rules"):
        return
    hidden = [name for name in SLOW if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # pyright: ignore  (an import raises ImportError)
    try:
        from numba.core.registry import cpu_target

        contexts: list[Any] = [cpu_target.typing_context, cpu_target.target_context]
        for context in contexts:
            context.refresh()
    finally:
        for name in hidden:
            del sys.modules[name]
