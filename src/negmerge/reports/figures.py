"""The figures of a page: functions that turn data frames into SVG charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from negmerge.evaluation.criteria import kept
from negmerge.evaluation.metrics import Histogram, Metric
from negmerge.reports.charts import TEXT, Chart, colour_of
from negmerge.reports.frames import Bin, Cells, groups, records, scores_frame
from negmerge.reports.page_data import PageData
from negmerge.reports.ranking import SHOWN
from negmerge.reports.styles import Styles
from negmerge.vectors.inspection import natural_key

MAX_GROUPS = 40
"""The number of groups, at most, in a figure by depth or component; more labels would overlap."""
NEAR = 0.9
"""The share of the original's retain metric that the models in the second chart keep."""
NOT_METRICS = ("method", "scale", "chosen", "avg_gap")
"""Columns of a sweep that are not metrics."""


def trade_off(
    page: PageData, scores: pd.DataFrame, members: pd.DataFrame | None
) -> tuple[list[str], str]:
    """The retain metric against the forget metric, for members and methods (Figure 1a).

    If some models lose much of the retain metric and the first method does not, a second chart
    shows only the others.

    Returns:
        The charts, and a description of the models in the second one ("" if there is none).
    """
    retain, methods = page.retain, records(scores)
    rows: list[Cells] = [
        row | {"style": "members", "method": f"member {row['member']}"}
        for row in ([] if members is None else records(members))
    ]
    rows += [row | {"style": row["method"]} for row in drawing_order(methods, page.first)]
    title = f"{retain.label} against {page.forget.label}, for each pool member and each method"
    charts = [_scatter("trade-off", title, rows, page)]
    lower = retain.better == "lower"
    near = [row for row in rows if kept(row, methods[0], retain.name, NEAR, lower)]
    if not 3 < len(near) < len(rows):
        return charts, ""
    if not {"original", page.first} <= {row["method"] for row in near}:
        return charts, ""
    text = (
        f"whose {retain.label} is at most {1 / NEAR:.2f} times the original's"
        if lower
        else f"that keep {100 * NEAR:.0f} % of the original's {retain.label}"
    )
    return [*charts, _scatter("trade-off-near", f"{title}: those {text}", near, page)], text


def trade_offs(pages: Mapping[str, PageData], styles: Styles) -> list[str]:
    """The retain metric against the forget metric, a chart for each run, with the same axes."""
    found = {name: records(scores_frame(page)) for name, page in pages.items()}
    first, every = next(iter(pages.values())), [row for rows in found.values() for row in rows]
    names = [metric.name for metric in (first.forget, first.retain)]
    if not all(name in row for row in every for name in names):
        return []
    ends = [(min(row[name] for row in every), max(row[name] for row in every)) for name in names]
    charts: list[str] = []
    for number, (name, page) in enumerate(pages.items()):
        rows = [row | {"style": row["method"]} for row in drawing_order(found[name], page.first)]
        title = f"{name}: {page.retain.label} against {page.forget.label}"
        charts.append(_scatter(f"trade-off-{number}", title, rows, page, styles, ends, name))
    return charts


def _scatter(
    id: str,
    title: str,
    rows: list[Cells],
    page: PageData,
    styles: Styles | None = None,
    ends: Sequence[tuple[float, float]] = (),
    heading: str = "",
) -> str:
    forget, retain = page.forget, page.retain
    chart = Chart(id, title, _axis(forget), _axis(retain), 4.2, styles or page.styles)
    chart.axes.set_title(heading)
    for (low, high), set_limits in zip(
        ends, (chart.axes.set_xlim, chart.axes.set_ylim), strict=False
    ):
        margin = 0.06 * (high - low) or 1.0
        set_limits(low - margin, high + margin)
    for row in rows:
        x, y = row[forget.name], row[retain.name]
        scale = f" (λ = {row['scale']:g})" if row.get("scale", np.nan) >= 0 else ""
        if row["method"] == page.first:
            chart.ring(x, y, page.first)
        text = f"{page.label(row['method'])}{scale}: {_both_metrics(row, page)}"
        chart.point(x, y, row["style"], text, size=9 if row["style"] == "members" else 10)
    if forget.better == "lower":
        chart.axes.invert_xaxis()
    if retain.better == "lower":
        chart.axes.invert_yaxis()
    return chart.page_svg()


