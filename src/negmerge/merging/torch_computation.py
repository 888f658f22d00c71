"""Merging with torch on a device: the same ranges, the same arithmetic, the same bytes."""

# pyright: basic
# The types of torch are too incomplete for the strict checker.
from __future__ import annotations

from typing import Any

import numpy as np
import torch

from negmerge.merging import loop
from negmerge.merging.computation import Task, Worker
from negmerge.merging.inputs import Inputs
from negmerge.merging.rule import Rule


class TorchWorker(Worker):
    """Folds and finishes tiles on a torch device."""

    def __init__(self, inputs: Inputs, rule: Rule, device: str) -> None:
        super().__init__(inputs, rule)
        self.statistics, self.finish = rule.parts()
        self.tallies, self.device = rule.tallies, "cpu" if device == "torch-cpu" else device

    def segment(self, task: Task) -> int:
        nonzero = 0
        for part in self.reader.tiles(task.segment):
            size = part.size
            rows = self.reader.read(part.info.name, part.start, size, task.checksums)[:, :size]
            values = self._values(rows, task)
            if values is None:
                return loop.NOT_FINITE
            at = part.start - task.segment.start
            if task.mask.size:
                some = values[values != 0]
                bits = np.packbits(values != 0, bitorder="little")
                task.mask.view(np.uint8)[at // 8 : at // 8 + bits.size] = bits
                task.out[nonzero : nonzero + some.size] = some
            else:
                task.out[at : at + size] = values
            nonzero += int(np.count_nonzero(values))
        return nonzero

    def _values(self, rows: np.ndarray[Any, Any], task: Task) -> np.ndarray[Any, Any] | None:
        on_device = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device).double()
        limits, constants, divisor = task.numbers
        limits = torch.from_numpy(limits).to(self.device)
        deltas = on_device[1:] - on_device[0]
        # Counts too: torch computes an integer tensor times a Python float in float32.
        state = [statistic.over(deltas, limits).double() for statistic in self.statistics]
        for j, tally in enumerate(self.tallies):
            self.tally[j] += int(tally(constants, *state).sum())
        kind = torch.float32 if task.out.dtype == np.float32 else torch.float64
        values = (self.finish(constants, *state) / divisor).to(kind)
        if not bool(values.isfinite().all()) or not bool(deltas.isfinite().all()):
            return None
        return (values + 0.0).cpu().numpy()
