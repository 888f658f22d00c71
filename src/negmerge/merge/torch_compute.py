"""The same merge with torch on a device: same ranges, same arithmetic, same bytes."""

# pyright: basic
# torch leaves too many types open for the strict checker.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from negmerge.merge import kernels, loop
from negmerge.merge.compute import Task
from negmerge.merge.rules import Rule
from negmerge.merge.tiles import TileReader

State = tuple[Tensor, ...]


def _total(deltas: Tensor) -> Tensor:
    total = torch.zeros_like(deltas[0])
    for delta in deltas:  # one after the other: torch's own sum would choose another order
        total += delta
    return total


def _votes(deltas: Tensor) -> State:
    return (deltas > 0).sum(0, dtype=torch.int32), (deltas < 0).sum(0, dtype=torch.int32)


def _extent(deltas: Tensor) -> State:
    return deltas.amin(0), deltas.amax(0)


def _nearest(deltas: Tensor) -> Tensor:
    nearest = deltas[0].clone()
    for delta in deltas[1:]:
        closer = (delta.abs() < nearest.abs()) | ((delta == -nearest) & (delta > 0))
        nearest = torch.where(closer, delta, nearest)
    return nearest


def _split(deltas: Tensor, limits: Tensor) -> State:
    up = (deltas >= limits[:, None]) & (deltas > 0)
    down = (-deltas >= limits[:, None]) & (deltas < 0)
    gain, loss = _total(deltas * up), _total(deltas * down)
    return _total(deltas), gain, loss, up.sum(0, dtype=torch.int32), down.sum(0, dtype=torch.int32)


def _active(deltas: Tensor, limits: Tensor) -> State:
    total = _total(deltas)
    distance = (total / len(deltas) - deltas).abs()
    return total, (deltas.abs() >= limits[0] * distance).sum(0, dtype=torch.int32)


FOLDS: dict[kernels.Fold, Callable[[Tensor, Tensor], State]] = {
    kernels.fold_total: lambda d, _: (_total(d),),
    kernels.fold_votes: lambda d, _: (_total(d), *_votes(d)),
    kernels.fold_extent: lambda d, _: (_total(d), *_extent(d)),
    kernels.fold_reach: lambda d, _: _extent(d),
    kernels.fold_spread: lambda d, _: (_total(d), *_votes(d), *_extent(d), _nearest(d)),
    kernels.fold_split: _split,
    kernels.fold_active: _active,
}


class TorchCompute:
    """Folds and finishes tiles on a torch device."""

    def __init__(self, rule: Rule, device: str) -> None:
        fold, self.finish = rule.parts()
        self.fold = FOLDS[fold]
        self.elects = fold is kernels.fold_split
        self.device = "cpu" if device == "torch-cpu" else device
        self.ballot = np.zeros(2, np.int64)

    def segment(self, reader: TileReader, task: Task) -> int:
        nonzero = 0
        for part in reader.tiles(task.segment):
            size = part.stop - part.start
            rows = reader.read(part.info.name, part.start, size, task.sums)[:, :size]
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
        state = self.fold(on_device[1:] - on_device[0], limits)
        if self.elects:
            elected = state[1] + state[2]
            self.ballot[0] += int(elected.sign().sum())
            self.ballot[1] += int(((elected == 0) & (state[3] > 0)).sum())
        kind = torch.float32 if task.out.dtype == np.float32 else torch.float64
        values = (self.finish(task.constants, *state) / task.divisor).to(kind)
        if not (bool(values.isfinite().all()) and all(bool(s.isfinite().all()) for s in state)):
            return None
        return (values + 0.0).cpu().numpy()
