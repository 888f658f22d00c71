"""`negmerge reproduce TABLE`: run the recipes of a table and compare with the published numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import RenderableType
from rich.table import Table

from negmerge.errors import NegMergeError, OptionError, printable
from negmerge.paper.comparison import (
    PRINTED,
    ComparedRow,
    MeasuredRow,
    both_values,
    compare,
    comparison_frame,
    measured_rows,
    rank_correlation,
)
from negmerge.paper.division import Part
from negmerge.paper.experiments import Experiment, TableScale, experiment, published, unstated
from negmerge.paper.spread import panels_figure, spread_figure, spread_frame
from negmerge.paper.timing import merge_seconds
from negmerge.paper.trials import Trial, finished_run, run_count, trials_of
from negmerge.reports.export import DataTable
from negmerge.reports.page import report
from negmerge.runs.checks import check_methods
from negmerge.runs.pipeline import run
from negmerge.runs.result import RunResult
from negmerge.runs.store import Run
from negmerge.support.files import report_write_errors, write_file
from negmerge.support.progress import Progress, Quiet
from negmerge.support.terminal import escape_markup

CHARTS = {"spread": spread_figure, "panels": panels_figure}


@dataclass(frozen=True)
class Reproduction:
    """A table with measured values, published values and differences."""

    table: str
    scale: TableScale
    caption: str
    frame: pd.DataFrame
    notes: list[str]
    pages: list[Path]
    folder: Path


def reproduce(
    table: str,
    scale: TableScale = "desk",
    out: Path | None = None,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
    seeds: Sequence[int] | None = None,
    part: Part | None = None,
) -> Reproduction:
    """Reproduce a table of the paper. An interrupted call resumes when it is repeated.

    Args:
        table: the name of the table, such as T2.
        scale: `paper` for the recipes of the paper, `desk` for small ones.
        out: the folder of runs and tables; None: runs/reproduce-SCALE. In one folder, tables share
            runs, and runs share trained models.
        changes: changes of every recipe as `key=value`.
        progress: shows the progress.
        seeds: added to the seed of the recipe, one for each trial; None: as many trials as in the
            paper, one at desk scale.
        part: make only the runs of one part, such as (2, 5). Runs of other parts that are finished
            in the folder, or were copied into it, are used; the notes list those that are missing.
    """
    wanted, printed = experiment(table), published()[table]
    folder = folder_of(scale, out)
    progress = progress or Quiet()
    trials = trials_of(table, scale, changes, seeds, part)
    missing: dict[str, NegMergeError] = {}
    for trial in (trial for trial in trials if trial.mine):  # before hours of work
        try:
            check(table, trial, folder, progress)
        except NegMergeError as error:
            missing[str(error)] = error
    if missing:
        raise type(next(iter(missing.values())))("; ".join(missing))
    not_stated = unstated(table, scale, changes)
    with report_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found: list[tuple[int, dict[str, Any], list[MeasuredRow]]] = []
    pages: list[Path] = []
    results: list[tuple[str, RunResult]] = []
    absent: list[Trial] = []
    for trial in trials:
        recipe, planned = trial.recipe, trial.planned
        done = make_run(trial, folder, progress) if trial.mine else finished_run(trial, folder)
        if done is None:
            absent.append(trial)
            continue
        pages += [done.page] if done.has_page else []
        results.append((recipe.settings.data_names()[0], done.result))
        seconds = seconds_of(wanted, trial, done, progress)
        rows = measured_rows(done.result, recipe, planned, wanted, seconds)
        found.append((trial.number, planned.where, rows))
    lines = compare(printed["rows"], found, wanted.readings)
    notes = [f"{run_count(len(found))}{seeds_text(seeds)}."]
    if part is not None:
        notes.append(f"Part {part[0]} of {part[1]}: {sum(t.mine for t in trials)} of the runs.")
    if absent:
        notes.append(missing_text(absent, len(trials)))
    if scale == "desk":
        notes.append(
            f"At desk scale: {wanted.smaller(changes)}. Differences from the paper are expected."
        )
    notes += ranking_texts(lines, wanted)
    if wanted.timed is not None:
        where = " and ".join(str(value) for value in wanted.timed.values())
        notes.append(f"Seconds: the mean of three merges of {where}, compiled before.")
    rows_absent = sum(not line.measured for line in lines)
    if rows_absent:
        notes.append(f"Not measured here: {rows_absent} of the {len(lines)} rows.")
    notes += not_stated
    rows = comparison_frame(lines) if wanted.chart is None else spread_frame(results)
    made = Reproduction(table, scale, printed["caption"], rows, notes, pages, folder)
    write_tables(made)
    if wanted.chart is not None and len(rows):
        write_file(folder / f"{table}.svg", CHARTS[wanted.chart](rows).encode())
    return made


def folder_of(scale: TableScale, out: Path | None) -> Path:
    """The folder of runs and tables; the arguments are those of `reproduce`."""
    return Path("runs") / f"reproduce-{scale}" if out is None else out


def make_run(trial: Trial, folder: Path, progress: Progress) -> Run:
    """Make a run and its page; models that other runs of the folder trained are used again."""
    own = folder / trial.name
    others = sorted(path for path in folder.iterdir() if path.is_dir() and path != own)
    done = run(trial.recipe, own, progress=progress, reuse_from=others)
    if not done.has_page:
        report(done, progress)
    return done


def seconds_of(
    wanted: Experiment, trial: Trial, done: Run, progress: Progress
) -> Mapping[str, Sequence[float]]:
    """The seconds of the merges of a run by title; empty if the table does not time them."""
    file = done.folder.with_name(f"{done.folder.name}.seconds.json")
    if not wanted.times(trial.planned) or not (trial.mine or file.exists()):
        return {}
    return merge_seconds(trial.recipe, done, file, progress)


def seeds_text(seeds: Sequence[int] | None) -> str:
    """The seeds of the trials, for the notes.

    >>> seeds_text([0, 1]), seeds_text([3]), seeds_text(None)
    (' with the seeds 0, 1', ' with the seed 3', '')
    """
    if seeds is None:
        return ""
    return f" with the seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def missing_text(absent: Sequence[Trial], count: int) -> str:
    """A note about the runs that are not there, by part."""
    parts: dict[int, list[str]] = {}
    for trial in absent:
        parts.setdefault(trial.part, []).append(trial.name)
    names = "; ".join(f"part {k}: {', '.join(names)}" for k, names in sorted(parts.items()))
    return f"Missing: {len(absent)} of the {run_count(count)}, means are over the others. {names}."


def ranking_texts(lines: Sequence[ComparedRow], wanted: Experiment) -> list[str]:
    """Notes about Kendall's τ; one for each reading, if rows can be read in several ways."""
    texts: list[str] = []
    for reading in range(max(map(len, wanted.readings.values()), default=1)):
        ranking = rank_correlation(lines, reading)
        if ranking is None:
            continue
        by, tau, count = ranking
        names = ", ".join(names[reading] for names in wanted.readings.values())
        read = f" with {names}" if names else ""
        texts.append(
            f"Ranking of {count} rows by {by}{read}: Kendall's τ = {tau:.2f} (1: same order)."
        )
    return texts


