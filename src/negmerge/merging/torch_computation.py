"""Merging with torch on a device: the same ranges, the same arithmetic, the same bytes."""

# pyright: basic
# The types of torch are too incomplete for the strict checker.
from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from negmerge.merging import loop
from negmerge.merging.computation import Task, Worker
from negmerge.merging.folds import Array
from negmerge.merging.inputs import Inputs
from negmerge.merging.rule import Rule
from negmerge.merging.tiles import Segment


class TorchWorker(Worker):
    """Folds and finishes tiles on a torch device.

    Tiles are copied to the device through two pinned buffers in turn: while the device copies and
    computes one tile, the next one is read. Results come back through pinned memory too. On the
    CPU nothing is pinned, and the same lines run one after the other.
    """

    def __init__(self, inputs: Inputs, rule: Rule, device: str) -> None:
        super().__init__(inputs, rule)
        self.statistics, self.finish = rule.parts()
        self.tallies = rule.tallies
        self.device = torch.device("cpu" if device == "torch-cpu" else device)
        self.on_gpu = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.on_gpu else None
        self.capacity = len(inputs.models) * self.reader.tile
        self.buffers: dict[torch.dtype, list[torch.Tensor]] = {}

    def segment(self, task: Task) -> int:
        nonzero, before = 0, None
        for turn, part in enumerate(self.reader.tiles(task.segment)):
            rows = self.reader.read(part.info.name, part.start, part.size, task.checksums)
            started = self._start(rows[:, : part.size], turn % 2, task)
            if before is not None:
                nonzero = self._store(task, *before, nonzero)
            before = part, started
            if nonzero < 0:
                return nonzero
        return nonzero if before is None else self._store(task, *before, nonzero)

    def _start(self, rows: Array, turn: int, task: Task) -> Started:
        """Queue the work for one tile; `finish` of the result waits for it."""
        with torch.cuda.stream(self.stream):
            on_device = self._copy(rows, turn).double()
            limits, constants, divisor = task.numbers
            limits = torch.from_numpy(limits).to(self.device)
            deltas = on_device[1:] - on_device[0]
            # Counts too: torch computes an integer tensor times a Python float in float32.
            state = [statistic.over(deltas, limits).double() for statistic in self.statistics]
            sums = [tally(constants, *state).sum() for tally in self.tallies]
            kind = torch.float32 if task.out.dtype == np.float32 else torch.float64
            values = (self.finish(constants, *state) / divisor).to(kind)
            finite = values.isfinite().all() & deltas.isfinite().all()
            return Started(values + 0.0, finite, sums, self.stream)

    def _copy(self, rows: Array, turn: int) -> torch.Tensor:
        """Copy rows to the device, through one of two pinned buffers if it is a GPU.

        The buffer is free: the work that used it last was waited for before its results were
        stored, which was before the tile in between was read.
        """
        host = torch.from_numpy(np.ascontiguousarray(rows))
        if not self.on_gpu:
            return host
        if host.dtype not in self.buffers:
            self.buffers[host.dtype] = [
                torch.empty(self.capacity, dtype=host.dtype, pin_memory=True) for _ in range(2)
            ]
        pinned = self.buffers[host.dtype][turn][: host.numel()].view(host.shape)
        pinned.copy_(host)
        return pinned.to(self.device, non_blocking=True)

    def _store(self, task: Task, part: Segment, started: Started, nonzero: int) -> int:
        """Write the values of a tile to the arrays of the task; return the count so far."""
        values = started.values(self.tally)
        if values is None:
            return loop.NOT_FINITE
        at = part.start - task.segment.start
        if task.mask.size:
            some = values[values != 0]
            bits = np.packbits(values != 0, bitorder="little")
            task.mask.view(np.uint8)[at // 8 : at // 8 + bits.size] = bits
            task.out[nonzero : nonzero + some.size] = some
        else:
            task.out[at : at + part.size] = values
        return nonzero + int(np.count_nonzero(values))


class Started:
    """The results of one tile, on their way from the device."""

    def __init__(
        self,
        values: torch.Tensor,
        finite: torch.Tensor,
        sums: list[torch.Tensor],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._values, self._finite, self._sums, self._event = values, finite, sums, None
        if stream is not None:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = host.copy_(values, non_blocking=True)
            self._event = stream.record_event()

    def values(self, tally: NDArray[np.int64]) -> Array | None:
        """Wait for the values, and add the sums of the tallies; None if they are not finite."""
        if self._event is not None:
            self._event.synchronize()
        for j, found in enumerate(self._sums):
            tally[j] += int(found)
        return self._values.numpy() if bool(self._finite) else None
