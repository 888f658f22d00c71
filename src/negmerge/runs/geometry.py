"""Where the models of a run lie: lengths, distances to the retrained model, losses along paths.

The paper's Appendix E explains the merged vectors by them. They are measured for the first methods
with the rules consensus, uniform and conflict, and for a few single members; only the page shows
them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from negmerge.errors import ValueRangeError
from negmerge.runs.context import Context
from negmerge.runs.geometry_record import Distances, Geometry, Losses, Placed, barrier
from negmerge.runs.measurements import ModelMeasurement, load_vector
from negmerge.runs.panels import conflict_of
from negmerge.runs.records import Done
from negmerge.runs.result import RunResult
from negmerge.runs.scores import Models
from negmerge.runs.steps import Advance
from negmerge.runs.terms import Terms
from negmerge.scenarios.base import Scenario, identity
from negmerge.scenarios.data import DataScenario, require_sets
from negmerge.support.files import file_digest
from negmerge.training.feeds import CachedFeed, Feed, PickedFeed, spaced
from negmerge.training.weights import named_weights

RULES = ("consensus", "uniform", "conflict")
"""The rules whose first method is measured."""
MEMBERS = 4
"""The largest number of single members that are measured; they are evenly spaced in the pool."""
SETS = ("retain", "forget", "holdout", "test")
"""The sets on which losses are measured, if they choose λ."""
SAMPLES = 500
"""The largest number of samples of a set on which losses are measured; they are evenly spaced."""
PATH = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""The t of the losses along θ − tλτ; t = 1 is the unlearned model."""


@dataclass(frozen=True)
class Vector:
    """A task vector with its λ: a patch, or the model file of a pool member with its terms."""

    title: str
    file: Path
    scale: float
    terms: Terms | None = None


@dataclass(frozen=True)
class PathLosses(ModelMeasurement[list[Losses]]):
    """The losses of θ − tλτ for several t, on some samples that choose λ; of θ if τ is None."""

    path: tuple[float, ...] = (0.0,)

    value_type: ClassVar = list[Losses]

    def size(self, scenario: Scenario) -> int:
        return len(self.path) * sum(map(len, path_feeds(scenario).values()))

    def run(self, scenario: Scenario, advance: Advance) -> Done[list[Losses]]:
        begun, data = time.perf_counter(), require_sets(scenario, "losses along paths")
        network = scenario.model(self.model)
        feeds = {name: CachedFeed(feed) for name, feed in path_feeds(scenario).items()}

        def losses() -> Losses:
            try:
                found = {n: data.mean_loss(network, n, feed, advance) for n, feed in feeds.items()}
            except ValueRangeError:  # the model is broken: its outputs are not finite
                return dict.fromkeys(feeds)
            return {name: loss if isfinite(loss) else None for name, loss in found.items()}

        if self.vector is None:
            return Done([losses()], time.perf_counter() - begun)
        tau = load_vector(self.model, self.vector, self.member_terms)
        found: list[Losses] = []
        for t in self.path:
            try:
                with scenario.subtracted(network, tau, t * self.scale):
                    found.append(losses())
            except ValueRangeError:  # a weight is too large for its number format
                found.append(dict.fromkeys(feeds))
        return Done(found, time.perf_counter() - begun)


@dataclass(frozen=True)
class DistanceMeasurement(ModelMeasurement[Distances]):
    """The length of λτ and the distances to a reference, over the parameters of the network."""

    reference: Path | None = None

    value_type: ClassVar = Distances

    def size(self, scenario: Scenario) -> int:
        return 1

    def run(self, scenario: Scenario, advance: Advance) -> Done[Distances]:
        begun = time.perf_counter()
        assert self.vector is not None
        tau = load_vector(self.model, self.vector, self.member_terms)
        start = named_weights(scenario.model(self.model))
        end = None
        if self.reference is not None:
            end = named_weights(scenario.model(self.reference))
        squares = own = way = both = 0.0
        for name, weight in start.items():
            entry = tau.entry_of(name)
            change = torch.zeros(weight.numel(), dtype=torch.float64)
            if entry is not None:
                change = tau.scale * torch.from_numpy(entry.dense().astype(np.float64))
            own += float(change @ change)
            if end is not None:
                to_end = (flat(end[name]) - flat(weight)).cpu()
                rest = to_end + self.scale * change
                way += float(to_end @ to_end)
                both -= float(change @ to_end)
                squares += float(rest @ rest)
        advance(1)
        found = Distances(length=abs(self.scale) * sqrt(own))
        if end is not None:
            apart = {"separation": sqrt(way), "distance": sqrt(squares)}
            cosine = both / sqrt(own) / sqrt(way) if own and way else None
            found = found.model_copy(update=apart | {"cosine": cosine})
        return Done(found, time.perf_counter() - begun)


