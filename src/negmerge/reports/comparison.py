"""Several runs side by side: whether their numbers can be compared, and the tables of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from negmerge.errors import FileError, MismatchError
from negmerge.evaluation.metrics import Metric
from negmerge.reports.export import DataTable
from negmerge.reports.frames import Cells, records, scores_frame
from negmerge.reports.names import COMPARED, Named, groups_of
from negmerge.reports.page_data import PageData
from negmerge.reports.questions import questions
from negmerge.reports.ranking import join_names
from negmerge.reports.styles import Styles, styles_of
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.runs.store import Run

Runs = Mapping[str, PageData]
"""The runs of a comparison, by name."""
NOT_SHOWN = ("data", "tow", "evaluations", "samples_processed", "sparsity")
"""Columns of the scores that the comparison leaves out."""


def load_runs(runs: Sequence[Run]) -> dict[str, PageData]:
    """Read finished runs; raise if one is not finished, or cannot be compared with the first."""
    places = [run.folder.resolve() for run in runs]
    found: dict[str, PageData] = {}
    for number, run in enumerate(runs):
        if places.index(places[number]) < number:
            raise FileError(f"{run.folder}: is given twice; name each run once")
        if not run.finished:
            raise FileError(
                f"{run.folder}: the run is not finished; finish it with `negmerge unlearn`, or "
                "leave it out"
            )
        page = PageData(run, load_recipe(run.recipe), run.result)
        if found:
            _check_metrics(next(iter(found.values())), page)
        found[_name(run.folder, places)] = page
    return found


def _name(folder: Path, places: Sequence[Path]) -> str:
    """The name of the folder of a run; its path if another run has the same name."""
    name = folder.resolve().name
    return name if [place.name for place in places].count(name) == 1 else str(folder)


def _check_metrics(first: PageData, other: PageData) -> None:
    """Raise if two runs measure forgetting or keeping by different metrics."""
    for what in ("forget", "retain"):
        ours, theirs = (_identity(getattr(page, what)) for page in (first, other))
        if ours != theirs:
            raise MismatchError(
                f"{other.run.folder}: its {what} metric is {theirs[0]} ({theirs[1]}), that of "
                f"{first.run.folder} is {ours[0]} ({ours[1]}); runs with different metrics cannot "
                "be compared: report them one by one"
            )


def _identity(metric: Metric) -> tuple[str, str, str]:
    return metric.name, metric.axis, metric.better


def names_in(runs: Runs) -> dict[str, Named]:
    """How the page calls the methods of all runs, by title; options may differ and are left out."""
    found = {title: named for page in runs.values() for title, named in page.names.items()}
    return {
        title: named._replace(note="" if named.label == title else title)
        for title, named in found.items()
    }


def styles_in(runs: Runs) -> Styles:
    """The styles of the models of all runs."""
    titles = [row.method for page in runs.values() for row in page.result.methods]
    return styles_of(dict.fromkeys(("original", "retrained", *titles)))


def scores_table(runs: Runs) -> DataTable:
    """Every model of every run; those with the same name follow each other."""
    rows: dict[str, list[Cells]] = {}
    for name, page in runs.items():
        for cells in records(scores_frame(page)):
            shown = {k: v for k, v in cells.items() if k not in (*NOT_SHOWN, page.loss_column)}
            rows.setdefault(str(cells["method"]), []).append(shown | {"run": name})
    frame = pd.DataFrame([cells for own in rows.values() for cells in own])
    frame = frame.dropna(axis=1, how="all")
    frame.insert(1, "run", frame.pop("run"))
    columns = {name: metric for page in runs.values() for name, metric in page.columns.items()}
    methods = {row.method: row for page in runs.values() for row in page.result.methods}
    groups = {COMPARED: ["original", "retrained"]} | groups_of(methods.values())
    return DataTable("scores", "Scores of the methods of all runs", frame, columns, groups)


def verdicts_table(runs: Runs) -> DataTable:
    """What was to be forgotten in each run, and the verdicts of its own page."""
    rows: list[Cells] = []
    for name, page in runs.items():
        asked, *others = questions(page)
        row: Cells = {"run": name, "seed": str(page.recipe.seed), "to be forgotten": asked.numbers}
        row["method"] = page.label(page.first)
        for one in others:
            row[one.question] = one.answer and one.answer.word
        rows.append(row)
    return DataTable("verdicts", "The verdicts of the runs", pd.DataFrame(rows))


def recipes_table(runs: Runs) -> DataTable | None:
    """The fields of the recipes that differ; None if all are equal."""
    trees = {name: fields_of(page.recipe) for name, page in runs.items()}
    keys = list(dict.fromkeys(key for tree in trees.values() for key in tree))
    rows = [
        {"field": key} | {name: tree.get(key, "") for name, tree in trees.items()}
        for key in keys
        if len({tree.get(key) for tree in trees.values()}) > 1
    ]
    if not rows:
        return None
    return DataTable("recipes", "Fields of the recipes that differ", pd.DataFrame(rows))


def fields_of(recipe: Recipe) -> dict[str, str]:
    """The fields of a recipe by dotted name, with a field for each method.

    >>> found = fields_of(Recipe(seed=3, methods=[{"name": "ties", "options": {"density": 0.1}}]))
    >>> found["seed"], found["train.batch"], found["methods.ties"]
    ('3', '256', 'density = 0.1')
    """
    tree: dict[str, Any] = yaml.safe_load(recipe.dump())
    plain = flat({name: value for name, value in tree.items() if name != "methods"})
    methods = {f"methods.{one.title}": one.options for one in recipe.methods}
    return plain | {
        name: ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items()) or "yes"
        for name, options in methods.items()
    }


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The values of nested mappings as JSON, by dotted name.

    >>> flat({"a": {"b": 1, "c": [2, 3]}, "d": None})
    {'a.b': '1', 'a.c': '[2, 3]', 'd': 'null'}
    """
    found: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.dumps(value, ensure_ascii=False)
    return found


def differences(runs: Runs) -> list[str]:
    """Warnings: what else differs, so that numbers of two runs differ not only by the methods."""
    found: list[str] = []
    pages = list(runs.values())
    if len({page.result.splits.data for page in pages}) > 1:
        found.append("The runs have different data sets: their numbers are of different data.")
    elif len({page.result.splits.fingerprint for page in pages}) > 1:
        found.append(
            "The runs forget or measure different samples: a difference of two numbers may come "
            "from the samples."
        )
    without = [name for name, page in runs.items() if page.result.retrain is None]
    if 0 < len(without) < len(runs):
        found.append(
            f"No retrained model in {join_names(without)}: its distance from retraining was not "
            "measured."
        )
    return found
