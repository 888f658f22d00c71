"""The strength λ of every merged method: measure a sweep of λ, then choose by the criterion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from negmerge.evaluation.criteria import Reference, choose
from negmerge.evaluation.scales import Search
from negmerge.evaluation.search import read_rows
from negmerge.runs.context import Context
from negmerge.runs.measurements import Sweep
from negmerge.runs.merges import MergedMethod
from negmerge.runs.selectors import MemberSweep, select_before_search, select_by_sweep
from negmerge.runs.terms import Terms
from negmerge.runs.trainings import Member
from negmerge.scenarios.base import identity
from negmerge.support.files import file_digest


def find_scales(
    context: Context,
    pool: Sequence[Member],
    merged: Mapping[str, MergedMethod],
    reference: Reference,
) -> tuple[dict[str, MergedMethod], list[MemberSweep]]:
    """Return every merged method with its λ, by title, and the sweeps of single members.

    `merged` has the methods that are merge rules, without λ.
    """
    found = {**merged, **select_before_search(context, pool)}
    by_sweep = [m.title for m in context.merge_methods if m.name == "single_best" and not m.add]
    sweeps = [
        plan_sweep(context, reference, title, method.patch)
        for title, method in found.items()
        if not method.added
    ]
    member_sweeps = plan_member_sweeps(context, reference, pool, decides=bool(by_sweep))
    steps = [*sweeps, *member_sweeps]
    done = context.run(f"searching λ in {len(steps)} sweeps", steps)
    members: list[MemberSweep] = []
    for step, swept in zip(steps, done, strict=True):
        rows, tolerance = read_rows(step.out), step.search.tolerance
        choice = choose(rows, context.criterion, reference, tolerance)
        if step.member_terms is not None:
            members.append(MemberSweep(step, swept, choice))
            continue
        method = found[step.title]
        found[step.title] = replace(
            method,
            choice=choice,
            evaluations=method.evaluations + swept.value,
            search_seconds=swept.seconds,
            sweeps=(step.title,),
        )
    for title in by_sweep:
        found[title] = select_by_sweep(context, title, pool, members)
    return found, members


def plan_member_sweeps(
    context: Context, reference: Reference, pool: Sequence[Member], decides: bool
) -> list[Sweep]:
    """Return a sweep of every single member, if `single_best` or the page needs them.

    The sweeps decide for `single_best`; for the page a coarse search is enough.
    """
    recipe = context.recipe
    if not (decides or (context.illustrated and recipe.pool.keep)):
        return []
    search = recipe.search if decides else recipe.search.coarse()
    return [
        plan_sweep(context, reference, f"member-{step.key}", step.out, recipe.terms, search)
        for step in pool
    ]


def plan_sweep(
    context: Context,
    reference: Reference,
    title: str,
    vector: Path,
    member_terms: Terms | None = None,
    search: Search | None = None,
) -> Sweep:
    """Return the sweep of a method or member with its key; the arguments are as in `Sweep`."""
    recipe, criterion = context.recipe, context.criterion
    search = search or recipe.search
    depends = [search.grid(), criterion.uses_reported_data, search.samples, recipe.seed]
    depends += [member_terms and member_terms.content()]
    if search.limit is not None or search.strategy == "refine":
        depends += [search.limit, criterion.name, reference, criterion.limits]
    if search.strategy != "grid":
        depends += [search.strategy, criterion.name]
    if search.strategy == "refine":
        depends += [search.evaluations]
    if search.confidence is not None:
        depends += ["confidence", search.confidence]
    depends += [*recipe.terms.after_subtraction, *context.plugin_versions]
    key = identity(file_digest(vector), depends, context.scenario.scored_on)
    return Sweep(
        key,
        context.store.base,
        vector,
        member_terms,
        search,
        criterion.name,
        reference,
        context.store.sweep(title),
        # Two methods may have the same vector, and so the same key.
        context.store.states / f"{identity(title, key)}.csv",
    )
