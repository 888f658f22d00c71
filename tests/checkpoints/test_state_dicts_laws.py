"""A state dict gives what the same weights in a file give."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import negmerge as nm
from negmerge.checkpoints.state_dict import StateDict
from negmerge.errors import NegMergeError
from negmerge.vectors.inspection import describe_checkpoint, describe_patch, inspect
from storage import TORCH


def states(dtype: torch.dtype = torch.float32, n: int = 3) -> list[dict[str, torch.Tensor]]:
    """A base and n models with transposed, channels-last, tied, scalar and empty tensors."""
    generator = torch.Generator().manual_seed(1)
    base = {
        "t": torch.randn(301, 70, generator=generator).t(),
        "conv": torch.randn(4, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last),
        "s": torch.tensor(0.5),
        "empty": torch.zeros(0, 3),
        "every": torch.randn(40, generator=generator)[::2],
    }
    base = {name: value.to(dtype) for name, value in base.items()}
    found = [base | {"steps": torch.tensor(7), "on": torch.tensor([True, False])}]
    for _ in range(n):
        noise = {k: torch.randn(v.shape, generator=generator) for k, v in base.items()}
        found.append(found[0] | {k: v + (0.1 * noise[k]).to(dtype) for k, v in base.items()})
    for state in found:
        state["tied"] = state["t"]
    return found


def stored(folder, found):
    paths = [folder / f"{k}.safetensors" for k in range(len(found))]
    for path, state in zip(paths, found, strict=True):
        save_file(
            {k: v.clone(memory_format=torch.contiguous_format) for k, v in state.items()}, path
        )
    return paths


W = torch.zeros(3)


def as_numpy(state):
    return {name: value.numpy() for name, value in state.items()}


def same(left: nm.TaskVector, right: nm.TaskVector) -> None:
    assert left.origin.base == right.origin.base
    prints = [[m["fingerprint"] for m in t.origin.members] for t in (left, right)]
    assert prints[0] == prints[1]
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].numpy().tobytes() == right[name].numpy().tobytes(), name


@pytest.mark.parametrize("dtype", list(TORCH))
@pytest.mark.parametrize("rule", ["consensus", "ties"])
def test_merge(dtype, rule, tmp_path):
    found = states(TORCH[dtype])
    paths = stored(tmp_path, found)
    wanted = nm.merge(paths[0], paths[1:], rule)
    same(nm.merge(found[0], found[1:], rule), wanted)
    same(nm.merge(paths[0], [found[1], paths[2], found[3]], rule), wanted)
    same(nm.merge(found[0], paths[1:], rule, out=tmp_path / "p"), wanted)
    if dtype != "BF16":
        same(nm.merge(as_numpy(found[0]), [as_numpy(f) for f in found[1:]], rule), wanted)
        swapped = {k: v.astype(v.dtype.newbyteorder(">")) for k, v in as_numpy(found[1]).items()}
        same(nm.merge(found[0], [swapped, *found[2:]], rule), wanted)


@pytest.mark.parametrize("dtype", list(TORCH))
def test_apply(dtype, tmp_path):
    found = states(TORCH[dtype], n=1)
    paths = stored(tmp_path, found)
    tau = nm.merge(found[0], found[1:])
    same(tau, nm.merge(paths[0], paths[1:]))
    for out in ("file", "memory"):
        nm.apply(paths[0] if out == "file" else found[0], -0.5 * tau, tmp_path / out)
    names = [
        sorted(p.name for p in (tmp_path / out).glob("*.safetensors")) for out in ("file", "memory")
    ]
    assert names[0] == names[1]
    one = nm.merge(paths[0], [tmp_path / "file"])
    same(one, nm.merge(found[0], [tmp_path / "memory"]))


@pytest.mark.parametrize("dtype", ["keep", "float64", "float32", "float16", "bfloat16"])
def test_apply_without_an_output_gives_a_state_dict(dtype, tmp_path):
    found = states(n=1)
    paths = stored(tmp_path, found)
    before = copy.deepcopy(found[0])
    tau = nm.merge(found[0], found[1:])
    nm.apply(found[0], -0.5 * tau, tmp_path / "out.safetensors", dtype=dtype)
    wanted = load_file(tmp_path / "out.safetensors")
    for base in (found[0], paths[0]):
        state = nm.apply(base, -0.5 * tau, dtype=dtype)
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            assert state[name].dtype == value.dtype, name
            assert torch.equal(state[name], value), name
    assert list(nm.apply(found[0], tau)) == list(found[0])
    for name, value in before.items():
        assert torch.equal(found[0][name], value), "the base is left as it was"
    if dtype == "bfloat16":
        with pytest.raises(NegMergeError, match=r"base '.*': numpy has no bfloat16; pass torch"):
            nm.apply(as_numpy(found[0]), tau, dtype=dtype)
        return
    plain = nm.apply(as_numpy(found[0]), -0.5 * tau, dtype=dtype)
    for name, value in wanted.items():
        assert isinstance(plain[name], np.ndarray)
        assert plain[name].dtype == value.numpy().dtype, name
        np.testing.assert_array_equal(plain[name], value.numpy())


def test_what_cannot_be_applied_in_memory():
    base, other = {"w": W}, {"w": W + 1}
    tau = nm.merge(base, [other])
    for given, options, said in (
        ((base, other), {}, "vector: got dict, wanted a TaskVector or a patch file"),
        ((base, tau), {"shard_size": 5}, "shard_size: shards need a folder; name a folder as out"),
        ((other, tau), {}, "^base: is not the base of this patch"),
        ((tau, tau), {}, "^base: got a task vector, wanted a model"),
    ):
        with pytest.raises(NegMergeError, match=said):
            nm.apply(*given, **options)


@pytest.mark.parametrize("kind", [dict, as_numpy])
def test_applied_changes_a_state_dict_in_place_and_undoes_it(kind):
    base, model = (kind(state) for state in states(n=1))
    before = copy.deepcopy(base)
    tau = nm.merge(base, [model])
    wanted = nm.apply(base, -0.5 * tau)
    with tau.applied(base, -0.5) as state:
        assert state is base
        for name, value in wanted.items():
            assert np.array_equal(base[name], value), name
    for name, value in before.items():
        assert np.asarray(base[name]).tobytes() == np.asarray(value).tobytes(), name


def test_inspection(tmp_path):
    found = states(n=2)
    paths = stored(tmp_path, found)
    one, two = describe_checkpoint(StateDict(found[0], "base")), inspect(paths[0])
    assert one | {"files": two["files"]} == two
    tau = nm.merge(paths[0], paths[1:], out=tmp_path / "patch")
    in_memory = describe_patch(nm.merge(found[0], paths[1:]))
    assert in_memory == describe_patch(tau) == inspect(tmp_path / "patch")


def test_apply_gives_the_file_that_safetensors_would_write(tmp_path):
    base, model = (
        {name: value for name, value in state.items() if value.is_floating_point()}
        for state in states(n=1)
    )
    nm.apply(base, 0 * nm.merge(base, [model]), tmp_path / "a.safetensors")
    plain = {
        name: value.clone(memory_format=torch.contiguous_format) for name, value in base.items()
    }
    save_file(plain, tmp_path / "b.safetensors", {"format": "pt"})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_an_accumulator_keeps_the_base_though_the_module_is_trained(
    small_pool, small_model, tmp_path
):
    base, _ = small_pool
    acc = nm.Accumulator(small_model.state_dict())
    start = copy.deepcopy(small_model.state_dict())
    for k in range(3):
        with torch.no_grad():
            for parameter in small_model.parameters():
                generator = torch.Generator().manual_seed(k)
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        save_file(small_model.state_dict(), tmp_path / f"m{k}")
        assert acc.add(small_model.state_dict())
    assert not acc.add(small_model.state_dict())
    assert [m["name"] for m in acc.members] == ["models[0]", "models[1]", "models[2]"]
    wanted = nm.merge(base, [tmp_path / f"m{k}" for k in range(3)])
    assert acc.finish().origin.base == wanted.origin.base
    for name, value in acc.finish().items():
        assert torch.equal(value, wanted[name])
    acc.save(tmp_path / "state")
    assert nm.Accumulator.load(tmp_path / "state", start).n == 3
    with pytest.raises(NegMergeError, match=r"^base: is not the base of"):
        nm.Accumulator.load(tmp_path / "state", small_model.state_dict())


def test_tensors_are_not_copied_unless_they_must_be():
    weight = torch.randn(8, 8)
    for given, shared in ((weight, True), (weight.numpy(), True), (weight.t(), False)):
        with StateDict({"w": given}, "base") as model:
            before = model.read(model.tensors["w"]).copy()
            weight += 1
            assert (model.read(model.tensors["w"]).tobytes() != before.tobytes()) == shared


def test_numpy_alone_does_not_load_torch():
    code = (
        "import numpy as np, sys, negmerge as nm\n"
        "w = {'w': np.arange(6, dtype=np.float32)}\n"
        "nm.merge(w, [{'w': w['w'] + 1}]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"w": [1.0]}, r"models\[1\] 'w': got list, wanted a torch tensor or a numpy array"),
        ({"w": torch.zeros(3, device="meta")}, r"models\[1\] 'w': the values of the tensor cannot"),
        ({"w": W.to_sparse()}, r"models\[1\] 'w': the values of the tensor cannot"),
        ({"w": torch.zeros(3, dtype=torch.complex128)}, r"models\[1\] 'w': format complex128"),
        ({"w": np.array(["a"] * 3)}, r"models\[1\] 'w': format str"),
        ({"w": torch.zeros(4)}, r"^models\[1\] 'w': shape \(4,\), base has \(3,\)"),
        ({"x": W}, r"^models\[1\]: 1 are not in the base, first 'x'"),
        ({5: W}, r"models\[1\] '5': tensor names must be printable"),
        ({"a\x1b": W}, r"models\[1\] 'a\\x1b': tensor names must be printable"),
        ({"w": torch.full((3,), float("nan"))}, r"^models\[1\] 'w': 3 of 3 values are NaN"),
    ],
    ids=str,
)
def test_errors_name_the_member(change, said):
    with pytest.raises(NegMergeError, match=said):
        nm.merge({"w": W}, [{"w": W + 1}, {"w": W + 2} | change, {"w": W + 3}])


def test_what_is_no_model():
    base, model = {"w": W}, {"w": W + 1}
    for given, said in (
        ((base, [torch.nn.Linear(2, 2)]), r"models\[0\]: got Linear.*state_dict\(\)"),
        ((base, [5]), r"models\[0\]: got int, wanted a file, a folder or a state dict$"),
        ((base, model), "models: got one model, wanted a list"),
        ((base, [nm.merge(base, [model])]), r"models\[0\]: got a task vector"),
        ((base, [{}]), r"models\[0\]: contains no tensors"),
        ((base, [model, model]), r"models\[1\]: listed twice \(also as models\[0\]\)"),
        (
            (base, [model, {**model}]),
            r"models\[.\]: has the same weights.*state_dict\(\) returns the",
        ),
        (
            (base, [{"module.w": W}]),
            r"models\[0\]: every name starts with 'module\.'.*removeprefix",
        ),
    ):
        with pytest.raises(NegMergeError, match=said):
            nm.merge(*given)


def test_options_as_keywords(small_pool):
    base, pool = small_pool
    wanted = nm.merge(base, pool, "consensus", {"quorum": 0.6, "signed": True})
    for tau in (
        nm.merge(base, pool, "consensus", quorum=0.6, signed=True),
        nm.merge(base, pool, "consensus", {"quorum": 0.6}, signed=True),
    ):
        assert tau.origin.options == wanted.origin.options
        same(tau, wanted)
    with pytest.raises(NegMergeError, match="'quorum' is in options and a keyword"):
        nm.merge(base, pool, "consensus", {"quorum": 0.6}, quorum=0.7)
    with pytest.raises(NegMergeError, match=r"unknown keyword 'qorum'.*reduce.*quorum.*max_memory"):
        nm.merge(base, pool, qorum=0.7)
    with pytest.raises(NegMergeError, match=r"unknown keyword 'quorum'; .*'uniform': none"):
        nm.merge(base, pool, "uniform", quorum=0.7)


def test_models_that_are_no_list_are_told(small_pool):
    base, pool = small_pool
    for models, kind in (
        (iter(pool), "list_iterator"),
        (5, "int"),
        (torch.nn.Linear(2, 2), "Linear"),
    ):
        with pytest.raises(NegMergeError, match=f"models: got {kind}, wanted a list of models"):
            nm.merge(base, models)
