"""The scores of every model on the reported data, and the result of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from negmerge.evaluation.criteria import Reference, Row
from negmerge.evaluation.refinement import TOLERANCE
from negmerge.evaluation.scores import Scores, avg_gap, compared, tug_of_war
from negmerge.evidence.findings import Evidence
from negmerge.evidence.verdicts import overdone
from negmerge.runs.context import Context
from negmerge.runs.measurements import Evaluation
from negmerge.runs.merges import MergedMethod
from negmerge.runs.result import MemberRow, MethodRow, RunResult, Scored
from negmerge.runs.rivals import TrainedRival, plan_measurement
from negmerge.runs.selectors import MemberSweep
from negmerge.runs.terms import Terms
from negmerge.runs.trainings import Member, Training
from negmerge.scenarios.base import identity
from negmerge.scenarios.settings import Description
from negmerge.support.files import file_digest
from negmerge.vectors.task_vector import TaskVector

LOW_AGREEMENT = 55.0
"""The percentage of pairs of equal signs below which a run warns."""
NO_REFERENCE = "there is no retrained model: how near the result is to retraining is not known"


@dataclass(frozen=True)
class Models:
    """The models of a run; merged methods and rivals by title; `doubts` are warnings about them."""

    original: Training
    reference: Training | None
    pool: list[Member]
    merged: dict[str, MergedMethod]
    members: list[MemberSweep]
    rivals: dict[str, TrainedRival]
    doubts: list[str] = field(default_factory=list)


def score_reference(context: Context, reference: Training | None) -> Reference:
    """Score the retrained model, whose scores the criterion `oracle` needs to choose λ."""
    if reference is None:
        return None
    (done,) = context.run("scoring the retrained model", [plan_scores(context, reference.out)])
    return score_fields(done.value)


def plan_scores(
    context: Context,
    model: Path,
    vector: Path | None = None,
    scale: float = 0.0,
    member_terms: Terms | None = None,
) -> Evaluation:
    """Return the step that scores θ or θ − λτ; the arguments are those of `Evaluation`."""
    recipe, digest = context.recipe, vector and file_digest(vector)
    content = [file_digest(model), digest, scale, context.criterion.uses_reported_data, "report"]
    terms = member_terms and member_terms.content()
    content += [recipe.search.samples, recipe.seed, terms, *context.plugin_versions]
    content += [] if vector is None else recipe.terms.after_subtraction
    key = identity("scores", *content, context.scenario.scored_on)
    out = context.store.states / f"{key}.json"
    return Evaluation(key, model, out, vector, scale, member_terms)


def score_models(context: Context, models: Models) -> dict[str, Scores]:
    """Score all models on data that did not choose λ, unless the criterion uses reported data.

    Returns:
        The scores by title: `original`, `retrained`, the titles of the methods, and `member-KEY`
        for single members.
    """
    base, terms = models.original.out, context.recipe.terms
    steps = {"original": plan_scores(context, base)}
    if models.reference is not None:
        steps["retrained"] = plan_scores(context, models.reference.out)
    for title, method in models.merged.items():
        steps[title] = plan_scores(context, base, method.patch, method.scale)
    for title, rival in models.rivals.items():
        steps[title] = plan_scores(context, rival.chosen.out)
    if context.illustrated:
        for member in models.members:
            vector, scale = member.step.vector, member.choice.scale
            steps[member.step.title] = plan_scores(context, base, vector, scale, terms)
    done = context.run("scoring every method", list(steps.values()))
    return {title: scored.value for title, scored in zip(steps, done, strict=True)}


def measure_added(context: Context, models: Models) -> dict[str, Row]:
    """Measure the methods that add τ, and the original, on the samples that choose λ.

    The paper reports the retain accuracy of added vectors on these samples. Nothing is measured if
    no method adds τ; a model whose outputs are not finite is left out.
    """
    added = {title: method for title, method in models.merged.items() if method.added}
    if not added:
        return {}
    base = models.original.out
    steps = {"original": plan_measurement(context, base)}
    for title, method in added.items():
        steps[title] = plan_measurement(context, base, method.patch, method.scale)
    done = context.run("measuring added vectors", list(steps.values()))
    rows = {title: measured.value for title, measured in zip(steps, done, strict=True)}
    return {title: row for title, row in rows.items() if row is not None}


def make_result(
    context: Context,
    models: Models,
    scores: Mapping[str, Scores],
    added: Mapping[str, Row],
    evidence: Evidence | None = None,
) -> RunResult:
    """Return everything that the run measured.

    Args:
        scores: from `score_models`.
        added: from `measure_added`.
        evidence: from `gather_evidence`.
    """
    recipe, about = context.recipe, context.scenario.describe()
    if models.reference is not None:
        scores = {
            title: compared(own, scores["retrained"], context.scenario.metrics)
            for title, own in scores.items()
        }
    validation = {title: {"validation": row} for title, row in added.items()}
    original = score_fields(scores["original"]) | cost_fields([models.original])
    original |= validation.get("original", {})
    reference = retraining = None
    if models.reference is not None:
        reference = score_fields(scores["retrained"]) | cost_fields([models.reference])
        reference |= distances(reference, reference)
        original |= distances(original, reference)
        # The samples of retraining by the recipe, also when the reference came from a file.
        retraining = models.reference.samples(context.scenario)
    rows: dict[str, MethodRow] = {}
    row: dict[str, Any]
    for title in (method.title for method in recipe.methods):
        if title in models.merged:
            row = merged_fields(context, models.merged[title], about.looked)
        else:
            row = models.rivals[title].row(context.criterion, about.looked)
        row = {"method": title} | row | score_fields(scores[title]) | validation.get(title, {})
        row |= {"avg_gap": None} if reference is None else distances(row, reference)
        row["cost_ratio"] = None if not retraining else row["samples_processed"] / retraining
        rows[title] = MethodRow.model_validate(row)
    result = RunResult(
        format="negmerge-scores/1",
        title=recipe.title,
        seed=recipe.seed,
        original=Scored.model_validate(original),
        retrain=None if reference is None else Scored.model_validate(reference),
        methods=list(rows.values()),
        splits=about,
        pool=member_rows(models, scores, reference),
        warnings=warnings_of(context, models, about, rows, retraining)
        + ([] if evidence is None else overdone(evidence)),
    )
    return result if evidence is None else result.model_copy(update={"evidence": evidence})


def distances(row: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float | None]:
    """Return Avg. Gap to the retrained model, and ToW if all its accuracies were measured."""
    found = {"avg_gap": avg_gap(row, reference)}
    tow = tug_of_war(row, reference)
    return found if tow is None else found | {"tow": tow}


def score_fields(scores: Scores) -> dict[str, Any]:
    """Return scores as fields of a row."""
    intervals = {name: list(bounds) for name, bounds in scores.intervals.items()}
    return scores.values | {"intervals": intervals, "samples": scores.samples}


def cost_fields(models: Sequence[Member]) -> dict[str, Any]:
    """Return the total cost of models as fields of a row.

    Checkpoints of one training cost what the training has cost until the last of them.
    """
    last = {model.training: model.read_cost() for model in models}  # in the order of the epochs
    costs = last.values()
    return {
        "samples_processed": sum(cost.samples for cost in costs),
        "seconds": sum(cost.seconds for cost in costs),
    }


def merged_fields(context: Context, method: MergedMethod, looked: bool) -> dict[str, Any]:
    """Return the fields of the row of a merged method, without scores and comparisons."""
    tau = TaskVector.load(method.patch)
    training = cost_fields([*method.pool, *method.further])
    seconds = method.merge_seconds + method.search_seconds
    row: dict[str, Any] = {
        "splits": "forget",
        "scale": method.choice.scale,
        "sparsity": 100 * tau.sparsity(),
        "seconds": training["seconds"] + seconds,
        "seconds_merge": method.merge_seconds,
        "seconds_search": method.search_seconds,
        "samples_processed": training["samples_processed"],
        "evaluations": method.evaluations,
        "criterion": None if method.added else context.criterion.name,
        "looked": looked,
        "edge": method.choice.edge,
        "agreement": None if tau.origin.pairwise is None else 100 * tau.origin.pairwise,
    }
    if method.choice.left is not None and not method.added:
        row["unused"] = 100 * method.choice.left
    if method.added:
        row["direction"] = "add"
    return row | context.scenario.details(tau) | method.detail


def member_rows(
    models: Models, scores: Mapping[str, Scores], reference: Reference
) -> list[MemberRow]:
    """Return the cost of every member, and its scores with its own λ if they were measured."""
    swept = {member.step.vector: member for member in models.members}
    rows: list[MemberRow] = []
    for step in models.pool:
        row = step.read_cost().model_dump(exclude_unset=True, exclude={"sha256"})
        member = swept.get(step.out)
        if member is not None and member.step.title in scores:
            own = score_fields(scores[member.step.title])
            gap = None if reference is None else avg_gap(own, reference)
            del own["samples"]  # the row has the samples of the training
            row |= {"scale": member.choice.scale} | own | {"avg_gap": gap}
        rows.append(MemberRow.model_validate(row))
    return rows


def low_agreement(rows: Mapping[str, MethodRow]) -> list[str]:
    """Return a warning if the signs of the members agree little more often than by chance."""
    for row in rows.values():
        if row.agreement is not None and row.agreement < LOW_AGREEMENT:
            return [
                f"{row.method}: the signs of two members agree in {row.agreement:.1f} % of the "
                "elements that both change, by chance in 50 %: what all members agree on is mostly "
                "noise; choose hyper-parameters that are nearer to each other"
            ]
    return []


def unused_budgets(context: Context, models: Models) -> list[str]:
    """Return a warning if `refine` ended far from the limit of the criterion, for all methods."""
    criterion, limit = context.criterion, context.criterion.limit
    if limit is None or context.recipe.search.strategy != "refine":
        return []
    far = [
        f"{title} {100 * choice.left:.0f} %"
        for title, choice in ((title, method.choice) for title, method in models.merged.items())
        if choice.left is not None
        and choice.left > TOLERANCE
        and choice.largest
        and not choice.edge
        and choice.scale > 0
        and choice.loss > criterion.best
    ]
    if not far:
        return []
    return [
        f"the largest allowed λ leaves over {100 * TOLERANCE:.0f} % of what {limit.metric} may "
        f"lose: {', '.join(far)}; the metric has steps, or {context.recipe.search.evaluations} "
        "evaluations were too few: raise search.samples"
    ]


def warnings_of(
    context: Context,
    models: Models,
    about: Description,
    rows: Mapping[str, MethodRow],
    retraining: int | None,
) -> list[str]:
    """Return the warnings of the run.

    `retraining` is the number of samples that retraining processes; None without a reference.
    """
    criterion = context.criterion
    found = [*about.notes, *context.recipe.member_notes, *models.doubts]
    found += low_agreement(rows)
    if about.forgotten_class is not None and criterion.name == "match_holdout":
        found.append(
            "match_holdout leaves a whole class as well known as held-out data of the others; "
            "keep_retain or oracle forget it"
        )
    if context.merge_methods and len(models.pool) == 1:
        found.append("a pool of one member: every rule gives its own task vector")
    if about.looked and not criterion.uses_reported_data:
        found.append("λ was chosen on the reported data")
    for title, method in models.merged.items():
        if method.choice.scale == 0:
            found.append(f"{title}: λ = 0 did best by {criterion.name}: nothing is forgotten")
        elif method.choice.edge:
            found.append(
                f"{title}: a λ larger than all that were tried may be better: raise search.stop "
                "or search.limit"
            )
    found += unused_budgets(context, models)
    for title, rival in models.rivals.items():
        if not rival.allowed:
            found.append(
                f"{title}: {criterion.name} allows none of {len(rival.steps)} tries; the one "
                "with the highest retain accuracy is shown"
            )
    if retraining is None:
        return [*found, NO_REFERENCE] if context.recipe.settings.retrainable else found
    ratio = cost_fields(models.pool)["samples_processed"] / retraining
    if ratio > 1:
        found.append(f"the pool processed {ratio:.2f} × the samples of retraining from scratch")
    for title, rival in models.rivals.items():
        if (rows[title].cost_ratio or 0) > 1:
            found.append(
                f"{title}: its {len(rival.steps)} trainings processed "
                f"{rows[title].cost_ratio:.2f} × the samples of retraining from scratch"
            )
    return found
