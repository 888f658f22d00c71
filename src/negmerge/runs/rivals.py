"""The rivals of a run: trained from the original, and tuned with the same number of tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from negmerge.errors import ValueRangeError
from negmerge.evaluation.criteria import Criterion, Reference, Row
from negmerge.evaluation.limits import metrics_of
from negmerge.evaluation.metrics import Metric
from negmerge.rivals import rivals
from negmerge.runs.context import Context
from negmerge.runs.measurements import Measurement
from negmerge.runs.pool import check_disk_space
from negmerge.runs.records import Done
from negmerge.runs.result import Tried
from negmerge.runs.rival_trainings import RivalTraining, plan_rivals
from negmerge.runs.trainings import Start
from negmerge.scenarios.base import identity
from negmerge.support.files import file_digest


@dataclass(frozen=True)
class TrainedRival:
    """A rival that was trained.

    Args:
        chosen: the training that is reported.
        tried: the tries and their metrics; empty if the rival is not tuned.
        seconds: the seconds of measuring the tries.
        allowed: whether the criterion allows the chosen training.
    """

    steps: list[RivalTraining]
    chosen: RivalTraining
    tried: list[Tried] = field(default_factory=list)
    seconds: float = 0.0
    allowed: bool = True

    def row(self, criterion: Criterion, looked: bool) -> dict[str, Any]:
        """Return the fields of its row in the result, without scores and comparisons."""
        rival = rivals.get(self.chosen.method)
        costs = [step.read_cost() for step in self.steps]
        training = sum(cost.seconds for cost in costs)
        settings = self.chosen.settings.model_dump(mode="json", include=set(rival.accepts))
        return {
            "splits": rival.used(self.chosen.options),
            "scale": None,
            "sparsity": None,
            "seconds": training + self.seconds,
            "seconds_search": training + self.seconds - self.chosen.read_cost().seconds,
            "samples_processed": sum(cost.samples for cost in costs),
            "evaluations": len(self.tried),
            "criterion": criterion.name if self.tried else None,
            "looked": looked and bool(self.tried),
            "edge": False,
            "options": self.chosen.options,
            "settings": settings,
            "tried": self.tried,
        }


def train_rivals(context: Context, start: Start, reference: Reference) -> dict[str, TrainedRival]:
    """Train the rivals of the recipe from the original, and tune those that ask for it."""
    settings = context.recipe.settings
    plans = plan_rivals(context.scenario, context.recipe, context.store, start)
    steps = [step for tries in plans.values() for step in tries]
    check_disk_space(context, steps, "rivals", "lower search.tries")
    context.run(f"training {len(plans)} rivals", steps)
    rows = measure_tries(context, [step for step in steps if step.tried is not None])
    found: dict[str, TrainedRival] = {}
    for title, tries in plans.items():
        if tries[0].tried is None:
            found[title] = TrainedRival(tries, tries[0])
        else:
            measured = [rows.get(step.key) for step in tries]
            original = rows["original"].value or {}
            kept = settings.metric(settings.retain_metric)
            found[title] = best_try(tries, measured, original, context.criterion, reference, kept)
    return found


def measure_tries(context: Context, tries: Sequence[RivalTraining]) -> dict[str, Done[Row | None]]:
    """Measure the original and every try that has a model; return the metrics by key."""
    usable = {step.key: step.out for step in tries if step.read_cost().failure is None}
    if not usable:
        return {}
    models = {"original": context.store.base} | usable
    bounded = None if context.recipe.search.confidence is None else context.criterion.name
    steps = [plan_measurement(context, model, bounded=bounded) for model in models.values()]
    return dict(zip(models, context.run("measuring the tries of rivals", steps), strict=True))


def plan_measurement(
    context: Context,
    model: Path,
    vector: Path | None = None,
    scale: float = 0.0,
    bounded: str | None = None,
) -> Measurement:
    """Return the step that measures θ or θ − λτ on the data that chooses λ.

    The arguments are those of `Measurement`.
    """
    recipe, uses_reported_data = context.recipe, context.criterion.uses_reported_data
    content = [file_digest(model), uses_reported_data, recipe.search.samples, recipe.seed]
    if vector is not None:
        content += [file_digest(vector), scale, *recipe.terms.after_subtraction]
    content += [] if bounded is None else ["bounded", bounded]
    key = identity("choose", *content, *context.plugin_versions, context.scenario.scored_on)
    out = context.store.states / f"{key}.json"
    return Measurement(key, model, out, vector, scale, bounded=bounded)


def best_try(
    steps: list[RivalTraining],
    measured: Sequence[Done[Row | None] | None],
    original: Row,
    criterion: Criterion,
    reference: Reference,
    kept: Metric,
) -> TrainedRival:
    """Choose the try with the lowest loss by the criterion; the first one of equal tries.

    If the criterion allows no try, the one that keeps most of the retain set is chosen.

    Args:
        steps: the tries.
        measured: the metrics of each; None where there is no model.
        original, criterion, reference: what the loss of a try is computed from.
        kept: the metric of the retain set.
    """
    rows = [None if done is None else done.value for done in measured]
    losses = [None if row is None else criterion.loss(row, original, reference) for row in rows]
    tried: list[Tried] = []
    for step, row, loss in zip(steps, rows, losses, strict=True):
        cost = step.read_cost()
        entry: dict[str, Any] = {"options": step.tried, "loss": loss} | metrics_of(row or {})
        entry |= {"samples": cost.samples, "seconds": cost.seconds}
        if row is None:
            entry["failure"] = cost.failure or "its outputs are not finite"
        tried.append(Tried.model_validate(entry))
    usable = {k: row for k, row in enumerate(rows) if row is not None}
    if not usable:
        raise ValueRangeError(
            f"{steps[0].method}: all {len(steps)} tries diverged; give it a smaller lr in its "
            "options"
        )
    allowed = {k: loss for k, loss in enumerate(losses) if loss is not None}
    sign = 1 if kept.better == "lower" else -1
    ranks = allowed or {k: sign * row[kept.name] for k, row in usable.items()}
    best = min(ranks, key=lambda k: ranks[k])
    seconds = sum(done.seconds for done in measured if done is not None and done.value is not None)
    return TrainedRival(steps, steps[best], tried, seconds, bool(allowed))