def _axis(metric: Metric) -> str:
    return f"{metric.axis} (axis reversed)" if metric.better == "lower" else metric.axis


def drawing_order(rows: list[Cells], first: str) -> list[Cells]:
    """The rows with the reference models and the first method at the end, so that none hides them.

    >>> rows = [{"method": name} for name in ("original", "a", "b")]
    >>> [row["method"] for row in drawing_order(rows, "a")]
    ['b', 'original', 'a']
    """
    last = ("original", "retrained", first)
    return sorted(rows, key=lambda r: last.index(r["method"]) if r["method"] in last else -1)


def spread(page: PageData, scores: pd.DataFrame, members: pd.DataFrame) -> list[str]:
    """The forget metric of the members, each with its own λ, and of the methods (Figure 1b)."""
    forget = page.forget
    title = f"{forget.label} of the pool members, each with its own λ, and of the methods"
    chart = Chart("spread", title, forget.axis, "", height=2.4, styles=page.styles)
    box = chart.axes.boxplot(
        [members[forget.name].dropna()],
        orientation="horizontal",
        positions=[1],
        widths=0.5,
        showfliers=False,
        patch_artist=False,
    )
    for line in (line for lines in box.values() for line in lines):
        line.set(color=colour_of(chart.style("members")), linewidth=1)
        chart.tag(line, "members")
    for k, row in enumerate(records(members)):
        text = f"member {row['member']} (λ = {row['scale']:g}): {_both_metrics(row, page)}"
        chart.point(row[forget.name], 1 + 0.14 * (k % 3 - 1), "members", text, size=9, alpha=0.8)
    for row in drawing_order(records(scores), page.first):
        text = f"{page.label(row['method'])}: {_both_metrics(row, page)}"
        chart.point(row[forget.name], 0.25, row["method"], text)
    chart.axes.set_yticks([0.25, 1], ["methods", "members"])
    chart.axes.set_ylim(-0.1, 1.5)
    chart.axes.grid(axis="y", visible=False)
    return [chart.page_svg()]


def lambda_curves(page: PageData, sweeps: pd.DataFrame) -> list[str]:
    """Some metrics by λ, with the chosen λ and the target of the criterion.

    The forget metric comes first, then the retain metric, then the first ones of the scenario.
    """
    first = (page.forget.name, page.retain.name, *page.metrics)
    names = dict.fromkeys((*first, *map(str, sweeps)))
    measured = [name for name in names if name in sweeps and name not in NOT_METRICS]
    metrics = [metric for metric in map(page.metric, measured) if metric.reported][:SHOWN]
    if "avg_gap" in sweeps:
        metrics.append(page.columns["avg_gap"])
    zero, retrain = records(sweeps)[0], page.result.retrain
    reference = None if retrain is None else retrain.measured()
    charts: list[str] = []
    for number, metric in enumerate(metrics):
        title = f"{metric.label} by λ, with the chosen λ"
        chart = Chart(f"sweep-{number}", title, "λ", metric.axis, styles=page.styles)
        for method, rows in groups(sweeps.dropna(subset=[metric.name]), "method").items():
            chart.line([row["scale"] for row in rows], [row[metric.name] for row in rows], method)
            for row in rows:
                text = f"{page.label(method)}: λ = {row['scale']:g}, "
                text += metric.text(row[metric.name])
                point = (row["scale"], row[metric.name], method)
                if row["chosen"]:
                    chart.point(*point, f"{text}, chosen", size=11, zorder=4)
                else:
                    chart.point(*point, text, size=5, zorder=2)
        target = page.criterion.aim(metric.name, zero, reference)
        if target is not None and metric.name != "avg_gap":
            chart.target_line(*target)
        charts.append(chart.page_svg())
    return charts


