"""Putting a tensor's merged segments together, sparse or dense, whichever is smaller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.header import TensorInfo
from negmerge.merge.memory import Budget
from negmerge.merge.tiles import SEGMENT
from negmerge.patch import Entry, Layout, layout_for


@dataclass(frozen=True)
class Piece:
    """What one segment became: its packed values (unless they went to their place), and counts."""

    nonzero: int
    mask: NDArray[np.uint8]
    values: NDArray[Any]
    sums: NDArray[np.uint64]
    dissent: NDArray[np.int64]
    sampled: int


NOTHING = np.empty(0, np.uint8)


class Assembly:
    """The result of one tensor while its segments come in.

    In place: segments are written where they belong, for rules whose results are mostly dense and
    for tensors too large for memory. Otherwise segments come packed and are joined at the end.
    """

    def __init__(
        self, info: TensorInfo, dtype: str, layout: Layout, budget: Budget, in_place: bool
    ) -> None:
        self.info, self.dtype, self.budget = info, dtype, budget
        self.layout: Layout = layout
        self.kind = np.float32 if dtype == "F32" else np.float64
        size = info.elements * np.dtype(self.kind).itemsize
        self.whole: NDArray[Any] | None = None
        if in_place or budget.is_large(size):
            self.whole = budget.allocate(info.elements, self.kind)
        self.pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """Take the next segment, in order."""
        self.pieces.append(piece)

    def entry(self) -> Entry:
        """The finished tensor."""
        shape, elements = self.info.shape, self.info.elements
        nonzero = sum(piece.nonzero for piece in self.pieces)
        if not nonzero:
            return Entry(shape, self.dtype, 0)
        sparse = layout_for(nonzero, elements, self.dtype, self.layout) == "sparse"
        if self.whole is not None:
            if not sparse:
                return Entry(shape, self.dtype, nonzero, None, self.whole)
            mask = self.budget.allocate(-(-elements // 8), np.uint8)
            values = self.budget.allocate(nonzero, self.kind)
            at = 0
            for start in range(0, elements, SEGMENT):
                part = self.whole[start : start + SEGMENT]
                some = part[part != 0]
                mask[start // 8 : start // 8 + -(-part.size // 8)] = np.packbits(
                    part != 0, bitorder="little"
                )
                values[at : at + some.size] = some
                at += some.size
            return Entry(shape, self.dtype, nonzero, mask, values)
        if sparse:
            masks, values = [p.mask for p in self.pieces], [p.values for p in self.pieces]
            return Entry(shape, self.dtype, nonzero, masks, values)
        return Entry(shape, self.dtype, nonzero, None, self._expanded())

    def _expanded(self) -> NDArray[Any]:
        flat = np.zeros(self.info.elements, self.kind)
        for start, piece in zip(range(0, flat.size, SEGMENT), self.pieces, strict=True):
            part = flat[start : start + SEGMENT]
            part[np.unpackbits(piece.mask, count=part.size, bitorder="little").view(bool)] = (
                piece.values
            )
        return flat
