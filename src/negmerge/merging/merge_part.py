"""The merge of a range of segments, to a part file or to the files of a model."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock, local

from negmerge.checkpoints.dtypes import Bytes
from negmerge.checkpoints.header import TensorInfo
from negmerge.errors import ValueRangeError
from negmerge.merging.assembly import NOTHING, Assembly
from negmerge.merging.computation import Worker, check_device
from negmerge.merging.engine import Merge, Merged
from negmerge.merging.first_pass import Floats
from negmerge.merging.inputs import Inputs
from negmerge.merging.memory import Budget
from negmerge.merging.one_pass import MergeAndApply, passing
from negmerge.merging.part_file import PartFile, PartWriter
from negmerge.merging.parts import Description, Facts, Part, hash_of
from negmerge.merging.rule import Numbers, make_rule
from negmerge.merging.tiles import Segment
from negmerge.support.files import report_write_errors, write_fully
from negmerge.support.parallel import run_in_order
from negmerge.support.progress import Advance, Quiet
from negmerge.support.reading import open_regular

NOT_FINITE, REFUSED = "not finite", "refused"
"""Failures: the merged values of a tensor are not finite, or the sum with the base does not fit."""


@dataclass(frozen=True)
class Target:
    """The output of a merge that writes a model: θ + scale·τ.

    Args:
        places: file, offset and number format of each tensor.
    """

    scale: float
    places: dict[str, tuple[Path, int, str]]


@dataclass(frozen=True)
class MergePart(Part):
    """The merge of some segments.

    Its results are the pieces of the segments, as tuples. A part with a target writes the sums of
    the segments to the output, and its pieces have no values.

    Args:
        work: name, start, stop and strip of each segment.
        found: what the first pass found for each tensor of the range.
        sums: the sums of the tallies, if they are known.
    """

    merge: Description
    work: list[tuple[str, int, int, int]]
    nbytes: int
    found: dict[str, Floats] = field(default_factory=dict[str, Floats])
    sums: tuple[int, ...] = ()
    target: Target | None = None

    @property
    def key(self) -> str:
        target = None
        if self.target is not None:
            places = {n: [str(p), *more] for n, (p, *more) in self.target.places.items()}
            target = [self.target.scale, places]
        return hash_of("merge", self.merge.key, self.work, self.found, self.sums, target)

    def fill(self, inputs: Inputs, threads: int, writer: PartWriter, advance: Advance) -> Facts:
        check_device(self.merge.device)
        rule = make_rule(self.merge.rule, self.merge.options)
        budget = Budget(self.merge.max_memory, Path())  # a folder: memory is bounded
        given = (inputs, rule, "auto", "keep", threads, budget, self.merge.device, Quiet())
        job = _Sums(*given) if self.target else _Pieces(*given)
        tensors = inputs.base.tensors
        job.work = [Segment(tensors[name], *place) for name, *place in self.work]
        job.numbers = Numbers(rule, len(inputs.members), self.found, self.sums)
        facts: Facts = {}
        with job.output(self.target):
            try:
                for segment, _, piece in job.pieces():
                    values = (piece.nonzero, piece.mask, piece.values)
                    writer.add((*values, piece.checksums, piece.dissent, piece.sampled))
                    advance(inputs.bytes_of(segment.info.name, segment.size))
            except _NotFinite as error:
                facts["failure"] = [NOT_FINITE, str(error)]
            except ValueRangeError as error:
                facts["failure"] = [REFUSED, str(error)]
        return facts | job.facts()

    def _intact(self, file: PartFile) -> bool:
        if self.target is None:
            return True
        for name, at, size, found in file.facts["written"]:
            path, offset, _ = self.target.places[name]
            descriptor = open_regular(path)
            try:
                if zlib.crc32(os.pread(descriptor, size, offset + at)) != found:
                    return False
            finally:
                os.close(descriptor)
        return True


class _NotFinite(ValueRangeError):
    """The merged values of a tensor are not finite; the message is its name."""


class _Pieces(Merge):
    """Merges some segments, whose values are packed, or dense if the rule is mostly dense."""

    work: list[Segment]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._workers: list[Worker] = []
        self._buffers = local()

    def output(self, target: Target | None) -> ExitStack:
        """Prepare the output."""
        return ExitStack()

    def pieces(self) -> Iterator[Merged]:
        """Merge the segments, and yield them in order."""
        return run_in_order(self._work(), self._segment, self._new_worker, self.workers)

    def facts(self) -> Facts:
        return {"sums": list(self._sums())}

    def _work(self) -> Iterator[tuple[Segment, Assembly]]:
        return passing(self, self.work, self._buffers)

    def _segment(self, worker: Worker, work: tuple[Segment, Assembly]) -> Merged:
        segment, assembly, piece = super()._segment(worker, work)
        if assembly.whole is not None and piece.nonzero:
            values = assembly.whole[segment.start : segment.stop].copy()
            return segment, assembly, replace(piece, values=values)
        if not piece.nonzero:
            return segment, assembly, replace(piece, mask=NOTHING, values=NOTHING)
        return segment, assembly, piece

    def _raise_not_finite(self, info: TensorInfo) -> None:
        raise _NotFinite(info.name)  # whoever puts the parts together looks for the reason


class _Sums(MergeAndApply):
    """Merges some segments, and writes their sums with the base to the output."""

    work: list[Segment]

    def output(self, target: Target | None) -> ExitStack:
        """Open the files of the output; they are flushed to the disk when they are closed."""
        assert target is not None
        self.scale, self.changes = target.scale, Counter[str]()
        self._workers: list[Worker] = []
        self._formats = {name: dtype for name, (_, _, dtype) in target.places.items()}
        self._written: list[tuple[str, int, int, int]] = []
        stack, turns = ExitStack(), dict[Path, Lock]()
        descriptors: dict[Path, int] = {}
        for path, _, _ in target.places.values():
            if path not in descriptors:
                with report_write_errors(path):
                    descriptors[path] = os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
                stack.callback(os.close, descriptors[path])
                stack.callback(_flush, path, descriptors[path])
                turns[path] = Lock()

        def put(name: str, at: int, raw: Bytes) -> None:
            path, offset, _ = target.places[name]
            with report_write_errors(path), turns[path]:
                write_fully(descriptors[path], raw.data, offset + at)
            self._written.append((name, at, raw.size, zlib.crc32(raw.data)))

        self._put: Callable[[str, int, Bytes], None] = put
        return stack

    def pieces(self) -> Iterator[Merged]:
        """Merge the segments, and yield them in order."""
        return run_in_order(self._work(), self._segment, self._new_worker, self.workers)

    def facts(self) -> Facts:
        counts = {"changes": dict(sorted(self.changes.items())), "clamped": self.clamped}
        return {"sums": list(self._sums()), "written": sorted(self._written)} | counts

    def _work(self) -> Iterator[tuple[Segment, Assembly]]:
        return passing(self, self.work, self._buffers)

    def _raise_not_finite(self, info: TensorInfo) -> None:
        raise _NotFinite(info.name)


def _flush(path: Path, descriptor: int) -> None:
    with report_write_errors(path):
        os.fsync(descriptor)
