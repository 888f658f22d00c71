"""The sections of a page: text, charts with a legend, a table, pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from negmerge.evaluation.metrics import Histogram
from negmerge.reports import evidence, figures, frames, geometry, matching
from negmerge.reports.charts import Drawing
from negmerge.reports.export import DataTable
from negmerge.reports.frames import Missing, NotMeasured, PanelData
from negmerge.reports.inspection import notes
from negmerge.reports.names import COMPARED, groups_of
from negmerge.reports.page_data import PageData
from negmerge.reports.ranking import criterion_losses, join_names
from negmerge.reports.slider import Slider, slider_of


@dataclass(frozen=True)
class Section:
    """A section of a page.

    Args:
        legend: the methods or sets in the legend of the charts.
        lines: whether the legend shows the dashes of lines.
        table: the data of the charts.
        open: whether the table is unfolded.
        notes: an explanation of the table.
        pictures: the pictures of the panel as data URIs, by file name.
        parts: parts with a title, text, charts and a table of their own; the legend is for all.
        slider: a slider over λ below the charts.
    """

    id: str
    text: str
    charts: list[str] = field(default_factory=list)
    legend: list[str] = field(default_factory=list)
    lines: bool = False
    table: DataTable | None = None
    open: bool = False
    notes: list[str] = field(default_factory=list)
    panel: PanelData | None = None
    pictures: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[str, Section]] = field(default_factory=list)
    slider: Slider | None = None

    @property
    def tables(self) -> list[DataTable]:
        """Its table, and those of its parts."""
        own = [] if self.table is None else [self.table]
        return [*own, *(table for _, part in self.parts for table in part.tables)]

    @property
    def drawings(self) -> list[Drawing]:
        """Its charts, and those of its parts."""
        own = [chart for chart in self.charts if isinstance(chart, Drawing)]
        return [*own, *(drawing for _, part in self.parts for drawing in part.drawings)]


MakeSection = Callable[[PageData], Section]


def scores(page: PageData) -> Section:
    result = page.result
    retrained = " and the model retrained without the forget set" if result.retrain else ""
    bounds = " Numbers in brackets are 95 % intervals." if result.original.intervals else ""
    text = (
        f"Every method beside the original model{retrained}, with its name in the paper and in the "
        f"recipe. The column “data” names the training data that a method uses.{bounds}"
    )
    losses = criterion_losses(result, page.criterion)
    if losses:
        text += (
            f" In each group sorted by {page.criterion.name} on the reported data "
            f"({page.criterion.summary})."
        )
    refused = [name for name, loss in losses.items() if loss is None]
    if refused:
        text += f" Methods that the criterion does not allow come last: {_named(page, refused)}."
    added = [row.method for row in result.methods if row.added]
    if added:
        text += (
            " Methods that add the task vector, to learn the forget set instead of forgetting it: "
            f"{_named(page, added)}."
        )
    compared = [] if result.retrain is None else ["retrained"]
    groups = {COMPARED: ["original", *compared]} | groups_of(result.methods)
    frame = frames.scores_frame(page)
    table = DataTable("scores", "Scores of all methods", frame, page.columns, groups)
    return Section("scores", text, table=table, open=True, notes=notes(result))


def sceptic(page: PageData) -> Section:
    found = page.result.evidence
    if found is None:
        raise NotMeasured("no test of forgetting was run")
    parts: list[tuple[str, Section]] = []
    for name, test in found.tests.items():
        if test.missing is None:
            charts = evidence.charts(page, name, test)
            table = evidence.table(page, name, test)
            says = [evidence.about(page, test), *evidence.others(page, test)]
            section = Section(f"evidence-{name}", test.text, charts, table=table, notes=says)
            parts.append((test.title, section))
    notes, legend = evidence.missing(page), _models(page)
    if parts and page.result.retrain is not None:
        chart, table = evidence.glance(page), evidence.verdicts_table(page)
        section = Section("evidence-glance", evidence.GLANCE, [chart], table=table)
        parts.insert(0, ("All tests at a glance", section))
    return Section("evidence", evidence.overview(page), legend=legend, notes=notes, parts=parts)


def trade_off(page: PageData) -> Section:
    frame = frames.scores_frame(page)
    for metric in (page.forget, page.retain):
        if metric.name not in frame:
            raise Missing(f"{metric.label} was not measured")
    text = (
        "Models further to the right forget more, models further up retain more. The ring marks "
        "the method that made the unlearned model."
    )
    if page.result.retrain is not None:
        text += " The retrained model is the target: forgetting more than it did is not better."
    try:
        members, legend = frames.members_frame(page), [*_models(page), "members"]
    except Missing as missing:
        members, legend = None, _models(page)
        text += f" The pool members are not shown: {missing}."
    charts, near = figures.trade_off(page, frame, members)
    if near:
        text += f" The second chart shows only the models {near}."
    return Section("trade-off", text, charts, legend)


def tries(page: PageData) -> Section:
    text = (
        "The hyper-parameters that were tried for each tuned rival, measured on the data on which "
        "λ is chosen; the try with the smallest loss of the criterion is taken. Samples and "
        "seconds of a tuned rival include all its tries."
    )
    frame = frames.tries_frame(page)
    table = DataTable("tries", "Tries of the tuned rivals", frame, page.columns)
    return Section("tries", text, table=table, open=True)


def pool(page: PageData) -> Section:
    text = (
        "The result of each pool member if its task vector alone were subtracted, with its own λ. "
        "The wider the spread, the more a single model depends on its hyper-parameters."
    )
    if not any(m.name == "single_best" and m.add is None for m in page.recipe.methods):
        text += " The λ of the members come from a coarser search than those of the methods."
    members = frames.members_frame(page)
    charts = figures.spread(page, frames.scores_frame(page), members)
    table = DataTable("members", "Pool members, each with its own λ", members, page.columns)
    return Section("pool", text, charts, [*_models(page), "members"], table=table)


def sweeps(page: PageData) -> Section:
    text = (
        "The metrics at each λ, measured on the data on which λ is chosen. The large marker is the "
        "chosen λ; the dashed horizontal line is the target or the limit of the criterion."
    )
    frame = frames.sweeps_frame(page)
    charts = figures.lambda_curves(page, frame)
    legend = [row.method for row in page.result.methods if row.searched]
    table = DataTable("sweeps", "Metrics at each λ", frame, page.columns)
    slider = slider_of(page, frame)
    return Section("sweeps", text, charts, legend, lines=True, table=table, slider=slider)


def matched(page: PageData) -> Section:
    frame = matching.matched_frame(page)
    charts, text = matching.matched_charts(page, frame), matching.matched_text(page, frame)
    table = DataTable("matched", "Metrics at the forget level", frame, matching.columns(page))
    return Section("matched", text, charts, table=table, open=True)


def where(page: PageData) -> Section:
    frame = geometry.geometry_frame(page)
    charts, text = geometry.path_charts(page), geometry.geometry_text(page)
    table = DataTable("geometry", "Lengths, distances and barriers", frame)
    legend = geometry.legend(page)
    return Section("geometry", text, charts, legend, lines=True, table=table, open=True)


def prefixes(page: PageData) -> Section:
    text = (
        "The share of zeros in the consensus of the first n members. The dashed line is the share "
        "that would be zero if the members changed every element in a random direction; the "
        "further the consensus is below it, the more the members have in common."
    )
    for row in page.result.methods:
        if row.agreement is not None:
            text += (
                " Of the elements that two members both change, they change "
                f"{row.agreement:.1f} % in the same direction; by chance it would be 50 %."
            )
            break
    if parts := page.result.first.sparsity_parts:
        text += f" Zeros of {page.first} by part of the model: " + ", ".join(
            f"{part} {zeros:.1f} %" for part, zeros in parts.items()
        )
        text += "."
    frame = frames.prefixes_frame(page)
    table = DataTable("prefixes", "Sparsity of the consensus of the first n members", frame)
    charts, legend = figures.sparsity_by_members(frame), ["consensus", "coin_flips"]
    return Section("prefixes", text, charts, legend, lines=True, table=table)


GROUPINGS = {
    "depth": "The depth of a tensor is the number of its layer, with the path of the layer where "
    "a model numbers layers in several places; “none” means tensors outside the layers.",
    "component": "The component of a tensor is its name within its layer.",
}


def sparsity(page: PageData, by: str) -> Section:
    frame, text = frames.sparsity_frame(page, by), GROUPINGS[by]
    if len(set(frame[by])) > figures.MAX_GROUPS:
        text += f" The chart shows the first {figures.MAX_GROUPS}, the table all."
    charts = figures.sparsity_by(frame, by, page.styles)
    table = DataTable(by, f"Sparsity by {by}", frame)
    return Section(f"by-{by}", text, charts, figures.methods_with_zeros(frame), table=table)


def dissent(page: PageData) -> Section:
    text = (
        "The share of elements at which only this member disagrees with the sign of all others. A "
        "member with a much larger share than the others removes most from the consensus; check "
        "its hyper-parameters."
    )
    frame = frames.dissent_frame(page)
    table = DataTable("dissent", "Share of elements at which only this member disagrees", frame)
    return Section("dissent", text, figures.dissent(frame), table=table)


def histograms(page: PageData, histogram: Histogram) -> Section:
    bins, id = frames.bins_of(page.run, histogram), Path(histogram.file).stem
    names = {one.model for one in bins}
    models = [model for model in ("original", "retrained", page.first) if model in names]
    charts = figures.histograms(id, histogram, bins, models)
    table = DataTable(id, f"Samples by {histogram.axis}", frames.bins_frame(bins, models))
    legend = list(dict.fromkeys(one.set for one in bins))
    text = f"{histogram.text} The vertical axis is logarithmic."
    return Section(id, text, charts, legend, table=table)


def panel(page: PageData, id: str) -> Section:
    found, pictures = frames.panel_of(page.run, id)
    return Section(id, found.text, panel=found, pictures=pictures)


SECTIONS: dict[str, MakeSection] = {
    "All methods": scores,
    "Would a sceptic agree?": sceptic,
    "Retained against forgotten": trade_off,
    "How rivals were tuned": tries,
    "The pool": pool,
    "How λ was chosen": sweeps,
    "At equal forgetting": matched,
    "Where the models lie": where,
    "Sparsity against the number of members": prefixes,
    "Sparsity by depth": partial(sparsity, by="depth"),
    "Sparsity by component": partial(sparsity, by="component"),
    "Members that disagree with all others": dissent,
}
"""The sections of every page by title; those of metrics and of the scenario follow."""


def sections_of(page: PageData) -> Iterator[tuple[str, MakeSection]]:
    """The sections of a page by title: those of every page, of its metrics, of its scenario."""
    yield from SECTIONS.items()
    for metric in page.metrics.values():
        if metric.histogram is not None:
            yield metric.histogram.title, partial(histograms, histogram=metric.histogram)
    for one in page.recipe.settings.panels:
        yield one.title, partial(panel, id=one.id)


def _models(page: PageData) -> list[str]:
    return [str(name) for name in frames.scores_frame(page)["method"]]


def _named(page: PageData, titles: list[str]) -> str:
    return join_names([page.label(title) for title in titles])
