"""Adding a task vector to a base, range by range in threads.

Sums are computed in float64 and rounded once. `compiled_addition.py` computes the same bytes faster
for float32; loading numba takes longer than applying a vector to a small model with numpy.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import Checkpoint, aligned_buffer
from negmerge.checkpoints.dtypes import FLOATS, SIZES, Bytes, narrow, widen
from negmerge.checkpoints.fingerprint import BLOCK, checksum, fingerprint, padded_size
from negmerge.checkpoints.header import TensorInfo
from negmerge.checkpoints.names import is_variance
from negmerge.errors import MismatchError, ValueRangeError, quoted
from negmerge.support.parallel import run_in_order
from negmerge.support.progress import Progress
from negmerge.vectors.entry import Entry
from negmerge.vectors.task_vector import TaskVector

RANGE = 1 << 18
"""Elements of one unit of work."""
LARGE = 1 << 30
"""For a base of more bytes numba is loaded."""
_BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Range:
    """A range of one tensor; a sparse entry has `first` stored values before it."""

    info: TensorInfo
    start: int
    stop: int
    first: int


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
        self.compiled = _worth_compiling(model.nbytes)

    def run(self, formats: Mapping[str, str], put: Callable[[str, int, Bytes], None]) -> None:
        """Compute all tensors, then check the fingerprint of the base.

        Args:
            formats: the number format of each result.
            put: called by several threads with the name of a tensor, an offset in its bytes, and
                the bytes at this offset.
        """
        self.progress.stage("applying", self.model.nbytes)
        sums: Counter[str] = Counter()
        changes: Counter[str] = Counter()

        def run(buffer: Bytes, part: Range) -> tuple[Range, int, int, int]:
            dtype = formats[part.info.name]
            raw, total = self._read(buffer, part)
            raw, changed, clamped = self._add(part, raw, dtype)
            put(part.info.name, part.start * SIZES[dtype], raw)
            return part, total, changed, clamped

        done = run_in_order(self._ranges(), run, lambda: aligned_buffer(RANGE * 8), self.workers)
        for part, total, changed, clamped in done:
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
                f"wanted {wanted}; name the base from which the patch was made"
            )
        self.changed = changes.total()
        for name, entry in self.tau.entries.items():
            if self.tau.scale and (lost := entry.nonzero - changes[name]):
                self.lost[formats[name]] = self.lost.get(formats[name], 0) + lost

    def _ranges(self) -> Iterator[Range]:
        for info in self.model.tensors.values():
            entry = self.tau.entries.get(info.name)
            counts = entry.counts(RANGE) if entry is not None and entry.layout == "sparse" else []
            first = 0
            for j, start in enumerate(range(0, info.elements, RANGE)):
                yield Range(info, start, min(start + RANGE, info.elements), first)
                first += counts[j] if counts else 0

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

    def _add(self, part: Range, raw: Bytes, dtype: str) -> tuple[Bytes, int, int]:
        """Add the vector to a range of the base.

        Where the vector is zero the result is the base, converted to the format that is written.

        Returns:
            The bytes of the result, the number of changed elements, the number of clamped ones.
        """
        info, entry, scale = part.info, self.tau.entries.get(part.info.name), self.tau.scale
        out = raw if dtype == info.dtype else _converted(raw, info, dtype)
        if entry is None or entry.layout == "zero" or scale == 0:
            return out, 0, 0
        clamp = is_variance(info.name)
        if self.compiled and {info.dtype, entry.dtype, dtype} == {"F32"} and not clamp:
            changed, finite = _add_compiled(entry, part, out.view(np.float32), scale)
            clamped = 0
        else:
            changed, clamped, finite = _add_plain(entry, part, raw, out, dtype, scale, clamp)
        if not finite:
            if not np.isfinite(entry.stored()).all():
                raise ValueRangeError(f"{entry.location()}: NaN or infinity in the task vector")
            raise ValueRangeError(
                f"{quoted(info.name)}: θ + {scale}·τ does not fit {dtype}; use a smaller scale"
            )
        return out, changed, clamped


def _worth_compiling(nbytes: int) -> bool:
    return nbytes > LARGE or "numba" in sys.modules


def _add_plain(
    entry: Entry, part: Range, raw: Bytes, out: Bytes, dtype: str, scale: float, clamp: bool
) -> tuple[int, int, bool]:
    """Add the vector with numpy.

    Args:
        raw: the base as it is stored; may be the same memory as `out`.
        out: the base in the format `dtype`, which becomes the result.
        clamp: whether negative results become zero.

    Returns:
        The number of changed elements, of clamped elements, and whether all results are finite.
    """
    clamped = 0
    where, values = _stored(entry, part)
    base = raw.view(_BITS[FLOATS[part.info.dtype]])[where]
    with np.errstate(over="ignore", invalid="ignore"):
        exact = widen(base.view(np.uint8), part.info.dtype) + scale * values.astype(np.float64)
    if clamp:
        clamped = int(np.count_nonzero(exact < 0))
        exact = np.maximum(exact, 0.0)
    packed = narrow(exact, dtype)
    table = out.view(_BITS[FLOATS[dtype]])
    new = packed.view(table.dtype)
    changed = int(np.count_nonzero(new != table[where]))
    table[where] = new
    return changed, clamped, bool(np.isfinite(widen(packed, dtype)).all())


def _add_compiled(
    entry: Entry, part: Range, singles: NDArray[np.float32], scale: float
) -> tuple[int, bool]:
    from negmerge.vectors.compiled_addition import add_dense, add_sparse

    if entry.layout == "dense":
        return add_dense(singles, entry.stored(part.start, part.stop), scale)
    bits = entry.bits(part.start // 8, -(-part.stop // 8))
    count = int(np.bitwise_count(bits).sum())
    return add_sparse(singles, bits, entry.stored(part.first, part.first + count), scale)


def _stored(entry: Entry, part: Range) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Positions within a range, and the values there."""
    if entry.layout == "dense":
        values = entry.stored(part.start, part.stop)
        where = np.flatnonzero(values)
        return where, values[where]
    bits = entry.bits(part.start // 8, -(-part.stop // 8))
    # Most bytes have no bit set: only the others are unpacked.
    filled = np.flatnonzero(bits)
    found = np.flatnonzero(np.unpackbits(bits[filled], bitorder="little").view(np.bool_))
    where = filled[found >> 3] * 8 + (found & 7)
    return where, entry.stored(part.first, part.first + where.size)


def _converted(raw: Bytes, info: TensorInfo, dtype: str) -> Bytes:
    values = widen(raw, info.dtype)
    new = narrow(values, dtype)
    lost = int(np.count_nonzero(np.isfinite(values) & ~np.isfinite(widen(new, dtype))))
    if lost:
        raise ValueRangeError(
            f"{quoted(info.name)}: {lost} values do not fit {dtype}; "
            f"keep {info.dtype}, or use bfloat16"
        )
    return new
