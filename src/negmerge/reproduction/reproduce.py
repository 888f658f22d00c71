"""`negmerge reproduce TABLE`: run its recipes, then put what came out beside what was printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from negmerge.errors import printable
from negmerge.files import told_plainly, write_file
from negmerge.pipeline import run
from negmerge.progress import Progress, Quiet
from negmerge.recipe import Recipe
from negmerge.report.export import Table
from negmerge.report.page import report
from negmerge.reproduction.compare import METRICS, Row, agreement, compare, frame, measured_rows
from negmerge.reproduction.experiments import Scale, experiment, published, unstated
from negmerge.scenario import identity

if TYPE_CHECKING:
    from rich.console import RenderableType


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


def needs(table: str, scale: Scale) -> str:
    """What a table takes, for the decision to begin."""
    from negmerge.reproduction.estimate import estimate

    wanted = experiment(table)
    recipes = {r.dump(): r for part in wanted.parts(scale) for r in [part.load()]}.values()
    total = reduce(add, [estimate(recipe) for recipe in recipes for _ in wanted.trials(scale)])
    data = {recipe.data.name for recipe in recipes}
    data |= {recipe.clip.control.name for recipe in recipes if recipe.clip is not None}
    return (
        f"{table} at {scale} scale: {len(recipes) * len(wanted.trials(scale))} runs on "
        f"{', '.join(sorted(data))}; {total}"
    )


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
        share it there.
    changes: `key=value` for every recipe.
    seeds: of the trials; as many as the paper's, or one on a desk, if not given.
    """
    wanted, printed = experiment(table), published()[table]
    folder = Path("runs") / f"reproduce-{scale}" if out is None else out
    with told_plainly(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found: list[tuple[int, dict[str, Any], list[Row]]] = []
    pages: list[Path] = []
    for number, part in enumerate(wanted.parts(scale)):
        for seed in wanted.trials(scale) if seeds is None else seeds:
            recipe = part.load(seed, changes)
            done = run(recipe, folder / name_of(part.recipe, recipe), progress=progress or Quiet())
            if not done.page.exists():
                report(done, progress)
            pages.append(done.page)
            rows = measured_rows(done.scores, recipe, part, wanted.direction)
            found.append((number, part.where, rows))
    lines = compare(printed, found)
    notes = [f"{len(found)} run{'s' if len(found) > 1 else ''}."]
    if scale == "desk":
        notes.append(f"On a desk: {wanted.stands_in}. Differences to the paper are expected.")
    ranking = agreement(lines)
    if ranking is not None:
        by, tau, count = ranking
        notes.append(f"Ranking of {count} rows by {by}: Kendall's τ = {tau:.2f} (1 is the same).")
    absent = sum(not line.measured for line in lines)
    if absent:
        notes.append(f"Not measured here: {absent} of the {len(lines)} rows.")
    notes += [f"The paper does not state {one.what}; here: {one.ours}." for one in unstated(table)]
    made = Reproduction(table, scale, printed["caption"], frame(lines), notes, pages, folder)
    write_tables(made)
    return made


def name_of(shipped: str, recipe: Recipe) -> str:
    """The folder of a run, the same for all tables that need it.

    >>> from negmerge.recipe import load_recipe
    >>> name_of("demo", load_recipe("demo")).startswith("demo-fashion_small-0-")
    True
    """
    return f"{shipped}-{Path(recipe.data.name).name}-{recipe.seed}-{identity(recipe.dump())}"


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
    grid = Grid(*words, title=title, title_justify="left")
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
    found, printed = row.get(metric), row[f"{metric}_paper"]
    if printed != printed:
        return ""
    if found is None or found != found:
        return f"– ({printed:.2f})"
    if metric == "seconds":
        return f"{found:.2f} ({printed:.0f})"
    off = found - printed
    colour = "green" if abs(off) <= 1 else "yellow" if abs(off) <= 5 else "red"
    return f"{found:.2f} ({printed:.2f}) [{colour}]{off:+.2f}[/]"
