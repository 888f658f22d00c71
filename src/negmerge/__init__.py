"""negmerge makes a trained model forget.

The public API; each name is imported when it is first used, so that nothing pays for torch or numba
before it needs them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from negmerge.errors import NegMergeError as NegMergeError
    from negmerge.hyperparameters import HyperParameters as HyperParameters
    from negmerge.merge.accumulator import Accumulator as Accumulator
    from negmerge.merge.engine import merge as merge
    from negmerge.patching import apply as apply
    from negmerge.pipeline import run as run
    from negmerge.recipe import Pool as Pool
    from negmerge.recipe import Recipe as Recipe
    from negmerge.recipe import Search as Search
    from negmerge.report.page import report as report
    from negmerge.task_vector import TaskVector as TaskVector
    from negmerge.unlearning import Unlearned as Unlearned
    from negmerge.unlearning import unlearn as unlearn

_HOME = {
    "Accumulator": "negmerge.merge.accumulator",
    "HyperParameters": "negmerge.hyperparameters",
    "NegMergeError": "negmerge.errors",
    "Pool": "negmerge.recipe",
    "Recipe": "negmerge.recipe",
    "Search": "negmerge.recipe",
    "TaskVector": "negmerge.task_vector",
    "Unlearned": "negmerge.unlearning",
    "apply": "negmerge.patching",
    "merge": "negmerge.merge.engine",
    "report": "negmerge.report.page",
    "run": "negmerge.pipeline",
    "unlearn": "negmerge.unlearning",
}
__all__ = [
    "Accumulator",
    "HyperParameters",
    "NegMergeError",
    "Pool",
    "Recipe",
    "Search",
    "TaskVector",
    "Unlearned",
    "apply",
    "merge",
    "report",
    "run",
    "unlearn",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'negmerge' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
