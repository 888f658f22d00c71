"""16-bit models merge in the compiled loop with the bytes of the same models in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import negmerge as nm
import oracle
from negmerge.errors import ValueRangeError
from negmerge.merging.rules import rules
from negmerge.merging.tiles import TileReader
from storage import TORCH

HALVES = ["BF16", "F16"]


def write(folder: Path, models: list[torch.Tensor]) -> list[Path]:
    paths = [folder / f"{k}.safetensors" for k in range(len(models))]
    for model, path in zip(models, paths, strict=True):
        save_file({"w": model}, path)
    return paths


def words(rng: np.random.Generator, dtype: str, n: int, size: int) -> list[torch.Tensor]:
    """Any finite numbers: normal, subnormal, 0 and −0; members are often equal to the base."""
    top = {"BF16": 0x7F00, "F16": 0x7800}[dtype]  # sums of a few of these are finite
    base = rng.integers(0, top, size) | rng.integers(0, 2, size) << 15
    base[rng.random(size) < 0.1] &= 0x8003
    found = [base]
    for _ in range(n):
        other = rng.integers(0, top, size) | rng.integers(0, 2, size) << 15
        near = np.clip((base & 0x7FFF) + rng.integers(-2, 3, size), 0, top) | base & 0x8000
        found.append(np.where(rng.random(size) < 0.2, other, near))
    bits = [torch.from_numpy(row.astype(np.uint16).view(np.int16)) for row in found]
    return [row.view(TORCH[dtype]) for row in bits]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from(HALVES),
    st.sampled_from(list(rules)),
    st.integers(1, 7),
    st.sampled_from([1, 63, 2047, 2048, 2049, 4097, 70000]),
)
def test_16_bits_merge_as_the_oracle_does(tmp_path_factory, seed, dtype, rule, n, size):
    folder = tmp_path_factory.mktemp("pool")
    models = words(np.random.default_rng(seed), dtype, n, size)
    base, *members = write(folder, models)
    tau = nm.merge(base, members, rule, allow_duplicates=True)
    # The engine sums the members in the order of their content.
    order = [int(member["name"].partition(".")[0]) for member in tau.origin.members]
    stack = [{"w": (models[k].double() - models[0].double()).numpy()} for k in order]
    wanted = oracle.merge(stack, rule)["w"].astype(np.float32) + 0.0
    assert tau["w"].numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("rule", list(rules))
@pytest.mark.parametrize("dtype", HALVES)
def test_strips_in_the_loop_give_the_bytes_of_whole_tiles(dtype, rule, tmp_path, monkeypatch):
    """Files that the loop cannot read are read and widened tile by tile."""
    models = words(np.random.default_rng(3), dtype, 5, 9001)
    base, *members = write(tmp_path, models)
    nm.merge(base, members, rule, out=tmp_path / "a")
    monkeypatch.setattr(
        TileReader, "find", lambda self, name: (find(self, name)[0], unreadable(self, name))
    )
    nm.merge(base, members, rule, out=tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


find = TileReader.find


def unreadable(reader: TileReader, name: str) -> tuple[np.ndarray, np.ndarray]:
    descriptors, offsets = find(reader, name)[1]
    return np.full_like(descriptors, -1), offsets


@pytest.mark.parametrize("rule", list(rules))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 2047, 2048, 5000])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_number_that_is_not_finite_is_found(dtype, place, bad, rule, tmp_path):
    models = words(np.random.default_rng(4), dtype, 3, 5001)
    models[2][place] = bad
    base, *members = write(tmp_path, models)
    with pytest.raises(ValueRangeError, match=r"2\.safetensors 'w': 1 of 5001 values are NaN or"):
        nm.merge(base, members, rule)
