"""The check of all trainings of a run before the first one begins: do they fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from negmerge.errors import OptionError
from negmerge.rivals import rivals
from negmerge.runs.recipe import Recipe
from negmerge.runs.rival_trainings import plan_rivals
from negmerge.runs.store import Run
from negmerge.runs.trainings import Start
from negmerge.scenarios.base import Scenario, ToTrain, TrainingSet
from negmerge.scenarios.data import DataScenario
from negmerge.training.execution import checkpointed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.memory import check_step

SPARE = 0.05
"""The share of a GPU's free memory that is left to the CUDA context of a worker process and to
fragmentation; an assumption."""


class Planned(NamedTuple):
    """A training: where the recipe has its settings, the set and the settings."""

    where: str
    on: TrainingSet
    settings: HyperParameters

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the memory of a step depends on."""
        own = self.settings
        how = (own.precision, own.checkpointing, own.optimizer, own.momentum > 0)
        return self.on, own.batch, own.accumulate, *how


def check_trainings(recipe: Recipe, scenario: Scenario, limit: float | None) -> None:
    """Raise if a training of a run does not fit in memory, or its model has no checkpointing.

    Args:
        recipe: the settings of the run.
        scenario: its data and models.
        limit: the bytes of memory for one training; None: memory is not checked.
    """
    if not isinstance(scenario, DataScenario):
        return
    model = None
    for where, on, settings in {one.kind: one for one in _plan(recipe, scenario)}.values():
        if limit is None and not settings.checkpointing:
            continue
        model = scenario.model() if model is None else model
        try:
            if settings.checkpointing:
                with checkpointed(model):
                    pass
        except OptionError as error:
            raise OptionError(f"{where}.{error}") from None
        if limit is not None:
            feed, objective = scenario.train_set(on), scenario.loss(settings)
            check_step(where, model, feed, settings, objective, limit)


def memory_limit(workers: int, gpus: int) -> float | None:
    """Return the bytes of GPU memory for each worker process; None if there is no GPU.

    Args:
        workers: the number of processes.
        gpus: the number of GPUs, which are taken to be alike.
    """
    if not gpus:
        return None
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return (1 - SPARE) * free / ceil(workers / gpus)


def _plan(recipe: Recipe, scenario: Scenario) -> Iterator[Planned]:
    """Yield every training of a run."""
    for plan in (scenario.original(), scenario.reference()):
        if isinstance(plan, ToTrain):
            yield Planned("train", plan.on, plan.settings)
    if any(method.name not in rivals for method in recipe.methods):
        for member in recipe.pool.members():
            yield Planned("pool.settings", "forget", member)
    plans = plan_rivals(scenario, recipe, Run(""), Start(Path(), ""))  # only to look at them
    for steps in plans.values():
        for step in steps:  # rivals take over the batch and its parts from the original
            yield Planned("train", step.on[0], step.settings)
