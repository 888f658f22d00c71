"""The data frames of a page: one for each section, exported together with it.

If a run has no data for a frame, `Missing` gives the reason, which the page shows.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, Field

from negmerge.errors import FileError, NegMergeError, quoted
from negmerge.evaluation.limits import is_finite, metrics_of
from negmerge.evaluation.metrics import Histogram
from negmerge.evaluation.scores import avg_gap, gap_metrics
from negmerge.evaluation.search import read_rows
from negmerge.merging.engine import merge
from negmerge.reports.page_data import PageData
from negmerge.reports.ranking import criterion_losses, gap_interval, ranked
from negmerge.runs.records import Record, check_record, read_record
from negmerge.runs.result import Scored
from negmerge.runs.store import RESTORE, Run
from negmerge.support.reading import MAX_JSON, read_bytes, read_csv
from negmerge.vectors.inspection import describe_patch, natural_key
from negmerge.vectors.task_vector import TaskVector

Cells = dict[str, Any]
"""One row of a table, by column."""

COSTS = ("sparsity", "evaluations", "samples_processed", "cost_ratio", "seconds")
"""The last columns of the scores."""
POOL_SIZES = 10
"""The number of pool sizes, at most, for which the page merges a consensus."""
NOT_KEPT = "the members were merged and deleted one by one (pool.keep is false)"


class Missing(NegMergeError):
    """The run has no data for a section; the message gives the reason."""


class NotMeasured(Missing):
    """The run was not asked for the data of a section; the page leaves the section out."""


# ------------------------------------------------------------------------------------------- scores


def scores_frame(page: PageData) -> pd.DataFrame:
    """The original and the retrained model, then every method, ranked by the criterion.

    The criterion's loss is a column unless another column has the same absolute values.
    """
    result = page.result
    losses = criterion_losses(result, page.criterion)
    rows = [_score_cells("original", result.original, page, losses)]
    if result.retrain is not None:
        rows.append(_score_cells("retrained", result.retrain, page, losses))
    for row in ranked(result, page.criterion, page.retain):
        rows.append(_score_cells(row.method, row, page, losses))
    frame = pd.DataFrame(rows).dropna(axis=1, how="all")
    if page.loss_column in frame:
        known = frame.dropna(subset=page.loss_column)
        loss = known[page.loss_column].abs()
        others = [name for name in (*page.metrics, "avg_gap") if name in frame]
        if any(loss.equals(known[name].abs()) for name in others):
            return frame.drop(columns=page.loss_column)
    return frame


def _score_cells(
    name: str, row: Scored, page: PageData, losses: Mapping[str, float | None]
) -> Cells:
    cells = {"method": name, "data": getattr(row, "splits", None)}
    cells["scale"] = getattr(row, "scale", None)
    for metric in page.metrics:
        low, high = row.intervals.get(metric, (None, None))
        cells |= {metric: row.value(metric), f"{metric}_low": low, f"{metric}_high": high}
    bounds = None if name == "retrained" else gap_interval(row, page.result)
    low, high = bounds or (None, None)
    cells |= {"avg_gap": row.avg_gap, "avg_gap_low": low, "avg_gap_high": high}
    cells["tow"] = row.tow
    cells[page.loss_column] = losses.get(name)
    return cells | {column: getattr(row, column, None) for column in COSTS}


def members_frame(page: PageData) -> pd.DataFrame:
    """Every pool member: its settings, and its scores with its own λ."""
    if not page.result.pool:
        raise Missing("no pool was trained, because all methods are rivals")
    rows: list[Cells] = []
    for number, member in enumerate(page.result.pool, 1):
        row: Cells = {"member": number, "id": member.id}
        row |= {name: _setting(member.settings, name) for name in page.recipe.pool.grid}
        if page.recipe.pool.checkpoints:
            row["epoch"] = member.epoch or _setting(member.settings, "epochs")
        row |= {"scale": member.scale} | {name: member.value(name) for name in page.metrics}
        row |= {"avg_gap": member.avg_gap, "samples": member.samples, "seconds": member.seconds}
        rows.append(row)
    frame = pd.DataFrame(rows).dropna(axis=1, how="all")
    if page.forget.name not in frame:
        unmeasured = "this run did not score its members one by one"
        raise Missing(unmeasured if page.recipe.pool.keep else NOT_KEPT)
    return frame


def tries_frame(page: PageData) -> pd.DataFrame:
    """Every try of every tuned rival with its scores; `taken` marks the best."""
    rows: list[Cells] = []
    for method in page.result.methods:
        for tried in method.tried:
            row: Cells = {"method": method.method}
            row["tried"] = ", ".join(f"{k} = {v:g}" for k, v in tried.options.items())
            row |= tried.metrics | {"loss": tried.loss, "samples": tried.samples}
            row |= {"seconds": tried.seconds, "failure": tried.failure}
            rows.append(row | {"taken": tried.options.items() <= method.chosen.items()})
    if not rows:
        raise NotMeasured("no rival was tuned")
    return pd.DataFrame(rows).dropna(axis=1, how="all")


def sweeps_frame(page: PageData) -> pd.DataFrame:
    """The metrics of every merged method at every λ; `chosen` marks the chosen λ."""
    frames: list[pd.DataFrame] = []
    retrain = page.result.retrain
    reference = {} if retrain is None else retrain.measured()
    gaps = gap_metrics(reference)
    for method in (row for row in page.result.methods if row.searched):
        swept = method.method if method.member is None else f"member-{method.member}"
        rows = read_rows(_existing(page.run, page.run.sweep(swept)))
        rows = [metrics_of(row) for row in rows if is_finite(row)]
        if gaps and rows[0].keys() >= {*gaps}:
            rows = [row | {"avg_gap": avg_gap(row, reference)} for row in rows]
        frame = pd.DataFrame(rows)
        frame.insert(0, "method", method.method)
        frame.insert(2, "chosen", frame["scale"] == method.scale)
        frames.append(frame)
    if not frames:
        raise Missing("no method searched λ")
    return pd.concat(frames, ignore_index=True)


# ------------------------------------------------------------------------------------- task vectors


def prefixes_frame(page: PageData) -> pd.DataFrame:
    """The sparsity of the consensus of the first n members, and that of random signs.

    Elements that the first member does not change, such as frozen weights, are zero in both.
    """
    run, recipe = page.run, page.recipe
    if not page.result.pool:
        raise Missing("no pool was trained")
    if not recipe.pool.keep:
        raise Missing(NOT_KEPT)
    base = _existing(run, run.base)
    members = [_existing(run, run.member(member.id)) for member in page.result.pool]
    n = len(members)
    sizes = sorted({max(round(n * k / POOL_SIZES), 1) for k in range(1, POOL_SIZES + 1)} | {1})
    rows: list[Cells] = []
    for size in sizes:
        tau = merge(base, members[:size], progress=page.progress, **recipe.terms.arguments())
        sparsity = 100 * tau.sparsity()
        unchanged = rows[0]["sparsity"] if rows else sparsity
        flips = unchanged + (100 - unchanged) * (1 - 2 ** (1 - size))
        rows.append({"members": size, "sparsity": sparsity, "coin_flips": flips})
    return pd.DataFrame(rows)


def sparsity_frame(page: PageData, by: str) -> pd.DataFrame:
    """The share of zeros of every patch, by depth or component."""
    rows: list[Cells] = []
    for title, tau in _patches(page).items():
        for group, found in tau.sparsity(by=by).items():  # pyright: ignore
            row = {"method": title, by: group, "tensors": found.tensors, "elements": found.elements}
            row |= {"nonzero": found.nonzero, "sparsity": 100 * found.element_weighted}
            rows.append(row | {"sparsity_tensor_mean": 100 * found.tensor_mean})
    return pd.DataFrame(rows)


def dissent_frame(page: PageData) -> pd.DataFrame:
    """For each member, the share of elements where only this member disagreed with the others."""
    numbers = {member.id: number for number, member in enumerate(page.result.pool, 1)}
    for tau in _patches(page).values():
        members = describe_patch(tau)["members"]
        if any("sole_dissent" in member for member in members):
            rows: list[Cells] = [
                {
                    "member": numbers.get(Path(member["name"]).stem, member["name"]),
                    "sole_dissent": 100 * member["sole_dissent"],
                    "fingerprint": member["fingerprint"],
                }
                for member in members
            ]
            return pd.DataFrame(sorted(rows, key=lambda row: natural_key(str(row["member"]))))
    raise Missing("only merges of three or more members record it; this run has no such patch")


def _patches(page: PageData) -> dict[str, TaskVector]:
    titles = [row.method for row in page.result.methods if row.merged]
    if not titles:
        raise Missing("no task vectors were merged, because all methods are rivals")
    return {title: TaskVector.load(_existing(page.run, page.run.patch(title))) for title in titles}


# ----------------------------------------------------------------------- files in `report/data`


class Bin(BaseModel):
    """A bin of a histogram: the number of samples of a set between `low` and `high`.

    `member`: the attack classifies samples in this bin as training data.
    """

    model: str
    set: str
    low: float
    high: float
    count: int
    member: bool


def bins_of(run: Run, histogram: Histogram) -> list[Bin]:
    """Read the histograms of a metric, of all models."""
    path = run.data / histogram.file
    if not path.exists():
        raise Missing("this run did not record histograms")
    return check_record(read_csv(path), list[Bin], path, RESTORE)


def bins_frame(bins: Sequence[Bin], models: Sequence[str]) -> pd.DataFrame:
    """The histograms of some models: one row for each bin, with the counts of all sets."""
    found: dict[tuple[str, float], Cells] = {}
    for one in (one for one in bins if one.model in models):
        new = {"model": one.model, "low": one.low, "high": one.high}
        row = found.setdefault((one.model, one.low), new)
        row |= {one.set: one.count, "taken_for_member": one.member}
    return pd.DataFrame(list(found.values()))


class Picture(Record):
    """A cell of a panel: a picture in `report/data` with an alternative text, or only a caption."""

    caption: str
    alt: str = ""
    file: str | None = None


class PictureRow(Record):
    """A row of a panel."""

    cells: list[Picture]


class PanelData(Record):
    """The content of a panel of a scenario, `report/data/ID.json`, or why it has none."""

    text: str = ""
    columns: list[str] = Field(default_factory=list)
    rows: list[PictureRow] = Field(default_factory=list)
    missing: str | None = None


def panel_of(run: Run, id: str) -> tuple[PanelData, dict[str, str]]:
    """Read a panel, and its pictures as data URIs by file name."""
    path = run.data / f"{id}.json"
    if not path.exists():
        raise Missing("this run did not draw it")
    found: PanelData = read_record(path, PanelData, RESTORE)
    if found.missing is not None:
        raise Missing(found.missing)
    files = [cell.file for row in found.rows for cell in row.cells if cell.file is not None]
    return found, {
        name: f"data:image/png;base64,{base64.b64encode(_png(run, name)).decode()}"
        for name in files
    }


def _png(run: Run, name: str) -> bytes:
    """Read a PNG file of `report/data`; refuse paths and symbolic links to anywhere else."""
    path = run.data / name
    if path.name != name or path.is_symlink():
        raise FileError(
            f"{path.parent}: {quoted(name)} is not the name of a picture in this folder"
        )
    raw = read_bytes(path, MAX_JSON)
    if not raw.startswith(b"\x89PNG"):
        raise FileError(f"{path}: is not a PNG")
    return raw


# ------------------------------------------------------------------------------------------ helpers


def records(frame: pd.DataFrame) -> list[Cells]:
    """The rows of a frame as dictionaries.

    >>> records(pd.DataFrame({"a": [1], "b": ["x"]}))
    [{'a': 1, 'b': 'x'}]
    """
    return frame.to_dict("records")  # pyright: ignore[reportReturnType]


def groups(frame: pd.DataFrame, by: str) -> dict[str, list[Cells]]:
    """The rows of a frame grouped by a column, in order of appearance.

    >>> groups(pd.DataFrame({"a": ["y", "x", "y"], "b": [1, 2, 3]}), "a")["y"]
    [{'a': 'y', 'b': 1}, {'a': 'y', 'b': 3}]
    """
    return {str(name): records(own) for name, own in frame.groupby(by, sort=False)}


def _existing(run: Run, path: Path) -> Path:
    """Return the path of a file of the run; raise `Missing` if there is none."""
    if not path.exists():
        raise Missing(f"{path.relative_to(run.folder)} is missing")
    return path


def _setting(tree: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key."""
    value: Any = tree
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise FileError(f"pool: a member in scores.json has no setting {key!r}")
        value = value[part]
    return value if not isinstance(value, dict) else json.dumps(value)
