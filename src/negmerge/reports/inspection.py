"""A run in the terminal: its table of scores, or the progress of an unfinished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from negmerge.errors import printable
from negmerge.evaluation.metrics import Metric, metric_of
from negmerge.reports.ranking import (
    SHOWN,
    gap_metric,
    interval_text,
    join_names,
    measured_metrics,
    nearest_to_retrained,
)
from negmerge.runs.recipe import load_recipe
from negmerge.runs.result import MethodRow, RunResult, Scored
from negmerge.runs.store import Run
from negmerge.support.terminal import escape_markup


def contents_of(run: Run) -> dict[str, Any]:
    """What the folder of a run contains, as `negmerge inspect --json` prints it."""
    return {
        "kind": "run",
        "finished": run.finished,
        "base": run.base.exists(),
        "retrain": run.retrain.exists(),
        "members": len(list(run.folder.glob("pool/*/*.json"))),
        "members_planned": len(load_recipe(run.recipe).pool.members()),
        "rivals": sorted(path.name for path in run.folder.glob("rivals/*/")),
        "patches": sorted(path.stem for path in run.folder.glob("patches/*.safetensors")),
        "sweeps": sorted(path.stem for path in run.folder.glob("sweeps/*.csv")),
        "scores": run.result.tree() if run.finished else None,
    }


def progress_text(contents: Mapping[str, Any]) -> str:
    """What an unfinished run has."""
    have = [name for name in ("base", "retrain") if contents[name]]
    have.append(f"{contents['members']} of {contents['members_planned']} members")
    counts = [f"{len(contents[name])} {name}" for name in ("patches", "sweeps", "rivals")]
    return ", ".join([*have, *counts])


def scores_table(result: RunResult) -> list[RenderableType]:
    """The scores of all models with their 95 % intervals, and notes that explain them."""
    table = Table("method", "data", title=escape_markup(result.title) or None, title_justify="left")
    names = measured_metrics(result)
    metrics = [metric_of(name) for name in names[:SHOWN]]
    compared = any(row.avg_gap is not None for row in result.methods)
    gap = gap_metric(result) if compared else None
    gaps = () if gap is None else (gap.short,)
    for name in ("λ", *(m.heading for m in metrics), *gaps, "zero %", "seconds"):
        table.add_column(name, justify="right")
    table.add_row(*_cells("original", result.original, metrics, gap))
    if result.retrain is not None:
        table.add_row(*_cells("retrained", result.retrain, metrics, gap), end_section=True)
    best = nearest_to_retrained(result)
    for group in grouped(result.methods):
        for row in group:
            style = "bold" if best == (row.method, []) else ""
            cells = _cells(row.method, row, metrics, gap)
            table.add_row(*cells, style=style, end_section=row is group[-1])
    more = [f"Further metrics: {', '.join(names[SHOWN:])}; see the page."] if names[SHOWN:] else []
    lines = (*notes(result), *more, *(f"warning: {text}" for text in result.warnings))
    return [table, *map(printable, lines)]


def grouped(methods: Sequence[MethodRow]) -> list[list[MethodRow]]:
    """The methods grouped by the data they use, as in the paper's Table 2; merges come last."""
    rivals = [row for row in methods if not row.merged]
    groups = [[r for r in rivals if r.splits == s] for s in ("all", "retain", "forget")]
    return [group for group in (*groups, [row for row in methods if row.merged]) if group]


def notes(result: RunResult) -> list[str]:
    """Notes that explain the scores."""
    sizes = ", ".join(f"{count:,} {name}" for name, count in result.original.samples.items())
    bounds = " In brackets: the 95 % interval." if result.original.intervals else ""
    found = [f"Measured on {sizes} samples.{bounds}"] if sizes else []
    searched = [row for row in result.methods if row.searched]
    if searched:
        first = searched[0]
        found.append(f"λ was chosen by {first.criterion} on {chosen_on(result, first)}.")
        if first.cost_ratio is not None:
            found.append(f"The pool processed {first.cost_ratio:.2f} × the samples of retraining.")
    found += matched_note(result)
    for row in (row for row in result.methods if row.tried):
        best = ", ".join(f"{name} = {row.chosen[name]:g}" for name in row.tried[0].options)
        found.append(
            f"{row.method}: {best}, the best of {len(row.tried)} tries by {row.criterion}."
        )
    return found


def matched_note(result: RunResult) -> list[str]:
    """The gap of each method at equal forgetting, the smallest first; empty without gaps."""
    gaps = {row.method: row.matched.get("matched_gap") for row in result.methods}
    known = sorted((gap, method) for method, gap in gaps.items() if gap is not None)
    if result.matching is None or not known:
        return []
    forget, gap = metric_of(result.matching.metric), gap_metric(result)
    texts = [f"{method} {gap.number(value)}" for value, method in known]
    return [
        f"At equal forgetting ({forget.short} {forget.text(result.matching.level)} on the samples "
        f"that choose λ), mean gap of the other metrics to retraining: {join_names(texts)}."
    ]


def chosen_on(result: RunResult, row: MethodRow) -> str:
    """The data on which λ was chosen."""
    chosen = result.splits.chosen_on
    if row.looked or isinstance(chosen, str):
        return "the reported data"
    sizes = ", ".join(f"{count:,} {name}" for name, count in chosen.items())
    return f"{sizes} samples that are not part of the reported data"


def _cells(name: str, row: Scored, metrics: Sequence[Metric], gap: Metric | None) -> list[str]:
    method = row if isinstance(row, MethodRow) else None
    scale, sparsity = (method.scale, method.sparsity) if method else (None, None)
    cells = [name, method.splits if method else "", "" if scale is None else f"{scale:g}"]
    for metric in metrics:
        value, bounds = row.value(metric.name), row.intervals.get(metric.name)
        text = "" if value is None else metric.number(value)
        cells.append(text if bounds is None else f"{text} {interval_text(bounds, metric)}")
    if gap is not None:
        cells.append("" if row.avg_gap is None else gap.number(row.avg_gap))
    return [*cells, "" if sparsity is None else f"{sparsity:.1f}", f"{row.seconds:.1f}"]
