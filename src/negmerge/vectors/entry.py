"""One tensor of a task vector, in memory or in a patch file: zero, dense or sparse."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import NUMPY_TYPES, SIZES, Bytes
from negmerge.checkpoints.header import TensorInfo
from negmerge.errors import FileError, quoted

VALUES = "#values"
"""The suffix of the tensor that stores the values of a sparse entry."""
Layout = Literal["auto", "sparse", "dense"]
Source = NDArray[Any] | tuple[Checkpoint, TensorInfo] | list[NDArray[Any]]
"""An array, a tensor of an open file, or a list of arrays that are joined on first use."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a task vector.

    Args:
        shape: the shape of the tensor.
        dtype: F32, or F64 if an input was float64.
        nonzero: the number of elements that are not zero.
        mask: one bit per element, lowest bit first; None for dense and zero entries.
        values: the nonzero elements of a sparse entry, all elements of a dense entry; None for a
            zero entry.
    """

    shape: tuple[int, ...]
    dtype: str
    nonzero: int
    mask: Source | None = None
    values: Source | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def layout(self) -> str:
        return "zero" if self.values is None else "dense" if self.mask is None else "sparse"

    @property
    def nbytes(self) -> int:
        """The size in a file."""
        return _sizes(self.nonzero, self.elements, self.dtype)[self.layout]

    def bits(self, start: int = 0, stop: int | None = None) -> Bytes:
        """Bytes `start` to `stop` of the mask; by default the whole mask."""
        assert self.mask is not None
        return _part(self.mask, np.uint8, start, -(-self.elements // 8) if stop is None else stop)

    def stored(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Stored values `start` to `stop`; by default all."""
        kind = NUMPY_TYPES[self.dtype]
        if self.values is None:
            return np.empty(0, kind)
        count = self.elements if self.mask is None else self.nonzero
        return _part(self.values, kind, start, count if stop is None else stop)

    def dense(self) -> NDArray[Any]:
        """All elements as a flat array."""
        if self.layout == "dense":
            return self.stored()
        found = np.zeros(self.elements, NUMPY_TYPES[self.dtype])
        found[self.positions()] = self.stored()
        return found

    def positions(self) -> NDArray[np.int64]:
        """Flat indices of the nonzero elements."""
        if self.mask is None:
            return np.flatnonzero(self.stored())
        self.counts(max(self.elements, 1))
        return np.flatnonzero(np.unpackbits(self.bits(), count=self.elements, bitorder="little"))

    def counts(self, step: int) -> list[int]:
        """The number of values in each range of `step` elements of a sparse entry.

        Raises if the mask does not fit the values.
        """
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
    """The requested layout of a tensor, or the smaller one for `auto`."""
    sizes = _sizes(nonzero, elements, dtype)
    smaller = "sparse" if sizes["sparse"] < sizes["dense"] else "dense"
    return smaller if layout == "auto" else layout


def _sizes(nonzero: int, elements: int, dtype: str) -> dict[str, int]:
    """The bytes of a tensor in each layout."""
    size = SIZES[dtype]
    return {"zero": 0, "dense": elements * size, "sparse": -(-elements // 8) + nonzero * size}


def _part(source: Source, dtype: Any, start: int, stop: int) -> NDArray[Any]:
    if isinstance(source, list):
        if len(source) > 1:
            source[:] = [np.concatenate(source)]
        source = source[0]
    if isinstance(source, np.ndarray):
        return source.reshape(-1)[start:stop]
    model, info = source
    size = np.dtype(dtype).itemsize
    return model.read(info, start * size, stop * size).view(dtype)
