"""The section of a page that compares methods at equal forgetting: its table, figures and text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from negmerge.evaluation.matching import compared_metrics
from negmerge.evaluation.metrics import Metric
from negmerge.reports.charts import TEXT, Chart, colour_of
from negmerge.reports.frames import Cells, Missing, NotMeasured, records
from negmerge.reports.page_data import PageData
from negmerge.reports.ranking import AVG_GAP, join_names
from negmerge.runs.result import Matching

GAP = replace(AVG_GAP, name="matched_gap", label="mean gap of the other metrics", short="mean gap")
"""The mean distance to the retrained model over the metrics other than the forget metric."""


def columns(page: PageData) -> dict[str, Metric]:
    """The metrics of the table, by column."""
    return page.columns | {GAP.name: replace(GAP, unit=page.columns["avg_gap"].unit)}


def matched_frame(page: PageData) -> pd.DataFrame:
    """The retrained model, then every method with λ at the level, the nearest to it first."""
    matching = _matching(page)
    names = dict.fromkeys((matching.metric, page.retain.name, *matching.retrained))
    rows = [row for row in page.result.methods if row.matched or row.unmatched]
    if not any(row.matched for row in rows):
        reasons = [f"{row.method}: {row.unmatched}" for row in rows]
        raise Missing(f"no method reached the level: {'; '.join(reasons)}")
    names |= dict.fromkeys(name for row in rows for name in row.matched)
    found = [_cells("retrained", matching.retrained, names, page)] if matching.retrained else []
    measured = [_cells(row.method, row.matched, names, page) for row in rows if row.matched]
    found += sorted(measured, key=lambda cells: _order(cells, page))
    found += [
        {"method": row.method, "remark": row.unmatched} for row in rows if row.unmatched is not None
    ]
    return pd.DataFrame(found).dropna(axis=1, how="all")


def _matching(page: PageData) -> Matching:
    if page.result.matching is None:
        raise NotMeasured("there is no retrained model, and the recipe states no level")
    return page.result.matching


def _order(cells: Cells, page: PageData) -> float:
    if cells.get(GAP.name) is not None:
        return cells[GAP.name]
    value = cells.get(page.retain.name) or 0.0
    return value if page.retain.better == "lower" else -value


def _cells(name: str, values: dict[str, float], names: dict[str, Any], page: PageData) -> Cells:
    cells: Cells = {"method": name, "scale": values.get("scale")}
    for metric in (page.metric(one) for one in names if one not in ("scale", GAP.name)):
        low, high = _interval(metric, values.get(metric.name), _matching(page)) or (None, None)
        cells[metric.name] = values.get(metric.name)
        cells |= {f"{metric.name}_low": low, f"{metric.name}_high": high}
    return cells | {GAP.name: values.get(GAP.name)}


def _interval(
    metric: Metric, value: float | None, matching: Matching
) -> tuple[float, float] | None:
    """The 95 % interval of a value, from the number of samples of its set."""
    n = matching.samples.get(metric.sets[0]) if metric.sets else None
    level = metric.name == matching.metric  # it is the same for all, by construction
    if value is None or metric.interval is None or not n or level:
        return None
    return metric.interval(value, n)


def matched_charts(page: PageData, frame: pd.DataFrame) -> list[str]:
    """The metrics of Avg. Gap, each with a row for each method and a line for the retrained model.

    The forget metric is left out: it is the same for all.
    """
    matching = _matching(page)
    rows = [row for row in records(frame) if row["scale"] >= 0]  # NaN without a match
    members = [member.matched for member in page.result.pool if member.matched]
    wanted = dict.fromkeys((page.retain.name, *compared_metrics(map(str, frame))))
    charts: list[str] = []
    for name in wanted:
        if name == matching.metric or name not in frame:
            continue
        metric = page.metric(name)
        title = f"{metric.label} of each method at equal forgetting"
        height = 1.1 + 0.26 * (len(rows) + bool(members))
        chart = Chart(f"matched-{name}", title, metric.axis, "", height, page.styles)
        for place, row in enumerate(rows):
            _draw(chart, place, row, metric)
        for k, member in enumerate(members):
            text = f"a single member: λ = {member['scale']:.4g}, {metric.text(member[name])}"
            place = len(rows) + 0.14 * (k % 3 - 1)
            chart.point(member[name], place, "members", text, size=9, alpha=0.8)
        if name in matching.retrained:
            target = matching.retrained[name]
            line = chart.axes.axvline(target, color=TEXT, linestyle=(0, (4, 3)), linewidth=1)
            chart.tag(line, "retrained", f"retrained: {metric.text(target)}")
        labels = [row["method"] for row in rows] + (["members"] if members else [])
        chart.axes.set_yticks(range(len(labels)), labels)
        chart.axes.set_ylim(len(labels) - 0.4, -0.6)
        chart.axes.grid(axis="y", visible=False)
        charts.append(chart.page_svg())
    return charts


def _draw(chart: Chart, place: int, row: Cells, metric: Metric) -> None:
    """Draw the value of a method, with its interval if there is one."""
    value, method = row[metric.name], row["method"]
    low, high = (row.get(f"{metric.name}_{end}") for end in ("low", "high"))
    if low is not None and high is not None:
        options = {"color": colour_of(chart.style(method)), "linewidth": 1.6, "alpha": 0.6}
        (bar,) = chart.axes.plot([low, high], [place, place], **options)
        chart.tag(bar, method)
    chart.point(value, place, method, f"{method}: λ = {row['scale']:.4g}, {metric.text(value)}")


def matched_text(page: PageData, frame: pd.DataFrame) -> str:
    """What the section compares, on which data, and which methods are missing."""
    matching, metric = _matching(page), page.metric(_matching(page).metric)
    whose = "stated by the recipe" if matching.stated else "that of the retrained model"
    text = (
        "A method that forgets less usually retains more. Here every method has the λ with the "
        f"same {metric.label}: {metric.text(matching.level)}, {whose}. All values are linearly "
        "interpolated between two neighbouring λ, never extrapolated, and measured on the samples "
        "that choose λ"
    )
    sizes = ", ".join(f"{count:,} {name}" for name, count in matching.samples.items())
    text += f" ({sizes})" if sizes else ""
    text += ", also those of the retrained model: they differ from the reported ones."
    if matching.retrained:
        text += " The dashed line is the retrained model."
    if "matched_gap" in frame:
        text += (
            " The mean gap is the distance to the retrained model, over the metrics of Avg. Gap "
            "without the forget metric."
        )
    if any(f"{name}_low" in frame for name in map(str, frame)):
        text += (
            " Intervals are those of one method; all methods are measured on the same samples, so "
            "that differences between them are surer than the intervals suggest."
        )
    rivals = [row.method for row in page.result.methods if not row.merged]
    if rivals:
        text += f" Methods without λ are not compared: {join_names(rivals)}."
    return text
