"""Merging with torch on a device: the same ranges, the same arithmetic, the same bytes."""

# pyright: basic
# The types of torch are too incomplete for the strict checker.
from __future__ import annotations

from typing import Any

import numpy as np
import torch

from negmerge.merging import loop
from negmerge.merging.computation import Task
from negmerge.merging.rule import Rule
from negmerge.merging.tiles import TileReader


class TorchComputation:
    """Folds and finishes tiles on a torch device."""

    def __init__(self, rule: Rule, device: str) -> None:
        self.statistics, self.finish = rule.parts()
        self.device = "cpu" if device == "torch-cpu" else device
        self.tallies, self.tally = rule.tallies, np.zeros(len(rule.tallies), np.int64)

    def segment(self, reader: TileReader, task: Task) -> int:
        nonzero = 0
        for part in reader.tiles(task.segment):
            size = part.size
            rows = reader.read(part.info.name, part.start, size, task.checksums)[:, :size]
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
        limits = torch.from_numpy(task.limits).to(self.device)
        deltas = on_device[1:] - on_device[0]
        # Counts too: torch computes an integer tensor times a Python float in float32.
        state = [statistic.over(deltas, limits).double() for statistic in self.statistics]
        for j, tally in enumerate(self.tallies):
            self.tally[j] += int(tally(task.constants, *state).sum())
        kind = torch.float32 if task.out.dtype == np.float32 else torch.float64
        values = (self.finish(task.constants, *state) / task.divisor).to(kind)
        if not bool(values.isfinite().all()) or not bool(deltas.isfinite().all()):
            return None
        return (values + 0.0).cpu().numpy()
