"""Small pools with many segments, and an executor that counts, for tests of merges in ranges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from negmerge.merging import engine, one_pass, parted, tiles
from negmerge.runs.executors import InProcess
from storage import TORCH

VARIANTS = [
    ("consensus", {}),
    ("consensus", {"quorum": 0.6, "zeros": "abstain"}),
    ("consensus", {"reduce": "max", "signed": True}),
    ("conflict", {}),
    ("magmax", {}),
    ("uniform", {}),
    ("ties", {"density": 0.5}),
    ("ties", {"density": 0.4, "scope": "tensor"}),
    ("localize", {"density": 0.3}),
    ("localize", {"density": 0.5, "scope": "tensor"}),
    ("tall", {}),
    ("soft", {}),
    ("shrink", {"errors": 1.5}),
    ("shrink", {"by": "james_stein"}),
]


def make_pool(folder: Path, dtype: str = "F32", n: int = 3, seed: int = 3):
    """A base and models with tensors of several segments, small and empty ones, and statistics."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (300, 31), "a.bias": (31,), "s": (), "empty": (0, 2), "z.weight": (5000,)}
    base = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    base |= {"bn.running_var": torch.rand(60, generator=draw) * 0.01}
    models = []
    for k in range(n):
        model = {m: v + 0.1 * torch.randn(v.shape, generator=draw) for m, v in base.items()}
        model["a.weight"][:100] = base["a.weight"][:100]
        models.append(model | {"count": torch.tensor([k, 2])})
    for k, model in enumerate([base | {"count": torch.tensor([9, 2])}, *models]):
        kind = TORCH[("F32", "BF16", "F64")[k % 3] if dtype == "mixed" else dtype]
        model = {m: v.to(kind) if v.is_floating_point() else v for m, v in model.items()}
        save_file(model, folder / f"m{k}.safetensors", {"format": "pt", "note": str(k)})
    first, *rest = sorted(folder.glob("m*.safetensors"))
    return first, rest


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    """Several segments for each tensor."""
    for module in (tiles, one_pass, engine):
        monkeypatch.setattr(module, "SEGMENT", 4096)
    monkeypatch.setattr("negmerge.merging.assembly.SEGMENT", 4096)
    monkeypatch.setattr(parted, "LITTLE", 0)


def no_scenario() -> None: ...


class Counting(InProcess):
    """Notes the steps that it runs; fails after a number of steps if it is told to."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(None)
        self.ran: list[str] = []
        self.fail_at = fail_at

    def run(self, steps, watch, stage_size=None):
        for found in super().run(steps, watch, stage_size):
            self.ran.append(steps[found[0]].key)
            if len(self.ran) == self.fail_at:
                raise RuntimeError("the machine is gone")
            yield found


def left(out: Path) -> list[str]:
    """What stays in the folder of an output, beside the models and the outputs."""
    return [path.name for path in out.parent.iterdir() if path.name.startswith(".")]