def flat(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as a vector of float64."""
    return weight.detach().double().flatten()


def add_geometry(context: Context, models: Models, result: RunResult) -> RunResult:
    """Add the lengths, distances and losses to the result; unchanged if no vector was merged."""
    vectors = vectors_to_place(context, models)
    if not vectors:
        return result
    base, reference = models.original.out, models.reference and models.reference.out
    measured = [plan_distances(context, base, vector, reference) for vector in vectors]
    distances = context.run("measuring distances", measured, unit="models")
    placed = [
        Placed(model=vector.title, scale=vector.scale, **done.value.model_dump(exclude_none=True))
        for vector, done in zip(vectors, distances, strict=True)
    ]
    geometry = Geometry(path=list(PATH), models=placed)
    why = why_no_losses(context.scenario)
    if why is None:
        geometry = with_losses(context, models, vectors, geometry)
    else:
        geometry = geometry.model_copy(update={"missing": why})
    return result.model_copy(update={"geometry": geometry})


def with_losses(
    context: Context, models: Models, vectors: Sequence[Vector], geometry: Geometry
) -> Geometry:
    """Measure the losses along the path of every vector whose λ is not 0."""
    base, reference = models.original.out, models.reference and models.reference.out
    steps: dict[str, PathLosses] = {"original": plan_losses(context, base)}
    if reference is not None:
        steps["retrained"] = plan_losses(context, reference)
    steps |= {v.title: plan_losses(context, base, v) for v in vectors if v.scale}
    done = context.run("measuring losses along paths", list(steps.values()))
    found = dict(zip(steps, (one.value for one in done), strict=True))
    (start,) = found["original"]
    placed: list[Placed] = []
    for one in geometry.models:
        update: dict[str, Any] = {}
        if one.model in found:
            rows = [start, *found[one.model]]
            losses = {name: [row[name] for row in rows] for name in start}
            rises = {name: barrier(PATH, own) for name, own in losses.items()}
            known = {name: rise for name, rise in rises.items() if rise is not None}
            update = {"losses": losses, "barriers": known}
        placed.append(one.model_copy(update=update))
    samples = {name: len(feed) for name, feed in path_feeds(context.scenario).items()}
    update = {"models": placed, "samples": samples}
    if "retrained" in found:
        update["retrained"] = found["retrained"][0]
    return geometry.model_copy(update=update)


def vectors_to_place(context: Context, models: Models) -> list[Vector]:
    """Return the vectors of the rules and of some members, or that of the first method."""
    names = {method.title: method.name for method in context.recipe.methods}
    negated = {title: method for title, method in models.merged.items() if not method.added}
    first: dict[str, str] = {}
    for title in negated:
        first.setdefault(names[title], title)
    found: list[Vector] = []
    for rule in RULES:
        if rule in first:
            method = negated[first[rule]]
            found.append(Vector(first[rule], method.patch, method.scale))
        elif rule == "conflict" and "consensus" in first and context.recipe.pool.keep:
            shown = conflict_of(context, models, first["consensus"])
            assert shown.patch is not None
            found.append(Vector(rule, shown.patch, shown.scale))
    if not found:
        found = [Vector(title, one.patch, one.scale) for title, one in negated.items()][:1]
    for place in spaced(len(models.members), MEMBERS):
        step, choice = models.members[place].step, models.members[place].choice
        found.append(Vector(step.title, step.vector, choice.scale, step.member_terms))
    return found


def plan_losses(context: Context, model: Path, vector: Vector | None = None) -> PathLosses:
    """Return the step that measures losses along the path of a vector, or of a model alone."""
    depends = [file_digest(model), SETS, SAMPLES, context.criterion.uses_reported_data]
    depends += [context.recipe.search.samples, context.recipe.seed, *context.plugin_versions]
    if vector is None:
        key = identity("losses", depends, context.scenario.scored_on)
        return PathLosses(key, model, context.store.states / f"{key}.json")
    path = PATH[1:]  # all paths begin at the original
    depends += [*content_of(vector), path, *context.recipe.terms.after_subtraction]
    key = identity("path", depends, context.scenario.scored_on)
    out = context.store.states / f"{key}.json"
    return PathLosses(key, model, out, vector.file, vector.scale, vector.terms, path)


def plan_distances(
    context: Context, base: Path, vector: Vector, reference: Path | None
) -> DistanceMeasurement:
    """Return the step that measures the length and the distances of a vector."""
    other = reference and file_digest(reference)
    key = identity("distances", file_digest(base), other, content_of(vector))
    out = context.store.states / f"{key}.json"
    where = (vector.file, vector.scale, vector.terms)
    return DistanceMeasurement(key, base, out, *where, reference)


def content_of(vector: Vector) -> list[Any]:
    """Return what the results of a vector depend on."""
    return [file_digest(vector.file), vector.scale, vector.terms and vector.terms.content()]


def path_feeds(scenario: Scenario) -> dict[str, Feed]:
    """Return the samples on which losses along paths are measured, by set."""
    feeds = require_sets(scenario, "losses along paths").eval_sets("choose")
    return {
        name: PickedFeed(feeds[name], spaced(len(feeds[name]), SAMPLES))
        for name in SETS
        if name in feeds
    }


def why_no_losses(scenario: Scenario) -> str | None:
    """Return why the losses of a scenario cannot be measured; None if they can."""
    if not isinstance(scenario, DataScenario):
        return "the scenario has no sets of samples with a loss"
    own = type(scenario).mean_loss is not DataScenario.mean_loss
    return None if own or "loss" in scenario.columns else "the scenario does not observe the loss"
