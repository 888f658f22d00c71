"""The figures of a study: the paired differences of every method in one number, or in one test."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

from matplotlib.ticker import MaxNLocator

from negmerge.evaluation.metrics import Metric
from negmerge.reports.charts import TEXT, Chart, colour_of
from negmerge.reports.evidence import metric_for
from negmerge.reports.styles import Style
from negmerge.studies.comparison import Comparison, Difference
from negmerge.studies.evidence import Found
from negmerge.studies.statistics import Mean
from negmerge.studies.summary import difference_text, unit_of

VERDICTS = {
    "better": Style("blue", ">"),
    "worse": Style("orange", "<"),
    "undecided": Style("grey", "o"),
}
"""The colour and the marker of a mean difference by verdict; the marker points where it lies."""
APART = {"told apart": Style("orange", "D"), "not told apart": Style("grey", "o")}
"""The same by what a test of forgetting says about a model."""
WIDEST = 44
"""The number of characters after which the label of the axis is broken."""


def forest(study: Comparison, name: str) -> str:
    """A row for each method: the mean difference with its interval, and a dot for each seed."""
    metric, found = study.metrics[name], study.of(name)
    unit = unit_of(metric) and f", {unit_of(metric)}"
    what = "distance from retraining, " if study.directed[name] == "reference" else ""
    label = fill(f"{metric.label}: {what}difference from {study.against}{unit}", WIDEST)
    title = f"Paired differences from {study.against}: {metric.label}"
    id = f"forest-{list(study.metrics).index(name)}"
    chart = Chart(id, title, label, "", 1.2 + 0.34 * len(found), VERDICTS, width=4.2)
    for position, one in enumerate(found):
        _row(chart, position, one, metric)
    axes = _frame(chart, [one.method for one in found])
    if found[0].better == "lower":
        axes.invert_xaxis()
    beside: dict[str, Any] = {"transform": axes.transAxes, "va": "bottom", "color": TEXT}
    axes.text(1.0, 1.01, "better →", ha="right", **beside)
    axes.text(0.0, 1.01, "← worse", ha="left", **beside)
    return chart.page_svg()


def against_retrained(rows: list[Found]) -> str:
    """A row for each model: the mean difference of one test from the retrained model, at zero."""
    first = rows[0]
    metric = metric_for(first.quantity)
    unit = unit_of(metric) and f", {unit_of(metric)}"
    label = fill(f"{metric.label}: difference from the {first.against} model{unit}", WIDEST)
    title = f"{first.title} Differences from the {first.against} model"
    chart = Chart(f"sceptic-{first.test}", title, label, "", 1.2 + 0.34 * len(rows), APART, 4.2)
    for position, one in enumerate(rows):
        style = "told apart" if one.verdict in ("above", "below") else "not told apart"
        seeds = {seed: value - one.null[seed] for seed, value in one.by_seed.items()}
        told = "only a bound" if one.bound else style
        told += "" if one.holm is None else f", p = {one.holm:.2g}"
        _draw(chart, position, style, one.model, seeds, one.pairs.mean, metric, told)
    axes = _frame(chart, [one.model for one in rows])
    words: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": TEXT}
    axes.text(0.0, 1.01, first.against, ha="center", va="bottom", **words)
    return chart.page_svg()


def _frame(chart: Chart, names: list[str]) -> Any:
    """Name the rows, and draw the line at zero with room for a word on either side of it."""
    axes = chart.axes
    axes.axvline(0, color=TEXT, linewidth=1, zorder=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    low, high = axes.get_xlim()
    least = 0.15 * max(-low, high)
    axes.set_xlim(min(low, -least), max(high, least))
    return axes


def _row(chart: Chart, position: int, one: Difference, metric: Metric) -> None:
    """Draw the differences of a method, and say what the t test decides."""
    told = "" if one.t_holm is None else (
        f"{one.verdict}, p = {one.t_holm:.2g}, "
        f"better in {one.better_seeds} of {one.test.mean.n} seeds"
    )  # fmt: skip
    _draw(chart, position, one.verdict, one.method, one.by_seed, one.test.mean, metric, told)


def _draw(
    chart: Chart,
    position: int,
    style: str,
    name: str,
    seeds: Mapping[int, float],
    mean: Mean,
    metric: Metric,
    told: str,
) -> None:
    """Draw the mean difference with its interval, and a dot for each seed."""
    for seed, value in seeds.items():
        text = f"{name}, seed {seed}: {difference_text(value, metric)}"
        dot: dict[str, Any] = {"marker": "o", "alpha": 0.55, "markeredgewidth": 0, "zorder": 2}
        chart.point(value, position + 0.22, style, text, size=4, **dot)
    words = f"{name}: {difference_text(mean.mean, metric)} {unit_of(metric)}".rstrip()
    if mean.low is not None and mean.high is not None:
        options: dict[str, Any] = {"color": colour_of(chart.style(style)), "linewidth": 2.2}
        (line,) = chart.axes.plot([mean.low, mean.high], [position - 0.08] * 2, zorder=3, **options)
        chart.tag(line, style)
        ends = (difference_text(end, metric) for end in (mean.low, mean.high))
        words += f" [{' to '.join(ends)}]"
    words += f", {told}" if told else ""
    chart.point(mean.mean, position - 0.08, style, words, size=7.5, zorder=4)
