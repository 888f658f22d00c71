"""θ + s·τ on files and on modules: exact, reversible, tied weights stay tied."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import negmerge as nm
from negmerge.checkpoints.dtypes import BITS, FLOAT_NAMES, FLOATS, from_bits, narrow
from negmerge.checkpoints.header import TensorInfo
from negmerge.errors import NegMergeError
from negmerge.vectors import addition
from negmerge.vectors.compiled_addition import INFINITE
from negmerge.vectors.entry import Entry
from negmerge.vectors.module import rounded
from negmerge.vectors.origin import Origin
from negmerge.vectors.ranges import Adder, Range
from storage import TORCH, loaded

FORMATS = list(FLOATS)


def make_pool(folder: Path, dtype: str, seed: int = 0, n: int = 3):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "a.weight": (300, 31),
        "a.bias": (31,),
        "s": (),
        "empty": (0, 2),
        "bn.running_var": (5,),
    }
    base = {n: torch.randn(s, generator=generator).to(TORCH[dtype]) for n, s in shapes.items()}
    base["bn.running_var"] = base["bn.running_var"].abs() * 0.01
    base["count"] = torch.tensor([1, 2])
    base["a.weight"][0, 0] = -0.0
    save_file(base, folder / "base.safetensors", {"format": "pt", "note": "kept"})
    for k in range(n):
        model = {
            name: (v.double() + 0.1 * torch.randn(v.shape, generator=generator).double()).to(
                v.dtype
            )
            if v.is_floating_point()
            else v + k
            for name, v in base.items()
        }
        model["a.weight"][0] = base["a.weight"][0]
        save_file(model, folder / f"m{k}.safetensors")
    return folder / "base.safetensors", sorted(folder.glob("m*.safetensors"))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("wanted", ["keep", *FLOAT_NAMES])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_compiled_and_plain_loops_give_the_same_bytes(layout, dtype, wanted, tmp_path, monkeypatch):
    base, models = make_pool(tmp_path, dtype)
    tau = nm.merge(base, models, out=tmp_path / "p", layout=layout)
    done = []
    for compiled in (False, True):
        monkeypatch.setattr(addition, "_worth_compiling", lambda _, wanted=compiled: wanted)
        out = tmp_path / f"{compiled}.safetensors"
        done.append(nm.apply(base, -0.7 * tau, out, dtype=wanted))
    plain, fast = done
    assert plain.out.read_bytes() == fast.out.read_bytes()
    assert (plain.changed, plain.nonzero) == (fast.changed, fast.nonzero)


@pytest.mark.parametrize(
    ("dtype", "out", "stored"),
    [
        *((dtype, out, "F64" if dtype == "F64" else "F32") for dtype in FORMATS for out in FORMATS),
        *((dtype, dtype, "BF16") for dtype in FORMATS),
    ],
)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1.0, -1.0, 0.5, -0.7, 1e-5]))
def test_any_bits_are_added_as_numpy_adds_them(dtype, out, stored, seed, scale):
    """Bases and vectors of arbitrary finite bits, and those near one: sums are hard to round."""
    draw = np.random.default_rng(seed)

    def words(kind: str) -> np.ndarray:
        one = int(narrow(np.ones(1), kind).view(BITS[kind])[0])
        near = one + draw.integers(-99, 100, 300)
        some = np.append(near, draw.integers(0, int(INFINITE[kind]), 60)).astype(np.uint64)
        signs = draw.integers(0, 2, some.size).astype(np.uint64) << np.uint64(8 * FLOATS[kind] - 1)
        return draw.permutation(some | signs).astype(BITS[kind])

    base, values = words(dtype), words(stored)
    info = TensorInfo("w", dtype, (base.size,), 0, 0)
    dense = from_bits(values, stored)
    kept = dense != 0
    mask = np.packbits(kept, bitorder="little")
    whole = Entry(info.shape, stored, int(kept.sum()), None, values)
    packed = Entry(info.shape, stored, int(kept.sum()), mask, values[kept])
    for entry in (whole, packed):
        part = Range(info, 0, base.size, 0, entry.nonzero)
        found = []
        for compiled in (False, True):
            raw = base.copy().view(np.uint8)
            try:
                done = Adder(base.size, compiled).add(part, entry, raw, out, scale)
                found.append((done.raw.tobytes(), done.changed))
            except NegMergeError as error:
                found.append(str(error))
        assert found[0] == found[1]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_files_get_base_plus_scaled_vector_rounded_once(dtype, layout, tmp_path):
    base, models = make_pool(tmp_path, dtype)
    tau = nm.merge(base, models, out=tmp_path / "p", layout=layout)
    done = nm.apply(base, -0.7 * tau, tmp_path / "out.safetensors")
    before, after = load_file(base), load_file(tmp_path / "out.safetensors")
    changed = 0
    for name, old in before.items():
        wanted = old
        if name in tau:
            exact = old.double() - 0.7 * tau[name].double()
            wanted = torch.where(tau[name] == 0, old, rounded(exact, old.dtype))
            changed += int((wanted.view(-1) != old.view(-1)).sum())
        assert after[name].dtype == old.dtype
        assert torch.equal(bits(after[name]), bits(wanted)), name
    assert done.changed == changed > 0
    assert torch.equal(after["count"], before["count"]), "integers are the base's"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("wanted", ["keep", *FLOAT_NAMES])
@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(size=st.sampled_from([1e-6, 1e-4, 1e-2]), seed=st.integers(0, 99), dense=st.booleans())
def test_changes_are_counted_in_the_format_that_is_written(
    dtype, wanted, compiled, size, seed, dense, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("counted")
    base, models = make_pool(folder, dtype, seed, n=1)
    whole = nm.merge(base, models, "uniform", layout="dense" if dense else "sparse")
    tau = size * whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(addition, "_worth_compiling", lambda _: compiled)
        without = nm.apply(base, 0 * tau, folder / "without.safetensors", dtype=wanted)
        done = nm.apply(base, tau, folder / "with.safetensors", dtype=wanted)
    before, after = load_file(without.out), load_file(done.out)
    for name, old in load_file(base).items():
        if name in tau:
            exact = old.double() + size * whole[name].double()
            once = torch.where(whole[name] == 0, before[name], rounded(exact, before[name].dtype))
            assert torch.equal(bits(after[name]), bits(once)), name
    differ = {n: (elementwise(v) != elementwise(after[n])).sum().item() for n, v in before.items()}
    assert done.changed == sum(differ.values())
    lost = tau.nonzero - done.changed
    assert done.lost == ({dtype if wanted == "keep" else FLOAT_NAMES[wanted]: lost} if lost else {})
    assert (without.changed, without.lost) == (0, {})


def elementwise(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.reshape(-1).view(kinds[tensor.element_size()])


@pytest.mark.parametrize("dtype", FORMATS)
def test_scale_zero_gives_the_bytes_of_the_base(dtype, tmp_path):
    base, models = make_pool(tmp_path, dtype)
    tau = nm.merge(base, models)
    nm.apply(base, 0 * tau, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == base.read_bytes()


@pytest.mark.parametrize("dtype", FORMATS)
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(scale=st.floats(-3, 3), seed=st.integers(0, 1000))
def test_module_is_changed_like_the_file_and_restored_to_the_bit(
    dtype, scale, seed, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("applied")
    base, models = make_pool(folder, dtype, seed)
    tau = nm.merge(base, models)
    module = torch.nn.Module()
    for name, value in load_file(base).items():
        module.register_buffer(name.replace(".", "_"), value)
    entries = {name.replace(".", "_"): e for name, e in tau.entries.items()}
    local = nm.TaskVector(entries, tau.origin)
    before = {n: v.clone() for n, v in module.state_dict().items()}
    nm.apply(base, scale * tau, folder / "out.safetensors")
    with local.applied(module, scale):
        inside = {n: v.clone() for n, v in module.state_dict().items()}
    for name, value in load_file(folder / "out.safetensors").items():
        assert torch.equal(inside[name.replace(".", "_")], value), name
    for name, value in module.state_dict().items():
        assert torch.equal(bits(value), bits(before[name])), name


def test_channels_last_transposed_and_tied_tensors(tmp_path):
    weight = torch.randn(4, 3, 2, 2)
    tied = torch.randn(6, 5)
    state = {"conv": weight, "one": tied, "two": tied.clone(), "t": torch.randn(5, 6)}
    save_file(state, tmp_path / "base.safetensors")
    change = {n: 0.1 * torch.randn(v.shape) for n, v in state.items()}
    change["two"] = change["one"]
    save_file({n: v + change[n] for n, v in state.items()}, tmp_path / "m.safetensors")
    tau = nm.merge(tmp_path / "base.safetensors", [tmp_path / "m.safetensors"])
    module = torch.nn.Module()
    module.register_buffer("conv", weight.clone().to(memory_format=torch.channels_last))
    module.one = torch.nn.Parameter(tied.clone())
    module.two = module.one
    module.register_buffer("t", state["t"].t().contiguous().t())
    before = {n: v.clone() for n, v in module.state_dict().items()}
    with tau.applied(module, 2.0):
        now = module.state_dict()
        for name in state:
            wanted = (state[name].double() + 2 * tau[name].double()).float()
            assert torch.equal(now[name], wanted), name
        assert module.one is module.two
        assert now["conv"].is_contiguous(memory_format=torch.channels_last)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    nm.apply(tmp_path / "base.safetensors", 0.5 * tau, tmp_path / "out.safetensors")
    after = load_file(tmp_path / "out.safetensors")
    assert torch.equal(after["one"], after["two"]), "tied weights stay tied"


def test_module_is_restored_when_the_block_fails(small_pool, small_model):
    base, pool = small_pool
    tau = nm.merge(base, pool, "uniform")
    before = {n: v.clone() for n, v in small_model.state_dict().items()}

    def fail() -> None:
        with tau.applied(small_model, 1.0):
            now = small_model.state_dict()["head.weight"]
            assert not torch.equal(now, before["head.weight"])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    for name, value in small_model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_module_that_does_not_fit_is_refused(small_pool):
    base, pool = small_pool
    tau = nm.merge(base, pool)
    with (
        pytest.raises(NegMergeError, match=r"blocks\.0\.bias.*is missing"),
        tau.applied(torch.nn.Linear(2, 2)),
    ):
        pass


def test_batchnorm_statistics_stay_or_are_merged_and_clamped(tmp_path):
    base, models = make_pool(tmp_path, "F32")
    kept = nm.merge(base, models)
    assert "bn.running_var" not in kept
    assert {"bn.running_var", "count"} == set(kept.origin.kept)
    merged = nm.merge(base, models, "uniform", buffers="merge")
    assert "bn.running_var" in merged
    done = nm.apply(base, -40 * merged, tmp_path / "out.safetensors")
    variance = loaded(tmp_path / "out.safetensors")["bn.running_var"]
    assert (variance >= 0).all()
    assert done.clamped == int((variance == 0).sum()) > 0


def test_algebra_is_exact(tmp_path):
    base, models = make_pool(tmp_path, "F32")
    one, two = (nm.merge(base, [m]) for m in models[:2])
    total, mean = one + two, nm.merge(base, models[:2], "uniform")
    for name in mean:
        np.testing.assert_array_equal(
            total[name].numpy(), (one[name].double() + two[name].double()).float().numpy()
        )
        np.testing.assert_allclose((total / 2)[name].numpy(), mean[name].numpy(), atol=2e-8)
    assert (one - one).nonzero == 0
    assert (-one).scale == -1
    assert torch.equal((-2 * one)["a.bias"], -2 * one["a.bias"])
    stranger = nm.merge(models[0], [models[1]])
    with pytest.raises(NegMergeError, match="different bases"):
        one + stranger


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("layout", ["auto", "sparse", "dense"])
def test_saved_vectors_come_back(dtype, layout, tmp_path):
    base, models = make_pool(tmp_path, dtype)
    tau = nm.merge(base, models)
    (-1.5 * tau).save(tmp_path / "p", layout)
    again = nm.TaskVector.load(tmp_path / "p")
    assert again.origin == tau.origin
    assert again.nonzero == tau.nonzero
    for name in tau:
        assert torch.equal(again[name], (-1.5 * tau)[name])


def test_sparsity_is_weighted_by_elements_or_by_tensors(tmp_path):
    base = {"l.0.w": torch.zeros(10), "l.0.b": torch.zeros(2), "l.1.w": torch.zeros(8)}
    model = {"l.0.w": torch.zeros(10), "l.0.b": torch.ones(2), "l.1.w": torch.zeros(8)}
    model["l.1.w"][:2] = 1
    save_file(base, tmp_path / "b.safetensors")
    save_file(model, tmp_path / "m.safetensors")
    tau = nm.merge(tmp_path / "b.safetensors", [tmp_path / "m.safetensors"])
    assert tau.sparsity() == 16 / 20
    assert tau.sparsity(by="tensor_mean") == pytest.approx((1 + 0 + 0.75) / 3)
    depth = tau.sparsity(by="depth")
    assert depth["0"].element_weighted == pytest.approx(10 / 12)
    assert depth["0"].tensor_mean == 0.5
    assert set(tau.sparsity(by="component")) == {"w", "b"}
    assert tau.sparsity(by="tensor")["l.1.w"].nonzero == 2


def many_tensors(count: int, filled: int) -> nm.TaskVector:
    """A task vector of tensors with the longest names, the last of which are not zero."""
    zero, full = Entry((4,), "F32", 0), Entry.of(np.array([0, 2, 0, 0], np.float32), (4,), "sparse")
    entries = {
        f"{k:06}".ljust(512, "x"): full if k >= count - filled else zero for k in range(count)
    }
    return nm.TaskVector(entries, Origin("uniform", 1, "0" * 32))


@pytest.mark.parametrize(
    ("count", "filled", "limit"),
    [(15_000, 1, None), (2_000, 2_000, 3_000_000)],
    ids=["table in the header", "table as a tensor"],
)
def test_patches_of_very_many_tensors_are_read_back(count, filled, limit, tmp_path, monkeypatch):
    if limit is not None:
        monkeypatch.setattr("negmerge.checkpoints.header.MAX_HEADER", limit)
    tau = many_tensors(count, filled)
    tau.save(tmp_path / "p", "sparse")
    again = nm.TaskVector.load(tmp_path / "p")
    assert (len(again), again.nonzero) == (count, filled)
    last = max(again)
    assert again[last].tolist() == [0, 2, 0, 0]
    with safe_open(tmp_path / "p", "np") as file:
        assert file.get_tensor(f"{last}#values").tolist() == [2]
        assert ("tensors" in file.metadata()) == (filled == 1)


def test_a_patch_that_nobody_could_read_is_refused_before_the_work(tmp_path, monkeypatch):
    base, models = make_pool(tmp_path, "F32")
    tau, before = nm.merge(base, models), set(tmp_path.iterdir())
    monkeypatch.setattr("negmerge.checkpoints.header.MAX_HEADER", 4_000)
    monkeypatch.setattr("negmerge.merging.engine.Merge._work", lambda _: pytest.fail("too late"))
    for write in (lambda p: nm.merge(base, models, out=p), tau.save):
        with pytest.raises(NegMergeError, match=r"a patch of 4 tensors .* cannot be written"):
            write(tmp_path / "p")
        assert set(tmp_path.iterdir()) == before


def test_a_patch_that_cannot_be_read_back_gets_no_name(tmp_path, monkeypatch):
    base, models = make_pool(tmp_path, "F32")
    tau = nm.merge(base, models)
    before = set(tmp_path.iterdir())
    monkeypatch.setattr("negmerge.vectors.patch._checked_row", lambda *_: ("F32", (1,), "dense", 1))
    for write in (lambda p: nm.merge(base, models, out=p), tau.save):
        with pytest.raises(NegMergeError, match="as listed"):
            write(tmp_path / "p")
        assert set(tmp_path.iterdir()) == before


def test_a_patch_is_closed_when_its_task_vector_is_gone(tmp_path: Path):
    base, model = ({"w": np.full(9, k, np.float32)} for k in (0, 1))
    out = tmp_path / "patch.safetensors"
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        assert nm.merge(base, [model], out=out).entries["w"].stored().all()
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
