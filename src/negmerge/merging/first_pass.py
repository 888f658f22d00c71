"""A pass over all models before the merge, for rules that depend on whole task vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.header import TensorInfo
from negmerge.merging.inputs import Inputs
from negmerge.merging.statistics import TOTAL
from negmerge.merging.tiles import Segment, segments, visit_tiles
from negmerge.support.progress import Progress

R = TypeVar("R")
Rows = NDArray[Any]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class FirstPass:
    """A number that a rule needs of each whole vector; subclasses define `find`.

    Args:
        of: `members` for a number of each member, which the statistics get as the limit of that
            member; `mean` for a number of the mean of all members, which `finish` gets as a
            constant.
        scope: whether a vector is the whole model or one tensor.
    """

    of: Literal["members", "mean"] = "members"
    scope: Literal["model", "tensor"] = "model"

    def find(self, changes: Changes) -> Floats:
        """Return a number for each vector."""
        raise NotImplementedError

    def find_all(
        self, tensors: list[TensorInfo], changes: Callable[[list[TensorInfo]], Changes]
    ) -> dict[str, Floats]:
        """Return the numbers for each tensor, by name."""
        found: dict[str, Floats] = {}
        for group in [tensors] if self.scope == "model" else [[info] for info in tensors]:
            found |= dict.fromkeys((info.name for info in group), self.find(changes(group)))
        return found


def run_first_pass(
    first: FirstPass | None,
    inputs: Inputs,
    workers: int,
    progress: Progress,
    stage: str = "first pass",
) -> dict[str, Floats]:
    """Return the numbers that a first pass finds for each tensor; without one, read nothing."""
    if first is None:
        return {}
    progress.stage(stage, inputs.nbytes)
    mean = first.of == "mean"
    return first.find_all(
        inputs.merged, lambda group: StoredChanges(inputs, group, mean, workers, progress)
    )


class Changes:
    """The changes of some tensors: a vector for each member, or one vector, their mean."""

    def __init__(self, tensors: list[TensorInfo], width: int, mean: bool) -> None:
        self.tensors, self.width, self.mean = tensors, width, mean
        self.elements = sum(info.elements for info in tensors)

    def each(self, run: Callable[[Rows, int], R], work: list[Segment] | None = None) -> Iterator[R]:
        """Call a function with the rows of every range, and yield the results in order.

        Args:
            run: gets the rows, the base first, and the number of elements; rows may be longer.
                Several threads call it.
            work: the ranges; all if not given.
        """
        raise NotImplementedError

    def blocks(self) -> Iterator[Floats]:
        """Yield all changes, range by range: a row of float64 for each vector."""

        def run(rows: Rows, size: int) -> Floats:
            deltas = changes_of(rows, size)
            return TOTAL.over(deltas, (0.0,))[None] / len(deltas) if self.mean else deltas

        yield from self.each(run)


class StoredChanges(Changes):
    """The changes of models that are read from their files."""

    def __init__(
        self, inputs: Inputs, group: list[TensorInfo], mean: bool, workers: int, progress: Progress
    ) -> None:
        super().__init__(group, 1 if mean else len(inputs.members), mean)
        self._inputs, self._workers, self._progress = inputs, workers, progress

    def each(self, run: Callable[[Rows, int], R], work: list[Segment] | None = None) -> Iterator[R]:
        chosen = segments(self.tensors) if work is None else work
        for tile, result, _ in visit_tiles(self._inputs, run, self._workers, chosen):
            yield result
            if work is None:
                self._progress.advance(self._inputs.bytes_of(tile.info.name, tile.size))


class AccumulatedMean(Changes):
    """The mean of the members of an accumulator, from the sum of all changes of each tensor."""

    def __init__(self, tensors: list[TensorInfo], totals: Mapping[str, Floats], n: int) -> None:
        super().__init__(tensors, 1, False)
        self._totals, self._n = totals, n

    def each(self, run: Callable[[Rows, int], R], work: list[Segment] | None = None) -> Iterator[R]:
        for segment in segments(self.tensors) if work is None else work:
            mean = self._totals[segment.info.name][segment.start : segment.stop] / self._n
            yield run(np.stack([np.zeros_like(mean), mean]), mean.size)


def changes_of(rows: Rows, size: int) -> Floats:
    """Return the changes of all members, a row of float64 each, from rows with the base first."""
    with np.errstate(invalid="ignore", over="ignore"):
        return rows[1:, :size].astype(np.float64) - rows[0, :size]
