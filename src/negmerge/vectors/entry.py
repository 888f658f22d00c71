"""One tensor of a task vector, in memory or in a patch file: zero, dense, sparse or listed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import BITS, NUMPY_TYPES, SIZES, Bytes, from_bits
from negmerge.checkpoints.header import TensorInfo
from negmerge.errors import FileError, quoted

VALUES = "#values"
"""The suffix of the tensor that stores the values of a sparse or listed entry."""
LISTED = 1 << 16
"""Elements of one block of a listed entry, whose positions fit 16 bits."""
STEP = 1 << 22
"""Elements whose positions are found at once: memory stays small."""
Layout = Literal["auto", "sparse", "dense"]
Source = NDArray[Any] | tuple[Checkpoint, TensorInfo] | list[NDArray[Any]]
"""An array, a tensor of an open file, or a list of arrays that are joined on first use."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a task vector.

    Args:
        shape: the shape of the tensor.
        dtype: F32, F64 if an input was float64, or BF16 if the values were rounded to it; arrays of
            BF16 values hold their bits.
        nonzero: the number of elements that are not zero.
        mask: one bit per element, lowest bit first; None for other entries than sparse ones.
        values: the nonzero elements of a sparse or listed entry, all elements of a dense entry;
            None for a zero entry.
        listing: the positions of the nonzero elements, as `listed_positions` packs them; None for
            other entries than listed ones.
    """

    shape: tuple[int, ...]
    dtype: str
    nonzero: int
    mask: Source | None = None
    values: Source | None = None
    listing: Source | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def layout(self) -> str:
        if self.values is None:
            return "zero"
        return (
            "listed" if self.listing is not None else "sparse" if self.mask is not None else "dense"
        )

    @property
    def nbytes(self) -> int:
        """The size in a file."""
        return _sizes(self.nonzero, self.elements, self.dtype)[self.layout]

    def bits(self, start: int = 0, stop: int | None = None, into: Bytes | None = None) -> Bytes:
        """Bytes `start` to `stop` of the mask; by default the whole mask.

        Args:
            into: a buffer for bytes that are read from a file.
        """
        assert self.mask is not None
        stop = -(-self.elements // 8) if stop is None else stop
        return _part(self.mask, np.uint8, start, stop, into)

    def mask_bits(self) -> Bytes:
        """The whole mask of a sparse or listed entry."""
        if self.listing is None:
            return self.bits()
        mask = np.zeros(-(-self.elements // STEP) * STEP // 8, np.uint8)
        for start, first, count in self.ranges(STEP):
            flags = np.zeros(STEP, np.bool_)
            flags[self.positions_in(start, min(start + STEP, self.elements), first, count)] = True
            mask[start // 8 : (start + STEP) // 8] = np.packbits(flags, bitorder="little")
        return mask[: -(-self.elements // 8)]

    def words(
        self, start: int = 0, stop: int | None = None, into: Bytes | None = None
    ) -> NDArray[Any]:
        """The bits of stored values `start` to `stop`, as integers; by default all."""
        kind = BITS[self.dtype]
        if self.values is None:
            return np.empty(0, kind)
        count = self.elements if self.layout == "dense" else self.nonzero
        return _part(self.values, kind, start, count if stop is None else stop, into)

    def stored(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Stored values `start` to `stop`, as float32 or float64; by default all."""
        return from_bits(self.words(start, stop), self.dtype)

    def dense(self) -> NDArray[Any]:
        """All elements as a flat array."""
        if self.layout == "dense":
            return self.stored()
        found = np.zeros(self.elements, NUMPY_TYPES.get(self.dtype, np.float32))
        found[self.positions()] = self.stored()
        return found

    # ---------------------------------------------------------------------------------- positions

    def positions(self) -> NDArray[np.int64]:
        """Flat indices of the nonzero elements."""
        if self.layout in ("dense", "zero"):
            return np.flatnonzero(self.stored())
        parts = [np.empty(0, np.int64)]
        for start, first, count in self.ranges(STEP):
            stop = min(start + STEP, self.elements)
            parts.append(self.positions_in(start, stop, first, count) + start)
        return np.concatenate(parts)

    def ranges(self, step: int) -> Iterator[tuple[int, int, int]]:
        """For each range of `step` elements its start, the values before it, the values in it.

        Raises if the positions do not fit the values. The last number is 0 for a dense or zero
        entry, and the number before it too.

        Args:
            step: a multiple of `LISTED`.
        """
        counts = [0] * -(-self.elements // step)
        if self.layout in ("sparse", "listed"):
            counts = self._mask_counts(step) if self.listing is None else self._listed_counts(step)
        first = 0
        for j, count in enumerate(counts):
            yield j * step, first, count
            first += count

    def positions_in(self, start: int, stop: int, first: int, count: int) -> NDArray[np.int64]:
        """Positions of the nonzero elements of a range that `ranges` gave, from its start on."""
        if self.listing is None:
            bits = self.bits(start // 8, -(-stop // 8))
            # Most bytes have no bit set: only the others are unpacked.
            filled = np.flatnonzero(bits)
            found = np.flatnonzero(np.unpackbits(bits[filled], bitorder="little").view(np.bool_))
            return filled[found >> 3] * 8 + (found & 7)
        blocks = -(-self.elements // LISTED)
        counts = self._block_counts(start // LISTED, -(-stop // LISTED))
        own = 2 * blocks + first
        offsets = _part(self.listing, np.uint16, own, own + count)
        where = np.repeat(np.arange(counts.size) * LISTED, counts) + offsets
        if where.size and (where[-1] >= stop - start or (np.diff(where) <= 0).any()):
            raise FileError(
                f"{self.location()}: the listed positions are not in order, or one is after the "
                f"last of {self.elements} elements; the patch is damaged"
            )
        return where

    def _mask_counts(self, step: int) -> list[int]:
        found: list[int] = []
        for start in range(0, self.elements, step):
            bits = self.bits(start // 8, -(-min(start + step, self.elements) // 8))
            found.append(int(np.bitwise_count(bits).sum()))
        used = self.elements % 8
        unused_bits = int(self.bits(self.elements // 8)[0]) >> used if used else 0
        if sum(found) != self.nonzero or unused_bits:
            raise FileError(
                f"{self.location()}: the mask has {sum(found)} bits for {self.nonzero} values; "
                "the patch is damaged"
            )
        return found

    def _listed_counts(self, step: int) -> list[int]:
        counts = self._block_counts(0, -(-self.elements // LISTED))
        if int(counts.sum()) != self.nonzero or (counts > LISTED).any():
            raise FileError(
                f"{self.location()}: {int(counts.sum())} positions are listed for {self.nonzero} "
                "values; the patch is damaged"
            )
        return [
            int(counts[at : at + step // LISTED].sum())
            for at in range(0, counts.size, step // LISTED)
        ]

    def _block_counts(self, start: int, stop: int) -> NDArray[np.int64]:
        """The number of values in blocks of `LISTED` elements."""
        assert self.listing is not None
        halves = _part(self.listing, np.uint16, 2 * start, 2 * stop).astype(np.int64)
        return halves[::2] + (halves[1::2] << 16)

    def listed_positions(self) -> NDArray[np.uint16]:
        """The positions of a sparse or listed entry, packed.

        For each block of 65,536 elements two numbers, the low and the high 16 bits of the number of
        values in the block; then the position of each value within its block.

        >>> flat = np.zeros(65540, np.float32)
        >>> flat[[7, 65539]] = 1
        >>> Entry.of(flat, (65540,), "sparse").listed_positions()
        array([1, 0, 1, 0, 7, 3], dtype=uint16)
        """
        blocks = -(-self.elements // LISTED)
        counts = np.zeros(blocks, np.uint32)
        found = np.empty(2 * blocks + self.nonzero, np.uint16)
        for start, first, count in self.ranges(STEP):
            where = self.positions_in(start, min(start + STEP, self.elements), first, count)
            found[2 * blocks + first : 2 * blocks + first + count] = where & (LISTED - 1)
            some = np.bincount(where >> 16).astype(np.uint32)
            counts[start // LISTED : start // LISTED + some.size] = some
        found[: 2 * blocks] = counts.view(np.uint16)
        return found

    def location(self) -> str:
        """The file and the name of this tensor, for errors."""
        if isinstance(self.values, tuple):
            model, info = self.values
            return f"{model.path} {quoted(info.name.removesuffix(VALUES))}"
        return "a task vector in memory"

    @classmethod
    def of(cls, flat: NDArray[Any], shape: tuple[int, ...], layout: Layout = "auto") -> Entry:
        """Pack a flat float32 or float64 array, by default in the smaller layout.

        >>> Entry.of(np.array([0, 2, 0], np.float32), (3,), "sparse").stored()
        array([2.], dtype=float32)
        """
        dtype = {4: "F32", 8: "F64"}[flat.itemsize]
        nonzero = int(np.count_nonzero(flat))
        if not nonzero:
            return cls(shape, dtype, 0)
        if layout_for(nonzero, flat.size, dtype, layout) == "dense":
            return cls(shape, dtype, nonzero, None, flat)
        mask = np.packbits(flat != 0, bitorder="little")
        return cls(shape, dtype, nonzero, mask, flat[flat != 0])


def layout_for(nonzero: int, elements: int, dtype: str, layout: Layout) -> str:
    """The requested layout of a tensor in memory, or the smaller one for `auto`."""
    sizes = _sizes(nonzero, elements, dtype)
    smaller = "sparse" if min(sizes["sparse"], sizes["listed"]) < sizes["dense"] else "dense"
    return smaller if layout == "auto" else layout


def listing_is_smaller(entry: Entry) -> bool:
    """Whether a list of the positions takes fewer bytes than a mask."""
    sizes = _sizes(entry.nonzero, entry.elements, entry.dtype)
    return sizes["listed"] < sizes["sparse"]


def _sizes(nonzero: int, elements: int, dtype: str) -> dict[str, int]:
    """The bytes of a tensor in each layout."""
    size = SIZES[dtype]
    listing = 4 * -(-elements // LISTED) + 2 * nonzero
    return {
        "zero": 0,
        "dense": elements * size,
        "sparse": -(-elements // 8) + nonzero * size,
        "listed": listing + nonzero * size,
    }


def _part(
    source: Source, dtype: Any, start: int, stop: int, into: Bytes | None = None
) -> NDArray[Any]:
    if isinstance(source, list):
        if len(source) > 1:
            source[:] = [np.concatenate(source)]
        source = source[0]
    if isinstance(source, np.ndarray):
        return source.reshape(-1)[start:stop].view(dtype)
    model, info = source
    size = np.dtype(dtype).itemsize
    if into is None:
        return model.read(info, start * size, stop * size).view(dtype)
    part = into[: (stop - start) * size]
    model.read_into(info, start * size, part)
    return part.view(dtype)
