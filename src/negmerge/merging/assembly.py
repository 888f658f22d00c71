"""The merged tensor, put together from its segments, sparse or dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.dtypes import NUMPY_TYPES
from negmerge.checkpoints.header import TensorInfo
from negmerge.merging.memory import Budget
from negmerge.merging.tiles import SEGMENT
from negmerge.vectors.entry import Entry, Layout, layout_for

NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Piece:
    """The result of one segment; mask and values are empty if the values are not packed.

    Args:
        dissent: for each member, the number of sampled elements where it alone disagrees; then the
            pairs of members that agree in the sampled elements, and all pairs that are not zero.
        sampled: the number of sampled elements.
    """

    nonzero: int
    mask: NDArray[np.uint8]
    values: NDArray[Any]
    checksums: NDArray[np.uint64]
    dissent: NDArray[np.int64]
    sampled: int


class Assembly:
    """The result of one tensor; its pieces are appended to `pieces` in order.

    Args:
        in_place: whether segments are written to their places in `whole`, for rules whose results
            are mostly dense. Results that are too large for memory always are. Otherwise segments
            are packed, and joined at the end.
    """

    def __init__(
        self, info: TensorInfo, dtype: str, layout: Layout, budget: Budget, in_place: bool
    ) -> None:
        self.info, self.dtype, self.budget = info, dtype, budget
        self.layout: Layout = layout
        self.kind = NUMPY_TYPES[dtype]
        self.whole: NDArray[Any] | None = None
        if in_place or budget.is_large(info.elements * np.dtype(self.kind).itemsize):
            self.whole = budget.allocate(info.elements, self.kind)
        self.pieces: list[Piece] = []

    def entry(self) -> Entry:
        """Return the finished tensor."""
        nonzero = sum(piece.nonzero for piece in self.pieces)
        masks = values = None
        if nonzero and layout_for(nonzero, self.info.elements, self.dtype, self.layout) == "dense":
            values = self._unpacked() if self.whole is None else self.whole
        elif nonzero and self.whole is not None:
            masks, values = self._packed(self.whole, nonzero)
        elif nonzero:
            masks, values = [p.mask for p in self.pieces], [p.values for p in self.pieces]
        return Entry(self.info.shape, self.dtype, nonzero, masks, values)

    def _packed(self, whole: NDArray[Any], nonzero: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """Return a bit for each value, and the values that are not zero."""
        mask = self.budget.allocate(-(-whole.size // 8), np.uint8)
        values = self.budget.allocate(nonzero, self.kind)
        at = 0
        for start in range(0, whole.size, SEGMENT):
            part = whole[start : start + SEGMENT]
            kept = part != 0
            bits, some = np.packbits(kept, bitorder="little"), part[kept]
            mask[start // 8 : start // 8 + bits.size] = bits
            values[at : at + some.size] = some
            at += some.size
        return mask, values

    def _unpacked(self) -> NDArray[Any]:
        """Return all values of packed segments."""
        flat = np.zeros(self.info.elements, self.kind)
        for start, piece in zip(range(0, flat.size, SEGMENT), self.pieces, strict=True):
            part = flat[start : start + SEGMENT]
            bits = np.unpackbits(piece.mask, count=part.size, bitorder="little")
            part[bits.view(bool)] = piece.values
        return flat
