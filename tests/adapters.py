"""Adapters for tests, written as peft writes them, and the dense models that they mean."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

Model = dict[str, torch.Tensor]


def write_adapter(folder: Path, tensors: Model, **fields: Any) -> Path:
    """Write a folder with an adapter; `fields` are those of its configuration."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} | fields
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{k}": v.contiguous() for k, v in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def pair(rng: np.random.Generator, rows: int, columns: int, rank: int, a: Any = None) -> Any:
    """Random B and A, of some columns and rows; a given A is used as it is."""
    b = torch.from_numpy(rng.standard_normal((rows, rank)).astype(np.float32) * 0.1)
    own = torch.from_numpy(rng.standard_normal((rank, columns)).astype(np.float32))
    return b, own if a is None else a


def product(b: torch.Tensor, a: torch.Tensor) -> np.ndarray:
    """BA in float64: one term after the other, without a library of matrices."""
    total = np.zeros((b.shape[0], a.shape[1]))
    for j in range(b.shape[1]):
        total = total + b[:, j].double().numpy()[:, None] * a[j].double().numpy()[None]
    return total


def adapted(weight: torch.Tensor, change: np.ndarray, scaling: float) -> torch.Tensor:
    """The weight of a model with an adapter: float32, or float64 for a base of float64."""
    total = weight.double().numpy() + scaling * change.reshape(weight.shape)
    kind = np.float64 if weight.dtype == torch.float64 else np.float32
    return torch.from_numpy(total.astype(kind))


def scaling(rank: int, alpha: float, rslora: bool = False) -> float:
    return alpha / (sqrt(rank) if rslora else rank)
