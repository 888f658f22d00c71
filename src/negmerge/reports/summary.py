"""The texts below the verdicts of a page: the numbers of three models, λ, cost, what is unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from negmerge.evaluation.metrics import Metric
from negmerge.reports.export import Cell
from negmerge.reports.inspection import chosen_on
from negmerge.reports.page_data import PageData
from negmerge.reports.ranking import (
    SHOWN,
    gap_interval,
    interval_text,
    join_names,
    nearest_to_retrained,
)


def summary_of(page: PageData) -> dict[str, Any]:
    """The texts and the table below the verdicts, as the template names them."""
    result = page.result
    return {
        "method": page.first,
        "nearest": nearest_method(page),
        "models": ["original", "unlearned", *(["retrained"] if result.retrain else [])],
        "rows": metric_rows(page),
        "sparsity": result.first.sparsity,
        "scale": scale(page),
        "cost": cost(page),
        "not_measured": not_measured(page),
    }


def metric_rows(page: PageData) -> list[list[Cell]]:
    """For some metrics the label, then the values of the original, unlearned and retrained model.

    The forget metric comes first, then the retain metric, then the first ones of the scenario.
    """
    result, first = page.result, page.result.first
    models = [result.original, first, *([result.retrain] if result.retrain else [])]
    order = dict.fromkeys((page.forget.name, page.retain.name, *page.metrics))
    names = [name for name in order if first.value(name) is not None][:SHOWN]
    found: list[tuple[Metric, list[float | None], Sequence[float] | None]] = [
        (page.metrics[name], [row.value(name) for row in models], first.intervals.get(name))
        for name in names
    ]
    if first.avg_gap is not None:
        gaps = [row.avg_gap for row in models]
        found.append((page.columns["avg_gap"], gaps, gap_interval(first, result)))
    rows: list[list[Cell]] = []
    for metric, values, bounds in found:
        cells = [Cell("" if value is None else metric.number(value)) for value in values]
        if bounds is not None:
            cells[1] = Cell(cells[1].text, interval=interval_text(bounds, metric))
        rows.append([Cell(metric.axis), *cells])
    return rows


def nearest_method(page: PageData) -> str:
    """Which method is nearest to retraining, and which the intervals do not tell apart from it."""
    found, gap = nearest_to_retrained(page.result), page.columns["avg_gap"]
    if found is None:
        return ""
    (best, alike), first = found, page.first
    gaps = {row.method: gap.text(row.avg_gap or 0.0) for row in page.result.methods}
    text = f"Of {len(gaps)} methods, {page.label(best)} "
    if not alike:
        text += f"came nearest to retraining, with an Avg. Gap of {gaps[best]}"
    else:
        text += (
            f"has the smallest Avg. Gap to retraining, {gaps[best]}, but is not distinguishable "
            f"from {join_names([*map(page.label, alike)])}: their 95 % intervals overlap"
        )
    if first not in (best, *alike):
        text += f"; {page.label(first)} has {gaps[first]}"
    return text + "."


def scale(page: PageData) -> str:
    """λ, and how it was chosen."""
    first = page.result.first
    if first.scale is None:
        tried = len(first.tried)
        how = f"the best of {tried} tries by {first.criterion}" if tried else "not tuned"
        return f"No λ: {page.label(first.method)} trains the model itself; {how}."
    if first.criterion is None:
        return f"λ = {first.scale:g}, set by the recipe; the task vector is added."
    summary = page.recipe.settings.criterion(first.criterion).summary
    count = first.evaluations
    text = (
        f"λ = {first.scale:g}, chosen by the criterion {first.criterion} ({summary}) on "
        f"{chosen_on(page.result, first)}, with {count} evaluation{'' if count == 1 else 's'}."
    )
    if first.looked:
        text += " On data that did not choose λ the scores may be worse."
    if first.edge and first.scale:
        text += " A λ larger than all that were tried may be better."
    return text


def cost_ratio(page: PageData) -> str:
    """What unlearning cost compared with retraining, in one sentence."""
    first, retrain = page.result.first, page.result.retrain
    ratio, of = first.cost_ratio, "of retraining"
    retraining = page.recipe.settings.retraining(page.result.splits.sizes)
    if ratio is None and retraining:
        ratio = first.samples_processed / retraining
        of = "that retraining with the settings of the recipe would process"
    if ratio is None:
        return f"{_samples(page)}{first.seconds:.0f} s; the cost of retraining is not known."
    text = f"{ratio:.2f} × the samples {of}"
    if retrain is not None and retrain.seconds:
        text += f", {first.seconds:.0f} s against {retrain.seconds:.0f} s"
    return f"{text}{'; retraining would have been cheaper' if ratio > 1 else ''}."


def cost(page: PageData) -> str:
    """What unlearning cost."""
    first = page.result.first
    return (
        f"{_samples(page)}{first.seconds:.0f} s in total, {first.seconds_search:.0f} s of it for "
        "the search for λ. The total is the sum over all trainings, merges and searches, although "
        "several may have run at the same time."
    )


def _samples(page: PageData) -> str:
    """The number of samples processed in training; "" if the user's training code did not count."""
    count = page.result.first.samples_processed
    return f"{count:,} samples processed in training, " if count else ""


def not_measured(page: PageData) -> list[str]:
    """What a reader might expect to be measured and is not."""
    result = page.result
    found = [
        f"{page.metric(name).label}: not measured in this scenario"
        for name, value in result.first.metrics.items()
        if value is None
    ]
    if result.retrain is None:
        found.append("distance to a model that never saw the data: there is no retrained reference")
    bounds = "; the 95 % intervals reflect only the number of samples"
    spread = f"variation over seeds: this is one run, with seed {result.seed}"
    found.append(spread + (bounds if result.first.intervals else ""))
    attacks = [metric.short for metric in page.metrics.values() if metric.histogram is not None]
    tests = {} if result.evidence is None else result.evidence.tests
    attacks += [
        f"the attack {name} below"
        for name, test in tests.items()
        if any(test.finding(model, "auc") is not None for model in test.models)
    ]
    if attacks:
        was = "was" if len(attacks) == 1 else "were"
        found.append(
            f"other attacks: only {join_names(attacks)} {was} run, and another attack may succeed "
            f"where {'this one fails' if len(attacks) == 1 else 'these fail'}"
        )
    return found
