"""Fixtures for tests and for the examples in docstrings."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Several test processes share the cores: a thread that waits must not keep one busy.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from safetensors.numpy import save_file

# A busy machine is no failure, and a failure is one every time.
patient = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "derandomize": True}
settings.register_profile("patient", **patient)
settings.load_profile("patient")

collect_ignore = ["tests/toy.py"]
"""A plug-in: what it registers must not be there unless a test loads it."""

SHAPES = {
    "blocks.0.weight": (4, 6),
    "blocks.0.bias": (4,),
    "blocks.1.weight": (2, 4),
    "head.weight": (3, 2),
}


def small_weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def small_pool(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A base and three models fine-tuned from it."""
    base = small_weights(0)
    save_file(base, tmp_path / "base.safetensors")
    paths = []
    for k in range(1, 4):
        change = small_weights(k)
        model = {name: base[name] + np.float32(0.1) * change[name] for name in base}
        paths.append(tmp_path / f"model{k}.safetensors")
        save_file(model, paths[-1])
    return tmp_path / "base.safetensors", paths


@pytest.fixture
def small_model():
    """A module with the base's weights."""
    import torch

    class Small(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(
                [torch.nn.Linear(6, 4), torch.nn.Linear(4, 2, bias=False)]
            )
            self.head = torch.nn.Linear(2, 3, bias=False)

        def forward(self, x):
            return self.head(self.blocks[1](self.blocks[0](x)))

    model = Small()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in small_weights(0).items()})
    return model
