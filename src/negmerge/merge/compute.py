"""What turns a segment into merged values: the fused kernels here, or torch on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from negmerge.dtypes import Bytes
from negmerge.errors import OptionError
from negmerge.fingerprint import KEYS
from negmerge.jit import identity
from negmerge.merge import kernels, loop
from negmerge.merge.proof import proof_of
from negmerge.merge.rules import Constants, Rule
from negmerge.merge.tiles import Segment, TileReader, in_blocks

NO_PLACES = (np.empty(0, np.int32), np.empty(0, np.int64))
NO_BYTES, NO_WORDS = np.empty((0, 0), np.uint8), np.empty((0, 0, 512), np.uint64)


@dataclass
class Task:
    """One segment to merge, and where its results go.

    divisor: what finished values are divided by.
    mask, out: if there is a mask, its bits (as 64-bit words) tell which values are not zero, and
        out gets those; else out gets all.
    """

    segment: Segment
    limits: NDArray[np.float64]
    constants: Constants
    divisor: float
    sums: NDArray[np.uint64]
    mask: NDArray[np.uint64]
    out: NDArray[Any]


class Compute(Protocol):
    """Merges segments; each worker has its own.

    ballot: the sum of elected signs, and how many elements cancel exactly (ties only).
    """

    ballot: NDArray[np.int64]

    def segment(self, reader: TileReader, task: Task) -> int:
        """Merge one segment; return the number of values that are not zero, or NOT_FINITE."""
        ...


_LOOPS: dict[tuple[Any, ...], Callable[..., int]] = {}
_TURN = Lock()


def loop_for(rule: Rule, packs: bool) -> Callable[..., int]:
    """The compiled loop of a rule, one for all workers; it is compiled when it is called.

    packs: whether only the values that are not zero are kept, with a mask.
    """
    fold, finish = rule.streamed()
    # By what they compute: a function may refer to a name whose value has changed since.
    parts = (identity(fold), finish and identity(finish), packs)
    with _TURN:
        if parts not in _LOOPS:
            _LOOPS[parts] = loop.segment_kernel(fold, finish, packs, proof_of(rule, packs))
        return _LOOPS[parts]


class CpuCompute:
    """The fused loop of `loop.py`."""

    def __init__(self, rule: Rule) -> None:
        fold, finish = rule.streamed()
        self.state = kernels.new_state(fold)
        self.values = self.state[0] if finish is None else np.empty(kernels.STRIP)
        self.loops = {packs: loop_for(rule, packs) for packs in (True, False)}
        self.flags = np.empty(kernels.STRIP, np.uint8)
        self.ballot = np.zeros(2, np.int64)

    def segment(self, reader: TileReader, task: Task) -> int:
        segment = task.segment
        formats = reader.formats(segment.info.name)
        if formats in ({"F32"}, {"F64"}):
            raw, rows, _ = reader.rows(*formats)
            places = reader.places(segment.info.name)
            before = self.ballot.copy()
            found = self._run(task, segment, 0, places, raw, in_blocks(raw), rows)
            if found != loop.NOT_READ:
                return found
            self.ballot[:] = before  # the tiles before the break will be counted again
        return self._slowly(reader, task)

    def _slowly(self, reader: TileReader, task: Task) -> int:
        """Tile by tile: 16-bit formats, a mixed pool, or a file that could not be read at once."""
        task.sums[:] = 0
        nonzero = 0
        for part in reader.tiles(task.segment):
            rows = reader.read(part.info.name, part.start, part.stop - part.start, task.sums)
            nonzero = self._run(task, part, nonzero, NO_PLACES, NO_BYTES, NO_WORDS, rows)
            if nonzero < 0:
                break
        return nonzero

    def _run(
        self,
        task: Task,
        part: Segment,
        nonzero: int,
        places: tuple[NDArray[np.int32], NDArray[np.int64]],
        raw: Bytes,
        words: NDArray[np.uint64],
        rows: NDArray[Any],
    ) -> int:
        at = part.start - task.segment.start
        packs = task.mask.size > 0
        return self.loops[packs](
            *places,
            raw,
            words,
            rows.reshape(len(rows), -1, kernels.STRIP),
            part.start,
            part.stop,
            KEYS,
            task.sums,
            task.limits,
            task.constants,
            task.divisor,
            self.state,
            self.values,
            self.flags,
            np.empty((3, kernels.STRIP), rows.dtype),
            self.ballot,
            task.mask[at // 64 :],
            task.out if packs else task.out[at:],
            nonzero,
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
