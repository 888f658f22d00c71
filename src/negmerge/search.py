"""The strength λ: a sweep runs the model over a grid; its rows are saved, so that choosing again
(`criteria.py`) never runs the model again."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from torch import nn

from negmerge.criteria import Criterion, Row, choose
from negmerge.data.feeds import Feed, Remembered
from negmerge.errors import FileError, ValueRangeError
from negmerge.evaluation.linear import LinearRay
from negmerge.evaluation.predictions import Predictions, predict_all
from negmerge.evaluation.scores import METRICS, accuracy, score
from negmerge.files import write_file
from negmerge.models.linearized import LinearizedClassifier
from negmerge.reading import read_csv
from negmerge.recipe import Search
from negmerge.task_vector import TaskVector


def measure(
    model: nn.Module, feeds: Mapping[str, Feed], advance: Callable[[int], None] = lambda count: None
) -> Row:
    """Accuracy on every set; membership inference too where a test set is among them."""
    return row_of(predict_all(model, feeds, advance))


def row_of(found: Mapping[str, Predictions]) -> Row:
    """What a criterion may look at."""
    if "test" in found:
        scores = score(found)
        return {metric: scores[metric] for metric in METRICS}
    return {f"acc_{name}": accuracy(predictions) for name, predictions in found.items()}


class Ray:
    """The models θ − λτ, each measured once, in place on the model, which is left as it was.

    feeds: the sets to run over.
    partial: a file that keeps the rows while they are measured; rows in it are not measured again.
    """

    def __init__(
        self,
        model: nn.Module,
        tau: TaskVector,
        feeds: Mapping[str, Feed],
        partial: Path | None = None,
        advance: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.model, self.tau, self.feeds = model, tau, feeds
        self.partial, self.advance = partial, advance
        known = read_rows(partial) if partial is not None and partial.exists() else []
        self.rows = {row["scale"]: row for row in known}
        self.linear = LinearRay(model, tau) if isinstance(model, LinearizedClassifier) else None

    def at(self, scale: float) -> Row:
        """The row of one λ."""
        if scale in self.rows:
            self.advance(sum(len(feed) for feed in self.feeds.values()))
            return self.rows[scale]
        try:
            if self.linear is not None:
                found = row_of(self.linear.predictions(scale, self.feeds, self.advance))
            else:
                with self.tau.applied(self.model, -scale):
                    found = measure(self.model, self.feeds, self.advance)
        except ValueRangeError as error:
            raise ValueRangeError(f"λ = {scale:g}: {error}") from None
        self.rows[scale] = {"scale": scale} | found
        if self.partial is not None:
            write_rows(self.partial, list(self.rows.values()))
        return self.rows[scale]

    @property
    def evaluations(self) -> int:
        """How many times the data ran through a model."""
        return len(self.rows) if self.linear is None else 1

    def walked(self) -> list[Row]:
        """All rows, λ rising."""
        return [self.rows[scale] for scale in sorted(self.rows)]


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
) -> Ray:
    """Sweep the grid, and on beyond its edge while a larger λ may be better."""
    scales = search.grid()
    feeds = {name: Remembered(feed) for name, feed in feeds.items()}
    ray = Ray(model, tau, feeds, partial, advance)

    def loss(scale: float) -> float | None:
        return criterion.loss(ray.at(scale), ray.rows[0.0], reference)

    while True:
        if search.strategy == "bracket" and ray.linear is None:  # where it is, λ cost nothing
            bracket(loss, scales)
        else:
            for scale in scales:
                ray.at(scale)
        more = search.beyond(scales)
        if not more or not choose(ray.walked(), criterion, reference).edge:
            return ray
        scales = (*scales, *more)
        ray.advance = lambda count: None  # what was announced is done


def bracket(loss: Callable[[float], float | None], scales: Sequence[float]) -> None:
    """Ask for few losses that are enough to know the best λ, if larger λ forget and lose more.

    The largest λ that is allowed is found by halving. Three more questions check the assumption:
    the λ below it must not be better, nor as good (then smaller ones are asked for), and the second
    above it must not be allowed. If what was seen contradicts the assumption, all λ are asked for.

    >>> asked = []
    >>> def loss(scale):
    ...     asked.append(scale)
    ...     return None if scale > 12 else 90.0 - scale
    >>> bracket(loss, range(21)); len(set(asked)), 12 in asked
    (7, True)

    loss: of a λ; None if it is not allowed. scales: rising, the first is 0.
    """
    seen: dict[int, float | None] = {}

    def at(place: int) -> float | None:
        if place not in seen:
            seen[place] = loss(scales[place])
        return seen[place]

    def halved(low: int, high: int, goes_on: Callable[[float | None], bool]) -> int:
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if goes_on(at(middle)) else (low, middle)
        return low

    at(0)
    best = halved(0, len(scales), lambda own: own is not None)
    if best > 0 and at(best - 1) == at(best):  # of equals the grid's choice is the smallest
        halved(-1, best, lambda own: own != at(best))
    if best + 2 < len(scales):
        at(best + 2)
    known = [seen[place] for place in sorted(seen)]
    allowed = [own for own in known if own is not None]
    falls = all(a >= b for a, b in pairwise(allowed))
    if not falls or None in known[: len(allowed)]:
        for place in range(len(scales)):
            at(place)


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
        rows = [{k: float(v) for k, v in row.items()} for row in read_csv(path)]
    except (ValueError, FileError) as error:
        raise FileError(f"{path}: is not a sweep: {error}; remove it and run again") from None
    if "scale" not in rows[0] or not all(isfinite(v) for row in rows for v in row.values()):
        raise FileError(
            f"{path}: is not a sweep: wanted a column `scale` and finite numbers; remove it and "
            "run again"
        )
    return rows
