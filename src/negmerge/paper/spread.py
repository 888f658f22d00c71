"""Figures 1 and B1 for all data sets: the spread of the members, and the trade-off of each set."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

import pandas as pd

from negmerge.evaluation.metrics import metric_of
from negmerge.reports.charts import Chart, colour_of
from negmerge.reports.frames import groups
from negmerge.reports.styles import styles_of
from negmerge.runs.result import RunResult

FORGET, RETAIN = metric_of("acc_forget"), metric_of("acc_retain")
SHOWN = ("consensus", "single_best", "uniform", "greedy", "ties", "magmax")
"""The methods of the paper's figures."""
COLUMNS = 4
"""The panels side by side in Figure B1."""


def spread_frame(runs: Iterable[tuple[str, RunResult]]) -> pd.DataFrame:
    """For each data set every member with its own λ, the original and every method."""
    rows: list[dict[str, Any]] = []
    for data, result in runs:
        named = [(f"member {k}", one, one.scale) for k, one in enumerate(result.pool, 1)]
        named += [("original", result.original, None)]
        named += [(one.method, one, one.scale) for one in result.methods]
        for name, one, scale in named:
            row = {"dataset": data, "seed": result.seed, "method": name, "scale": scale}
            rows.append(row | {metric.name: one.value(metric.name) for metric in (FORGET, RETAIN)})
    return pd.DataFrame(rows)


def spread_figure(frame: pd.DataFrame) -> str:
    """Figure 1b as SVG: for each data set the forget accuracy of the members and methods.

    >>> rows = [{"dataset": "mnist", "method": m, "acc_forget": 40.0} for m in ("member 1", "ties")]
    >>> "mnist" in spread_figure(pd.DataFrame(rows))
    True
    """
    sets = groups(frame.dropna(subset=[FORGET.name]), "dataset")
    styles, width = styles_of(SHOWN), 2.2 + 1.3 * len(sets)
    chart = Chart("F1", "Members and methods", "", FORGET.axis, 4.2, styles, width)
    parts, grey = ("box", "whisker", "cap", "median"), {"color": colour_of(chart.style("members"))}
    lines: dict[str, Any] = {f"{part}props": grey for part in parts}
    for position, rows in enumerate(sets.values()):
        members = [r[FORGET.name] for r in rows if r["method"].startswith("member ")]
        chart.axes.boxplot([members], positions=[position], widths=0.5, showfliers=False, **lines)
        for k, value in enumerate(members):
            chart.point(position + 0.08 * (k % 3 - 1), value, "members", "", size=5)
        for row in (row for row in rows if row["method"] in SHOWN):
            chart.point(position + 0.36, row[FORGET.name], row["method"], "", size=6)
    for name in (*SHOWN, "members"):
        chart.point(float("nan"), float("nan"), name, "", size=6, label=name)
    chart.axes.set_xticks(range(len(sets)), list(sets))
    chart.axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return chart.file_svg()


def panels_figure(frame: pd.DataFrame) -> str:
    """Figure B1 as SVG: for each data set a panel of retain accuracy against forget accuracy.

    >>> rows = [{"dataset": d, "method": "ties", "acc_forget": 40.0, "acc_retain": 60.0}
    ...         for d in ("mnist", "dtd")]
    >>> "dtd" in panels_figure(pd.DataFrame(rows))
    True
    """
    sets = groups(frame.dropna(subset=[FORGET.name, RETAIN.name]), "dataset")
    columns = min(COLUMNS, max(len(sets), 1))
    lines = ceil(len(sets) / columns)
    size = {"height": 3.0 * lines + 0.5, "width": 3.4 * columns}
    axes = (f"{FORGET.axis} (axis reversed)", RETAIN.axis)
    chart = Chart("FB1", "Members and methods by data set", *axes, styles=styles_of(SHOWN), **size)
    for number, (data, rows) in enumerate(sets.items()):
        chart.panel(lines, columns, number, data)
        for row in rows:
            member = row["method"].startswith("member ")
            style = "members" if member else row["method"]
            if style in (*SHOWN, "members", "original"):
                chart.point(row[FORGET.name], row[RETAIN.name], style, "", size=5 if member else 8)
        chart.axes.invert_xaxis()
    for name in (*SHOWN, "original", "members"):
        chart.point(float("nan"), float("nan"), name, "", size=6, label=name)
    handles, labels = chart.axes.get_legend_handles_labels()
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": 8, "frameon": False}
    chart.figure.legend(handles, labels, **place)
    return chart.file_svg()
