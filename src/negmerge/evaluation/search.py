"""The search for λ: measure a model at a series of λ, and keep the rows.

Choosing from the rows (`criteria.py`) never runs the model.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from negmerge.errors import FileError, MismatchError, ValueRangeError
from negmerge.evaluation.bisection import bracket, doubling
from negmerge.evaluation.criteria import Criterion, Reference, choose
from negmerge.evaluation.limits import Limit, Row, is_finite
from negmerge.evaluation.refinement import refine_to_limit, refine_to_optimum
from negmerge.evaluation.scales import FIRST, FIRST_SHARE, LARGEST, LARGEST_SHARE, Search
from negmerge.evaluation.scores import Scores
from negmerge.support.files import write_file
from negmerge.support.progress import Advance
from negmerge.support.reading import read_csv
from negmerge.vectors.task_vector import TaskVector

if TYPE_CHECKING:
    from torch import nn


Subtracted = Callable[["nn.Module", TaskVector, float], AbstractContextManager[Any]]
"""Takes a model, τ and λ; the model is θ − λτ during the block."""


class Evaluator(Protocol):
    """Measures the models θ − λτ."""

    single_pass: bool
    """Whether a single pass over the data serves every λ."""

    def at(self, scale: float, advance: Advance) -> Scores:
        """Measure at one λ; `advance` is called with the number of finished samples."""
        ...


class InPlace:
    """Subtracts λτ in place from a model, calls `measure`, and restores the model.

    Args:
        subtracted: subtracts λτ during a block, as `Scenario.subtracted` does; by default, nothing
            else is changed.
    """

    single_pass = False

    def __init__(
        self,
        model: nn.Module,
        tau: TaskVector,
        measure: Callable[[nn.Module, Advance], Scores],
        subtracted: Subtracted = lambda model, tau, scale: tau.applied(model, -scale),
    ) -> None:
        self.model, self.tau, self.measure, self.subtracted = model, tau, measure, subtracted

    def at(self, scale: float, advance: Advance) -> Scores:
        """Measure at one λ."""
        with self.subtracted(self.model, self.tau, scale):
            return self.measure(self.model, advance)


class Curve:
    """The row of each λ, measured once.

    Args:
        size: the number of samples of one measurement, for the progress.
        partial: a file that stores the rows as they are measured; its rows are not measured again.
        bounded: the limit that the end of the interval of its metric must keep; each row then has
            this end, and that of the original, which is compared with itself, is its value.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        size: int,
        partial: Path | None = None,
        advance: Advance = lambda count: None,
        bounded: Limit | None = None,
    ) -> None:
        self.evaluator, self.size = evaluator, size
        self.partial, self.advance, self.bounded = partial, advance, bounded
        known = read_rows(partial) if partial is not None and partial.exists() else []
        self.rows = {row["scale"]: row for row in known}

    def at(self, scale: float) -> Row:
        """Return the row of one λ."""
        if scale in self.rows:
            self.advance(self.size)
            return self.rows[scale]
        try:
            scores = self.evaluator.at(scale, self.advance)
        except ValueRangeError as error:
            raise ValueRangeError(f"λ = {scale:g}: {error}") from None
        row = {"scale": scale} | scores.row()
        if self.bounded is not None:
            bound = self.bounded.bound_of(scores)
            row |= bound if scale else {self.bounded.bound: row[self.bounded.metric]}
        return self._keep(scale, row)

    def attempt(self, scale: float) -> Row:
        """Return the row of one λ; of NaN if the outputs of the model are not finite.

        λ = 0 must have been measured before.
        """
        try:
            return self.at(scale)
        except ValueRangeError:
            return self._keep(scale, dict.fromkeys(self.rows[0.0], nan) | {"scale": scale})

    def _keep(self, scale: float, row: Row) -> Row:
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
    curve: Curve,
    search: Search,
    criterion: Criterion,
    reference: Reference = None,
    unit: float | None = None,
) -> list[Row]:
    """Measure the λ of a search, and larger ones while the criterion may prefer them.

    Args:
        unit: the λ at which the change λτ is as long as the weights that it changes; for `refine`.

    Returns:
        The rows in the order of λ.
    """
    if search.strategy == "refine":
        refine(curve, search, criterion, reference, unit)
        return curve.ordered()
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


def refine(
    curve: Curve, search: Search, criterion: Criterion, reference: Reference, unit: float | None
) -> None:
    """Measure λ up to the limit of a criterion, or around its optimum.

    A λ at which the outputs of the model are not finite is too large; λ = 0 must not be one.
    """
    zero, limit = curve.at(0.0), criterion.limit
    rows: dict[float, Row] = {0.0: zero}
    first = FIRST if unit is None else FIRST_SHARE * unit
    largest = search.limit or (LARGEST if unit is None else LARGEST_SHARE * unit)

    def loss(scale: float) -> float | None:
        if scale not in rows:
            rows[scale] = curve.attempt(scale)
        return criterion.loss(rows[scale], zero, reference) if is_finite(rows[scale]) else None

    def loss_or_infinity(scale: float) -> float:
        own = loss(scale)
        return inf if own is None or isnan(own) else own

    def reached(scale: float) -> bool:
        return loss_or_infinity(scale) <= criterion.best

    def left(scale: float) -> float | None:
        allowed = loss(scale) is not None
        share = limit.left(rows[scale], zero) if limit and is_finite(rows[scale]) else None
        if allowed:
            return 1.0 if share is None else max(share, 0.0)
        return share if share is not None and share < 0 else None

    if not criterion.limits:
        best = criterion.best
        refine_to_optimum(loss_or_infinity, first, largest, search.evaluations, best)
    elif not reached(0.0):
        refine_to_limit(left, first, largest, search.evaluations, reached)


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
    if "scale" not in rows[0] or not all(map(_is_row, rows)):
        raise FileError(
            f"{path}: is not a sweep: wanted a column `scale` and finite numbers; remove the file "
            "and run again"
        )
    return rows


def _is_row(row: Row) -> bool:
    """Return whether the numbers of a row are finite, or all but λ are NaN: a broken model."""
    others = [value for name, value in row.items() if name != "scale"]
    broken = bool(others) and all(map(isnan, others))
    return isfinite(row["scale"]) and (broken or all(map(isfinite, others)))
