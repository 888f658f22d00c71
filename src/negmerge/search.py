"""The strength λ: a sweep runs the model over a grid; its rows are saved, so that choosing again
(`criteria.py`) never runs the model again."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from negmerge.criteria import Criterion, Row, choose
from negmerge.data.feeds import Feed, Remembered
from negmerge.errors import FileError, ValueRangeError
from negmerge.evaluation.predictions import predict_all
from negmerge.evaluation.scores import METRICS, accuracy, score
from negmerge.files import write_file
from negmerge.recipe import Search
from negmerge.task_vector import TaskVector


def measure(
    model: nn.Module, feeds: Mapping[str, Feed], advance: Callable[[int], None] = lambda count: None
) -> Row:
    """Accuracy on every set; membership inference too where a test set is among them."""
    found = predict_all(model, feeds, advance)
    if "test" in found:
        scores = score(found)
        return {metric: scores[metric] for metric in METRICS}
    return {f"acc_{name}": accuracy(predictions) for name, predictions in found.items()}


def sweep(
    model: nn.Module,
    tau: TaskVector,
    scales: Sequence[float],
    feeds: Mapping[str, Feed],
    *,
    partial: Path | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Row]:
    """Measure θ − λτ for every λ, in place on the model, which is left as it was.

    scales: the λ, rising. feeds: the sets to run over.
    partial: a file that keeps the rows while the sweep runs; rows in it are not measured again.
    """
    rows = read_rows(partial) if partial is not None and partial.exists() else []
    size = sum(len(feed) for feed in feeds.values())
    done = {row["scale"] for row in rows}
    for scale in scales:
        if scale in done:
            advance(size)
            continue
        try:
            with tau.applied(model, -scale):
                rows.append({"scale": scale} | measure(model, feeds, advance))
        except ValueRangeError as error:
            raise ValueRangeError(f"λ = {scale:g}: {error}") from None
        if partial is not None:
            write_rows(partial, rows)
    return rows


def search_scale(
    model: nn.Module,
    tau: TaskVector,
    search: Search,
    criterion: Criterion,
    reference: Mapping[str, Any] | None,
    feeds: Mapping[str, Feed],
    *,
    partial: Path | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Row]:
    """Sweep the grid, and on beyond its edge while the largest λ is as good as any."""
    scales = search.grid()
    feeds = {name: Remembered(feed) for name, feed in feeds.items()}
    while True:
        rows = sweep(model, tau, scales, feeds, partial=partial, advance=advance)
        more = search.beyond(scales)
        if not more or not choose(rows, criterion, reference).edge:
            return rows
        scales = (*scales, *more)
        advance = lambda count: None  # noqa: E731 (what was announced is done)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a sweep as CSV, atomically; numbers are read back exactly."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: repr(v) for k, v in row.items()} for row in rows)
    write_file(path, text.getvalue().encode())


def read_rows(path: Path) -> list[Row]:
    """Read a sweep.

    >>> path = getfixture("tmp_path") / "s.csv"
    >>> write_rows(path, [{"scale": 0.1, "acc_forget": 2 / 3}])
    >>> read_rows(path)
    [{'scale': 0.1, 'acc_forget': 0.6666666666666666}]
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    except (ValueError, TypeError, AttributeError) as error:
        raise FileError(f"{path}: is not a sweep: {error}; remove it and run again") from None
