"""State dicts as checkpoints: weights in memory are read like weights in a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import ALL_NAMES, SIZES, Bytes
from negmerge.checkpoints.header import NAME_RULE, Header, TensorInfo, is_name
from negmerge.errors import MismatchError, OptionError, quoted

PathLike = str | os.PathLike[str]
Model = PathLike | Mapping[str, Any]
"""A file, a folder, or a state dict: a mapping from names to torch tensors or numpy arrays."""

_NAMES = {dtype: name for name, dtype in ALL_NAMES.items()}


class StateDict(Checkpoint):
    """A state dict, as a checkpoint without files.

    >>> with StateDict({"w": np.ones((2, 3), np.float32)}, "base") as model:
    ...     model.tensors["w"].shape, model.nbytes
    ((2, 3), 24)

    Args:
        tensors: torch tensors or numpy arrays by name. Tensors that are not contiguous, or on
            another device, are copied.
        name: the name in errors.
        copied: whether all tensors are copied. Training changes those of `model.state_dict()`.
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
                raise MismatchError(f"{name} {quoted(key)}: {NAME_RULE}")
            dtype, raw = _bytes_of(value, f"{name} {quoted(key)}")
            self._raw[key] = raw.copy() if copied else raw
            found.append(TensorInfo(key, dtype, tuple(value.shape), 0, 0))
        if not found:
            raise MismatchError(f"{name}: contains no tensors")
        # The order of safetensors: wide formats first, so that all tensors are aligned.
        found.sort(key=lambda info: (-SIZES[info.dtype], info.name))
        self.tensors = {info.name: info for info in found}
        self.headers = [Header(self.tensors, {}, b"")]

    def read_into(self, info: TensorInfo, start: int, buffer: Bytes) -> None:
        buffer[:] = self._raw[info.name][start : start + buffer.size]

    def place(self, info: TensorInfo) -> tuple[int, int]:
        """An invalid descriptor: reading from it fails, and `read_into` is used instead."""
        return -1, 0

    def identity(self) -> tuple[tuple[int, int], ...]:
        return ((-1, id(self._given)),)

    def check_unchanged(self) -> None:
        """Do nothing: changes of memory cannot be detected."""


def open_checkpoint(model: Model | Checkpoint, name: str) -> Checkpoint:
    """Open a file, a folder or a state dict, which errors call `name`; an open one is returned."""
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


def tensor_of(raw: Bytes, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
    """Make a tensor of a state dict from bytes.

    >>> tensor_of(np.zeros(8, np.uint8), "F32", (2,), np.ones(2, np.float32))
    array([0., 0.], dtype=float32)

    Args:
        raw: the bytes, which become the memory of the tensor.
        like: a numpy array, to get a numpy array; a torch tensor, to get a torch tensor on the
            same device; None, to get a torch tensor on the CPU.
    """
    if isinstance(like, np.ndarray):
        return raw.view(_numpy_format(like, dtype)).reshape(shape)
    import torch

    kind = getattr(torch, _NAMES[dtype])
    # torch cannot view an empty tensor as another format.
    found = torch.from_numpy(raw).view(kind) if raw.size else torch.empty(0, dtype=kind)
    return found.reshape(shape).to("cpu" if like is None else like.device)


def check_numpy_holds(like: Any, dtype: str, where: str) -> None:
    """Raise if the result for a numpy array needs a format that numpy does not have."""
    if isinstance(like, np.ndarray):
        try:
            _numpy_format(like, dtype)
        except TypeError:
            raise OptionError(
                f"{where}: numpy has no {_NAMES[dtype]}; pass torch tensors, or write a file (out)"
            ) from None


def _numpy_format(like: Any, dtype: str) -> Any:
    own = like.dtype.newbyteorder("<")
    return own if ALL_NAMES.get(own.name) == dtype else np.dtype(_NAMES[dtype])


def _bytes_of(value: Any, where: str) -> tuple[str, Bytes]:
    """The format of a tensor, and its bytes in row-major order, copied only if necessary."""
    torch = sys.modules.get("torch")  # if torch is not loaded, no value is a torch tensor
    is_tensor = torch is not None and isinstance(value, torch.Tensor)
    if not is_tensor and not isinstance(value, np.ndarray):
        raise MismatchError(
            f"{where}: got {type(value).__name__}, wanted a torch tensor or a numpy array; "
            "remove it"
        )
    kind = value.dtype if is_tensor else value.dtype.newbyteorder("=").name
    name = str(kind).removeprefix("torch.")
    if name not in ALL_NAMES:
        raise MismatchError(f"{where}: format {name}, wanted one of {', '.join(ALL_NAMES)}")
    if torch is None or not is_tensor:
        array = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return ALL_NAMES[name], array.reshape(-1).view(np.uint8)
    try:
        tensor: Any = value
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return ALL_NAMES[name], plain.reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:100]
        raise MismatchError(
            f"{where}: the values of the tensor cannot be read ({reason}); "
            "wanted a plain tensor with its values in memory"
        ) from error
