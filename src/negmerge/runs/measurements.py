"""The steps that measure models: λ sweeps, scores, and the losses that selectors use."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import ClassVar

from torch import nn

from negmerge.errors import ValueRangeError
from negmerge.evaluation.criteria import Reference, Row
from negmerge.evaluation.scales import Search
from negmerge.evaluation.scores import Scores
from negmerge.evaluation.search import Curve, search_scale, write_rows
from negmerge.merging.engine import merge
from negmerge.merging.select import Greedy
from negmerge.runs.records import Done, read_record
from negmerge.runs.steps import Advance, FileStep, Step, T, ValueStep
from negmerge.runs.store import MEASURE_AGAIN
from negmerge.runs.terms import Terms
from negmerge.scenarios.base import PanelContent, PanelModel, Scenario
from negmerge.scenarios.data import require_sets
from negmerge.support.files import write_file
from negmerge.training.feeds import CachedFeed, Feed
from negmerge.vectors.module import unit_scale
from negmerge.vectors.task_vector import TaskVector


def load_vector(base: Path, vector: Path, member_terms: Terms | None) -> TaskVector:
    """Return the task vector of a patch or of a pool member; the arguments are as in `Sweep`."""
    if member_terms is None:
        return TaskVector.load(vector)
    return merge(base, [vector], "uniform", **member_terms.arguments())


@dataclass(frozen=True)
class Sweep(FileStep):
    """A λ sweep: θ − λτ is measured for a series of λ.

    Args:
        base: θ.
        vector: a patch, or the model file of a pool member.
        member_terms: the terms on which pool members are merged; None for a patch.
        search: the λ to measure.
        criterion: the name of the criterion, which decides whether to extend the sweep.
        reference: the scores of the retrained model, if there is one.
        partial: the file that keeps the rows until the run is finished.
    """

    key: str
    base: Path
    vector: Path
    member_terms: Terms | None
    search: Search
    criterion: str
    reference: Reference
    out: Path
    partial: Path

    def size(self, scenario: Scenario) -> int:
        return scenario.size("choose") * self.search.passes()

    def run(self, scenario: Scenario, advance: Advance) -> Done[int]:
        begun = time.perf_counter()
        tau = load_vector(self.base, self.vector, self.member_terms)
        model = scenario.model(self.base)
        criterion = scenario.settings.criterion(self.criterion)
        bounded = None if self.search.confidence is None else criterion.limit
        evaluator, size = scenario.evaluator(model, tau), scenario.size("choose")
        curve = Curve(evaluator, size, self.partial, advance, bounded)
        unit = unit_scale(tau, model)
        write_rows(self.out, search_scale(curve, self.search, criterion, self.reference, unit))
        return Done(curve.evaluations, time.perf_counter() - begun)


@dataclass(frozen=True)
class ModelMeasurement(ValueStep[T]):
    """A measurement of one model, θ or θ − λτ.

    Args:
        model: θ.
        vector: τ, as in a `Sweep`; None to measure θ.
        scale: λ; a negative λ adds τ.
        member_terms: as in a `Sweep`.
    """

    key: str
    model: Path
    out: Path
    vector: Path | None = None
    scale: float = 0.0
    member_terms: Terms | None = None

    @contextmanager
    def network(self, scenario: Scenario) -> Iterator[nn.Module]:
        """Make the network, with τ subtracted in the block."""
        network = scenario.model(self.model)
        if self.vector is None:
            yield network
            return
        tau = load_vector(self.model, self.vector, self.member_terms)
        with scenario.subtracted(network, tau, self.scale):
            yield network


class Evaluation(ModelMeasurement[Scores]):
    """The scores of a model on the reported data."""

    value_type: ClassVar = Scores

    def size(self, scenario: Scenario) -> int:
        return scenario.size("report")

    def run(self, scenario: Scenario, advance: Advance) -> Done[Scores]:
        begun = time.perf_counter()
        with self.network(scenario) as network:
            scores = scenario.measure(network, "report", advance)
        return Done(scores, time.perf_counter() - begun)


@dataclass(frozen=True)
class Measurement(ModelMeasurement[Row | None]):
    """The metrics of a model on the data that chooses λ; None if outputs are not finite.

    Args:
        bounded: the name of the criterion whose limit the end of an interval must keep; the row
            then has this end.
    """

    bounded: str | None = None

    value_type: ClassVar = Row | None

    def size(self, scenario: Scenario) -> int:
        return scenario.size("choose")

    def run(self, scenario: Scenario, advance: Advance) -> Done[Row | None]:
        begun = time.perf_counter()
        with self.network(scenario) as network:
            try:
                scores = scenario.measure(network, "choose", advance)
            except ValueRangeError:
                return Done(None, time.perf_counter() - begun)
        limit = None if self.bounded is None else scenario.settings.criterion(self.bounded).limit
        row = scores.row() | ({} if limit is None else limit.bound_of(scores))
        return Done(row, time.perf_counter() - begun)


@dataclass(frozen=True)
class MeanLoss(ValueStep[float]):
    """The loss of θ − λ·mean(τ) for some pool members, on a set that chooses λ.

    Args:
        base: θ.
        members: the model files of the members.
        on: the name of the set.
        scale: λ; a negative λ adds the mean.
    """

    key: str
    base: Path
    members: tuple[Path, ...]
    terms: Terms
    on: str
    scale: float
    out: Path

    value_type: ClassVar = float

    def feed(self, scenario: Scenario) -> Feed:
        return require_sets(scenario, "losses of members").eval_sets("choose")[self.on]

    def size(self, scenario: Scenario) -> int:
        return len(self.feed(scenario))

    def measure(self, scenario: Scenario, model: nn.Module, feed: Feed, advance: Advance) -> float:
        """Return the loss; infinity if the outputs are not finite."""
        tau = merge(self.base, self.members, "uniform", **self.terms.arguments())
        try:
            with scenario.subtracted(model, tau, self.scale):
                data = require_sets(scenario, "losses of members")
                return data.mean_loss(model, self.on, feed, advance)
        except ValueRangeError:
            return inf

    def run(self, scenario: Scenario, advance: Advance) -> Done[float]:
        begun = time.perf_counter()
        model, feed = scenario.model(self.base), self.feed(scenario)
        loss = self.measure(scenario, model, feed, advance)
        return Done(loss, time.perf_counter() - begun)


@dataclass(frozen=True)
class GreedySelection(ValueStep[list[int]]):
    """The selector `greedy`: members join the mean one by one while the loss falls.

    Args:
        single: the steps that measured each member alone.
        losses: the losses of these steps.
        partial: the file that keeps the measured losses.
    """

    key: str
    greedy: Greedy
    single: tuple[MeanLoss, ...]
    losses: tuple[float, ...]
    out: Path
    partial: Path

    value_type: ClassVar = list[int]

    def size(self, scenario: Scenario) -> int:
        """Return the number of samples: the set, once for each member but the first."""
        return self.single[0].size(scenario) * (len(self.single) - 1)

    def run(self, scenario: Scenario, advance: Advance) -> Done[list[int]]:
        first = self.single[0]
        model, feed = scenario.model(first.base), CachedFeed(first.feed(scenario))
        known: dict[str, float] = {}
        if self.partial.exists():
            known = read_record(self.partial, dict[str, float], MEASURE_AGAIN, infinite=True)
        begun = time.perf_counter() - known.get("seconds", 0.0)

        def score(positions: list[int]) -> float:
            name = " ".join(map(str, positions))
            if name in known:
                advance(len(feed))
            else:
                members = tuple(self.single[k].members[0] for k in positions)
                mean = replace(first, members=members)
                known[name] = mean.measure(scenario, model, feed, advance)
                known["seconds"] = time.perf_counter() - begun
                write_file(self.partial, json.dumps(known).encode())
            return known[name]

        positions, _ = self.greedy.walk(self.losses, score)
        return Done(positions, time.perf_counter() - begun)


@dataclass(frozen=True)
class Drawing(Step[PanelContent]):
    """A panel of the page; the key is its id."""

    key: str
    shown: tuple[PanelModel, ...]
    out: Path

    def size(self, scenario: Scenario) -> int:
        return len(self.shown)

    def run(self, scenario: Scenario, advance: Advance) -> Done[PanelContent]:
        begun = time.perf_counter()
        return Done(scenario.draw(self.key, self.shown, advance), time.perf_counter() - begun)
