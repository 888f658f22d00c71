"""The toy scenario (`toy.py`) in this process: registered for a while, and run without workers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from negmerge.evaluation.criteria import criteria
from negmerge.evaluation.metrics import metrics
from negmerge.runs.context import Context
from negmerge.runs.executors import InProcess
from negmerge.runs.pipeline import unlearn
from negmerge.runs.recipe import Recipe
from negmerge.runs.store import Run
from negmerge.scenarios.settings import scenarios
from negmerge.support.progress import Quiet

SMALL: dict[str, Any] = {
    "scenario": "numbers",
    "records": 40,
    "train": {"epochs": 10, "batch": 16, "lr": 0.02},
    "pool": {"settings": {"batch": 16, "lr": 0.02}, "grid": {"epochs": [1, 2, 3]}},
    "methods": ["consensus"],
    "search": {"count": 3},
}


@contextmanager
def toy_scenario() -> Iterator[ModuleType]:
    """Register the toy's scenario, metrics and criterion; afterwards they are gone again."""
    before = {registry: {*registry} for registry in (metrics, criteria, scenarios)}
    try:
        yield import_module("toy")
    finally:
        for registry, names in before.items():
            for name in {*registry} - names:
                registry.remove(name)
        sys.modules.pop("toy", None)


def run_toy(folder: Path, **changes: Any) -> Run:
    """Run a small recipe of the toy to its end, whether the folder was begun before or not."""
    recipe = Recipe.model_validate(SMALL | changes)
    scenario, store = recipe.make_scenario(), Run(folder)
    with store.locked():
        unlearn(Context(recipe, scenario, store, InProcess(scenario), Quiet()))
    return Run(folder)
