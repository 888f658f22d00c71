"""The search for λ: measure a model at each λ of a grid, and keep the rows.

Choosing from the rows (`criteria.py`) never runs the model.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from negmerge.errors import FileError, MismatchError, ValueRangeError
from negmerge.evaluation.criteria import Criterion, Reference, Row, choose
from negmerge.evaluation.scales import MOST_EVALUATIONS, Search
from negmerge.evaluation.scores import Scores
from negmerge.support.files import write_file
from negmerge.support.progress import Advance
from negmerge.support.reading import read_csv
from negmerge.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from torch import nn


class Evaluator(Protocol):
    """Measures the models θ − λτ."""

    single_pass: bool
    """Whether a single pass over the data serves every λ."""

    def at(self, scale: float, advance: Advance) -> Scores:
        """Measure at one λ; `advance` is called with the number of finished samples."""
        ...


class InPlace:
    """Applies −λτ in place to a model, calls `measure`, and restores the model."""

    single_pass = False

    def __init__(
        self, model: nn.Module, tau: TaskVector, measure: Callable[[nn.Module, Advance], Scores]
    ) -> None:
        self.model, self.tau, self.measure = model, tau, measure

    def at(self, scale: float, advance: Advance) -> Scores:
        """Measure at one λ."""
        with self.tau.applied(self.model, -scale):
            return self.measure(self.model, advance)


class Curve:
    """The row of each λ, measured once.

    Args:
        size: the number of samples of one measurement, for the progress.
        partial: a file that stores the rows as they are measured; its rows are not measured again.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        size: int,
        partial: Path | None = None,
        advance: Advance = lambda count: None,
    ) -> None:
        self.evaluator, self.size = evaluator, size
        self.partial, self.advance = partial, advance
        known = read_rows(partial) if partial is not None and partial.exists() else []
        self.rows = {row["scale"]: row for row in known}

    def at(self, scale: float) -> Row:
        """Return the row of one λ."""
        if scale in self.rows:
            self.advance(self.size)
            return self.rows[scale]
        try:
            found = self.evaluator.at(scale, self.advance).row()
        except ValueRangeError as error:
            raise ValueRangeError(f"λ = {scale:g}: {error}") from None
        row = {"scale": scale} | found
        if self.rows and row.keys() != (other := next(iter(self.rows.values()))).keys():
            names = ", ".join(sorted(map(str, row.keys() ^ other.keys())))
            raise MismatchError(
                f"λ = {scale:g}: was measured with other numbers than λ = {other['scale']:g}; only "
                f"one of the two has {names}; return the same names for every model"
            )
        self.rows[scale] = row
        if self.partial is not None:
            write_rows(self.partial, list(self.rows.values()))
        return row

    @property
    def evaluations(self) -> int:
        """The number of passes over the data."""
        return 1 if self.evaluator.single_pass else len(self.rows)

    def ordered(self) -> list[Row]:
        """Return all rows in the order of λ."""
        return [self.rows[scale] for scale in sorted(self.rows)]


def search_scale(
    curve: Curve, search: Search, criterion: Criterion, reference: Reference = None
) -> list[Row]:
    """Measure the λ of a search, and larger ones while the criterion may prefer them.

    Returns:
        The rows in the order of λ.
    """
    scales = search.grid()

    def loss(scale: float) -> float | None:
        return criterion.loss(curve.at(scale), curve.rows[0.0], reference)

    if search.strategy == "doubling":
        doubling(loss, scales, criterion.best)
        return curve.ordered()
    while True:
        if search.strategy == "bracket" and not curve.evaluator.single_pass:
            bracket(loss, scales)
        else:
            for scale in scales:
                curve.at(scale)
        more = search.beyond(scales)
        if not more or not choose(curve.ordered(), criterion, reference).edge:
            return curve.ordered()
        scales = (*scales, *more)
        curve.advance = lambda count: None  # the announced work is done


