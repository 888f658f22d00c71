"""The matched comparison: every method at the forget level of the retrained model.

The level, the sweeps and the retrained model are measured on the samples that choose λ; reported
samples are not used, unless the criterion itself uses them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from negmerge.errors import ValueRangeError
from negmerge.evaluation.criteria import Row
from negmerge.evaluation.limits import is_finite, metrics_of
from negmerge.evaluation.matching import (
    EVALUATIONS,
    Level,
    at_level,
    matched_gap,
    refine,
    why_missing,
)
from negmerge.evaluation.search import Curve, read_rows, write_rows
from negmerge.runs.context import Context
from negmerge.runs.measurements import load_vector
from negmerge.runs.records import Done
from negmerge.runs.result import Matching, MemberRow, RunResult
from negmerge.runs.rivals import plan_measurement
from negmerge.runs.scores import Models
from negmerge.runs.steps import Advance, FileStep
from negmerge.runs.terms import Terms
from negmerge.scenarios.base import Scenario, identity
from negmerge.scenarios.data import DataScenario
from negmerge.support.files import file_digest

SHOWN_EVALUATIONS = 2
"""The largest number of λ that are measured in addition to the sweep of a member that is only
shown on the page."""


@dataclass(frozen=True)
class MatchedSweep(FileStep):
    """The rows of a finished sweep, and of a few more λ around a forget level.

    λ is chosen from the sweep alone, whose file stays as it is.

    Args:
        base, vector, member_terms: as in a `Sweep`.
        sweep: the file of the finished sweep.
        evaluations: the largest number of λ to measure.
        partial: the file that keeps the new rows until the run is finished.
    """

    key: str
    base: Path
    vector: Path
    member_terms: Terms | None
    level: Level
    evaluations: int
    sweep: Path
    out: Path
    partial: Path

    def size(self, scenario: Scenario) -> int:
        """Return the number of samples if one λ is measured, which is the most frequent case."""
        return scenario.size("choose")

    def run(self, scenario: Scenario, advance: Advance) -> Done[int]:
        begun = time.perf_counter()

        @cache
        def curve() -> Curve:
            tau = load_vector(self.base, self.vector, self.member_terms)
            evaluator = scenario.evaluator(scenario.model(self.base), tau)
            return Curve(evaluator, scenario.size("choose"), self.partial, advance)

        def measure(scale: float) -> Row | None:
            try:
                return curve().at(scale)
            except ValueRangeError:  # the model is broken: its outputs are not finite
                return None

        # An interval is only of the search, and where outputs are not finite, nothing is measured.
        swept = [metrics_of(row) for row in read_rows(self.sweep) if is_finite(row)]
        rows = refine(swept, self.level, measure, self.evaluations)
        self.out.parent.mkdir(exist_ok=True)
        write_rows(self.out, rows)
        return Done(len(rows) - len(swept), time.perf_counter() - begun)


def add_matched(
    context: Context, models: Models, result: RunResult
) -> tuple[RunResult, list[Path]]:
    """Add the metrics at the forget level to the rows of methods and members.

    Returns:
        The result, unchanged if there is no level or no sweep, and the files that were written.
    """
    sweeps = sweeps_to_match(context, models)
    reference = measure_reference(context, models) if sweeps else {}
    level = level_of(context, reference)
    if level is None or not sweeps:
        return result, []
    steps = {
        title: plan_matched(context, title, level, to_match)
        for title, to_match in sweeps.items()
        if level.metric in read_rows(context.store.sweep(title))[0]
    }
    context.run(f"comparing at {level.metric} = {level.value:g}", list(steps.values()))
    fields: dict[str, dict[str, Any]] = {}
    for title in sweeps:
        rows = read_rows(steps[title].out if title in steps else context.store.sweep(title))
        fields[title] = matched_fields(rows, level, reference)
    scenario = context.scenario
    sets = scenario.eval_sets("choose") if isinstance(scenario, DataScenario) else {}
    matching = Matching(
        metric=level.metric,
        level=level.value,
        stated=context.recipe.search.matched is not None,
        retrained=reference,
        samples={name: len(feed) for name, feed in sets.items()},
    )
    methods = [
        row
        if row.added
        else row.model_copy(update=fields.get(sweep_of(row.method, row.member), {}))
        for row in result.methods
    ]
    pool: list[MemberRow] = []
    for row in result.pool:
        own = fields.get(sweep_of("", row.id), {})
        pool.append(row.model_copy(update={"matched": own["matched"]} if "matched" in own else {}))
    changes = {"matching": matching, "methods": methods, "pool": pool}
    return result.model_copy(update=changes), [step.out for step in steps.values()]


class ToMatch(NamedTuple):
    """The vector of a sweep, and how many λ may be added to it; as in `MatchedSweep`."""

    vector: Path
    member_terms: Terms | None = None
    evaluations: int = EVALUATIONS


def sweeps_to_match(context: Context, models: Models) -> dict[str, ToMatch]:
    """Return the sweeps by title: of methods, of the selected member, for the page of all members.

    Fewer λ are added to the sweeps of members that are only shown.
    """
    found: dict[str, ToMatch] = {}
    selected: set[str] = set()
    for title, method in models.merged.items():
        if method.added:
            continue
        name = sweep_of(title, method.detail.get("member"))
        if name == title:
            found[title] = ToMatch(method.patch)
        else:
            selected.add(name)
    for step in (member.step for member in models.members):
        if step.title in selected:
            found[step.title] = ToMatch(step.vector, step.member_terms)
        elif context.illustrated:
            found[step.title] = ToMatch(step.vector, step.member_terms, SHOWN_EVALUATIONS)
    return found


def sweep_of(title: str, member: str | None) -> str:
    """Return the title of the sweep of a method, which may be that of a selected member."""
    return title if member is None else f"member-{member}"


def measure_reference(context: Context, models: Models) -> Row:
    """Measure the retrained model on the samples that choose λ; empty if there is none."""
    if models.reference is None:
        return {}
    step = plan_measurement(context, models.reference.out)
    (done,) = context.run("measuring the retrained model", [step])
    return done.value or {}


def level_of(context: Context, reference: Mapping[str, float]) -> Level | None:
    """Return the level of the recipe, or else that of the retrained model."""
    settings, stated = context.recipe.settings, context.recipe.search.matched
    metric = settings.metric(settings.forget_metric)
    value = reference.get(metric.name) if stated is None else stated
    return None if value is None else Level(metric.name, value, metric.better != "higher")


def plan_matched(context: Context, title: str, level: Level, to_match: ToMatch) -> MatchedSweep:
    """Return the step that measures a few λ around the level."""
    recipe, store, sweep = context.recipe, context.store, context.store.sweep(title)
    vector, terms, evaluations = to_match
    depends = [file_digest(vector), file_digest(sweep), terms and terms.content(), evaluations]
    depends += [level.metric, level.value, level.lower, context.criterion.uses_reported_data]
    depends += [recipe.search.samples, recipe.seed, *context.plugin_versions]
    depends += recipe.terms.after_subtraction
    key = identity("matched", depends, context.scenario.scored_on)
    partial, out = store.states / f"{identity(title, key)}.csv", store.matched(title)
    return MatchedSweep(key, store.base, vector, terms, level, evaluations, sweep, out, partial)


def matched_fields(rows: list[Row], level: Level, reference: Mapping[str, float]) -> dict[str, Any]:
    """Return the fields of a row of the result: the metrics at the level, or why there are none."""
    found = at_level(rows, level) if level.metric in rows[0] else None
    if found is None:
        return {"unmatched": why_missing(rows, level)}
    gap = matched_gap(found, reference, level.metric)
    return {"matched": found if gap is None else found | {"matched_gap": gap}}
