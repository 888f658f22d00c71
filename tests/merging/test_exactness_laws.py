"""The same bytes however the work is cut, and one rounding only."""

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
from negmerge.checkpoints.dtypes import narrow, widen
from negmerge.merging import assembly, engine, tiles
from negmerge.merging.rules import rules
from negmerge.vectors.module import rounded
from storage import TORCH, dense


@pytest.fixture(scope="module", params=["F32", "BF16", "F16", "F64"])
def large(request, tmp_path_factory):
    """Five models of some ten thousand elements, so that they are cut in many ways."""
    folder = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(1)
    shapes = {"a.weight": (130, 131), "b.bias": (7,), "c.weight": (4096,), "d.weight": (9001,)}
    base = {
        n: torch.randn(s, generator=generator).to(TORCH[request.param]) for n, s in shapes.items()
    }
    save_file(base, folder / "base.safetensors")
    paths = []
    for k in range(5):
        change = {n: torch.randn(s, generator=generator) * 0.05 for n, s in shapes.items()}
        model = {n: (base[n].float() + change[n]).to(TORCH[request.param]) for n in base}
        paths.append(folder / f"m{k}.safetensors")
        save_file(model, paths[-1])
    return folder / "base.safetensors", paths


def patch_bytes(large, rule: str, out: Path, **options) -> bytes:
    base, paths = large
    nm.merge(base, paths, rule, out=out, **options)
    return out.read_bytes()


@pytest.mark.parametrize("rule", list(rules))
def test_workers_and_chunks_do_not_matter(large, rule, tmp_path, monkeypatch):
    whole = patch_bytes(large, rule, tmp_path / "a", workers=1)
    for workers, segment, memory in ((2, 4096, 1), (3, 8192, 1), (1, 4096, 10**6)):
        for module in (tiles, assembly, engine):
            monkeypatch.setattr(module, "SEGMENT", segment)
        monkeypatch.setattr(tiles, "TILES", memory)
        assert patch_bytes(large, rule, tmp_path / "b", workers=workers) == whole


@pytest.mark.parametrize("layout", ["sparse", "dense"])
@pytest.mark.parametrize("rule", ["consensus", "uniform"])
def test_layouts_hold_the_same_values(large, rule, layout, tmp_path):
    base, paths = large
    nm.merge(base, paths, rule, out=tmp_path / "p", layout=layout)
    found, wanted = nm.TaskVector.load(tmp_path / "p"), nm.merge(base, paths, rule)
    assert {e.layout for e in found.entries.values()} - {"zero"} == {layout}
    for name, values in dense(wanted).items():
        np.testing.assert_array_equal(dense(found)[name], values)


def test_results_larger_than_the_budget_wait_on_disk(large, tmp_path, monkeypatch):
    whole = patch_bytes(large, "consensus", tmp_path / "a")
    monkeypatch.setattr("negmerge.merging.memory.LARGE", 1000)
    assert patch_bytes(large, "consensus", tmp_path / "b") == whole
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_small_files_of_the_same_content_in_shards_give_the_same_patch(large, tmp_path):
    base, paths = large
    zero = 0.0 * nm.merge(base, paths)
    nm.apply(base, zero, tmp_path / "base", shard_size=20_000)
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    one = patch_bytes((base, paths), "consensus", tmp_path / "a")
    two = patch_bytes((tmp_path / "base", paths), "consensus", tmp_path / "b")
    assert one == two


@pytest.mark.parametrize("member", ["F32", "BF16", "F16", "F64"])
@pytest.mark.parametrize("origin", ["F32", "BF16", "F16", "F64"])
def test_mixed_formats_compare_with_the_base_as_the_member_would_store_it(origin, member, tmp_path):
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(3000, generator=generator, dtype=torch.float64).to(TORCH[origin])
    as_stored = rounded(base.double(), TORCH[member])
    save_file({"w": base}, tmp_path / "base.safetensors")
    members = []
    for k in range(3):
        change = torch.randn(3000, generator=generator) * (
            torch.rand(3000, generator=generator) < 0.5
        )
        members.append((as_stored.double() + 0.1 * change).to(TORCH[member]))
        members[-1][change == 0] = as_stored[change == 0]
        save_file({"w": members[-1]}, tmp_path / f"m{k}.safetensors")
    stack = [{"w": (m.double() - as_stored.double()).numpy()} for m in members]
    tau = nm.merge(tmp_path / "base.safetensors", sorted(tmp_path.glob("m*")), "consensus")
    wanted = oracle.merge(stack, "consensus")["w"]
    kind = np.float64 if "F64" in (origin, member) else np.float32
    np.testing.assert_array_equal(tau["w"].numpy(), wanted.astype(kind))
    untouched = np.all([s["w"] == 0 for s in stack], axis=0)
    assert untouched.any()
    assert not tau["w"].numpy()[untouched].any()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(width=64), min_size=1, max_size=20))
def test_narrowing_rounds_once(values):
    """Against exact rational arithmetic: no representable number is nearer."""
    array = np.array(values)
    array = array[np.isfinite(array)]
    for dtype, kind in (("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)):
        found = widen(narrow(array, dtype), dtype)
        same = rounded(torch.from_numpy(array.copy()), kind).double().numpy()
        np.testing.assert_array_equal(found, same)
        for x, y in zip(array, found, strict=True):
            if not np.isfinite(y):
                continue
            near = torch.tensor(y, dtype=torch.float64).to(kind)
            for direction in (np.inf, -np.inf):
                towards = torch.tensor(direction, dtype=kind)
                other = (
                    torch.nextafter(near, towards).double().item()
                    if dtype == "F32"
                    else _next(y, direction, kind)
                )
                if np.isfinite(other):
                    assert abs(_exact(x) - _exact(y)) <= abs(_exact(x) - _exact(other))


def _exact(x):
    from fractions import Fraction

    return Fraction(float(x))


def _next(y: float, direction: float, kind: torch.dtype) -> float:
    bits = torch.tensor([y], dtype=kind).view(torch.int16).int().item() & 0xFFFF
    magnitude, negative = bits & 0x7FFF, bits >> 15
    up = direction > 0
    if magnitude == 0:
        bits = 1 if up else 0x8001
    else:
        bits += 1 if up != bool(negative) else -1
    word = torch.tensor([bits if bits < 0x8000 else bits - 0x10000], dtype=torch.int16)
    return word.view(kind).double().item()
