"""θ + s·τ for one range of a tensor, with numpy or with compiled loops.

Sums are computed in float64 and rounded once. `compiled_addition.py` gives the same bytes faster;
loading numba takes longer than applying a vector to a small model with numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import aligned_buffer
from negmerge.checkpoints.dtypes import BITS, SIZES, Bytes, from_bits, narrow, widen
from negmerge.checkpoints.header import TensorInfo
from negmerge.checkpoints.names import is_variance
from negmerge.errors import FileError, ValueRangeError, quoted
from negmerge.vectors.entry import Entry


@dataclass(frozen=True)
class Range:
    """A range of one tensor.

    Args:
        first: the number of values of a sparse or listed entry before this range.
        count: the number of its values in this range.
    """

    info: TensorInfo
    start: int
    stop: int
    first: int = 0
    count: int = 0


@dataclass(frozen=True)
class Sum:
    """The result of one range.

    Args:
        raw: the bytes of the result.
        changed: the number of elements that differ from the base in the same format.
        clamped: the number of variances that would be negative and were set to zero.
    """

    raw: Bytes
    changed: int = 0
    clamped: int = 0


class Adder:
    """Adds vectors to ranges in one thread: the buffers of this thread.

    Args:
        size: the largest number of elements of a range.
        compiled: whether to use compiled loops.
    """

    def __init__(self, size: int, compiled: bool) -> None:
        self.compiled = compiled
        # Reading into fresh memory would take longer than the addition.
        self._mask, self._values = aligned_buffer(-(-size // 8)), aligned_buffer(size * 8)
        self._result = aligned_buffer(size * 8)
        self._positions = np.empty(size + 8 if compiled else 0, np.uint32)

    def add(self, part: Range, entry: Entry | None, raw: Bytes, dtype: str, scale: float) -> Sum:
        """Add a vector to a range of the base.

        Where the vector is zero the result is the base, converted to the format that is written.

        Args:
            entry: the vector of the whole tensor, or None if the tensor is kept.
            raw: the base as it is stored; may become the result.
            dtype: the format of the result.
        """
        if entry is None or entry.layout == "zero" or scale == 0:
            return Sum(self._converted(raw, part.info, dtype))
        if self.compiled and not is_variance(part.info.name):
            done = self._add_compiled(part, entry, raw, dtype, scale)
            if done is not None:
                return done
        out = raw if dtype == part.info.dtype else converted(raw, part.info, dtype)
        changed, clamped, finite = add_plain(part, entry, raw, out, dtype, scale)
        if not finite:
            _raise_not_finite(part.info, entry, dtype, scale)
        return Sum(out, changed, clamped)

    def _converted(self, raw: Bytes, info: TensorInfo, dtype: str) -> Bytes:
        """The base in the format of the result."""
        if dtype == info.dtype:
            return raw
        if self.compiled:
            from negmerge.vectors.compiled_addition import loops_for

            out = self._room(raw, info, dtype)
            loops = loops_for(info.dtype, dtype, "F32")
            if loops.convert(raw.view(BITS[info.dtype]), out):
                return out.view(np.uint8)
        return converted(raw, info, dtype)

    def _add_compiled(
        self, part: Range, entry: Entry, raw: Bytes, dtype: str, scale: float
    ) -> Sum | None:
        """The result, or None if the base has a number that is not finite in the new format."""
        from negmerge.vectors.compiled_addition import find_positions, loops_for

        loops = loops_for(part.info.dtype, dtype, entry.dtype)
        base = out = raw.view(BITS[part.info.dtype])
        if dtype != part.info.dtype:
            out = self._room(raw, part.info, dtype)
            if not loops.convert(base, out):
                return None
        if entry.layout == "dense":
            words = entry.words(part.start, part.stop, self._values)
            changed, finite = loops.add_all(base, out, words, scale)
            if not finite:  # an infinite number of the base stays where the vector is zero
                results = widen(out.view(np.uint8), dtype)
                finite = bool(np.isfinite(results[from_bits(words, entry.dtype) != 0]).all())
        else:
            words = entry.words(part.first, part.first + part.count, self._values)
            if entry.listing is None:
                bits = entry.bits(part.start // 8, -(-part.stop // 8), self._mask)
                where = self._positions
                found = find_positions(bits, where)
                if found != part.count or (found and where[found - 1] >= part.stop - part.start):
                    raise FileError(f"{entry.location()}: the mask changed while it was read")
            else:
                where = entry.positions_in(part.start, part.stop, part.first, part.count)
                where = where.astype(np.uint32)
            changed, finite = loops.add_at(base, out, where, words, scale)
        if not finite:
            _raise_not_finite(part.info, entry, dtype, scale)
        return Sum(out.view(np.uint8), changed)

    def _room(self, raw: Bytes, info: TensorInfo, dtype: str) -> NDArray[Any]:
        count = raw.size // SIZES[info.dtype]
        return self._result[: count * SIZES[dtype]].view(BITS[dtype])


def add_plain(
    part: Range, entry: Entry, raw: Bytes, out: Bytes, dtype: str, scale: float
) -> tuple[int, int, bool]:
    """Add the vector with numpy.

    Args:
        raw: the base as it is stored; may be the same memory as `out`.
        out: the base in the format `dtype`, which becomes the result.

    Returns:
        The number of changed elements, of clamped elements, and whether all results are finite.
    """
    clamped = 0
    where, values = _stored(entry, part)
    base = raw.view(BITS[part.info.dtype])[where]
    with np.errstate(over="ignore", invalid="ignore"):
        exact = widen(base.view(np.uint8), part.info.dtype) + scale * values.astype(np.float64)
    if is_variance(part.info.name):
        clamped = int(np.count_nonzero(exact < 0))
        exact = np.maximum(exact, 0.0)
    packed = narrow(exact, dtype)
    table = out.view(BITS[dtype])
    new = packed.view(table.dtype)
    changed = int(np.count_nonzero(new != table[where]))
    table[where] = new
    return changed, clamped, bool(np.isfinite(widen(packed, dtype)).all())


def _stored(entry: Entry, part: Range) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Positions within a range, and the values there."""
    if entry.layout == "dense":
        values = entry.stored(part.start, part.stop)
        where = np.flatnonzero(values)
        return where, values[where]
    where = entry.positions_in(part.start, part.stop, part.first, part.count)
    return where, entry.stored(part.first, part.first + where.size)


def converted(raw: Bytes, info: TensorInfo, dtype: str) -> Bytes:
    """The base in another format, with numpy; raises if a number does not fit."""
    values = widen(raw, info.dtype)
    new = narrow(values, dtype)
    lost = int(np.count_nonzero(np.isfinite(values) & ~np.isfinite(widen(new, dtype))))
    if lost:
        raise ValueRangeError(
            f"{quoted(info.name)}: {lost} values do not fit {dtype}; "
            f"keep {info.dtype}, or use bfloat16"
        )
    return new


def _raise_not_finite(info: TensorInfo, entry: Entry, dtype: str, scale: float) -> None:
    if not np.isfinite(entry.stored()).all():
        raise ValueRangeError(f"{entry.location()}: NaN or infinity in the task vector")
    raise ValueRangeError(
        f"{quoted(info.name)}: θ + {scale}·τ does not fit {dtype}; use a smaller scale"
    )
