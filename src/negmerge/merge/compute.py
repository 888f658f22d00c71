"""What turns a tile into merged values: the fused kernels here, or torch on a device."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import OptionError
from negmerge.fingerprint import KEYS
from negmerge.merge import kernels
from negmerge.merge.rules import Constants, Rule


class Compute(Protocol):
    """Merges one tile; each worker has its own.

    ballot: the sum of elected signs, and how many elements cancel exactly (ties only).
    """

    ballot: NDArray[np.int64]

    def tile(
        self,
        rows: NDArray[Any],
        words: NDArray[np.uint64],
        count: int,
        start: int,
        sums: NDArray[np.uint64],
        limits: NDArray[np.float64],
        constants: Constants,
        strip: int,
        every: int,
        dissent: NDArray[np.int64],
        out: NDArray[Any],
    ) -> int:
        """Fill out[:count]; return the number of values that are not zero, −1 if not all finite."""
        ...


class CpuCompute:
    """The fused loop of `kernels.py`."""

    def __init__(self, rule: Rule) -> None:
        fold, finish = rule.parts()
        self.kernel = kernels.tile_kernel(fold, finish)
        self.state = kernels.new_state(fold)
        self.ballot = np.zeros(2, np.int64)

    def tile(
        self,
        rows: NDArray[Any],
        words: NDArray[np.uint64],
        count: int,
        start: int,
        sums: NDArray[np.uint64],
        limits: NDArray[np.float64],
        constants: Constants,
        strip: int,
        every: int,
        dissent: NDArray[np.int64],
        out: NDArray[Any],
    ) -> int:
        return self.kernel(
            rows,
            words,
            count,
            start,
            KEYS,
            sums,
            limits,
            constants,
            self.state,
            self.ballot,
            strip,
            every,
            dissent,
            out,
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
