"""Adding a task vector to a base, range by range in threads; the base is checked meanwhile."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from negmerge.checkpoints.checkpoint import Checkpoint, aligned_buffer
from negmerge.checkpoints.dtypes import SIZES, Bytes
from negmerge.checkpoints.fingerprint import BLOCK, checksum, fingerprint, padded_size
from negmerge.errors import MismatchError, printable
from negmerge.support.parallel import run_in_order
from negmerge.support.progress import Progress
from negmerge.support.remote.scratch import given_name
from negmerge.vectors.entry import Entry
from negmerge.vectors.ranges import Adder, Range
from negmerge.vectors.task_vector import TaskVector

RANGE = 1 << 20
"""Elements of one unit of work, a multiple of `entry.LISTED`; for fewer the interpreter would take
as long as the addition."""
LARGE = 1 << 30
"""For more bytes numba is loaded."""
VALUE = 32
"""Adding one value with numpy takes as long as reading and checking so many bytes."""


class Addition:
    """The sum of a base and a task vector.

    Attributes:
        changed, clamped, lost: as in `Applied`; valid after `run`.
    """

    def __init__(
        self, model: Checkpoint, tau: TaskVector, progress: Progress, workers: int
    ) -> None:
        self.model, self.tau = model, tau
        self.progress, self.workers = progress, workers
        self.changed = self.clamped = 0
        self.lost: dict[str, int] = {}
        self.sources = [*model.sources, *([] if tau.path is None else [tau.path])]
        values = sum(e.elements if e.layout == "dense" else e.nonzero for e in tau.entries.values())
        self.compiled = _worth_compiling(model.nbytes + VALUE * values)

    def run(self, formats: Mapping[str, str], put: Callable[[str, int, Bytes], None]) -> None:
        """Compute all tensors, then check the fingerprint of the base; see `output.Job`."""
        self.progress.stage("applying", self.model.nbytes)
        sums: Counter[str] = Counter()
        changes: Counter[str] = Counter()

        def run(worker: tuple[Bytes, Adder], part: Range) -> tuple[Range, int, int, int]:
            buffer, adder = worker
            name = part.info.name
            raw, total = self._read(buffer, part)
            done = adder.add(part, self.tau.entry_of(name), raw, formats[name], self.tau.scale)
            put(name, part.start * SIZES[formats[name]], done.raw)
            return part, total, done.changed, done.clamped

        def make_worker() -> tuple[Bytes, Adder]:
            return aligned_buffer(RANGE * 8), Adder(RANGE, self.compiled)

        for part, total, changed, clamped in run_in_order(
            self._ranges(), run, make_worker, self.workers
        ):
            name = part.info.name
            sums[name] = (sums[name] + total) % 2**64
            changes[name] += changed
            self.clamped += clamped
            self.progress.advance((part.stop - part.start) * SIZES[part.info.dtype])
        self.model.check_unchanged()
        found, wanted = fingerprint(self.model.tensors, sums), self.tau.origin.base
        if found != wanted:
            raise MismatchError(
                f"{self.model.path}: is not the base of this patch: its fingerprint is {found}, "
                f"wanted {printable(wanted)}; name the base from which the patch was made"
            )
        self.changed = sum(changes[name] for name in self.tau.entries)
        for name, entry in self.tau.entries.items():
            if self.tau.scale and (lost := entry.nonzero - changes[name]):
                self.lost[formats[name]] = self.lost.get(formats[name], 0) + lost

    def command(self, settings: Mapping[str, str]) -> list[str] | None:
        """The command that makes the model again, without its output."""
        if self.tau.path is None or not self.model.sources:
            return None
        base, patch = given_name(self.model.path), given_name(self.tau.path)
        return ["negmerge", "apply", base, patch, *scale_words(self.tau.scale, settings)]

    def _ranges(self) -> Iterator[Range]:
        for info in self.model.tensors.values():
            entry = self.tau.entry_of(info.name) or Entry(info.shape, "F32", 0)
            for start, first, count in entry.ranges(RANGE):
                yield Range(info, start, min(start + RANGE, info.elements), first, count)

    def _read(self, buffer: Bytes, part: Range) -> tuple[Bytes, int]:
        """The bytes of a range of the base, and their checksum."""
        size = SIZES[part.info.dtype]
        count = (part.stop - part.start) * size
        self.model.read_into(part.info, part.start * size, buffer[:count])
        buffer[count : padded_size(count)] = 0
        blocks, number = buffer[: padded_size(count)], part.start * size // BLOCK
        if not self.compiled:
            return buffer[:count], checksum(blocks.view(np.uint64), number)
        from negmerge.checkpoints.checksum import add_checksums

        total = np.zeros(1, np.uint64)
        add_checksums(blocks[None], 0, blocks.size // BLOCK, number, total)
        return buffer[:count], int(total[0])


def scale_words(scale: float, settings: Mapping[str, str]) -> list[str]:
    """The arguments of a command that writes a model.

    >>> scale_words(-0.5, {"dtype": "bfloat16"})
    ['--negate', '0.5', '--dtype', 'bfloat16']
    """
    words = ["--negate" if scale < 0 else "--add", repr(abs(scale))]
    return words + [word for key, value in settings.items() for word in (f"--{key}", value)]


def _worth_compiling(nbytes: int) -> bool:
    return nbytes > LARGE or "numba" in sys.modules
