"""The slider over λ: what the search measured at each λ, and nothing between."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from negmerge.evaluation.metrics import Metric
from negmerge.reports.figures import NOT_METRICS
from negmerge.reports.frames import Cells, groups
from negmerge.reports.page_data import PageData


@dataclass(frozen=True)
class Slider:
    """The measured λ of every method, with texts that a script shows.

    Args:
        heads: the labels of the metrics, the forget metric first.
        methods: for each method its title, its label, its stops by rising λ (`scale`, `note`,
            `texts`), and the place of the chosen one.
        control: the texts of the retrained model on the same samples; empty if they are not known.
    """

    heads: list[str]
    methods: list[Cells]
    control: list[str]


def slider_of(page: PageData, sweeps: pd.DataFrame) -> Slider:
    """The slider of a page, from the table of its sweeps."""
    names = dict.fromkeys((page.forget.name, page.retain.name, *page.metrics, *map(str, sweeps)))
    measured = [name for name in names if name in sweeps and name not in NOT_METRICS]
    metrics = [page.metric(name) for name in measured]
    matching = page.result.matching
    retrained = {} if matching is None else matching.retrained
    return Slider(
        [metric.axis for metric in metrics],
        [_method(page, title, rows, metrics) for title, rows in groups(sweeps, "method").items()],
        _texts(retrained, metrics) if retrained else [],
    )


def _method(page: PageData, title: str, rows: list[Cells], metrics: list[Metric]) -> Cells:
    """One method: its stops by rising λ, and the place of the chosen one."""
    rows = sorted(rows, key=lambda row: row["scale"])
    retrain = page.result.retrain
    reference = None if retrain is None else retrain.measured()
    stops: list[Cells] = []
    for row in rows:
        found = {name: value for name, value in row.items() if name not in ("method", "chosen")}
        loss = page.criterion.loss(found, rows[0], reference)
        kinds = [] if loss is not None else [f"not allowed by {page.criterion.name}"]
        kinds += ["the original"] if row["scale"] == 0 else []
        kinds += ["chosen"] if row["chosen"] else []
        stops.append(
            {"scale": f"{row['scale']:g}", "note": ", ".join(kinds), "texts": _texts(row, metrics)}
        )
    chosen = next((k for k, row in enumerate(rows) if row["chosen"]), 0)
    return {"title": title, "label": page.label(title), "chosen": chosen, "stops": stops}


def _texts(row: Cells | dict[str, float], metrics: list[Metric]) -> list[str]:
    """The values of some metrics as texts; "" for one that is missing."""
    values = [row.get(metric.name) for metric in metrics]
    return [
        "" if value is None or value != value else metric.number(value)
        for metric, value in zip(metrics, values, strict=True)
    ]
