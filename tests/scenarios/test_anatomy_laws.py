"""The zeros of a task vector by part of the image encoder, counted a second time with numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import negmerge as nm
from negmerge.scenarios.clip.anatomy import anatomy
from storage import store

LAYERS = 6
SHAPES = {
    "ln_1.weight": (4,),
    "attn.in_proj_weight": (12, 4),
    "mlp.c_fc.weight": (16, 4),
    "mlp.c_fc.bias": (16,),
    "mlp.c_proj.weight": (4, 16),
}


def test_means_and_deviations_of_every_part(tmp_path: Path):
    rng = np.random.default_rng(0)
    places = {
        f"visual.transformer.resblocks.{layer}.{name}": (layer, shape)
        for layer in range(LAYERS)
        for name, shape in SHAPES.items()
    }
    shapes = {name: shape for name, (_, shape) in places.items()}
    shapes |= {"visual.conv1.weight": (4, 3, 2, 2), "visual.proj": (4, 3), "ln_final.bias": (4,)}
    change = {name: rng.integers(-1, 2, shape).astype(float) for name, shape in shapes.items()}
    for name in (name for name in change if ".attn." in name):  # frozen
        change[name][:] = 0
    base = store(tmp_path / "base.safetensors", {k: np.zeros(s) for k, s in shapes.items()})
    found = anatomy(nm.merge(base, [store(tmp_path / "tuned.safetensors", change)]))

    parts = {
        "early": [name for name, (layer, _) in places.items() if layer in (0, 1)],
        "middle": [name for name, (layer, _) in places.items() if layer in (2, 3)],
        "late": [name for name, (layer, _) in places.items() if layer in (4, 5)],
        "mlp": [name for name in places if ".mlp." in name],
    }
    assert found.keys() == parts.keys() | {"stem"}
    zeros = {name: 100 * np.mean(values == 0) for name, values in change.items()}
    for part, names in parts.items():
        elements = np.concatenate([change[name].ravel() for name in names])
        layers = sorted({places[name][0] for name in names})
        means = [np.mean([zeros[n] for n in names if places[n][0] == k]) for k in layers]
        wanted = {
            "elements": 100 * np.mean(elements == 0),
            "tensors": np.mean([zeros[name] for name in names]),
            "tensors_std": np.std([zeros[name] for name in names], ddof=1),
            "layers_std": np.std(means, ddof=1),
        }
        assert found[part] == pytest.approx(wanted), part
    stem = zeros["visual.conv1.weight"]
    assert found["stem"] == pytest.approx({"elements": stem, "tensors": stem})
