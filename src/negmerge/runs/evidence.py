"""The evidence of a run: every test of forgetting on the original, the retrained model and methods.

A test that the run cannot do is recorded with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from negmerge.evaluation.scores import Scores
from negmerge.evidence.findings import ORIGINAL, RETRAINED, SECOND, Evidence, Finding, TestResult
from negmerge.evidence.registry import (
    Exhibits,
    Findings,
    ForgettingTest,
    ModelTest,
    Need,
    ObservedTest,
    Seen,
    ShadowTest,
    Subject,
    forgetting_tests,
    tests_of,
)
from negmerge.evidence.sets import REASONS, lacks, observe, sets_of
from negmerge.runs.context import Context
from negmerge.runs.measurements import ModelMeasurement
from negmerge.runs.records import Done
from negmerge.runs.scores import Models, plan_scores
from negmerge.runs.shadows import train_shadows
from negmerge.runs.steps import Advance
from negmerge.runs.trainings import Training, make_training
from negmerge.scenarios.base import Scenario, ToTrain, identity
from negmerge.scenarios.data import require_sets
from negmerge.support.files import file_digest
from negmerge.training.loop import VERSION as LOOP

Columns = dict[str, dict[str, list[float]]]
"""By set and column, a number of each sample."""


@dataclass(frozen=True)
class Gathered:
    """The evidence of a run, and the files of the models that only the tests needed."""

    evidence: Evidence | None = None
    files: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Examined:
    """A model to test: a file of weights, minus λ times a patch."""

    model: Path
    vector: Path | None = None
    scale: float = 0.0


@dataclass(frozen=True)
class Observation(ModelMeasurement[Columns]):
    """What tests observe of single samples; `sets` are the names of the sets."""

    sets: tuple[str, ...] = ()
    value_type: ClassVar = Columns

    def size(self, scenario: Scenario) -> int:
        feeds = sets_of(require_sets(scenario, "evidence"), self.sets)
        return sum(map(len, feeds.values()))

    def run(self, scenario: Scenario, advance: Advance) -> Done[Columns]:
        begun, own = time.perf_counter(), require_sets(scenario, "evidence")
        with self.network(scenario) as network:
            found = observe(own, network, sets_of(own, self.sets), advance)
        columns = {
            name: {column: values.astype(float).tolist() for column, values in one.items()}
            for name, one in found.items()
        }
        return Done(columns, time.perf_counter() - begun)


@dataclass(frozen=True)
class Examination(ModelMeasurement[Findings]):
    """A test that runs something on a model.

    Args:
        test: the name of the test.
        title: the title of the model.
        original: the file of the original model.
        seed: of the run.
    """

    test: str = ""
    title: str = ""
    original: Path = Path()
    seed: int = 0
    value_type: ClassVar = dict[str, Finding]

    @property
    def label(self) -> str:
        return f"{self.test} of {self.title}"

    @property
    def _test(self) -> ModelTest:
        found = forgetting_tests.get(self.test)
        assert isinstance(found, ModelTest)
        return found

    def size(self, scenario: Scenario) -> int:
        return self._test.size(require_sets(scenario, self.test))

    def run(self, scenario: Scenario, advance: Advance) -> Done[Findings]:
        begun, own = time.perf_counter(), require_sets(scenario, self.test)
        with self.network(scenario) as network:
            subject = Subject(self.title, own, network, self.original, self.seed, advance)
            found = self._test.find(subject)
        return Done(found, time.perf_counter() - begun)


def gather_evidence(context: Context, models: Models, scores: Mapping[str, Scores]) -> Gathered:
    """Run the tests of the tier of the recipe on every model that forgets.

    Nothing is tested in a run without a page, where nobody would see it.
    """
    if not context.illustrated:
        return Gathered()
    tests, tier = tests_of(context.recipe.evidence), context.recipe.evidence
    second = plan_second(context, models.reference)
    missing = {test.name: why_not(context, models, second, test) for test in tests}
    todo = [test for test in tests if missing[test.name] is None]
    seconds, files = 0.0, list[Path]()
    examined = models_to_examine(models)
    scores = dict(scores)
    if second is not None and any("second" in test.needs for test in todo):
        (done,) = context.run("training a second retrained model", [second])
        seconds += done.seconds
        files += [second.out, second.cost_file]
        examined[SECOND] = Examined(second.out)
        (scored,) = context.run("scoring it", [plan_scores(context, second.out)])
        seconds += scored.seconds
        scores[SECOND] = scored.value
    seen, spent = observe_models(context, examined, scores, todo)
    found, more = examine_models(context, models, examined, todo)
    for test in todo:
        if isinstance(test, ObservedTest):
            found[test.name] = {
                title: test.find(seen, title)
                for title in examined
                if title != SECOND or test.null == SECOND
            }
    shadow_tests = [test for test in todo if isinstance(test, ShadowTest)]
    if shadow_tests:
        trained = train_shadows(context)
        files += trained.files
        seconds += trained.seconds
        found |= {test.name: test.find(trained.margins) for test in shadow_tests}
    results: dict[str, TestResult] = {}
    for test in tests:
        why = missing[test.name]
        own = {} if why is not None else test.finish(found[test.name])
        results[test.name] = test.result(context.recipe.settings, own, why)
    total = seconds + spent + more
    return Gathered(Evidence(tier=tier, tests=results, seconds=total), files)


def models_to_examine(models: Models) -> dict[str, Examined]:
    """Return the original, the retrained model, and every method that forgets."""
    base = models.original.out
    found = {ORIGINAL: Examined(base)}
    if models.reference is not None:
        found[RETRAINED] = Examined(models.reference.out)
    for title, method in models.merged.items():
        if not method.added:
            found[title] = Examined(base, method.patch, method.scale)
    for title, rival in models.rivals.items():
        found[title] = Examined(rival.chosen.out)
    return found


def plan_second(context: Context, reference: Training | None) -> Training | None:
    """Return the step that retrains once more, with another seed; None if nothing is retrained."""
    planned = context.scenario.reference()
    if reference is None or not isinstance(planned, ToTrain):
        return None
    return make_training(
        context.scenario,
        "second retrained model",
        planned.on,
        planned.settings,
        lambda _: context.store.second,
        context.store.states,
        save_every=context.recipe.save_every,
        repetition=1,
    )


def why_not(
    context: Context, models: Models, second: Training | None, test: ForgettingTest
) -> str | None:
    """Return why a test cannot be done; None if it can."""
    absent: dict[Need, bool] = {"retrained": models.reference is None, "second": second is None}
    for need in ("retrained", *sorted(test.needs - {"retrained"})):  # the most telling one first
        if need not in test.needs:
            continue
        if absent[need] if need in absent else lacks(context.scenario, need):
            return REASONS[need]
    return None


def _content(context: Context, examined: Examined) -> list[Any]:
    """Return what a test of a model depends on."""
    vector = examined.vector and file_digest(examined.vector)
    own = [file_digest(examined.model), vector, examined.scale]
    how = [context.criterion.uses_reported_data, context.recipe.search.samples, context.recipe.seed]
    how += [] if vector is None else context.recipe.terms.after_subtraction
    return [*own, *how, *context.plugin_versions, context.scenario.scored_on]


def observe_models(
    context: Context,
    examined: Mapping[str, Examined],
    scores: Mapping[str, Scores],
    todo: Sequence[ForgettingTest],
) -> tuple[Exhibits, float]:
    """Observe every model once, for all tests that need no more; return the time it took, too."""
    wanted = [test for test in todo if isinstance(test, ObservedTest)]
    sets = tuple(sorted({name for test in wanted for name in test.sets}))
    settings, seed = context.recipe.settings, context.recipe.seed
    columns: dict[str, Columns] = {title: {} for title in examined}
    seconds = 0.0
    if sets:
        steps: list[Observation] = []
        for one in examined.values():
            key = identity("observation", sets, *_content(context, one))
            out = context.store.states / f"{key}.json"
            steps.append(Observation(key, one.model, out, one.vector, one.scale, sets=sets))
        done = context.run("observing every model for the tests of forgetting", steps)
        columns = {title: one.value for title, one in zip(examined, done, strict=True)}
        seconds = sum(one.seconds for one in done)
    seen = {
        title: Seen(
            {
                name: {column: np.array(values) for column, values in own.items()}
                for name, own in columns[title].items()
            },
            scores[title],
        )
        for title in examined
    }
    return Exhibits(seen, settings.forget_metric, seed), seconds


def examine_models(
    context: Context,
    models: Models,
    examined: Mapping[str, Examined],
    todo: Sequence[ForgettingTest],
) -> tuple[dict[str, dict[str, Findings]], float]:
    """Run the tests that run something on a model; return findings by test, and the time."""
    base, seed = models.original.out, context.recipe.seed
    training = context.scenario.training.content()
    steps: dict[tuple[str, str], Examination] = {}
    for test in (test for test in todo if isinstance(test, ModelTest)):
        version = [test.name, test.version, *forgetting_tests.versions(test.name)]
        for title, one in examined.items():
            if title == SECOND:
                continue
            content = [file_digest(base), training, LOOP, *_content(context, one)]
            key = identity("examination", version, title, *content)
            out = context.store.states / f"{key}.json"
            model = (key, one.model, out, one.vector, one.scale)
            about = {"test": test.name, "title": title, "original": base, "seed": seed}
            steps[test.name, title] = Examination(*model, **about)
    done = context.run("testing what every model forgot", list(steps.values())) if steps else []
    found: dict[str, dict[str, Findings]] = {}
    for (name, title), one in zip(steps, done, strict=True):
        found.setdefault(name, {})[title] = one.value
    return found, sum(one.seconds for one in done)
