"""The figure of a study: the paired differences of every method in one number."""

from __future__ import annotations

from textwrap import fill
from typing import Any

from matplotlib.ticker import MaxNLocator

from negmerge.reports.charts import TEXT, Chart, colour_of
from negmerge.reports.styles import Style
from negmerge.studies.comparison import Comparison, Difference
from negmerge.studies.summary import difference_text, unit_of

VERDICTS = {
    "better": Style("blue", ">"),
    "worse": Style("orange", "<"),
    "undecided": Style("grey", "o"),
}
"""The colour and the marker of a mean difference by verdict; the marker points where it lies."""
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
    chart.axes.axvline(0, color=TEXT, linewidth=1, zorder=1)
    for position, one in enumerate(found):
        _row(chart, position, one, study)
    axes = chart.axes
    axes.set_yticks(range(len(found)), [one.method for one in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    low, high = axes.get_xlim()
    least = 0.15 * max(-low, high)  # room for a word on either side of zero
    axes.set_xlim(min(low, -least), max(high, least))
    if found[0].better == "lower":
        axes.invert_xaxis()
    beside: dict[str, Any] = {"transform": axes.transAxes, "va": "bottom", "color": TEXT}
    axes.text(1.0, 1.01, "better →", ha="right", **beside)
    axes.text(0.0, 1.01, "← worse", ha="left", **beside)
    return chart.page_svg()


def _row(chart: Chart, position: int, one: Difference, study: Comparison) -> None:
    metric, mean, verdict = study.metrics[one.metric], one.test.mean, one.verdict
    colour, texts = colour_of(chart.style(verdict)), difference_text
    for seed, value in one.by_seed.items():
        text = f"{one.method}, seed {seed}: {texts(value, metric)}"
        dot: dict[str, Any] = {"marker": "o", "alpha": 0.55, "markeredgewidth": 0, "zorder": 2}
        chart.point(value, position + 0.22, verdict, text, size=4, **dot)
    told = f"{one.method}: {texts(mean.mean, metric)} {unit_of(metric)}".rstrip()
    if mean.low is not None and mean.high is not None and one.t_holm is not None:
        (line,) = chart.axes.plot(
            [mean.low, mean.high], [position - 0.08] * 2, color=colour, linewidth=2.2, zorder=3
        )
        chart.tag(line, verdict)
        told += f" [{texts(mean.low, metric)} to {texts(mean.high, metric)}], {verdict}, "
        told += f"p = {one.t_holm:.2g}, better in {one.better_seeds} of {mean.n} seeds"
    chart.point(mean.mean, position - 0.08, verdict, told, size=7.5, zorder=4)
