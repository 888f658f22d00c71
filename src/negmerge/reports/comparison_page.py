"""The page that shows several runs side by side, in a folder of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from negmerge.errors import FileError
from negmerge.reports import figures
from negmerge.reports.comparison import (
    Runs,
    differences,
    load_runs,
    names_in,
    recipes_table,
    scores_table,
    styles_in,
    verdicts_table,
)
from negmerge.reports.page import figure_files, render_page, table_files
from negmerge.reports.ranking import join_names
from negmerge.reports.sections import Section
from negmerge.runs.directory import irregular_entry
from negmerge.runs.records import Record, Sha256
from negmerge.runs.store import is_run, open_run, write_json
from negmerge.support.files import lock_folder, report_write_errors, write_file
from negmerge.support.reading import is_file
from negmerge.support.remote.urls import refuse_url

OUT = Path("runs/comparison")
"""The folder of a comparison, if none is named."""
RECORD = "comparison.json"


class CompareRecord(Record):
    """`comparison.json`: the runs of a comparison, and the hashes of their results."""

    format: Literal["negmerge-comparison/1"] = "negmerge-comparison/1"
    runs: dict[str, Sha256]


def compare(runs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Build a page that shows several finished runs side by side.

    The same runs give the same bytes. The tables and figures of the page are written beside it.

    Args:
        runs: the folders of two or more runs that have the same forget and retain metric.
        out: the folder of the page; by default runs/comparison.

    Returns:
        The path of the page, `index.html` in the folder.
    """
    folder = Path(OUT if out is None else out)
    check_folder(folder)
    loaded = load_runs([open_run(Path(run)) for run in runs])
    sections = sections_of(loaded)
    with report_write_errors(folder):
        for name in ("tables", "figures"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    own = [section for _, section in sections]
    page = render(loaded, sections)
    files = table_files(own) | figure_files(own, names_in(loaded), folder / "figures")
    hashes = {name: page.run.read_manifest().result for name, page in loaded.items()}
    with lock_folder(folder):
        write_json(folder / RECORD, CompareRecord(runs=hashes).model_dump())
        for name, content in files.items():
            write_file(folder / name, content)
        write_file(folder / "index.html", page.encode())  # the page last: it refers to all others
    return folder / "index.html"


def check_folder(folder: Path) -> None:
    """Raise unless a folder is new, empty, or that of a comparison."""
    refuse_url(folder, "a page is on this machine; copy its folder afterwards")
    found = irregular_entry(folder)
    if found is not None:
        raise FileError(
            f"{found.path}: is neither a file nor a folder of its own; remove it, or name another "
            "folder with --out"
        )
    if is_run(folder):
        raise FileError(f"{folder}: is a run; name another folder with --out")
    if folder.is_dir() and any(folder.iterdir()) and not is_file(folder / RECORD):
        raise FileError(
            f"{folder}: is not empty, and holds no comparison; name another folder with --out"
        )


def verdicts(runs: Runs) -> Section:
    text = (
        "The verdicts of each run's own page, on the model that its first method made. The control "
        "is the retrained model of the same run."
    )
    return Section("verdicts", text, table=verdicts_table(runs), open=True)


def scores(runs: Runs) -> Section:
    text = (
        "The models of all runs; those of the same method follow each other. Each number is of one "
        "run; “negmerge study” tests over seeds which differences are more than chance."
    )
    if any(page.result.original.intervals for page in runs.values()):
        text += " Numbers in brackets are 95 % intervals."
    return Section("scores", text, table=scores_table(runs), open=True)


def trade_off(runs: Runs) -> Section | None:
    styles = styles_in(runs)
    charts = figures.trade_offs(runs, styles)
    if not charts:
        return None
    text = (
        "One chart for each run, with the same axes. Models further to the right forget more, "
        "models further up retain more; the ring marks the method that made the unlearned model."
    )
    return Section("trade-off", text, charts, list(styles))


def recipes(runs: Runs) -> Section:
    table = recipes_table(runs)
    if table is None:
        return Section("recipes", "The recipes of the runs are equal.")
    text = "The fields in which the recipes differ; an empty cell: the recipe has no such field."
    return Section("recipes", text, table=table, open=True)


SECTIONS = {
    "Verdicts": verdicts,
    "Methods side by side": scores,
    "Retained against forgotten": trade_off,
    "Differences of the recipes": recipes,
}


def sections_of(runs: Runs) -> list[tuple[str, Section]]:
    """The sections of the page, by title."""
    made = [(title, make(runs)) for title, make in SECTIONS.items()]
    return [(title, section) for title, section in made if section is not None]


def render(runs: Runs, sections: list[tuple[str, Section]]) -> str:
    """The page as HTML."""
    return render_page(
        "comparison.html.j2",
        styles_in(runs),
        names_in(runs),
        title=f"{len(runs)} runs: {join_names(list(runs))}",
        summary=None,
        questions=[],
        sections=sections,
        missing=[],
        warnings=differences(runs),
        figures="figures",
        runs={name: (page.recipe.title, str(page.run.folder)) for name, page in runs.items()},
    )
