"""What a merge will need: bytes, memory and seconds, from merging a small part of the files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from negmerge.checkpoints.state_dict import Model
from negmerge.errors import FileError
from negmerge.merging.computation import Task, Worker, check_device, make_worker
from negmerge.merging.first_pass import Floats, StoredChanges
from negmerge.merging.folds import STRIP
from negmerge.merging.inputs import Buffers, Inputs
from negmerge.merging.memory import AROUND, LARGE, TILES, Budget, anonymous_memory
from negmerge.merging.patterns import Globs, make_patterns
from negmerge.merging.rule import Numbers, Rule, make_rule
from negmerge.merging.thresholds import MOST
from negmerge.merging.tiles import Segment, segments
from negmerge.support.files import report_write_errors, write_fully
from negmerge.support.parallel import run_in_order, worker_count
from negmerge.support.progress import Quiet

SECONDS = 0.3
"""The time that the calibration may take, without compiling."""
SAMPLE = 64
"""The number of segments that are merged at most."""
FIRST_PASS = 16
"""The number of tensors of which the first pass of a rule reads a strip."""


@dataclass(frozen=True)
class Estimate:
    """What a merge will need.

    Args:
        elements: the number of elements to merge.
        read_bytes: the bytes of all models; a rule with a first pass reads them up to three times,
            and scaled members are read once more.
        patch_bytes: the bytes of the patch, if all elements are like those of the sample.
        memory: the memory of the process at its peak, without files that the system caches.
        seconds: the time of the merge.
        sampled: the share of the elements that were merged for this estimate.
    """

    elements: int
    read_bytes: int
    patch_bytes: int
    memory: int
    seconds: float
    sampled: float


def estimate(
    base: Model,
    models: Sequence[Model],
    rule: str = "consensus",
    options: Mapping[str, Any] | None = None,
    *,
    folder: Path | None = None,
    include: Globs = (),
    exclude: Globs = (),
    buffers: Buffers = "keep",
    equalise: bool = False,
    workers: int | None = None,
    max_memory: int | None = None,
    device: str = "cpu",
    allow_duplicates: bool = False,
) -> Estimate:
    """Estimate what a merge needs; the arguments are those of `merge`.

    >>> import numpy as np
    >>> base, model = {"w": np.zeros(4, np.float32)}, {"w": np.ones(4, np.float32)}
    >>> found = estimate(base, [model])
    >>> found.elements, found.read_bytes, found.sampled
    (4, 32, 1.0)

    Args:
        folder: the folder of the patch, to which a part of it is written and removed again.
    """
    chosen = make_rule(rule, options or {})
    check_device(device)
    if folder is not None and not folder.is_dir():
        raise FileError(f"{folder}: does not exist, or is not a folder; create it first")
    patterns = make_patterns(include, exclude)
    with Inputs(base, models, buffers, allow_duplicates, patterns=patterns) as inputs:
        threads = Budget(max_memory, folder).workers(worker_count(workers))
        before = anonymous_memory()
        if equalise:  # the factors do not matter for what the merge needs
            inputs.factors = np.ones(len(inputs.members))
        sample = _Sample(inputs, chosen, threads, device)
        sample.run(1, None)  # compiles
        sample.run(SAMPLE, folder)
        elements = sum(info.elements for info in inputs.merged)
        share = sample.elements / max(elements, 1)
        largest = max(info.elements * 4 for info in inputs.merged)
        results = min(largest, LARGE) + (MOST * 8 if chosen.first_pass() else 0)
        return Estimate(
            elements=elements,
            read_bytes=inputs.stored_bytes,
            patch_bytes=int(sample.written / max(share, 1e-12)),
            memory=min(before + threads * (TILES + AROUND) + results, max_memory or 1 << 62),
            seconds=sample.seconds / max(share, 1e-12),
            sampled=share,
        )


class _Sample:
    """Merges some segments, spread over all tensors, as `merge` does.

    After `run`, `seconds` is the time for the `elements` that were merged, and `written` the bytes
    of their part of the patch.
    """

    def __init__(self, inputs: Inputs, rule: Rule, workers: int, device: str) -> None:
        self.inputs, self.rule, self.workers, self.device = inputs, rule, workers, device
        self.tensors = [info for info in inputs.merged if info.elements]
        self.elements = self.written = 0
        self.seconds = 0.0

    def run(self, count: int, folder: Path | None) -> None:
        """Merge at most some segments within `SECONDS`."""
        every = segments(self.tensors)
        chosen = every[:: -(-len(every) // count)] if every else []
        self.elements = self.written = 0
        numbers = Numbers(self.rule, len(self.inputs.members), self._first_pass(chosen))
        begun = time.perf_counter()

        def in_time() -> Iterator[Segment]:
            for k, segment in enumerate(chosen):
                if k < self.workers or time.perf_counter() - begun < SECONDS:
                    yield segment

        def merge(worker: Worker, segment: Segment) -> tuple[Segment, bytes]:
            return segment, self._merge(worker, segment, numbers)

        def new_worker() -> Worker:
            return make_worker(self.device, self.inputs, self.rule)

        place = folder or Path(tempfile.gettempdir())
        with report_write_errors(place), tempfile.TemporaryFile(dir=place) as file:
            for segment, data in run_in_order(in_time(), merge, new_worker, self.workers):
                self.elements += segment.size
                self.written += len(data)
                if folder is not None:
                    write_fully(file.fileno(), data)
        self.seconds = time.perf_counter() - begun
        # A first pass and the norms of the members: each reads all models, and takes about as long.
        passes = [self.rule.first_pass() is not None, self.inputs.factors is not None]
        self.seconds *= 1 + sum(passes)

    def _first_pass(self, chosen: list[Segment]) -> dict[str, Floats]:
        """Return numbers like those of the first pass for all tensors, from a part of some."""
        first = self.rule.first_pass()
        if first is None or not chosen:
            return {}
        infos = {s.info.name: s.info for s in chosen[:FIRST_PASS]}
        some = [replace(i, shape=(min(i.elements, STRIP),)) for i in infos.values()]
        found = first.find_all(
            some,
            lambda group: StoredChanges(
                self.inputs, group, first.of == "mean", self.workers, Quiet()
            ),
        )
        return dict.fromkeys((i.name for i in self.tensors), next(iter(found.values())))

    def _merge(self, worker: Worker, segment: Segment, numbers: Numbers) -> bytes:
        """Merge one segment; return as many bytes as its part of the patch has."""
        infos = self.inputs.infos(segment.info.name)
        kind = np.dtype(np.float64 if any(i.dtype == "F64" for i in infos) else np.float32)
        words = 0 if self.rule.mostly_dense else -(-segment.size // STRIP) * STRIP // 64
        mask = np.empty(words, np.uint64)
        out, sums = np.zeros(segment.size + 1, kind), np.zeros(len(infos), np.uint64)
        nonzero = worker.segment(Task(segment, numbers.of(segment.info.name), sums, mask, out))
        sparse = -(-segment.size // 8) + max(nonzero, 0) * kind.itemsize
        return out.tobytes()[: min(sparse, segment.size * kind.itemsize)]
