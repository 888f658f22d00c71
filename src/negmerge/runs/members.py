"""The pool members that a method merges, and the losses of single members that choose them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from negmerge.merging.engine import merge
from negmerge.runs.context import Context
from negmerge.runs.measurements import MeanLoss
from negmerge.runs.methods import Method
from negmerge.runs.records import Done
from negmerge.runs.steps import Advance, ValueStep
from negmerge.runs.terms import Terms
from negmerge.runs.trainings import Member
from negmerge.scenarios.base import Scenario, identity
from negmerge.support.files import file_digest


@dataclass(frozen=True)
class ChosenMembers:
    """The members that a method merges.

    Args:
        members: in the order of the pool.
        pool: the members that had to be trained for it.
        evaluations: how often the data that chooses λ ran through a model.
        seconds: those of the choice.
        detail: fields of the row of the method in `scores.json`.
    """

    members: Sequence[Member]
    pool: Sequence[Member]
    evaluations: int = 0
    seconds: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EqualFactors(ValueStep[list[float]]):
    """The factors that give the task vectors of members their mean length, as in `norms.py`."""

    key: str
    base: Path
    members: tuple[Path, ...]
    terms: Terms
    out: Path

    value_type: ClassVar = list[float]
    in_main_process = True

    def size(self, scenario: Scenario) -> int:
        """Return the number of members."""
        return len(self.members)

    def run(self, scenario: Scenario, advance: Advance) -> Done[list[float]]:
        begun = time.perf_counter()
        origin = merge(self.base, self.members, "uniform", **self.terms.arguments()).origin
        # A merge has an order of its own, which does not depend on that of its arguments.
        names = [member["name"] for member in origin.members]
        factors = dict(zip(names, origin.factors, strict=True))
        advance(len(self.members))
        return Done([factors[path.name] for path in self.members], time.perf_counter() - begun)


def choose_members(context: Context, method: Method, pool: Sequence[Member]) -> ChosenMembers:
    """Return the members that a merge rule gets, by the fields `members` and `subset`."""
    candidates = method.candidates(pool, context.recipe.pool.per_training)
    if method.subset is None:
        return ChosenMembers(candidates, candidates)
    if method.subset.by == "random":
        chosen = method.subset.of(candidates)
        return ChosenMembers(chosen, chosen)
    return choose_by_retain(context, method.title, method.subset.count, candidates)


def choose_by_retain(
    context: Context, title: str, count: int, pool: Sequence[Member]
) -> ChosenMembers:
    """Choose the members that raise the loss of the retain set the least.

    Each task vector is scaled to the mean length of all, because a longer one does more damage at
    the same λ whatever its direction, and is subtracted with λ = 1.
    """
    store, terms = context.store, replace(context.recipe.terms, equalise=True)
    key = identity("factors", file_digest(store.base), [m.key for m in pool], terms.content())
    files = tuple(member.out for member in pool)
    step = EqualFactors(key, store.base, files, terms, store.states / f"{key}.json")
    (factors,) = context.run(f"{title}: measuring lengths", [step], unit="models")
    steps = [
        loss
        for member, factor in zip(pool, factors.value, strict=True)
        for loss in plan_losses(context, [member], factor, "retain")
    ]
    losses = context.run(f"{title}: ranking {len(steps)} members", steps)
    order = sorted(range(len(pool)), key=lambda k: losses[k].value)  # equal ones stay in order
    members = [pool[k] for k in sorted(order[:count])]
    seconds = factors.seconds + sum(done.seconds for done in losses)
    detail = {"splits": "all", "kept": [member.key for member in members], "order": "retain"}
    return ChosenMembers(members, pool, len(pool), seconds, detail)


def measure_members(
    context: Context, title: str, pool: Sequence[Member], scale: float, on: str
) -> tuple[list[MeanLoss], list[Done[float]]]:
    """Measure the loss of θ − λτ of every member on one set; return the steps and their results."""
    steps = plan_losses(context, pool, scale, on)
    return steps, context.run(f"{title}: ranking {len(steps)} members", steps)


def plan_losses(context: Context, pool: Sequence[Member], scale: float, on: str) -> list[MeanLoss]:
    """Return the steps that measure the loss of θ − λτ of every member on one set."""
    base, terms, states = context.store.base, context.recipe.terms, context.store.states
    content = [context.scenario.scored_on, context.recipe.search.samples, context.recipe.seed]
    depends = [*content, terms.content(), on, scale, file_digest(base)]
    depends += [*terms.after_subtraction, *context.plugin_versions]
    steps: list[MeanLoss] = []
    for member in pool:
        key = identity("mean loss", depends, file_digest(member.out))
        out = states / f"{key}.json"
        steps.append(MeanLoss(key, base, (member.out,), terms, on, scale, out))
    return steps