def check(table: str, trial: Trial, folder: Path, progress: Progress) -> None:
    """Raise if a run lacks a field that only the user can set, data or weights."""
    for field in trial.planned.missing(trial.recipe):
        raise OptionError(
            f"{table}: {field} is not set; the paper starts from ImageNet weights; add "
            f"--set {field}=FILE with a .safetensors file of these weights"
        )
    if not Run(folder / trial.name).finished:
        check_methods(trial.recipe)
        trial.recipe.make_scenario(progress).check()


def write_tables(made: Reproduction) -> None:
    """Write the table as CSV, Markdown (with the notes) and LaTeX."""
    pages = [page.relative_to(made.folder).as_posix() for page in made.pages]
    notes = "".join(f"- {line}\n" for line in (*made.notes, *(f"`{page}`" for page in pages)))
    files = {f"{made.table}.md": ""}
    if len(made.frame):
        files = DataTable(made.table, made.caption, made.frame).files()
    for name, text in files.items():
        if name.endswith(".md"):
            text = f"# {made.table}, {made.scale} scale: {made.caption}\n\n{text}\n{notes}"
        write_file(made.folder / name, text.encode())


def rendered(made: Reproduction) -> list[RenderableType]:
    """The table for the terminal: measured, published in brackets, the difference in colour."""
    title = f"{made.table}, {made.scale} scale: {made.caption}"
    lines = [*made.notes, *(f"page: {page}" for page in made.pages)]
    shown: list[RenderableType] = [printable(line) for line in lines]
    columns = [column for column in PRINTED if f"{column}_paper" in made.frame]
    if not columns:
        return [title, *shown]
    words = [str(c) for c in made.frame if not str(c).startswith(tuple(columns))]
    grid = Table(*words, title=escape_markup(title), title_justify="left")
    for column in columns:
        grid.add_column(f"{column}\nmeasured (paper)", justify="right")
    for row in made.frame.to_dict("records"):
        cells = ["" if row[word] != row[word] else f"{row[word]}" for word in words]
        grid.add_row(*cells, *(_cell(row, column) for column in columns))
    return [grid, *shown]


def _cell(row: dict[Any, Any], column: str) -> str:
    """Both values and the difference: green up to one point, red above five.

    Seconds were measured on different machines and get no difference.
    """
    text, difference = both_values(row, column), row.get(f"{column}_difference")
    if column == "seconds" or difference is None or difference != difference:
        return text
    colour = "green" if abs(difference) <= 1 else "yellow" if abs(difference) <= 5 else "red"
    return f"{text} [{colour}]{difference:+.2f}[/]"