def sparsity_by_members(prefixes: pd.DataFrame) -> list[str]:
    """The sparsity of the consensus against the number of members."""
    title = "Sparsity of the consensus against the number of members"
    chart = Chart("prefixes", title, "members merged", "zeros, %")
    for column, method in (("coin_flips", "coin_flips"), ("sparsity", "consensus")):
        chart.line(prefixes["members"], prefixes[column], method)
        name = "random signs" if method == "coin_flips" else method
        for row in records(prefixes):
            text = f"{name} of {row['members']}: {row[column]:.2f} % zero"
            chart.point(row["members"], row[column], method, text)
    chart.axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return [chart.page_svg()]


def sparsity_by(frame: pd.DataFrame, by: str, styles: Styles) -> list[str]:
    """The sparsity by depth or component, of each method that has zeros."""
    sparse = methods_with_zeros(frame)
    names = sorted(groups(frame, by), key=natural_key)[:MAX_GROUPS]
    zeros, height = "zeros, % of the elements", 1.1 + 0.22 * len(names)
    chart = Chart(f"by-{by}", f"Sparsity by {by}", zeros, "", height, styles)
    for row in records(frame):
        if row["method"] in sparse and row[by] in names:
            text = f"{row['method']}, {by} {row[by]}: {row['sparsity']:.2f} % zero"
            text += f" of {row['elements']:,} elements"
            chart.point(row["sparsity"], names.index(row[by]), row["method"], text)
    chart.axes.set_yticks(range(len(names)), names)
    chart.axes.set_ylim(len(names) - 0.5, -0.5)
    chart.axes.set_xlim(-2, 102)
    return [chart.page_svg()]


def methods_with_zeros(frame: pd.DataFrame) -> list[str]:
    """The methods whose patches have zeros."""
    return list(dict.fromkeys(frame["method"][frame["sparsity"] > 0]))


def dissent(frame: pd.DataFrame) -> list[str]:
    """For each member, how often only this member disagreed with the others."""
    title = "Share of elements at which only one member disagrees with all others, by member"
    height = 1.1 + 0.2 * len(frame)
    chart = Chart("dissent", title, "only dissenter, % of the elements", "member", height)
    for position, row in enumerate(records(frame)):
        text = f"member {row['member']}: only dissenter at {row['sole_dissent']:.3f} %"
        chart.bar(position, row["sole_dissent"], "members", text)
    chart.axes.set_yticks(range(len(frame)), [str(name) for name in frame["member"]])
    chart.axes.set_ylim(len(frame) - 0.5, -0.5)
    chart.axes.grid(axis="y", visible=False)
    return [chart.page_svg()]


def histograms(
    id: str, histogram: Histogram, bins: Sequence[Bin], models: Sequence[str]
) -> list[str]:
    """The distribution of the samples of each set, one chart for each model, on a log scale.

    Bins whose samples the attack classifies as training data are shaded.
    """
    charts: list[str] = []
    for number, model in enumerate(models):
        sets: dict[str, list[Bin]] = {}
        for one in (one for one in bins if one.model == model):
            sets.setdefault(one.set, []).append(one)
        title = f"{histogram.axis} under {model}, by set"
        label = f"{model}: % of the set"
        chart = Chart(f"{id}-{number}", title, histogram.axis, label, height=2.9)
        for name, own in sets.items():
            total = sum(one.count for one in own)
            edges = [own[0].low, *(one.high for one in own)]
            shares = [100 * one.count / max(total, 1) for one in own]
            colour = colour_of(chart.style(name))
            artist = chart.axes.stairs(shares, edges, color=colour, linewidth=1.6)
            top = own[int(np.argmax(shares))]
            text = f"{name} under {model}: {total:,} samples, {max(shares):.1f} % of them between "
            chart.tag(artist, name, text + f"{top.low:g} and {top.high:g}")
        own = next(iter(sets.values()))
        for one in (one for one in own if one.member):
            chart.axes.axvspan(one.low, one.high, color=TEXT, alpha=0.07, linewidth=0)
        chart.axes.set_xlim(own[0].low, own[-1].high)
        chart.axes.set_yscale("log")
        chart.axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        chart.axes.yaxis.set_minor_formatter(NullFormatter())
        chart.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        charts.append(chart.page_svg())
    return charts


def _both_metrics(row: Cells, page: PageData) -> str:
    both = [metric for metric in (page.retain, page.forget) if metric.name in row]
    return ", ".join(f"{metric.short} {metric.text(row[metric.name])}" for metric in both)
