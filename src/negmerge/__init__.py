"""negmerge makes a trained model forget.

This module lists the public API. Each name is imported when it is first used, because torch and
numba take seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from negmerge import extras

if TYPE_CHECKING:
    from negmerge.api.push import push as push
    from negmerge.api.unlearn import Unlearned as Unlearned
    from negmerge.api.unlearn import unlearn as unlearn
    from negmerge.errors import NegMergeError as NegMergeError
    from negmerge.evaluation.functions import FoundScale as FoundScale
    from negmerge.evaluation.functions import find_scale as find_scale
    from negmerge.evaluation.scales import Search as Search
    from negmerge.merging.accumulator import Accumulator as Accumulator
    from negmerge.merging.engine import merge as merge
    from negmerge.merging.one_pass import merge_and_apply as merge_and_apply
    from negmerge.reports.page import report as report
    from negmerge.runs.methods import Pool as Pool
    from negmerge.runs.pipeline import run as run
    from negmerge.runs.recipe import Recipe as Recipe
    from negmerge.studies.study import study as study
    from negmerge.training.hyperparameters import HyperParameters as HyperParameters
    from negmerge.vectors.adapter_output import save_adapter as save_adapter
    from negmerge.vectors.apply import apply as apply
    from negmerge.vectors.task_vector import TaskVector as TaskVector

_HOME = {
    "Accumulator": "negmerge.merging.accumulator",
    "FoundScale": "negmerge.evaluation.functions",
    "HyperParameters": "negmerge.training.hyperparameters",
    "NegMergeError": "negmerge.errors",
    "Pool": "negmerge.runs.methods",
    "Recipe": "negmerge.runs.recipe",
    "Search": "negmerge.evaluation.scales",
    "TaskVector": "negmerge.vectors.task_vector",
    "Unlearned": "negmerge.api.unlearn",
    "apply": "negmerge.vectors.apply",
    "find_scale": "negmerge.evaluation.functions",
    "merge": "negmerge.merging.engine",
    "merge_and_apply": "negmerge.merging.one_pass",
    "push": "negmerge.api.push",
    "report": "negmerge.reports.page",
    "run": "negmerge.runs.pipeline",
    "save_adapter": "negmerge.vectors.adapter_output",
    "study": "negmerge.studies.study",
    "unlearn": "negmerge.api.unlearn",
}
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

extras.install()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'negmerge' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
