"""A merge that others compute in parts (`parts.py`): cut, put together, checked as a whole.

The results have the bytes of a merge by one process, and bad input has the same errors.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from negmerge.checkpoints.dtypes import Bytes
from negmerge.checkpoints.header import TensorInfo
from negmerge.errors import ValueRangeError
from negmerge.merging.assembly import NOTHING, Assembly, Piece
from negmerge.merging.engine import Merge, Merged
from negmerge.merging.first_pass import FirstPass, Floats, R, Rows, StoredChanges
from negmerge.merging.first_pass_parts import NOT_STORED, ChangesPart, TensorsPart
from negmerge.merging.inputs import Inputs
from negmerge.merging.merge_part import NOT_FINITE, MergePart, Target
from negmerge.merging.one_pass import MergeAndApply
from negmerge.merging.part_file import PartFile
from negmerge.merging.parts import Description, Part, bytes_of, cut
from negmerge.merging.rule import Numbers
from negmerge.merging.tiles import Segment, segments
from negmerge.support.progress import Progress
from negmerge.vectors.output import Places

LITTLE = 1 << 21
"""A first pass over at most this number of elements, such as a sample, is not worth sending."""


class Runner(Protocol):
    """Computes parts; it may know the results of an earlier attempt.

    Attributes:
        ranges: the number of parts to cut a merge into.
        sums: the sums of the tallies that an earlier attempt has found; empty if there are none.
    """

    ranges: int
    sums: tuple[int, ...]

    def run(self, parts: Sequence[Part], reported: bool = True) -> Iterator[Path]:
        """Yield the files of parts in order; report the bytes that are read as progress."""
        ...

    def keep_sums(self, sums: tuple[int, ...]) -> None:
        """Keep the sums of the tallies for the next attempt."""


class PartedMerge(Merge):
    """A merge that a runner computes in parts."""

    description: Description
    runner: Runner

    def _first_numbers(self) -> Numbers:
        found, known = super()._first_numbers(), self.runner.sums
        return replace(found, sums=known) if len(known) == len(self.rule.tallies) else found

    def _scale(self, factors: Floats) -> None:
        super()._scale(factors)
        self.description = replace(self.description, factors=tuple(factors.tolist()))

    def _find_numbers(self, first: FirstPass | None, stage: str) -> dict[str, Floats]:
        if first is None:
            return {}
        self.progress.stage(stage, self.inputs.nbytes)
        tensors, description = self.inputs.merged, self.description
        if first.scope == "tensor" and type(first).find_all is FirstPass.find_all:
            sizes = [sum(info.nbytes for info in self.inputs.infos(i.name)) for i in tensors]
            parts: list[Part] = [
                TensorsPart(description, [i.name for i in tensors[a:b]], sum(sizes[a:b]))
                for a, b in cut(sizes, self.runner.ranges)
            ]
            found: dict[str, Floats] = {}
            for path in self.runner.run(parts):
                with PartFile(path) as file:
                    found |= dict(file)
            return found
        mean = first.of == "mean"
        given = (self.workers, self.progress, description, self.runner)
        return first.find_all(
            tensors, lambda group: PartedChanges(self.inputs, group, mean, *given)
        )

    def _pieces(self) -> Iterator[Merged]:
        every, work = segments(self.inputs.merged), self._work()
        self._tally = np.zeros(len(self.rule.tallies), np.int64)
        for path in self.runner.run(self._parts(every)):
            with PartFile(path) as file:
                for result in file:
                    segment, assembly = next(work)
                    yield segment, assembly, self._piece(segment, assembly, *result)
                self._tally += np.array(file.facts["sums"], np.int64)
                self._take(file.facts)

    def _parts(self, every: list[Segment]) -> list[MergePart]:
        assert self.numbers is not None
        sizes, numbers = bytes_of(self.inputs, every), self.numbers
        parts: list[MergePart] = []
        for first, stop in cut(sizes, self.runner.ranges):
            names = list(dict.fromkeys(segment.info.name for segment in every[first:stop]))
            found = {name: numbers.first[name] for name in names if name in numbers.first}
            given = (sum(sizes[first:stop]), found, numbers.sums, self._target(names))
            work = [(s.info.name, s.start, s.stop, s.strip) for s in every[first:stop]]
            parts.append(MergePart(self.description, work, *given))
        return parts

    def _target(self, names: list[str]) -> Target | None:
        """Return where the sums of some tensors are written, if a model is written."""
        return None

    def _piece(
        self, segment: Segment, assembly: Assembly, nonzero: int, mask: Any, values: Any, *more: Any
    ) -> Piece:
        """Return the result of a segment as a merge by one process does."""
        if assembly.whole is not None:
            part = assembly.whole[segment.start : segment.stop]
            if nonzero and mask.size:
                bits = np.unpackbits(mask, count=segment.size, bitorder="little")
                part[:] = 0
                part[bits.view(bool)] = values
            else:
                part[:] = values if nonzero else 0
            mask = values = NOTHING
        elif not nonzero:
            mask, values = np.zeros(-(-segment.size // 8), np.uint8), np.empty(0, assembly.kind)
        return Piece(nonzero, mask, values, *more)

    def _take(self, facts: Mapping[str, Any]) -> None:
        """Take the facts of a part after its pieces; raise the error that ended it."""
        kind, text = facts.get("failure") or (None, "")
        if kind == NOT_FINITE:
            self._raise_not_finite(self.inputs.base.tensors[text])
        if kind is not None:
            raise ValueRangeError(text)

    def _sums(self) -> tuple[int, ...]:
        sums = tuple(map(int, self._tally))
        self.runner.keep_sums(sums)
        return sums


class PartedMergeAndApply(PartedMerge, MergeAndApply):
    """A merge to a model that a runner computes in parts, which write to the files of the model."""

    def run(self, formats: Mapping[str, str], put: Callable[[str, int, Bytes], None]) -> None:
        assert isinstance(put, Places)
        self._places = put.places
        super().run(formats, put)

    def _target(self, names: list[str]) -> Target:
        written = [own for name in names for own in self.names.get(name, (name,))]
        places = {name: (*self._places[name], self._formats[name]) for name in written}
        return Target(self.scale, places)

    def _piece(
        self, segment: Segment, assembly: Assembly, nonzero: int, mask: Any, values: Any, *more: Any
    ) -> Piece:
        return Piece(nonzero, mask, values, *more)

    def _take(self, facts: Mapping[str, Any]) -> None:
        super()._take(facts)
        self.changes.update(facts["changes"])
        self.clamped += facts["clamped"]


class PartedChanges(StoredChanges):
    """The changes of models that others read, if the function that they call can be pickled."""

    def __init__(
        self,
        inputs: Inputs,
        group: list[TensorInfo],
        mean: bool,
        workers: int,
        progress: Progress,
        description: Description,
        runner: Runner,
    ) -> None:
        super().__init__(inputs, group, mean, workers, progress)
        self._description, self._runner = description, runner

    def each(self, run: Callable[[Rows, int], R], work: list[Segment] | None = None) -> Iterator[R]:
        chosen = segments(self.tensors) if work is None else work
        identity = _pickled(run)
        little = work is not None and sum(segment.size for segment in work) <= LITTLE
        if identity is None or little:
            yield from super().each(run, work)
            return
        sizes = bytes_of(self._inputs, chosen)
        ranges = cut(sizes, self._runner.ranges)
        parts: list[Part] = []
        for a, b in ranges:
            own = [(segment.info.name, segment.start, segment.stop) for segment in chosen[a:b]]
            parts.append(ChangesPart(self._description, run, identity, own, sum(sizes[a:b])))
        files = self._runner.run(parts, reported=work is None)
        for (a, b), path in zip(ranges, files, strict=True):
            with PartFile(path) as file:
                kind, _ = file.facts.get("failure") or (None, "")
                yield from super().each(run, chosen[a:b]) if kind == NOT_STORED else file


def _pickled(run: Any) -> bytes | None:
    """Return a function as bytes, or None if other processes cannot get it."""
    try:
        return pickle.dumps(run)
    except (pickle.PicklingError, AttributeError, TypeError):
        return None
