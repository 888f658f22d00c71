"""Reading one range of a tensor from all models, as the rows that folds take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from negmerge.checkpoints.adapted import Adapted
from negmerge.checkpoints.checkpoint import aligned_buffer
from negmerge.checkpoints.checksum import add_checksums
from negmerge.checkpoints.dtypes import BITS, FLOATS, NUMPY_TYPES, Bytes, from_bits, narrow, widen
from negmerge.checkpoints.fingerprint import BLOCK, checksum, padded_size
from negmerge.checkpoints.header import TensorInfo
from negmerge.merging.folds import STRIP
from negmerge.merging.inputs import Inputs
from negmerge.merging.memory import TILES
from negmerge.merging.rows import BFLOAT16, FLOAT16, read_rows
from negmerge.merging.rows import widen as widen_rows
from negmerge.support.parallel import run_in_order

SEGMENT = 1 << 19
"""The number of elements of one unit of work."""

Checksums = NDArray[np.uint64]
Places = tuple[NDArray[np.int32], NDArray[np.int64]]
"""The file descriptor and the offset of a tensor in every model."""
R = TypeVar("R")


@dataclass(frozen=True)
class Segment:
    """A range of one tensor: the unit of work of one worker.

    `strip` is the index of the first strip of the range among all strips of the model.
    """

    info: TensorInfo
    start: int
    stop: int
    strip: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.start


def segments(tensors: list[TensorInfo]) -> list[Segment]:
    """Cut tensors into segments, in order; an empty tensor is one empty segment.

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
            strip += -(-(stop - start) // STRIP)
    return found


class TileReader:
    """The buffers of one worker: reads tiles as rows of float32 or float64, the base first.

    If the format of every model holds the values of the base, the rows hold the values of the
    models, which are widened exactly where necessary. In other pools, row 0 is zero and row k is
    the exact difference of member k from the base rounded to the format of that member: rounding
    the base to a narrower format does not count as a change of the weight.

    If the members are scaled (`Inputs.factors`), row 0 is zero and row k is the change of member k
    in float64 times its factor, rounded once.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.factors = inputs, inputs.factors
        n = len(inputs.models)
        room = TILES if self.factors is None else TILES // 2  # the other half for scaled rows
        self.tile = max(4096, min(1 << 16, room // (n * 8) // 4096 * 4096))
        """The number of elements of a tile, a multiple of 4096."""
        self._buffer = aligned_buffer(n * self.tile * 8)
        self._wide = np.empty((0, 0), np.float32)
        self._scaled = np.zeros((0, 0) if self.factors is None else (n, self.tile))
        self._name: str | None = None
        self._formats: set[str] = set()
        self._places: Places

    def tiles(self, segment: Segment) -> Iterator[Segment]:
        """Cut a segment into tiles."""
        for start in range(segment.start, segment.stop, self.tile):
            yield Segment(segment.info, start, min(start + self.tile, segment.stop))

    def find(self, name: str) -> tuple[set[str], Places]:
        """Return the formats of a tensor in the models, and its places in their files.

        The last answer is remembered: a large tensor is looked up many times.
        """
        if self._name != name:
            models = self.inputs.models
            descriptors, offsets = zip(*(m.place(m.tensors[name]) for m in models), strict=True)
            self._places = np.array(descriptors, np.int32), np.array(offsets, np.int64)
            self._formats = {info.dtype for info in self.inputs.infos(name)}
            self._name = name
        return self._formats, self._places

    def rows(self, dtype: str) -> tuple[Bytes, NDArray[Any], int]:
        """Return the buffers of a float format: rows of bytes to read into, and rows of floats.

        Rows follow each other without gaps, and the arrays are whole, not slices: gaps would waste
        the cache, and numba must know that rows are contiguous.

        Returns:
            The rows of bytes, the rows of floats, and the `kind` that `rows.widen` takes, or 0 if
            both arrays are the same memory.
        """
        n, size = len(self.inputs.models), FLOATS[dtype]
        raw = self._buffer[: n * self.tile * size].reshape(n, -1)
        if size > 2:
            return raw, raw.view(np.float32 if size == 4 else np.float64), 0
        if not self._wide.size:
            self._wide = np.empty((n, self.tile), np.float32)
        return raw, self._wide, BFLOAT16 if dtype == "BF16" else FLOAT16

    def read(self, name: str, start: int, count: int, checksums: Checksums) -> NDArray[Any]:
        """Read one tile into rows, which are filled with zeros up to a whole strip.

        The checksums of the tile are added to `checksums`, one for each model.
        """
        rows = self._read(name, start, count, checksums)
        if self.factors is None:
            return rows
        whole, scaled = -(-count // STRIP) * STRIP, self._scaled
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(rows[1:, :whole], rows[0, :whole], scaled[1:, :whole], dtype=np.float64)
            scaled[1:, :whole] *= self.factors[:, None]
        return scaled

    def _read(self, name: str, start: int, count: int, checksums: Checksums) -> NDArray[Any]:
        """Read one tile into rows of the values of the models."""
        infos = self.inputs.infos(name)
        whole = -(-count // STRIP) * STRIP
        formats, places = self.find(name)
        if len(formats) > 1:
            if all(_holds(info.dtype, infos[0].dtype) for info in infos):
                return self._widened(infos, start, count, whole, checksums)
            return self._mixed(infos, start, count, whole, checksums)
        raw, rows, kind = self.rows(*formats)
        size = FLOATS[infos[0].dtype]
        end = padded_size(whole * size)
        done = read_rows(*places, start * size, count * size, end, raw)
        # Rows that `read_rows` could not fill: `_read_row` reads them or raises the error.
        for k in range(done, len(infos)):
            self._read_row(k, infos[k], start, raw[k, : count * size], rows[0])
            raw[k, count * size : end] = 0
        blocks = padded_size(count * size) // BLOCK
        add_checksums(raw, 0, blocks, start * size // BLOCK, checksums)
        if kind:
            widen_rows(raw, kind, 0, whole // STRIP, rows.reshape(len(rows), -1, STRIP))
        return rows

    def read_base(self, segment: Segment, checksums: Checksums) -> None:
        """Read a segment that is the same in all models, for the checksums."""
        info, model = segment.info, self.inputs.base
        size = FLOATS[info.dtype]
        step = len(self._buffer) // BLOCK * BLOCK // size
        for start in range(segment.start, segment.stop, step):
            count = min(step, segment.stop - start) * size
            row = self._buffer[None, : padded_size(count)]
            model.read_into(info, start * size, row[0, :count])
            row[0, count:] = 0
            found = np.zeros(1, np.uint64)
            add_checksums(row, 0, row.size // BLOCK, start * size // BLOCK, found)
            checksums += found

    def _read_row(
        self, k: int, info: TensorInfo, start: int, row: Bytes, base: NDArray[Any]
    ) -> None:
        """Read the bytes of model k; an adapter of the format of the row of the base is faster."""
        model = self.inputs.models[k]
        if isinstance(model, Adapted) and info.name in model.changes:
            values = row.view(NUMPY_TYPES[info.dtype])
            if base.dtype == values.dtype:
                model.add_to(base[: values.size], info.name, start, values)
                return
        model.read_into(info, start * FLOATS[info.dtype], row)

    def _widened(
        self, infos: list[TensorInfo], start: int, count: int, whole: int, checksums: Checksums
    ) -> NDArray[Any]:
        """Read models of several formats, whose values are widened to the widest of them."""
        widest = max((info.dtype for info in infos), key=lambda dtype: FLOATS[dtype])
        raw, rows, _ = self.rows(widest)
        narrow_row = np.zeros((1, padded_size(count * 4)), np.uint8)
        for k, info in enumerate(infos):
            size = FLOATS[info.dtype]
            same = info.dtype == widest
            own = raw[k : k + 1] if same else narrow_row
            self._read_row(k, info, start, own[0, : count * size], rows[0])
            own[0, count * size : padded_size(count * size)] = 0
            blocks = padded_size(count * size) // BLOCK
            add_checksums(own, 0, blocks, start * size // BLOCK, checksums[k : k + 1])
            if not same:
                rows[k, :count] = from_bits(
                    own[0, : count * size].view(BITS[info.dtype]), info.dtype
                )
            rows[k, count:whole] = 0
        return rows

    def _mixed(
        self, infos: list[TensorInfo], start: int, count: int, whole: int, checksums: Checksums
    ) -> NDArray[np.float64]:
        rows = np.zeros((len(infos), whole))
        bases: dict[str, NDArray[np.float64]] = {}
        """The base in the format of each member."""
        for k, (model, info) in enumerate(zip(self.inputs.models, infos, strict=True)):
            size = FLOATS[info.dtype]
            buffer = np.zeros(padded_size(count * size), np.uint8)
            model.read_into(info, start * size, buffer[: count * size])
            # Sums of arrays wrap around without a warning; sums of single numbers warn.
            found = checksum(buffer.view(np.uint64), start * size // BLOCK)
            checksums[k : k + 1] += np.array([found], np.uint64)
            values = widen(buffer[: count * size], info.dtype)
            if k == 0:
                bases[info.dtype] = values
                continue
            if info.dtype not in bases:
                base = bases[infos[0].dtype]
                bases[info.dtype] = widen(narrow(base, info.dtype), info.dtype)
            with np.errstate(invalid="ignore", over="ignore"):
                rows[k, :count] = values - bases[info.dtype]
        return rows


def _holds(dtype: str, base: str) -> bool:
    """Whether a format has all values of the format of the base.

    >>> _holds("F32", "BF16"), _holds("F16", "BF16")
    (True, False)
    """
    return dtype == base or FLOATS[dtype] > FLOATS[base]


def visit_tiles(
    inputs: Inputs,
    run: Callable[[NDArray[Any], int], R],
    workers: int,
    work: Sequence[Segment] | None = None,
) -> Iterator[tuple[Segment, R, Checksums]]:
    """Call a function with the rows of every tile, and yield the results in order.

    Args:
        run: gets the rows, which may be longer than the tile, and the number of elements; several
            threads call it.
        work: the segments to read; all merged tensors if not given.

    Yields:
        The tile, the result, and the checksums of the tile in each model.
    """

    def visit(reader: TileReader, segment: Segment) -> list[tuple[Segment, R, Checksums]]:
        results: list[tuple[Segment, R, Checksums]] = []
        for tile in reader.tiles(segment):
            checksums = np.zeros(len(inputs.models), np.uint64)
            rows = reader.read(tile.info.name, tile.start, tile.size, checksums)
            results.append((tile, run(rows, tile.size), checksums))
        return results

    chosen = segments(inputs.merged) if work is None else work
    for results in run_in_order(chosen, visit, lambda: TileReader(inputs), workers):
        yield from results
