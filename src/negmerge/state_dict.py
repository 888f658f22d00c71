"""State dicts as checkpoints: weights that are in memory are read like those of a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from negmerge.checkpoint import Checkpoint
from negmerge.dtypes import ALL_NAMES, SIZES, Bytes
from negmerge.errors import MismatchError, OptionError, shown
from negmerge.header import NAMES, Header, TensorInfo, is_name

PathLike = str | os.PathLike[str]
Model = PathLike | Mapping[str, Any]
"""A file, a folder, or a state dict: a mapping from names to torch tensors or numpy arrays."""


class StateDict(Checkpoint):
    """A state dict, as a checkpoint without files.

    >>> with StateDict({"w": np.ones((2, 3), np.float32)}, "base") as model:
    ...     model.tensors["w"].shape, model.nbytes
    ((2, 3), 24)

    tensors: torch tensors or numpy arrays by name. They are read where they are: only those that
        are not contiguous, or on another device, are copied.
    name: what errors call it. copied: read copies that are made now, because the tensors may change
        (those of `model.state_dict()` do, when the model is trained).
    """

    def __init__(self, tensors: Mapping[str, Any], name: str, *, copied: bool = False) -> None:
        self.path = Path(name)
        self.folder = None
        self.files = []
        self._closing = ExitStack()
        self._given = tensors
        self._raw: dict[str, Bytes] = {}
        found: list[TensorInfo] = []
        for key, value in tensors.items():
            if not is_name(key):
                raise MismatchError(f"{name} {shown(key)}: {NAMES}")
            dtype, raw = _bytes_of(value, f"{name} {shown(key)}")
            self._raw[key] = raw.copy() if copied else raw
            found.append(TensorInfo(key, dtype, tuple(value.shape), 0, 0))
        if not found:
            raise MismatchError(f"{name}: holds no tensors")
        # As safetensors lays them out: wide formats first, so that all are aligned.
        found.sort(key=lambda info: (-SIZES[info.dtype], info.name))
        self.tensors = {info.name: info for info in found}
        self.headers = [Header(self.tensors, {}, b"")]

    def read_into(self, info: TensorInfo, start: int, buffer: Bytes) -> None:
        buffer[:] = self._raw[info.name][start : start + buffer.size]

    def place(self, info: TensorInfo) -> tuple[int, int]:
        """No descriptor: reading from it fails at once, and `read_into` is asked instead."""
        return -1, 0

    def identity(self) -> tuple[tuple[int, int], ...]:
        return ((-1, id(self._given)),)

    def check_unchanged(self) -> None:
        """Nothing tells whether memory was written to."""


def open_checkpoint(model: Model | Checkpoint, name: str) -> Checkpoint:
    """Open a file, a folder or a state dict.

    name: what errors call a state dict, such as `models[2]`.
    """
    if isinstance(model, Checkpoint):
        return model
    if isinstance(model, Mapping):
        return StateDict(model, name)
    if isinstance(model, str | os.PathLike):
        return Checkpoint(model)
    remedy = "; pass its state_dict()" if hasattr(model, "state_dict") else ""
    raise OptionError(
        f"{name}: got {type(model).__name__}, wanted a file, a folder or a state dict{remedy}"
    )


def _bytes_of(value: Any, where: str) -> tuple[str, Bytes]:
    """The format of a tensor and its bytes in row-major order, not copied if they are so."""
    torch = sys.modules.get("torch")  # without it no value can be one of its tensors
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if not is_tensor and not isinstance(value, np.ndarray):
        raise MismatchError(
            f"{where}: got {type(value).__name__}, wanted a torch tensor or a numpy array; "
            "leave it out"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if not is_tensor:
        dtype = value.dtype.newbyteorder("=").name
    if dtype not in ALL_NAMES:
        raise MismatchError(f"{where}: format {dtype}, wanted one of {', '.join(ALL_NAMES)}")
    return ALL_NAMES[dtype], _of_torch(value, where) if is_tensor else _of_numpy(value)


def _of_numpy(array: Any) -> Bytes:
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return plain.reshape(-1).view(np.uint8)


def _of_torch(tensor: Any, where: str) -> Bytes:
    import torch

    try:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:100]
        raise MismatchError(
            f"{where}: a tensor whose numbers cannot be read here ({reason}); "
            "wanted a plain tensor with its values in memory"
        ) from error
