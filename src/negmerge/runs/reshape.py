"""The stage that changes a merged task vector τ before λ is searched, for methods that ask for it.

In this order: a retain term (`retain`), weights of the elements (`fisher`), factors of groups of
tensors (`groups`). The result is a patch like any other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from negmerge.checkpoints.groups import groups_by
from negmerge.errors import ValueRangeError
from negmerge.evaluation.criteria import Reference, choose
from negmerge.evaluation.factors import MOST_LOSSES, Factors, Losses, tune_factors
from negmerge.evaluation.scales import Search
from negmerge.evaluation.search import Curve, InPlace, search_scale
from negmerge.runs.context import Context
from negmerge.runs.measurements import load_vector
from negmerge.runs.merges import MergedMethod
from negmerge.runs.methods import Method
from negmerge.runs.records import Done, read_record
from negmerge.runs.steps import Advance, FileStep
from negmerge.runs.store import MEASURE_AGAIN
from negmerge.runs.terms import Terms
from negmerge.runs.trainings import Start, Training, make_training
from negmerge.scenarios.base import Scenario, TrainingSet, identity
from negmerge.scenarios.data import DataScenario, require_sets
from negmerge.support.files import file_digest, write_file
from negmerge.training.feeds import CachedFeed, Feed, Indices, spaced
from negmerge.training.fisher import SAMPLES, fisher_diagonal
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.weights import load_tensors, save_tensors
from negmerge.vectors.module import unit_scale
from negmerge.vectors.reshape import fisher_weighted, minus_retained, with_factors
from negmerge.vectors.task_vector import TaskVector

VERSION = 1
"""Part of the keys of the steps; to be raised when the same input gives another patch."""
SETS: tuple[TrainingSet, TrainingSet] = ("forget", "retain")


@dataclass(frozen=True)
class FisherInformation(FileStep):
    """The diagonal Fisher information of θ on some training samples of a set."""

    key: str
    base: Path
    on: TrainingSet
    out: Path

    @property
    def label(self) -> str:
        return f"fisher {self.on}"

    def samples(self, scenario: Scenario) -> tuple[Feed, Indices]:
        """Return the training set, and the positions of the samples that are used."""
        feed = require_sets(scenario, "fisher").train_set(self.on)
        return feed, spaced(len(feed), SAMPLES)

    def size(self, scenario: Scenario) -> int:
        return len(self.samples(scenario)[1])

    def run(self, scenario: Scenario, advance: Advance) -> Done[int]:
        begun, (feed, picked) = time.perf_counter(), self.samples(scenario)
        loss = require_sets(scenario, "fisher").loss(HyperParameters())
        found = fisher_diagonal(scenario.model(self.base), feed, picked, loss, advance)
        save_tensors(self.out, found, {"id": self.key, "samples": str(len(picked))})
        return Done(0, time.perf_counter() - begun)


@dataclass(frozen=True)
class Reshape(FileStep):
    """The patch of a method, made from the merged one.

    Args:
        base: θ.
        plain: the patch of the rule.
        method: says what is done.
        terms: the terms on which models are merged.
        retained: the model that was fine-tuned on the retain set, if the method needs it.
        fisher: the files of the Fisher information of the forget and of the retain set.
        search, criterion, reference: of the λ of τ, at whose level factors are compared.
        rows, losses: the files that keep what was measured until the run is finished.
    """

    key: str
    base: Path
    plain: Path
    method: Method
    terms: Terms
    retained: Path | None
    fisher: tuple[Path, ...]
    search: Search
    criterion: str
    reference: Reference
    out: Path
    rows: Path
    losses: Path

    def size(self, scenario: Scenario) -> int:
        """Return the largest number of samples to measure."""
        if self.method.groups is None:
            return 0
        return scenario.size("tune") * (self.search.passes() + MOST_LOSSES)

    def run(self, scenario: Scenario, advance: Advance) -> Done[int]:
        begun, evaluations = time.perf_counter(), 0
        tau, method = TaskVector.load(self.plain), self.method
        if method.retain is not None:
            assert self.retained is not None
            retained = load_vector(self.base, self.retained, self.terms)
            tau = minus_retained(tau, retained, method.retain)
        if method.fisher is not None:
            tau = weigh(tau, self.fisher, method.fisher)
        if method.groups is not None:
            tau, evaluations = self.tune(require_sets(scenario, "groups"), tau, advance)
        tau.save(self.out)
        return Done(evaluations, time.perf_counter() - begun)

    def tune(
        self, scenario: DataScenario, tau: TaskVector, advance: Advance
    ) -> tuple[TaskVector, int]:
        """Find the factors of groups; return τ′ and the number of evaluations."""
        assert self.method.groups is not None
        model, sets = scenario.model(self.base), scenario.eval_sets("tune")
        feeds = {name: CachedFeed(feed) for name, feed in sets.items()}
        lengths = lengths_of(tau, model)
        groups = groups_by(self.method.groups, lengths)
        scale, passes = self.level(scenario, model, tau, feeds, advance)
        known: dict[str, list[float] | None] = {}
        if self.losses.exists():
            kind = dict[str, list[float] | None]
            known = read_record(self.losses, kind, MEASURE_AGAIN, infinite=True)

        def measure(factors: Factors, scale: float) -> Losses | None:
            name = " ".join(map(repr, (scale, *factors.values())))
            if name in known:
                advance(sum(len(feeds[one]) for one in SETS))
            else:
                own = with_factors(tau, groups, factors)
                known[name] = losses_of(scenario, model, own, scale, feeds, advance)
                write_file(self.losses, json.dumps(known).encode())
            found = known[name]
            return None if found is None else Losses(*found)

        squares = {g: sum(lengths[name] for name in names) for g, names in groups.items()}
        factors = tune_factors(squares, scale, measure)
        counts = {f"samples_{one}": len(feeds[one]) for one in SETS}
        tuned = with_factors(tau, groups, factors, by=self.method.groups, **counts)
        return tuned, passes + len(known)

    def level(
        self,
        scenario: DataScenario,
        model: nn.Module,
        tau: TaskVector,
        feeds: Mapping[str, Feed],
        advance: Advance,
    ) -> tuple[float, int]:
        """Return the λ that the criterion chooses for τ on these samples, and the evaluations."""

        def measure(own: nn.Module, advance: Advance) -> Any:
            return scenario.measure_on(feeds, own, advance)

        criterion = scenario.settings.criterion(self.criterion)
        bounded = None if self.search.confidence is None else criterion.limit
        evaluator = InPlace(model, tau, measure, scenario.subtracted)
        curve = Curve(evaluator, scenario.size("tune"), self.rows, advance, bounded)
        unit = unit_scale(tau, model)
        found = search_scale(curve, self.search, criterion, self.reference, unit)
        choice = choose(found, criterion, self.reference, self.search.tolerance)
        return choice.scale, curve.evaluations


def losses_of(
    scenario: DataScenario,
    model: nn.Module,
    tau: TaskVector,
    scale: float,
    feeds: Mapping[str, Feed],
    advance: Advance,
) -> list[float] | None:
    """Return the losses of θ − λτ on the forget and on the retain set; None if not finite."""
    try:
        with scenario.subtracted(model, tau, scale):
            return [scenario.mean_loss(model, one, feeds[one], advance) for one in SETS]
    except ValueRangeError:
        return None


def lengths_of(tau: TaskVector, model: nn.Module) -> dict[str, float]:
    """Return the squared length of τ in each tensor that it changes, in the order of the model."""
    order = [tau.origin.tied.get(name, name) for name in model.state_dict()]
    return {
        name: float(np.square(tau.entries[name].stored(), dtype=np.float64).sum())
        for name in dict.fromkeys([*order, *tau.entries])
        if name in tau.entries and tau.entries[name].nonzero
    }


def weigh(tau: TaskVector, files: tuple[Path, ...], weight: float) -> TaskVector:
    """Multiply τ by the Fisher weights of two files of information."""
    (forget, about), (retain, other) = map(load_tensors, files)
    second = {name: alias for alias, name in tau.origin.tied.items()}

    def information(name: str) -> tuple[NDArray[Any], NDArray[Any]] | None:
        own = name if name in forget else second.get(name, name)
        if own not in forget:  # a buffer, or a weight that no training changes
            return None
        return forget[own].numpy().reshape(-1), retain[own].numpy().reshape(-1)

    counts = {"samples_forget": int(about["samples"]), "samples_retain": int(other["samples"])}
    return fisher_weighted(tau, information, weight, **counts)


# --------------------------------------------------------------------------------------- the stage


def reshape(
    context: Context, start: Start, merged: Mapping[str, MergedMethod], reference: Reference
) -> dict[str, MergedMethod]:
    """Return the methods by title; those that ask for it have another patch."""
    methods = {m.title: m for m in context.merge_methods if m.title in merged and m.reshaped_by}
    if not methods:
        return {**merged}
    further = plan_retain(context, start)
    if further is not None:
        context.run("fine-tuning on the retain set", [further])
    information: list[FisherInformation] = []
    seconds = 0.0
    if any(method.fisher is not None for method in methods.values()):
        information = plan_fisher(context)
        done = context.run("measuring the Fisher information", information)
        seconds = sum(one.seconds for one in done)
    steps = {
        title: plan_reshape(context, method, merged[title].patch, further, information, reference)
        for title, method in methods.items()
    }
    done = context.run(f"changing {len(steps)} task vectors", list(steps.values()))
    found = {**merged}
    for (title, step), changed in zip(steps.items(), done, strict=True):
        own, method = merged[title], methods[title]
        detail: dict[str, Any] = {"reshaped": TaskVector.load(step.out).origin.reshaped}
        if method.retain is not None or method.fisher is not None:
            detail["splits"] = "all"
        spent = own.merge_seconds + changed.seconds
        found[title] = replace(
            own,
            patch=step.out,
            merge_seconds=spent if method.fisher is None else spent + seconds,
            evaluations=own.evaluations + changed.value,
            detail=own.detail | detail,
            further=() if method.retain is None or further is None else (further,),
        )
    return found


def plan_retain(context: Context, start: Start) -> Training | None:
    """Return the training on the retain set, if a method needs it: one epoch, as members."""
    settings, store = context.recipe.retain_training, context.store
    if settings is None:
        return None
    return make_training(
        context.scenario,
        "retain term",
        "retain",
        settings,
        out=store.member,
        states=store.states,
        save_every=context.recipe.save_every,
        start=start,
    )


def plan_fisher(context: Context) -> list[FisherInformation]:
    """Return the steps that measure the Fisher information of the forget and the retain set."""
    scenario, store = context.scenario, context.store
    depends = [VERSION, SAMPLES, file_digest(store.base), scenario.identity]
    depends += [context.plugin_versions]
    keys = [identity("fisher", on, *depends) for on in SETS]
    places = [store.states / f"{key}.safetensors" for key in keys]
    return [
        FisherInformation(key, store.base, on, out)
        for key, on, out in zip(keys, SETS, places, strict=True)
    ]


def plan_reshape(
    context: Context,
    method: Method,
    plain: Path,
    further: Training | None,
    information: list[FisherInformation],
    reference: Reference,
) -> Reshape:
    """Return the step that makes the patch of a method; the arguments are as in `Reshape`."""
    recipe, store = context.recipe, context.store
    search, criterion = recipe.search.coarse(), context.criterion
    depends: list[Any] = [VERSION, file_digest(store.base), file_digest(plain)]
    retained, files = None, ()
    if method.retain is not None and further is not None:
        retained = further.out
        depends += ["retain", method.retain, file_digest(further.out), recipe.terms.content()]
    if method.fisher is not None:
        files = tuple(step.out for step in information)
        depends += ["fisher", method.fisher, [step.key for step in information]]
    if method.groups is not None:
        depends += ["groups", method.groups, search.model_dump(mode="json"), criterion.name]
        depends += [reference, recipe.seed, context.scenario.scored_on, *context.plugin_versions]
        depends += recipe.terms.after_subtraction
    key = identity("reshape", *depends)
    rows, losses = (identity(method.title, key, what) for what in ("rows", "losses"))
    return Reshape(
        key,
        store.base,
        plain,
        method,
        recipe.terms,
        retained,
        files,
        search,
        criterion.name,
        reference,
        store.patch(method.title),
        store.states / f"{rows}.csv",
        store.states / f"{losses}.json",
    )
