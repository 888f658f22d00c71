"""The scores of a run as `.eval_results/*.yaml`, the Hub's format for results of a model.

The format is described at https://huggingface.co/docs/hub/eval-results, its schema is
https://github.com/huggingface/hub-docs/blob/main/eval_results.yaml. An entry belongs to a data set
on the Hub: metrics on other data are in the model card only. The Hub shows entries of data sets
that it lists as benchmarks.
"""

from __future__ import annotations

from typing import Any

from negmerge.reports.card import ROUNDED, reported
from negmerge.reports.page_data import PageData
from negmerge.reports.ranking import interval_text
from negmerge.support.markdown import to_yaml

FILE = ".eval_results/negmerge.yaml"


def eval_results(page: PageData) -> str | None:
    """Return the content of the file; None if no metric was measured on data of the Hub."""
    result, entries = page.result, list[dict[str, Any]]()
    for metric in reported(page):
        part = metric.sets[0] if metric.sets else "forget"
        dataset = page.recipe.settings.hub_data(part)
        value, bounds = result.first.value(metric.name), result.first.intervals.get(metric.name)
        if dataset is None or value is None:
            continue
        notes = f"{metric.axis}; unlearned by {result.first.method}"
        notes += "" if bounds is None else f"; 95 % interval {interval_text(bounds, metric)}"
        entries.append(
            {
                "dataset": {"id": dataset, "task_id": metric.name},
                "value": round(value, ROUNDED),
                "notes": notes,
            }
        )
    return to_yaml(entries) if entries else None
