"""The strength λ: `sweep` runs the model over a grid and is saved, `choose` is pure and instant."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from negmerge.data.feeds import Feed
from negmerge.errors import FileError, OptionError, ValueRangeError
from negmerge.evaluation.predictions import predict
from negmerge.evaluation.scores import METRICS, accuracy, avg_gap, score
from negmerge.files import write_file
from negmerge.recipe import Search
from negmerge.registry import Registry
from negmerge.task_vector import TaskVector

Row = dict[str, float]
"""`scale` and what was measured there: `acc_<set>` for every set, `mia` if λ may look."""


def measure(
    model: nn.Module, feeds: Mapping[str, Feed], advance: Callable[[int], None] = lambda count: None
) -> Row:
    """Accuracy on every set; membership inference too where a test set is among them."""
    found = {name: predict(model, feed, advance) for name, feed in feeds.items()}
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


# ----------------------------------------------------------------------------------------- criteria


@dataclass(frozen=True)
class Criterion:
    """How λ is chosen from the rows of a sweep.

    loss: from a row, the row of λ = 0 and the retrained model's scores to a number; the smallest
        wins, and of equals the smallest λ. None: the row may not be chosen.
    looks: whether it chooses on the data that is reported.
    """

    name: str
    summary: str
    loss: Callable[[Row, Row, Mapping[str, Any] | None], float | None]
    looks: bool = False


@dataclass(frozen=True)
class Choice:
    """The chosen λ, how good it was by the criterion, and whether the largest was as good."""

    scale: float
    loss: float
    edge: bool


def choose(
    rows: Iterable[Row], criterion: Criterion, retrain: Mapping[str, Any] | None = None
) -> Choice:
    """The best row by a criterion.

    >>> rows = [dict(scale=s, acc_forget=f, acc_retain=99.0, acc_holdout=90.0)
    ...         for s, f in ((0.0, 100.0), (0.5, 91.0), (1.0, 60.0))]
    >>> choose(rows, criteria.get("match_holdout")).scale
    0.5
    """
    ordered = sorted(rows, key=lambda row: row["scale"])
    if not ordered or ordered[0]["scale"] != 0:
        raise OptionError(
            "a sweep must begin at λ = 0: the original model is what others differ from"
        )
    losses = [(criterion.loss(row, ordered[0], retrain), row["scale"]) for row in ordered]
    allowed = [(loss, scale) for loss, scale in losses if loss is not None]
    if not allowed:
        raise ValueRangeError(f"no λ satisfies {criterion.name}; try other scales")
    loss, scale = min(allowed)
    return Choice(scale, loss, losses[-1][0] == loss)


def _match_holdout(row: Row, zero: Row, retrain: Mapping[str, Any] | None) -> float:
    # The original's accuracy on what it never saw is what it would have had on the forget set. The
    # unlearned model's own would do as well, but a destroyed model has both at chance, and matches.
    return abs(row["acc_forget"] - zero["acc_holdout"])


def _keep_retain(row: Row, zero: Row, retrain: Mapping[str, Any] | None) -> float | None:
    return row["acc_forget"] if row["acc_retain"] >= 0.95 * zero["acc_retain"] else None


def _oracle(row: Row, zero: Row, retrain: Mapping[str, Any] | None) -> float:
    if retrain is None:
        raise OptionError("criterion oracle needs the retrained model's scores")
    return avg_gap(row, retrain)


criteria: Registry[Criterion] = Registry("criterion")
for _criterion in (
    Criterion(
        "match_holdout",
        "forget accuracy nearest to the original's accuracy on held-out data; needs no retraining",
        _match_holdout,
    ),
    Criterion(
        "keep_retain",
        "lowest forget accuracy with at least 95 % of the original's retain accuracy",
        _keep_retain,
    ),
    Criterion(
        "oracle",
        "smallest Avg. Gap to the retrained model, on the reported data, as in the paper",
        _oracle,
        looks=True,
    ),
):
    criteria.register(_criterion.name, _criterion)
