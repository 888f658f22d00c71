"""Computing the merged values of a segment: with the compiled loop, or with torch on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import OptionError
from negmerge.merging import loop
from negmerge.merging.folds import STRIP, Array, fold_for
from negmerge.merging.inputs import Inputs
from negmerge.merging.proof import proof_of
from negmerge.merging.rule import Constants, Rule, new_memory
from negmerge.merging.slabs import Room
from negmerge.merging.tiles import Segment, TileReader
from negmerge.support.jit import identity


@dataclass
class Task:
    """One segment to merge, and the arrays for its results.

    Args:
        numbers: `Numbers.of` the tensor.
        checksums: one for each model; the checksums of the segment are added.
        mask: a bit for each value, in words of 64; empty if all values are written.
        out: the values that are not zero, or all values.
    """

    segment: Segment
    numbers: tuple[NDArray[np.float64], Constants, float]
    checksums: NDArray[np.uint64]
    mask: NDArray[np.uint64]
    out: NDArray[Any]


class Worker:
    """Merges segments in one thread."""

    def __init__(self, inputs: Inputs, rule: Rule) -> None:
        self.reader = TileReader(inputs)
        self.room = Room()
        """Room for packed values."""
        self.tally = np.zeros(len(rule.tallies), np.int64)
        """The sums of the tallies of the rule over all merged elements."""

    def segment(self, task: Task) -> int:
        """Merge one segment; return the number of values that are not zero, or NOT_FINITE."""
        raise NotImplementedError


_LOOPS: dict[tuple[Any, ...], Callable[..., int]] = {}
_LOCK = Lock()


def loop_for(rule: Rule, packs: bool) -> Callable[..., int]:
    """Return the compiled loop of a rule, one for all workers; the first call compiles it.

    A loop that packs writes only the values that are not zero, with a mask.
    """
    statistics, finish = rule.parts()
    direct = rule.direct_fold()
    fold, finish = (direct, None) if direct else (fold_for(statistics), finish)
    # Keyed by what the functions compute: the values of names that they refer to may change.
    parts = (identity(fold), finish and identity(finish), *map(identity, rule.tallies), packs)
    with _LOCK:
        if parts not in _LOOPS:
            proof = proof_of(rule, packs)
            _LOOPS[parts] = loop.segment_loop(fold, finish, rule.tallies, packs, proof)
        return _LOOPS[parts]


class CpuWorker(Worker):
    """Runs the compiled loop of `loop.py`."""

    def __init__(self, inputs: Inputs, rule: Rule) -> None:
        super().__init__(inputs, rule)
        self.memory = {kind: new_memory(rule, kind) for kind in (np.float32, np.float64)}
        self.loops = {packs: loop_for(rule, packs) for packs in (True, False)}

    def segment(self, task: Task) -> int:
        reader = self.reader
        name = task.segment.info.name
        if name in reader.inputs.untouched and self._is_zero(task):
            return 0
        formats, places = reader.find(name)
        if len(formats) == 1 and places[0].min() >= 0 and reader.factors is None:
            raw, rows, kind = reader.rows(*formats)
            before = self.tally.copy()
            strip = rows.reshape(-1)[: len(rows) * STRIP].reshape(len(rows), -1) if kind else rows
            found = self._run(task, task.segment, 0, (*places, raw, kind), strip)
            if found != loop.NOT_READ:
                return found
            self.tally[:] = before  # the tiles that were read will be counted again
        # Mixed formats, state dicts, adapters, scaled members, and files that the loop could not
        # read.
        task.checksums[:] = 0
        nonzero = 0
        for tile in reader.tiles(task.segment):
            rows = reader.read(tile.info.name, tile.start, tile.size, task.checksums)
            nonzero = self._run(task, tile, nonzero, loop.NO_FILES, rows)
            if nonzero < 0:
                break
        return nonzero

    def _is_zero(self, task: Task) -> bool:
        """Merge a segment that no member changes, from one of its elements, if the result is zero.

        All its elements have the same result and the same tallies.
        """
        info, size = task.segment.info, task.segment.size
        kind = task.out.dtype
        rows = np.zeros((len(self.reader.inputs.models), STRIP), kind)
        mask = np.zeros(STRIP // 64 if task.mask.size else 0, np.uint64)
        given = (task.numbers, task.checksums, mask, np.zeros(2, kind))
        one = Task(Segment(info, 0, min(size, 1)), *given)
        before = self.tally.copy()
        if self._run(one, one.segment, 0, loop.NO_FILES, rows):
            self.tally[:] = before
            return False
        self.tally[:] = before + size * (self.tally - before)
        self.reader.read_base(task.segment, task.checksums)
        if task.mask.size:
            task.mask[:] = 0
        else:
            task.out[:size] = 0
        return True

    def _run(self, task: Task, part: Segment, nonzero: int, files: Any, rows: Array) -> int:
        at, packs = part.start - task.segment.start, task.mask.size > 0
        mask, out = task.mask[at // 64 :], task.out if packs else task.out[at:]
        strips, memory = rows.reshape(len(rows), -1, STRIP), self.memory[rows.dtype.type]
        given = (part.start, part.stop, task.checksums, task.numbers, memory, self.tally)
        return self.loops[packs](files, strips, *given, mask, out, nonzero)


def make_worker(device: str, inputs: Inputs, rule: Rule) -> Worker:
    """Return a worker for `cpu`, or for a torch device such as `cuda` or `cuda:1`."""
    if device == "cpu":
        return CpuWorker(inputs, rule)
    from negmerge.merging.torch_computation import TorchWorker

    return TorchWorker(inputs, rule, device)


def check_device(device: str) -> None:
    """Raise if this machine does not have a device."""
    if device in ("cpu", "torch-cpu"):
        return
    if device.partition(":")[0] != "cuda":
        raise OptionError(f"device: got {device!r}, wanted cpu or cuda")
    import torch

    if not torch.cuda.is_available():
        raise OptionError("device: got 'cuda', but torch finds no CUDA GPU; use cpu")
