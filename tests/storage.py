"""Models of any format on disk, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def store(path: Path, weights: dict[str, np.ndarray], dtype: str = "F32") -> Path:
    """Save float64 arrays in a format; values must fit it exactly."""
    tensors = {}
    for name, values in weights.items():
        tensor = torch.from_numpy(np.array(values, np.float64)).to(TORCH[dtype])
        assert np.array_equal(tensor.double().numpy(), values), "not exact in this format"
        tensors[name] = tensor.contiguous()
    save_file(tensors, path)
    return path


def loaded(path: Path) -> dict[str, np.ndarray]:
    """All float tensors of a file as float64 arrays."""
    return {
        name: t.double().numpy() for name, t in load_file(path).items() if t.is_floating_point()
    }


def dense(tau) -> dict[str, np.ndarray]:
    """A task vector as float64 arrays."""
    return {name: tau[name].double().numpy() for name in tau}
