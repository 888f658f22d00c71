"""`negmerge reproduce TABLE`: run its recipes, then put what came out beside what was printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from negmerge.checking import check_methods
from negmerge.clip_scenario import make_problem
from negmerge.errors import NegMergeError, OptionError, printable
from negmerge.files import told_plainly, write_file
from negmerge.pipeline import run
from negmerge.progress import Progress, Quiet
from negmerge.recipe import Recipe
from negmerge.report.export import Table
from negmerge.report.page import report
from negmerge.reproduction.compare import (
    METRICS,
    Row,
    agreement,
    beside,
    compare,
    frame,
    measured_rows,
)
from negmerge.reproduction.experiments import (
    Part,
    Scale,
    experiment,
    published,
    unstated,
)
from negmerge.reproduction.spread import alone_and_merged, drawn
from negmerge.rundir import Run
from negmerge.scenario import identity
from negmerge.terminal import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

    from negmerge.reproduction.estimate import Estimate


@dataclass(frozen=True)
class Reproduction:
    """A table, measured beside published.

    table, scale: which. frame: measured, published and their difference. notes: what must be known
    to read it. pages: of the runs. folder: where the table is.
    """

    table: str
    scale: Scale
    caption: str
    frame: pd.DataFrame
    notes: list[str]
    pages: list[Path]
    folder: Path


def needs(table: str, scale: Scale, changes: Sequence[str] = ()) -> str:
    """What a table takes, for the decision to begin."""
    wanted = experiment(table)
    parts = wanted.parts(scale)
    missing = {field for part in parts for field in part.missing(part.load(changes=changes))}
    import torch

    try:
        takes = str(total(table, scale, changes))
    except OptionError as error:
        takes = f"not estimated, {error}"
    told = (
        f"{table} at {scale} scale: {runs(len(parts) * len(wanted.trials(scale)))} on "
        f"{', '.join(wanted.data(scale, changes))}; {takes}"
    )
    if not torch.cuda.is_available():
        told += "; there is no GPU here"
    return told + "".join(f"; and --set {field}=FILE" for field in sorted(missing))


def total(table: str, scale: Scale, changes: Sequence[str] = ()) -> Estimate:
    """What all runs of a table take together."""
    from negmerge.reproduction.estimate import estimate

    wanted, done = experiment(table), set[str]()
    parts, trials = wanted.parts(scale), wanted.trials(scale)
    recipes = [part.load(trial, changes) for part in parts for trial in trials]
    return reduce(add, [estimate(recipe, done) for recipe in recipes])


def runs(count: int) -> str:
    """The words for a number of runs.

    >>> runs(1), runs(40)
    ('1 run', '40 runs')
    """
    return f"{count} run{'s' if count > 1 else ''}"


def reproduce(
    table: str,
    scale: Scale = "desk",
    out: Path | None = None,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
    seeds: Sequence[int] | None = None,
) -> Reproduction:
    """Make a table of the paper; run again, it goes on.

    out: where runs and tables go; runs/reproduce-SCALE if not given. Tables that need the same run
        share it there, and runs that need the same training its models.
    changes: `key=value` for every recipe.
    seeds: added to the recipe's, one for each trial; as many as the paper's, or one on a desk, if
        not given.
    """
    wanted, printed = experiment(table), published()[table]
    folder = Path("runs") / f"reproduce-{scale}" if out is None else out
    progress = progress or Quiet()
    trials = [
        (number, part, part.load(seed, changes))
        for number, part in enumerate(wanted.parts(scale))
        for seed in (wanted.trials(scale) if seeds is None else seeds)
    ]
    missing: dict[str, NegMergeError] = {}
    for _, part, recipe in trials:  # before hours of work, and all of it at once
        try:
            check(table, part, recipe, folder, progress)
        except NegMergeError as error:
            missing[str(error)] = error
    if missing:
        raise type(next(iter(missing.values())))("; ".join(missing))
    left_open = unstated(table, scale, changes)
    with told_plainly(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found: list[tuple[int, dict[str, Any], list[Row]]] = []
    pages: list[Path] = []
    scored: list[tuple[str, dict[str, Any]]] = []
    for number, part, recipe in trials:
        own = folder / name_of(part.recipe, recipe)
        others = sorted(path for path in folder.iterdir() if path.is_dir() and path != own)
        done = run(recipe, own, progress=progress, lenders=others)
        if not done.reported:
            report(done, progress)
        pages.append(done.page)
        scored.append((recipe.data.name, done.scores))
        rows = measured_rows(done.scores, recipe, part, wanted.direction)
        found.append((number, part.where, rows))
    lines = compare(printed, found)
    notes = [f"{runs(len(found))}."]
    if scale == "desk":
        notes.append(
            f"On a desk: {wanted.smaller(changes)}. Differences to the paper are expected."
        )
    ranking = agreement(lines)
    if ranking is not None:
        by, tau, count = ranking
        notes.append(f"Ranking of {count} rows by {by}: Kendall's τ = {tau:.2f} (1 is the same).")
    absent = sum(not line.measured for line in lines)
    if absent:
        notes.append(f"Not measured here: {absent} of the {len(lines)} rows.")
    notes += left_open
    rows = alone_and_merged(scored) if wanted.spread else frame(lines)
    made = Reproduction(table, scale, printed["caption"], rows, notes, pages, folder)
    write_tables(made)
    if wanted.spread:
        write_file(folder / f"{table}.svg", drawn(rows).encode())
    return made


def check(table: str, part: Part, recipe: Recipe, folder: Path, progress: Progress) -> None:
    """Find what a run would miss: a field that only the user can give, data, weights."""
    for field in part.missing(recipe):
        raise OptionError(
            f"{table}: {field} is not set, and the paper starts from ImageNet weights; give "
            f"--set {field}=FILE with a .safetensors file of them"
        )
    if not Run(folder / name_of(part.recipe, recipe)).finished:
        check_methods(recipe)
        make_problem(recipe, progress).check()


def name_of(shipped: str, recipe: Recipe) -> str:
    """The folder of a run, the same for all tables that need it, whatever its title.

    >>> from negmerge.recipe import load_recipe
    >>> name_of("demo", load_recipe("demo")).startswith("demo-fashion_small-0-")
    True
    """
    content = identity(recipe.model_copy(update={"title": ""}).dump())
    return f"{shipped}-{Path(recipe.data.name).name}-{recipe.seed}-{content}"


def write_tables(made: Reproduction) -> None:
    """The table as CSV, Markdown and LaTeX; the notes go with the Markdown."""
    pages = [page.relative_to(made.folder).as_posix() for page in made.pages]
    notes = "".join(f"- {line}\n" for line in (*made.notes, *(f"`{page}`" for page in pages)))
    files = {f"{made.table}.md": ""}
    if len(made.frame):
        files = Table(made.table, made.caption, made.frame).files()
    for name, text in files.items():
        if name.endswith(".md"):
            text = f"# {made.table}, {made.scale} scale: {made.caption}\n\n{text}\n{notes}"
        write_file(made.folder / name, text.encode())


def rendered(made: Reproduction) -> list[RenderableType]:
    """For the terminal: measured, published in brackets, the difference in colour."""
    from rich.table import Table as Grid

    title = f"{made.table}, {made.scale} scale: {made.caption}"
    lines = [*made.notes, *(f"page: {page}" for page in made.pages)]
    shown: list[RenderableType] = [printable(line) for line in lines]
    metrics = [metric for metric in METRICS if f"{metric}_paper" in made.frame]
    if not metrics:
        return [title, *shown]
    words = [str(c) for c in made.frame if not str(c).startswith(tuple(metrics))]
    grid = Grid(*words, title=plain(title), title_justify="left")
    for metric in metrics:
        grid.add_column(f"{metric}\nmeasured (paper)", justify="right")
    for row in made.frame.to_dict("records"):
        cells = ["" if row[word] != row[word] else f"{row[word]}" for word in words]
        grid.add_row(*cells, *(_cell(row, metric) for metric in metrics))
    return [grid, *shown]


def _cell(row: dict[Any, Any], metric: str) -> str:
    """The number, the printed one, and how far off it is: green within a point, red beyond five.

    Seconds are another machine's, and have no colour.
    """
    told, off = beside(row, metric), row.get(f"{metric}_difference")
    if metric == "seconds" or off is None or off != off:
        return told
    colour = "green" if abs(off) <= 1 else "yellow" if abs(off) <= 5 else "red"
    return f"{told} [{colour}]{off:+.2f}[/]"
