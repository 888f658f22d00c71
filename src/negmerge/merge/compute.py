"""What turns a segment into merged values: the fused kernels here, or torch on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from negmerge.dtypes import Bytes
from negmerge.errors import OptionError
from negmerge.fingerprint import KEYS
from negmerge.merge import kernels
from negmerge.merge.rules import Constants, Rule
from negmerge.merge.tiles import Segment, TileReader

NO_BYTES = np.empty((0, 0), np.uint8)
NO_PLACES = (np.empty(0, np.int32), np.empty(0, np.int64))


@dataclass
class Task:
    """One segment to merge, and where its results go.

    divisor: what finished values are divided by; out: where they go, unless there is a mask: then
        they are packed into mask and kept.
    """

    segment: Segment
    limits: NDArray[np.float64]
    constants: Constants
    divisor: float
    sums: NDArray[np.uint64]
    out: NDArray[Any]
    mask: NDArray[np.uint8]
    kept: NDArray[Any]


class Compute(Protocol):
    """Merges segments; each worker has its own.

    ballot: the sum of elected signs, and how many elements cancel exactly (ties only).
    """

    ballot: NDArray[np.int64]

    def segment(self, reader: TileReader, task: Task) -> int:
        """Merge one segment; return the number of values that are not zero, or NOT_FINITE."""
        ...


class CpuCompute:
    """The fused loop of `kernels.py`."""

    def __init__(self, rule: Rule) -> None:
        fold, finish = rule.parts()
        self.kernel = kernels.segment_kernel(fold, finish)
        self.state = kernels.new_state(fold)
        self.ballot = np.zeros(2, np.int64)

    def segment(self, reader: TileReader, task: Task) -> int:
        segment = task.segment
        formats = reader.formats(segment.info.name)
        if formats in ({"F32"}, {"F64"}):
            raw, rows, _ = reader.rows(*formats)
            places = reader.places(segment.info.name)
            before = self.ballot.copy()
            found = self._run(task, segment, 0, places, reader.tile, raw, rows)
            if found != kernels.NOT_READ:
                return found
            self.ballot[:] = before  # the tiles before the break will be counted again
        return self._slowly(reader, task)

    def _slowly(self, reader: TileReader, task: Task) -> int:
        """Tile by tile: 16-bit formats, a mixed pool, or a file that could not be read at once."""
        task.sums[:] = 0
        nonzero = 0
        for part in reader.tiles(task.segment):
            rows = reader.read(part.info.name, part.start, part.stop - part.start, task.sums)
            found = self._run(task, part, nonzero, NO_PLACES, reader.tile, NO_BYTES, rows)
            if found < 0:
                return found
            nonzero += found
        return nonzero

    def _run(
        self,
        task: Task,
        part: Segment,
        nonzero: int,
        places: tuple[NDArray[np.int32], NDArray[np.int64]],
        tile: int,
        raw: Bytes,
        rows: NDArray[Any],
    ) -> int:
        at = part.start - task.segment.start
        return self.kernel(
            *places,
            raw,
            rows,
            part.start,
            part.stop,
            tile,
            KEYS,
            task.sums,
            task.limits,
            task.constants,
            task.divisor,
            self.state,
            self.ballot,
            task.out[at:],
            task.mask[at // 8 :],
            task.kept[nonzero:],
        )


def make_compute(device: str, rule: Rule) -> Compute:
    """The way to compute on a device: `cpu`, or a torch device such as `cuda` or `cuda:1`."""
    if device == "cpu":
        return CpuCompute(rule)
    from negmerge.merge.torch_compute import TorchCompute

    return TorchCompute(rule, device)


def check_device(device: str) -> None:
    """Raise if a device cannot be used here."""
    if device in ("cpu", "torch-cpu"):
        return
    if device.partition(":")[0] != "cuda":
        raise OptionError(f"device {device!r}: wanted cpu or cuda")
    import torch

    if not torch.cuda.is_available():
        raise OptionError("device cuda: torch finds no CUDA GPU here; use cpu")
