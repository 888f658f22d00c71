"""The step that merges pool members: the task vector τ of every method, as a patch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from negmerge.evaluation.criteria import Choice
from negmerge.merging.accumulator import Accumulator
from negmerge.merging.engine import merge
from negmerge.merging.rules import rules
from negmerge.merging.select import SELECTORS
from negmerge.runs.context import Context
from negmerge.runs.members import choose_members
from negmerge.runs.methods import Method
from negmerge.runs.records import Done
from negmerge.runs.steps import Advance, FileStep
from negmerge.runs.terms import Terms
from negmerge.runs.trainings import Member, Training
from negmerge.scenarios.base import Scenario, identity
from negmerge.support.progress import CallbackProgress


@dataclass(frozen=True)
class Merge(FileStep):
    """A merge of pool members by one rule.

    Args:
        base: θ.
        members: the model files of the members; empty if they are in the accumulator.
        accumulator: the file of the accumulator, if the members are deleted.
    """

    key: str
    base: Path
    members: tuple[Path, ...]
    rule: str
    terms: Terms
    out: Path
    options: dict[str, Any] = field(default_factory=dict)
    accumulator: Path | None = None

    in_main_process = True

    def size(self, scenario: Scenario) -> int:
        """Return the number of bytes to read."""
        return sum(path.stat().st_size for path in (self.base, *self.members))

    def run(self, scenario: Scenario, advance: Advance) -> Done[int]:
        begun = time.perf_counter()
        if self.accumulator is None:
            merge(
                self.base,
                self.members,
                self.rule,
                self.options,
                out=self.out,
                progress=CallbackProgress(advance),
                **self.terms.arguments(),
            )
        else:
            accumulator = Accumulator.load(self.accumulator, self.base)
            accumulator.finish(self.rule, self.options).save(self.out)
        return Done(0, time.perf_counter() - begun)


@dataclass(frozen=True)
class MergedMethod:
    """The task vector of a rule or selector, and its λ once it is chosen.

    Args:
        choice: λ; 0 until it is chosen.
        pool: the members that the method needed.
        members: those that a merge rule merged; empty for a selector.
        merge_seconds: the seconds of merging, and of the measurements of a selector.
        evaluations: how often the data that chooses λ ran through a model.
        sweeps: the titles of its sweeps.
        added: whether the method is θ + λτ instead of θ − λτ.
        detail: fields of its row in `scores.json` that only a method with chosen members or with a
            changed τ has.
        further: trainings that the method needed beside those of the members.
    """

    patch: Path
    choice: Choice
    pool: Sequence[Member]
    merge_seconds: float
    evaluations: int = 0
    search_seconds: float = 0.0
    sweeps: tuple[str, ...] = ()
    added: bool = False
    detail: dict[str, Any] = field(default_factory=dict)
    members: Sequence[Member] = ()
    further: Sequence[Training] = ()

    @property
    def scale(self) -> float:
        """The factor of τ in θ − λτ: negative if τ is added."""
        return -self.choice.scale if self.added else self.choice.scale


def merge_pool(context: Context, pool: Sequence[Member]) -> dict[str, MergedMethod]:
    """Merge the pool by every rule of the recipe; return the methods by title."""
    recipe, store, keep = context.recipe, context.store, context.recipe.pool.keep
    methods = [method for method in context.merge_methods if method.name not in SELECTORS]
    chosen = [choose_members(context, method, pool) for method in methods]
    steps: list[Merge] = []
    for method, own in zip(methods, chosen, strict=True):
        terms = recipe.terms_of(method)
        depends = [[step.key for step in own.members], method.name, method.options]
        depends += [terms.content()]
        key, out = identity(*depends, *rules.versions(method.name)), store.patch(method.title)
        if method.reshaped_by:  # the patch of the method is made from this one
            out = store.states / f"{identity('plain', key)}.safetensors"
        steps.append(
            Merge(
                key,
                store.base,
                tuple(step.out for step in own.members) if keep else (),
                method.name,
                terms,
                out,
                method.options,
                None if keep else context.accumulator,
            )
        )
    done = context.run(f"merging by {len(steps)} rules", steps, unit="bytes")
    found: dict[str, MergedMethod] = {}
    for method, own, step, merged in zip(methods, chosen, steps, done, strict=True):
        seconds = own.seconds + merged.seconds
        more = {"evaluations": own.evaluations, "detail": own.detail, "members": own.members}
        made = merged_method(context, method, own.pool, seconds, **more)
        found[method.title] = replace(made, patch=step.out)
    return found


def merged_method(
    context: Context, method: Method, pool: Sequence[Member], seconds: float, **more: Any
) -> MergedMethod:
    """Return a merged method whose λ is the recipe's `add`, or is not chosen yet."""
    choice, added = Choice(method.add or 0.0, 0.0, edge=False), method.add is not None
    patch = context.store.patch(method.title)
    return MergedMethod(patch, choice, pool, seconds, added=added, **more)


def merge_mean(
    context: Context, title: str, depends: Sequence[object], members: Sequence[Member]
) -> Done[int]:
    """Write the patch of a selector, the mean of members; its key is made from `depends`."""
    store, terms = context.store, context.recipe.terms
    files = tuple(step.out for step in members)
    key, out = identity(*depends, terms.content()), store.patch(title)
    step = Merge(key, store.base, files, "uniform", terms, out)
    (done,) = context.run(f"{title}: merging", [step], unit="bytes")
    return done
