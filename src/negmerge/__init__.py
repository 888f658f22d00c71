"""negmerge makes a trained model forget.

The public API; each name is imported when it is first used, so that nothing pays for torch or numba
before it needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from negmerge.errors import NegMergeError as NegMergeError
    from negmerge.merge.accumulator import Accumulator as Accumulator
    from negmerge.merge.engine import merge as merge
    from negmerge.patching import apply as apply
    from negmerge.task_vector import TaskVector as TaskVector

_HOME = {
    "Accumulator": "negmerge.merge.accumulator",
    "NegMergeError": "negmerge.errors",
    "TaskVector": "negmerge.task_vector",
    "apply": "negmerge.patching",
    "merge": "negmerge.merge.engine",
}
__all__ = ["Accumulator", "NegMergeError", "TaskVector", "apply", "merge"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'negmerge' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
