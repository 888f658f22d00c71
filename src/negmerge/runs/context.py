"""The context of a run: what every stage needs, and the only method that runs steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from negmerge.evaluation.criteria import Criterion, criteria
from negmerge.evaluation.metrics import metrics
from negmerge.merging.rules import rules
from negmerge.rivals import rivals
from negmerge.runs.executors import Executor, InProcess
from negmerge.runs.methods import Method
from negmerge.runs.recipe import Recipe
from negmerge.runs.records import Done
from negmerge.runs.status import StatusWriter
from negmerge.runs.steps import Step, T
from negmerge.runs.store import Run
from negmerge.runs.watch import Unit, Watch, facts_of
from negmerge.scenarios.base import Scenario, identity
from negmerge.scenarios.settings import scenarios
from negmerge.support.progress import Progress


def plugin_versions(recipe: Recipe, scenario: Scenario) -> list[str]:
    """Return the versions of the plug-ins that scores depend on: scenario, criterion, metrics."""
    return [
        *scenarios.versions(recipe.scenario),
        *scenario.plugin_versions,
        *criteria.versions(recipe.criterion),
        *metrics.versions(*(metric.name for metric in scenario.metrics)),
    ]


@dataclass(frozen=True)
class Context:
    """A run in progress; if illustrated, what only the page shows is measured, too."""

    recipe: Recipe
    scenario: Scenario
    store: Run
    executor: Executor
    progress: Progress
    illustrated: bool = True
    status: StatusWriter | None = None
    """Writes what `negmerge status` shows, if the run is to be watched."""

    @property
    def criterion(self) -> Criterion:
        """The criterion that chooses λ."""
        return self.recipe.settings.criterion(self.recipe.criterion)

    @property
    def merge_methods(self) -> list[Method]:
        """The methods that merge task vectors; the others are rivals."""
        return [method for method in self.recipe.methods if method.name not in rivals]

    @property
    def accumulator(self) -> Path:
        """The file of the accumulator; one for each version of rules that plug-ins define."""
        versions = rules.versions(*(method.name for method in self.merge_methods))
        path = self.store.accumulator
        return path.with_stem(f"{path.stem}-{identity(*versions)}") if versions else path

    @property
    def plugin_versions(self) -> list[str]:
        """The versions of the plug-ins that scores depend on."""
        return plugin_versions(self.recipe, self.scenario)

    def run(
        self,
        title: str,
        steps: Sequence[Step[T]],
        on_done: Callable[[Step[T]], None] = lambda step: None,
        stage_size: int | None = None,
        unit: str | None = None,
    ) -> list[Done[T]]:
        """Run the steps that are not done yet; return the results in the order of the steps.

        No other place asks whether a step is done, or records that it is. A step that fails stops
        the run; when the run is started again, only the steps that are not done run.

        Args:
            title: the title of the stage.
            steps: the steps; those with the same output file run once.
            on_done: called with each step that was not done before.
            stage_size: the number of steps of the stage, if `steps` does not list all of them; see
                `Executor.run`.
            unit: the unit of the sizes of the steps; the scenario's if not given.
        """
        distinct = {step.out: step for step in steps}
        results: dict[Path, Done[T]] = {}
        todo: list[Step[T]] = []
        for out, step in distinct.items():
            if (done := self.store.find(step)) is not None:
                results[out] = done
            elif (done := self.store.reuse(step)) is not None:
                results[out] = done
                on_done(step)
            else:
                todo.append(step)
        if todo:
            watch = self._watch(title, todo, unit or self.scenario.unit)
            executor = InProcess(self.scenario) if todo[0].in_main_process else self.executor
            for position, done in executor.run(todo, watch, stage_size or len(distinct)):
                step = todo[position]
                results[step.out] = self.store.mark_done(step, done)
                watch.finished(position)
                on_done(step)
        return [results[step.out] for step in steps]

    def _watch(self, title: str, steps: Sequence[Step[Any]], unit: str) -> Watch:
        """Begin a stage; return what executors tell about its steps."""
        units = [Unit(name=step.label, size=step.size(self.scenario)) for step in steps]
        total = sum(one.size for one in units)
        self.progress.stage(title, total, unit)
        if self.status is not None:
            self.status.begin(title, unit, total, units)

        def changed(one: Unit) -> None:
            self.progress.unit_changed(one.name, one.state, **facts_of(one))

        return Watch(units, self.progress.advance, changed)
