"""The tables of a study: on the page, in files and in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.table import Table

from negmerge.errors import printable
from negmerge.evaluation.metrics import Metric, metric_of
from negmerge.reports.export import DataTable
from negmerge.studies.comparison import Comparison, Difference
from negmerge.studies.statistics import Mean
from negmerge.studies.summary import (
    compared_text,
    difference_text,
    distance_texts,
    seeds_text,
    warnings_of,
)
from negmerge.support.terminal import escape_markup

HEADINGS = {
    "difference": "difference",
    "n": "seeds",
    "better_seeds": "better in",
    "t_p": "p, t test",
    "t_holm": "p, t test, Holm",
    "wilcoxon_p": "p, Wilcoxon",
    "wilcoxon_holm": "p, Wilcoxon, Holm",
    "detectable": "detectable",
}
"""The headings of the table of differences."""
COLOURS = {"better": "green", "worse": "red", "undecided": "yellow"}


@dataclass(frozen=True)
class MainTable(DataTable):
    """A table of the main metrics, whose CSV file has a long form with all of them."""

    everything: pd.DataFrame = field(default_factory=pd.DataFrame)

    def csv(self) -> str:
        return self.everything.to_csv(index=False, lineterminator="\n")


def means_table(study: Comparison) -> MainTable:
    """The mean of every model over the seeds, with its interval."""
    rows: dict[str, dict[str, Any]] = {model: {"method": model} for model in _models(study)}
    everything: list[dict[str, Any]] = []
    for name in study.values:
        for model, mean in study.means(name).items():
            if name in study.main:
                rows[model] |= _cells(name, mean)
            everything.append({"metric": name, "method": model, **asdict(mean)})
    frame = pd.DataFrame(list(rows.values())).dropna(axis=1, how="all")
    caption = f"Mean over {seeds_text(study.seeds)}"
    if len(study.seeds) > 1:
        caption += ", in brackets its 95 % interval"
    return MainTable("means", caption, frame, study.metrics, everything=pd.DataFrame(everything))


def differences_table(study: Comparison) -> MainTable:
    """The paired differences with both tests, both corrections and the verdict."""
    names = ("metric", "method", "n", "better_seeds", "difference", "low", "high")
    names += ("t_p", "t_holm", "wilcoxon_p", "wilcoxon_holm", "detectable", "verdict")
    renamed = {"low": "difference_low", "high": "difference_high"}
    rows: list[dict[str, Any]] = []
    for one in (one for name in study.main for one in study.of(name)):
        tree = one.tree() | {"metric": study.metrics[one.metric].heading}
        rows.append({renamed.get(name, name): tree[name] for name in names})
    frame = pd.DataFrame(rows).dropna(axis=1, how="all")
    everything = pd.DataFrame([one.tree() for one in study.differences])
    everything = everything.astype(dict.fromkeys(("better_seeds", "seeds_needed"), "Int64"))
    everything.insert(2, "against", study.against)
    caption = f"Each method less {study.against}, over {seeds_text(study.seeds)}"
    headings = {name: replace(metric_of(name), short=heading) for name, heading in HEADINGS.items()}
    return MainTable("differences", caption, frame, headings, everything=everything)


def seeds_table(study: Comparison) -> DataTable:
    """Every number of every seed."""
    rows: list[dict[str, Any]] = []
    for seed in study.seeds:
        for model in _models(study):
            row: dict[str, Any] = {"seed": seed, "method": model}
            for name, found in study.values.items():
                row[name] = found.get(model, {}).get(seed)
            rows.append(row)
    frame = pd.DataFrame(rows).dropna(axis=1, how="all")
    return DataTable("seeds", "Every number of every seed", frame, study.metrics)


def rendered(study: Comparison) -> list[RenderableType]:
    """The tables and lines for the terminal: each mean, and the difference with its verdict."""
    title = f"{study.recipe.title or study.recipe.scenario}: {seeds_text(study.seeds)}"
    grid = Table("method", title=escape_markup(title), title_justify="left")
    for name in study.main:
        grid.add_column(study.metrics[name].heading, justify="right")
    found = {(one.metric, one.method): one for one in study.differences}
    for model in _models(study):
        cells = [
            _terminal_cell(
                study.means(name).get(model), found.get((name, model)), study.metrics[name]
            )
            for name in study.main
        ]
        grid.add_row(model, *cells, end_section=model in ("retrained", study.against))
    lines = [compared_text(study), *distance_texts(study), *warnings_of(study)]
    verdicts = [one.verdict for name in study.main for one in study.of(name)]
    if "undecided" in verdicts:
        lines.append(
            f"Undecided: {verdicts.count('undecided')} of {len(verdicts)} differences; the page "
            "says how many seeds would decide."
        )
    return [grid, *map(printable, lines)]


def _models(study: Comparison) -> list[str]:
    """The models of the tables: original, retrained, the method compared with, the others."""
    titles = [method.title for method in study.recipe.methods]
    known = {model for found in study.values.values() for model in found}
    names = dict.fromkeys(("original", "retrained", study.against, *titles))
    return [name for name in names if name in known]


def _cells(name: str, mean: Mean) -> Mapping[str, float | None]:
    return {name: mean.mean, f"{name}_low": mean.low, f"{name}_high": mean.high}


def _terminal_cell(mean: Mean | None, one: Difference | None, metric: Metric) -> str:
    """The mean, and for a compared method the difference with its verdict."""
    if mean is None:
        return ""
    text = metric.number(mean.mean)
    if one is None:
        return text
    shown = difference_text(one.test.mean.mean, metric)
    return f"{text} ({shown} [{COLOURS[one.verdict]}]{one.verdict}[/])"
