"""`negmerge reproduce TABLE`: run its recipes, then put what came out beside what was printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from negmerge.files import told_plainly, write_file
from negmerge.pipeline import run
from negmerge.progress import Progress, Quiet
from negmerge.report.export import Table
from negmerge.report.page import report
from negmerge.reproduction.compare import METRICS, agreement, compare, frame, measured_rows
from negmerge.reproduction.experiments import Scale, experiment, published, unstated

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Reproduction:
    """A table, measured beside published.

    table, scale: which. frame: measured, published and their difference. notes: what must be known
    to read it. folder: where the runs and the table are.
    """

    table: str
    scale: Scale
    caption: str
    frame: pd.DataFrame
    notes: list[str]
    folder: Path


def needs(table: str, scale: Scale) -> str:
    """What a table takes, for the decision to begin."""
    from negmerge.reproduction.estimate import estimate

    wanted = experiment(table)
    recipes = [part.load() for part in wanted.parts(scale)]
    total = reduce(add, [estimate(recipe) for recipe in recipes for _ in wanted.trials(scale)])
    data = ", ".join(sorted({recipe.data.name for recipe in recipes}))
    return f"{table} at {scale} scale needs the data {data} and {total}"


def reproduce(
    table: str,
    scale: Scale = "desk",
    out: Path | None = None,
    changes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Reproduction:
    """Make a table of the paper; run again, it goes on.

    out: where the runs and the table go; runs/TABLE-SCALE if not given.
    changes: `key=value` for every recipe.
    """
    wanted, printed = experiment(table), published()[table]
    folder = Path("runs") / f"{table}-{scale}" if out is None else out
    with told_plainly(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for number, part in enumerate(wanted.parts(scale), 1):
        for seed in wanted.trials(scale):
            recipe = part.load(seed, tuple(changes))
            done = run(
                recipe, folder / f"{number}-{part.recipe}-{seed}", progress=progress or Quiet()
            )
            if not done.page.exists():
                report(done, progress)
            found.append((part.where, measured_rows(done.scores, recipe)))
    lines = compare(printed, found)
    notes = [f"{len(found)} runs; the pages of the runs are in their folders."]
    if scale == "desk":
        notes.append(f"On a desk: {wanted.stands_in}. Differences to the paper are expected.")
    ranking = agreement(printed, lines)
    if ranking is not None:
        by, tau, count = ranking
        notes.append(
            f"Ranking of {count} methods by {by}: Kendall's τ = {tau:.2f} (1 is the same)."
        )
    absent = [line.printed["method"] for line in lines if not line.measured]
    if absent:
        notes.append(f"Not measured here: {', '.join(absent)}.")
    notes += [f"The paper does not state {one.what}; here: {one.ours}." for one in unstated(table)]
    made = Reproduction(table, scale, printed["caption"], frame(lines), notes, folder)
    for name, text in Table(table, made.caption, made.frame).files().items():
        lines_of = f"{text}\n" + "".join(f"- {note}\n" for note in notes)
        write_file(folder / name, (lines_of if name.endswith(".md") else text).encode())
    return made


def rendered(made: Reproduction) -> list[RenderableType]:
    """For the terminal: measured, published in brackets, the difference in colour."""
    from rich.table import Table as Grid

    metrics = [metric for metric in METRICS if f"{metric}_paper" in made.frame]
    words = [c for c in made.frame if not str(c).startswith(tuple(metrics))]
    title = f"{made.table}, {made.scale} scale: {made.caption}"
    grid = Grid(*map(str, words), title=title, title_justify="left")
    for metric in metrics:
        grid.add_column(f"{metric}\nmeasured (paper)", justify="right")
    for row in made.frame.to_dict("records"):
        cells = ["" if row[word] != row[word] else str(row[word]) for word in words]
        grid.add_row(*cells, *(_cell(row, metric) for metric in metrics))
    return [grid, *made.notes]


def _cell(row: dict[Any, Any], metric: str) -> str:
    """The number, the printed one, and how far off it is: green within a point, red beyond five."""
    found, printed = row.get(metric), row[f"{metric}_paper"]
    if found is None or found != found:
        return f"– ({printed:.2f})" if printed == printed else ""
    off = found - printed
    colour = "green" if abs(off) <= 1 else "yellow" if abs(off) <= 5 else "red"
    return f"{found:.2f} ({printed:.2f}) [{colour}]{off:+.2f}[/]"
