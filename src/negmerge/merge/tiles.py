"""Reading the same range of one tensor from all models into rows that the kernels understand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoint import aligned
from negmerge.dtypes import FLOATS, Bytes, narrow, widen
from negmerge.fingerprint import BLOCK, KEYS, checksum, padded
from negmerge.header import TensorInfo
from negmerge.merge import kernels, loop
from negmerge.merge.inputs import Inputs
from negmerge.merge.memory import TILES

SEGMENT = 1 << 19
"""Elements of one unit of work."""


Lookup = tuple[set[str], tuple[NDArray[np.int32], NDArray[np.int64]]]


@dataclass(frozen=True)
class Segment:
    """A range of one tensor: the unit of work of one worker.

    strip: the number of its first strip, counted through the whole model.
    """

    info: TensorInfo
    start: int
    stop: int
    strip: int


def segments(tensors: list[TensorInfo]) -> list[Segment]:
    """Cut tensors into segments, in order.

    >>> info = TensorInfo("w", "F32", (600000,), 0, 0)
    >>> [(s.start, s.stop) for s in segments([info])]
    [(0, 524288), (524288, 600000)]
    """
    found: list[Segment] = []
    strip = 0
    for info in tensors:
        for start in range(0, max(info.elements, 1), SEGMENT):
            stop = min(start + SEGMENT, info.elements)
            found.append(Segment(info, start, stop, strip))
            strip += -(-(stop - start) // kernels.STRIP)
    return found


class TileReader:
    """One worker's buffers: reads tiles as rows of float32 or float64, the base first.

    If all models store a tensor in one format its values are used as they are (16-bit ones widened
    exactly to float32). In a mixed pool row k is the exact difference of member k from the base as
    that member would have stored it, and row 0 is zero: rounding the base to a member's narrower
    format is no change of the weight, and counts as none.

    tile: elements of a tile, a multiple of 4096.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        n = len(inputs.models)
        room = TILES // (n * 8) // 4096 * 4096
        self.tile = max(4096, min(1 << 16, room))
        self._buffer = aligned(n * self.tile * 8)
        self.wide = np.empty((0, 0), np.float32)
        nothing = np.empty(0, np.int32), np.empty(0, np.int64)
        self._found: tuple[str, Lookup] = ("", (set(), nothing))

    def tiles(self, segment: Segment) -> list[Segment]:
        """A segment cut into tiles."""
        return [
            Segment(
                segment.info,
                start,
                min(start + self.tile, segment.stop),
                segment.strip + (start - segment.start) // kernels.STRIP,
            )
            for start in range(segment.start, segment.stop, self.tile)
        ]

    def formats(self, name: str) -> set[str]:
        """The formats in which the models store a tensor."""
        return self._lookup(name)[0]

    def places(self, name: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Descriptor and offset of a tensor in every model."""
        return self._lookup(name)[1]

    def _lookup(self, name: str) -> Lookup:
        """Kept for the tensor at hand: a large one is asked about many times."""
        if self._found[0] != name:
            found = [model.place(model.tensors[name]) for model in self.inputs.models]
            descriptors, offsets = zip(*found, strict=True)
            places = np.array(descriptors, np.int32), np.array(offsets, np.int64)
            formats = {model.tensors[name].dtype for model in self.inputs.models}
            self._found = (name, (formats, places))
        return self._found[1]

    def rows(self, dtype: str) -> tuple[Bytes, NDArray[Any], int]:
        """For a format: rows of bytes to read into, rows of floats, and how to widen (or 0).

        Rows follow each other without gaps, and whole arrays are handed out, not slices of them:
        gaps would waste the cache, and numba must know that rows are contiguous.
        """
        n, size = len(self.inputs.models), FLOATS[dtype]
        raw = self._buffer[: n * self.tile * size].reshape(n, -1)
        if size > 2:
            return raw, raw.view(np.float32 if size == 4 else np.float64), 0
        if not self.wide.size:
            self.wide = np.empty((n, self.tile), np.float32)
        return raw, self.wide, loop.BFLOAT16 if dtype == "BF16" else loop.FLOAT16

    def read(self, name: str, start: int, count: int, sums: NDArray[np.uint64]) -> NDArray[Any]:
        """Rows that begin with one tile, padded with zeros to whole strips; adds to checksums."""
        infos = self.inputs.infos(name)
        whole = -(-count // kernels.STRIP) * kernels.STRIP
        formats = self.formats(name)
        if len(formats) > 1:
            return self._mixed(infos, start, count, whole, sums)
        raw, rows, half = self.rows(*formats)
        size = FLOATS[infos[0].dtype]
        end = padded(whole * size)
        done = loop.read_rows(*self.places(name), start * size, count * size, end, raw)
        # What could not be read at once is read with care, which tells what is wrong.
        for row, model, info in list(zip(raw, self.inputs.models, infos, strict=True))[done:]:
            model.read_into(info, start * size, row[: count * size])
            row[count * size : end] = 0
        blocks = padded(count * size) // BLOCK
        loop.add_checksums(in_blocks(raw), 0, blocks, start * size // BLOCK, KEYS, sums)
        if half:
            loop.widen(raw, half, whole, rows)
        return rows

    def _mixed(
        self,
        infos: list[TensorInfo],
        start: int,
        count: int,
        whole: int,
        sums: NDArray[np.uint64],
    ) -> NDArray[np.float64]:
        rows = np.zeros((len(infos), whole))
        bases: dict[str, NDArray[np.float64]] = {}
        own = rows[0]
        for k, (model, info) in enumerate(zip(self.inputs.models, infos, strict=True)):
            size = FLOATS[info.dtype]
            buffer = np.zeros(padded(count * size), np.uint8)
            model.read_into(info, start * size, buffer[: count * size])
            # As arrays, which wrap around; a single number would warn of it.
            seen = checksum(buffer.view(np.uint64), start * size // BLOCK, KEYS)
            sums[k : k + 1] += np.array([seen], np.uint64)
            values = widen(buffer[: count * size], info.dtype)
            if k == 0:
                bases[info.dtype] = values
                own = values
                continue
            if info.dtype not in bases:
                bases[info.dtype] = widen(narrow(own, info.dtype), info.dtype)
            with np.errstate(invalid="ignore", over="ignore"):
                rows[k, :count] = values - bases[info.dtype]
        return rows


def in_blocks(raw: Bytes) -> NDArray[np.uint64]:
    """Rows of bytes as the words of their blocks."""
    return raw.view(np.uint64).reshape(len(raw), -1, BLOCK // 8)
