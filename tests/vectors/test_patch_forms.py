"""Listed positions and rounded values: the same task vector, stored in fewer bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import negmerge as nm
from negmerge.checkpoints.dtypes import narrow, widen
from negmerge.cli import main
from negmerge.errors import NegMergeError
from negmerge.vectors import addition
from negmerge.vectors.entry import LISTED, Entry
from negmerge.vectors.module import rounded
from negmerge.vectors.origin import Origin
from storage import TORCH

BLOCKS = [1, 400, LISTED - 1, LISTED, LISTED + 1, 3 * LISTED + 77]


def vector(flat: np.ndarray, base: str = "0" * 32) -> nm.TaskVector:
    return nm.TaskVector({"w": Entry.of(flat, flat.shape, "sparse")}, Origin("uniform", 1, base))


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from(BLOCKS),
    places=st.lists(st.floats(0, 1), max_size=40),
    full=st.booleans(),
    step=st.sampled_from([LISTED, 2 * LISTED, 64 * LISTED]),
)
def test_listed_positions_are_those_of_the_mask(size, places, full, step, tmp_path_factory):
    flat = np.zeros(size, np.float32)
    where = np.array(sorted({round(p * (size - 1)) for p in places}), np.int64)
    if full:  # a block whose count does not fit 16 bits
        where = np.arange(min(size, LISTED))
    flat[where] = 1 + where % 7
    path = tmp_path_factory.mktemp("listed") / "p"
    tau = vector(flat)
    tau.save(path)
    entry = nm.TaskVector.load(path).entries["w"]
    smaller = 4 * -(-size // LISTED) + 2 * where.size < -(-size // 8)
    masked = 4 * size > 4 * where.size + -(-size // 8)
    if where.size and (smaller or masked):
        assert entry.layout == ("listed" if smaller else "sparse")
    np.testing.assert_array_equal(entry.positions(), where)
    np.testing.assert_array_equal(entry.dense(), flat)
    if entry.layout != "dense":
        for start, first, count in entry.ranges(step):
            inside = where[(where >= start) & (where < start + step)]
            assert (first, count) == (int((where < start).sum()), inside.size)
            if count:
                found = entry.positions_in(start, min(start + step, size), first, count)
                np.testing.assert_array_equal(found + start, inside)
    for layout in ("sparse", "dense", "auto"):
        nm.TaskVector.load(path).save(path.with_name(layout), layout)
        again = nm.TaskVector.load(path.with_name(layout)).entries["w"]
        np.testing.assert_array_equal(again.dense(), flat)
    assert path.with_name("auto").read_bytes() == path.read_bytes()


@pytest.fixture
def very_sparse(tmp_path):
    """A base and two models that differ from it in few elements."""

    def make(dtype: str):
        generator = torch.Generator().manual_seed(1)
        base = {"w": torch.randn(2, LISTED + 9, generator=generator).to(TORCH[dtype])}
        base |= {"b": torch.randn(31, generator=generator).to(TORCH[dtype])}
        save_file(base, tmp_path / "base.safetensors")
        where = torch.randperm(base["w"].numel(), generator=generator)[:900]
        for k in range(2):
            model = {name: value.clone() for name, value in base.items()}
            model["w"].view(-1)[where] += (1 + k) * 0.3
            model["b"] += 0.1 * (k + 1)
            save_file(model, tmp_path / f"m{k}.safetensors")
        return tmp_path / "base.safetensors", sorted(tmp_path.glob("m*.safetensors"))

    return make


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("values", ["keep", "bfloat16"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
def test_all_forms_of_a_patch_are_applied_alike(
    very_sparse, dtype, values, compiled, tmp_path, monkeypatch
):
    monkeypatch.setattr(addition, "_worth_compiling", lambda _: compiled)
    base, models = very_sparse(dtype)
    in_memory = nm.merge(base, models, values=values)
    written = []
    for layout in ("auto", "sparse", "dense"):
        tau = nm.merge(base, models, values=values, layout=layout, out=tmp_path / f"{layout}.p")
        wanted = {"auto": "listed", "sparse": "sparse", "dense": "dense"}[layout]
        assert tau.entries["w"].layout == wanted
        assert tau.origin.values == in_memory.origin.values
        out = nm.apply(base, -0.7 * tau, tmp_path / f"{layout}.safetensors").out
        written.append(out.read_bytes())
        state = load_file(base)
        with tau.applied(state, -0.7):
            for name, value in load_file(out).items():
                assert torch.equal(state[name], value), name
        assert torch.equal((tau + tau)["w"], 2 * in_memory["w"])
        assert tau.norm() == pytest.approx(in_memory.norm())
    nm.apply(base, -0.7 * in_memory, tmp_path / "memory.safetensors")
    assert {(tmp_path / "memory.safetensors").read_bytes(), *written} == {written[0]}


def test_a_listed_tensor_is_read_as_documented(very_sparse, tmp_path):
    base, models = very_sparse("F32")
    tau = nm.merge(base, models, out=tmp_path / "p", values="bfloat16")
    with safe_open(tmp_path / "p", "np") as file:
        assert file.metadata()["format"] == "negmerge-patch/2"
        dtype, shape, layout, nonzero = json.loads(file.metadata()["tensors"])["w"]
        listed = file.get_tensor("w#list")
    assert (dtype, layout) == ("BF16", "listed")
    with safe_open(tmp_path / "p", "pt") as file:
        values = file.get_tensor("w#values").float().numpy()
    elements = int(np.prod(shape))
    blocks = -(-elements // 65536)
    counts = listed[: 2 * blocks].view(np.uint32)
    where = np.repeat(np.arange(blocks) * 65536, counts) + listed[2 * blocks :]
    flat = np.zeros(elements, np.float32)
    flat[where] = values
    assert counts.sum() == nonzero
    np.testing.assert_array_equal(flat.reshape(shape), tau["w"].numpy())


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_values_are_rounded_once_and_the_loss_is_recorded(very_sparse, dtype, tmp_path, capsys):
    base, models = very_sparse(dtype)
    kept = nm.merge(base, models)
    tau = nm.merge(base, models, values="bfloat16")
    lost = whole = count = 0
    for name, value in kept.items():
        wanted = rounded(value.double(), torch.bfloat16).float()
        assert torch.equal(tau[name], wanted.to(tau[name].dtype)), name
        lost += (value.double() - wanted.double()).square().sum().item()
        whole += value.double().square().sum().item()
        count += int((value.double() != wanted.double()).sum())
    record = tau.origin.values
    assert (record["format"], record["rounded"], record["zeroed"]) == ("bfloat16", count, 0)
    assert record["error"] == pytest.approx((lost / whole) ** 0.5)
    assert 0 < record["error"] < 2**-8
    out = tmp_path / "p.safetensors"
    main(["merge", str(base), *map(str, models), "--values", "bfloat16", "-o", str(out)])
    assert f"{count:,} were rounded" in capsys.readouterr().out
    assert nm.TaskVector.load(out).origin.values == record
    main(["inspect", str(out)])
    assert "values stored as bfloat16" in capsys.readouterr().out
    assert "negmerge-patch/1" in _format(
        nm.merge(base, models, out=tmp_path / "k", layout="sparse")
    )


def _format(tau: nm.TaskVector) -> str:
    assert tau.path is not None
    with safe_open(tau.path, "np") as file:
        return file.metadata()["format"]


def test_float64_values_can_be_rounded_to_float32(very_sparse):
    base, models = very_sparse("F64")
    kept, tau = nm.merge(base, models), nm.merge(base, models, values="float32")
    assert all(torch.equal(tau[name], kept[name].float()) for name in kept)
    assert tau.origin.values["format"] == "float32"


def test_values_that_become_zero_are_not_stored(tmp_path):
    base = {"w": np.zeros(64, np.float32)}
    model = {"w": np.zeros(64, np.float32)}
    model["w"][[3, 9, 12]] = [1e-40, 2.0, 1e-45]
    tau = nm.merge(base, [model], values="bfloat16")
    assert tau.origin.values["zeroed"] == 1
    wanted = widen(narrow(model["w"].astype(np.float64), "BF16"), "BF16")
    np.testing.assert_array_equal(tau["w"].numpy(), wanted)
    assert tau.nonzero == np.count_nonzero(wanted)
    tau.save(tmp_path / "p")
    assert nm.TaskVector.load(tmp_path / "p").nonzero == tau.nonzero


def test_values_that_do_not_fit_are_refused():
    base, model = ({"w": np.full(3, value, np.float32)} for value in (0, 3.4e38))
    with pytest.raises(NegMergeError, match="does not fit bfloat16"):
        nm.merge(base, [model], values="bfloat16")
    with pytest.raises(NegMergeError, match="values: got 'float16', wanted keep"):
        nm.merge(base, [model], values="float16")  # pyright: ignore


def test_a_loaded_patch_is_saved_in_its_format(very_sparse, tmp_path):
    base, models = very_sparse("F32")
    tau = nm.merge(base, models, out=tmp_path / "p", values="bfloat16")
    tau.save(tmp_path / "q")
    assert (tmp_path / "q").read_bytes() == (tmp_path / "p").read_bytes()
    (0.3 * tau).save(tmp_path / "r")
    again = nm.TaskVector.load(tmp_path / "r")
    assert again.entries["w"].dtype == "F32"
    assert torch.equal(again["w"], (0.3 * tau)["w"])