def bracket(loss: Callable[[float], float | None], scales: Sequence[float]) -> None:
    """Compute the few losses that determine the best λ, if larger λ forget more and lose more.

    Bisection finds the largest allowed λ. Then the assumption is checked: the λ below it must not
    be better, nor as good (then smaller ones are computed), and the second λ above it must not be
    allowed. If a loss contradicts the assumption, all losses are computed.

    >>> asked = []
    >>> def loss(scale):
    ...     asked.append(scale)
    ...     return None if scale > 12 else 90.0 - scale
    >>> bracket(loss, range(21)); len(set(asked)), 12 in asked
    (7, True)

    Args:
        loss: returns the loss of a λ, or None if the λ is not allowed.
        scales: the λ in rising order; the first is 0.
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
    if best > 0 and at(best - 1) == at(best):  # the smallest λ of equal losses is chosen
        halved(-1, best, lambda own: own != at(best))
    if best + 2 < len(scales):
        at(best + 2)
    known = [seen[place] for place in sorted(seen)]
    allowed = [own for own in known if own is not None]
    falls = all(a >= b for a, b in pairwise(allowed))
    if not falls or None in known[: len(allowed)]:
        for place in range(len(scales)):
            at(place)


TOLERANCE = 1 / 16
"""The distance of two λ at which `doubling` stops, as a share of the larger one."""


def doubling(
    loss: Callable[[float], float | None],
    scales: Sequence[float],
    best: float = -inf,
    tolerance: float = TOLERANCE,
    evaluations: int = MOST_EVALUATIONS,
) -> None:
    """Compute losses up to the first λ that is not allowed, then bisect below it.

    The search ends when the largest allowed λ and the smallest other one differ by at most
    `tolerance` times the larger one, or times the first λ if that is larger: where already the
    first λ is not allowed, the allowed one may be 0. No λ is computed twice.

    >>> asked = []
    >>> def loss(scale):
    ...     asked.append(scale)
    ...     return None if scale > 1.3 else 90.0 - scale
    >>> doubling(loss, [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]); asked
    [0.0, 0.25, 0.5, 1.0, 2.0, 1.5, 1.25, 1.375, 1.3125]

    Args:
        loss: returns the loss of a λ, or None if the λ is not allowed.
        scales: the λ to double: 0, the first one, and so on.
        best: the lower bound of the loss; a λ that reaches it ends the doubling, too, and the
            smallest such λ is looked for.
        tolerance: the relative distance to stop at.
        evaluations: the largest number of losses to compute.
    """
    count = 0

    def ends(scale: float) -> bool:
        nonlocal count
        count += 1
        own = loss(scale)
        return own is None or own <= best

    low = high = scales[0]
    for scale in scales[:evaluations]:
        low, high = high, scale
        if ends(scale):
            break
    else:
        return
    while high - low > tolerance * max(high, scales[1]) and count < evaluations:
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle) else (middle, high)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a sweep as CSV, atomically; `read_rows` returns exactly the same numbers."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: repr(v) for k, v in row.items()} for row in rows)
    write_file(path, text.getvalue().encode())


def read_rows(path: Path) -> list[Row]:
    """Read a sweep.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_rows(Path(folder) / "sweep.csv", [{"scale": 0.1, "acc_forget": 2 / 3}])
    ...     read_rows(Path(folder) / "sweep.csv")
    [{'scale': 0.1, 'acc_forget': 0.6666666666666666}]
    """
    try:
        rows = [{k: float(v) for k, v in row.items()} for row in read_csv(path)]
    except (ValueError, FileError) as error:
        raise FileError(f"{path}: is not a sweep: {error}; remove the file and run again") from None
    if "scale" not in rows[0] or not all(isfinite(v) for row in rows for v in row.values()):
        raise FileError(
            f"{path}: is not a sweep: wanted a column `scale` and finite numbers; remove the file "
            "and run again"
        )
    return rows
