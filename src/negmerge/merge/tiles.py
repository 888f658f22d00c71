"""Reading the same range of one tensor from all models into rows that the kernels understand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.dtypes import FLOATS, Bytes, narrow, widen
from negmerge.fingerprint import KEYS, checksum, padded
from negmerge.header import TensorInfo
from negmerge.merge import kernels
from negmerge.merge.inputs import Inputs
from negmerge.merge.memory import TILES

SEGMENT = 1 << 18
"""Elements of one unit of work."""
NO_WORDS = np.empty((0, 0), np.uint64)


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

    >>> info = TensorInfo("w", "F32", (300000,), 0, 0)
    >>> [(s.start, s.stop) for s in segments([info])]
    [(0, 262144), (262144, 300000)]
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

    def __init__(self, inputs: Inputs, memory: int = TILES) -> None:
        self.inputs = inputs
        n = len(inputs.models)
        room = memory // (n * 8) // 4096 * 4096
        self.tile = max(4096, min(SEGMENT // 4, room))
        self.raw = aligned(n * self.tile * 8).reshape(n, -1)
        self.wide = np.empty((0, 0), np.float32)

    def tiles(self, segment: Segment) -> list[tuple[int, int]]:
        """(start, count) of each tile of a segment, in elements of the tensor."""
        return [
            (start, min(self.tile, segment.stop - start))
            for start in range(segment.start, segment.stop, self.tile)
        ]

    def read(
        self, name: str, start: int, count: int, sums: NDArray[np.uint64]
    ) -> tuple[NDArray[Any], NDArray[np.uint64]]:
        """Rows that begin with one tile, padded with zeros to whole strips, and their raw words.

        Words come back only where the kernel can take checksums from the rows themselves;
        otherwise they are added to `sums` here.
        """
        infos = self.inputs.infos(name)
        whole = -(-count // kernels.STRIP) * kernels.STRIP
        formats = {info.dtype for info in infos}
        if len(formats) > 1:
            return self._mixed(infos, start, count, whole, sums), NO_WORDS
        (dtype,) = formats
        size = FLOATS[dtype]
        end = padded(whole * size)
        for row, model, info in zip(self.raw, self.inputs.models, infos, strict=True):
            model.read_into(info, start * size, row[: count * size])
            row[count * size : end] = 0
        # Whole buffers are handed on, not slices of rows: numba then knows that rows are contiguous.
        words = self.raw.view(np.uint64)
        if size > 2:
            return self.raw.view(np.float32 if size == 4 else np.float64), words
        kernels.add_checksums(
            words, padded(count * size) // 8, start * size // 4096, KEYS, sums
        )
        if not self.wide.size:
            self.wide = np.empty((len(infos), self.tile), np.float32)
        bits, halves = self.wide.view(np.uint32), self.raw.view(np.uint16)
        if dtype == "BF16":
            kernels.widen_bfloat16(halves, whole, bits)
        else:
            kernels.widen_float16(halves, whole, self.wide, bits)
        return self.wide, NO_WORDS

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
        for k, (model, info) in enumerate(zip(self.inputs.models, infos, strict=True)):
            size = FLOATS[info.dtype]
            buffer = np.zeros(padded(count * size), np.uint8)
            model.read_into(info, start * size, buffer[: count * size])
            sums[k] += checksum(buffer.view(np.uint64), start * size // 4096, KEYS)
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


def aligned(nbytes: int) -> Bytes:
    """A buffer on a page boundary: reads into unaligned ones can be five times slower."""
    raw = np.empty(nbytes + 4096, np.uint8)
    skip = -raw.ctypes.data % 4096
    return raw[skip : skip + nbytes]
