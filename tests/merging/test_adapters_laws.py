"""A pool of adapters merges with the bytes of the dense models that the adapters mean."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import negmerge as nm
from adapters import adapted, pair, product, scaling, write_adapter
from negmerge.errors import MismatchError
from negmerge.merging.estimate import estimate
from negmerge.runs.executors import InProcess
from negmerge.runs.ranges import merge_and_apply_on, merge_on
from small_pools import VARIANTS
from storage import TORCH

SHAPES = {
    "embed.weight": (30, 8),
    "a.q.weight": (12, 8),
    "a.v.weight": (8, 8),
    "b.q.weight": (40, 70),
}


def make_pool(folder: Path, dtype: str, n: int, seed: int, targets=("a.q", "b.q")):
    """A base, adapters for it, and the dense models that they mean."""
    rng = np.random.default_rng(seed)
    base = {
        name: torch.from_numpy(rng.standard_normal(shape)).to(TORCH[dtype])
        for name, shape in SHAPES.items()
    }
    base["a.norm.weight"] = torch.ones(8, dtype=TORCH[dtype])
    base["steps"] = torch.tensor([3])
    save_file(base, folder / "base.safetensors")
    shared = {t: pair(rng, 1, SHAPES[f"{t}.weight"][1], 3)[1] for t in targets}
    adapters, models = [], []
    for k in range(n):
        rank, alpha, rslora = 1 + k % 3, 2.0 + k, k % 2 == 1
        tensors, model = {}, dict(base)
        for target in targets[: 1 + k % 2] if k else targets:
            b, a = pair(rng, *SHAPES[f"{target}.weight"], rank, shared[target][:rank])
            tensors |= {f"{target}.lora_A.weight": a, f"{target}.lora_B.weight": b}
            name = f"{target}.weight"
            model[name] = adapted(base[name], product(b, a), scaling(rank, alpha, rslora))
        fields = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora}
        adapters.append(write_adapter(folder / f"adapter{k}", tensors, **fields))
        models.append(folder / f"model{k}.safetensors")
        save_file(model, models[-1])
    return folder / "base.safetensors", adapters, models


def content(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """The metadata of a patch without the names of members, and its tensors."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    metadata = header.pop("__metadata__")
    metadata["members"] = [m["fingerprint"] for m in json.loads(metadata["members"])]
    return metadata, {name: v.numpy().tobytes() for name, v in load_file(path).items()}


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
@pytest.mark.parametrize(("rule", "options"), VARIANTS)
def test_adapters_merge_like_the_dense_models(tmp_path, dtype, rule, options):
    base, adapters, models = make_pool(tmp_path, dtype, 3, 1)
    nm.merge(base, adapters, rule, options, out=tmp_path / "one.safetensors")
    nm.merge(base, models, rule, options, out=tmp_path / "two.safetensors")
    one, two = content(tmp_path / "one.safetensors"), content(tmp_path / "two.safetensors")
    assert one == two
    assert any(any(raw) for raw in one[1].values())


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_adapters_of_one_norm_merge_like_the_dense_models(tmp_path, dtype):
    base, adapters, models = make_pool(tmp_path, dtype, 3, 1)
    for pool, out in ((adapters, "one"), (models, "two")):
        nm.merge(base, pool, "consensus", out=tmp_path / f"{out}.safetensors", equalise=True)
    one, two = content(tmp_path / "one.safetensors"), content(tmp_path / "two.safetensors")
    assert one == two
    assert len(json.loads(one[0]["factors"])) == 3


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["F32", "BF16"]),
    st.integers(1, 5),
    st.integers(0, 99),
    st.sampled_from([("a.q",), ("a.q", "b.q"), ("b.q", "a.v")]),
)
def test_adapters_and_whole_models_mix(dtype, n, seed, targets):
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        base, adapters, models = make_pool(place, dtype, n, seed, targets)
        mixed = [adapters[k] if k % 2 else models[k] for k in range(n)]
        for pool, out in ((mixed, "mixed"), (models, "models"), (adapters[::-1], "adapters")):
            nm.merge(base, pool, "uniform", out=place / f"{out}.safetensors")
        found = [content(place / f"{o}.safetensors") for o in ("mixed", "models", "adapters")]
        assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("rule", ["consensus", "ties", "uniform"])
def test_in_ranges_and_in_one_pass(tmp_path, dtype, rule, monkeypatch):
    from negmerge.merging import tiles

    monkeypatch.setattr(tiles, "SEGMENT", 2048)
    base, adapters, models = make_pool(tmp_path, dtype, 3, 5)
    out = [tmp_path / f"{k}.safetensors" for k in range(6)]
    tau = nm.merge(base, adapters, rule, out=out[0])
    merge_on(InProcess(None), base, adapters, rule, out=out[1], ranges=3)
    assert out[0].read_bytes() == out[1].read_bytes()
    nm.apply(base, -0.7 * tau, out[2])
    nm.merge_and_apply(base, adapters, -0.7, out[3], rule)
    merge_and_apply_on(InProcess(None), base, adapters, -0.7, out[4], rule, ranges=3)
    nm.merge_and_apply(base, models, -0.7, out[5], rule)
    assert len({path.read_bytes() for path in out[2:]}) == 1


def test_an_accumulator_takes_adapters(tmp_path):
    base, adapters, models = make_pool(tmp_path, "F32", 3, 2)
    one, two = nm.Accumulator(base), nm.Accumulator(base)
    for adapter, model in zip(adapters, models, strict=True):
        assert one.add(adapter)
        assert two.add(model)
        assert not one.add(model)
    one.finish().save(tmp_path / "one.safetensors")
    two.finish().save(tmp_path / "two.safetensors")
    assert content(tmp_path / "one.safetensors") == content(tmp_path / "two.safetensors")


def test_a_state_dict_is_a_base_too(tmp_path):
    base, adapters, models = make_pool(tmp_path, "F32", 2, 3)
    tau = nm.merge(load_file(base), adapters)
    other = nm.merge(load_file(base), [load_file(model) for model in models])
    assert {name: tau[name].tolist() for name in tau} == {n: other[n].tolist() for n in other}


def test_tensors_that_no_adapter_changes_are_read_once(tmp_path, monkeypatch):
    base, adapters, _ = make_pool(tmp_path, "F32", 3, 4, ("a.q",))
    read = []
    from negmerge.checkpoints.checkpoint import Checkpoint

    plain = Checkpoint.read_into

    def noted(self, info, start, buffer):
        read.append((self.path.name, info.name, buffer.nbytes))
        plain(self, info, start, buffer)

    monkeypatch.setattr(Checkpoint, "read_into", noted)
    monkeypatch.setattr("negmerge.merging.engine.sample_dissent", lambda *_: (0, 0))
    nm.merge(base, adapters, workers=1)
    whole = [row for row in read if row[1:] == ("b.q.weight", 40 * 70 * 4)]
    assert whole == [("base.safetensors", "b.q.weight", 40 * 70 * 4)]


def test_an_estimate_counts_the_files(tmp_path):
    base, adapters, _ = make_pool(tmp_path, "F32", 3, 4)
    found = estimate(base, adapters)
    stored = sum(v.nbytes for v in load_file(base).values())
    for adapter in adapters:
        stored += sum(v.nbytes for v in load_file(adapter / "adapter_model.safetensors").values())
    assert found.read_bytes == stored
    assert found.elements == sum(v.numel() for v in load_file(base).values()) - 1


# --------------------------------------------------------------------------------- forms of peft


def one(tmp_path: Path, base: dict, tensors: dict, **fields) -> nm.TaskVector:
    adapter = write_adapter(tmp_path / "adapter", tensors, **fields)
    return nm.merge(base, [adapter], "uniform")


def test_patterns_of_ranks_and_alphas(tmp_path):
    rng = np.random.default_rng(0)
    base = {f"layers.{k}.q.weight": torch.zeros(6, 5) for k in range(3)}
    ranks, alphas = {0: 2, 1: 3, 2: 2}, {0: 4.0, 1: 9.0, 2: 5.0}
    pairs = {k: pair(rng, 6, 5, ranks[k]) for k in range(3)}
    tensors = {}
    for k, (b, a) in pairs.items():
        tensors |= {f"layers.{k}.q.lora_A.weight": a, f"layers.{k}.q.lora_B.weight": b}
    patterns = {"rank_pattern": {"layers.1.q": 3}, "alpha_pattern": {r"layers\.[1].q": 9, "2.q": 5}}
    tau = one(tmp_path, base, tensors, **patterns)
    for k, (b, a) in pairs.items():
        wanted = adapted(base[f"layers.{k}.q.weight"], product(b, a), alphas[k] / ranks[k])
        assert torch.equal(tau[f"layers.{k}.q.weight"], wanted)


@pytest.mark.parametrize("shape", [(6, 5), (5, 5)])
def test_a_weight_stored_as_inputs_times_outputs(tmp_path, shape):
    b, a = pair(np.random.default_rng(0), shape[1], shape[0], 2)
    tensors = {"c.lora_A.weight": a, "c.lora_B.weight": b}
    tau = one(tmp_path, {"c.weight": torch.zeros(shape)}, tensors, fan_in_fan_out=True)
    assert torch.equal(tau["c.weight"], adapted(torch.zeros(shape), product(b, a).T, 2.0))


def test_embeddings_and_convolutions(tmp_path):
    rng = np.random.default_rng(0)
    b, a = pair(rng, 4, 9, 2)
    d, c = pair(rng, 6, 3 * 2 * 2, 2)
    base = {"e.weight": torch.zeros(9, 4), "conv.weight": torch.zeros(6, 3, 2, 2)}
    tensors = {
        "e.lora_embedding_A": a,
        "e.lora_embedding_B": b,
        "conv.lora_A.weight": c.reshape(2, 3, 2, 2),
        "conv.lora_B.weight": d.reshape(6, 2, 1, 1),
        "e.base_layer.weight": base["e.weight"],  # peft saves a copy of a targeted embedding
    }
    tau = one(tmp_path, base, tensors)
    assert torch.equal(tau["e.weight"], adapted(base["e.weight"], product(b, a).T, 2.0))
    assert torch.equal(tau["conv.weight"], adapted(base["conv.weight"], product(d, c), 2.0))
    tensors["e.base_layer.weight"] = torch.ones(9, 4)
    write_adapter(tmp_path / "other", tensors)
    with pytest.raises(MismatchError, match=r"'e.weight': .* whole tensor that differs"):
        nm.merge(base, [tmp_path / "other"])


def test_whole_tensors_and_biases(tmp_path):
    b, a = pair(np.random.default_rng(0), 3, 4, 2)
    base = {
        "q.weight": torch.zeros(3, 4),
        "q.bias": torch.zeros(3),
        "head.weight": torch.zeros(2, 3),
    }
    tensors = {
        "q.lora_A.weight": a,
        "q.lora_B.weight": b,
        "q.base_layer.bias": torch.tensor([1.0, 2, 3]),
        "head.weight": torch.ones(2, 3),
    }
    tau = one(tmp_path, base, tensors, bias="lora_only", modules_to_save=["head"])
    assert tau["q.bias"].tolist() == [1, 2, 3]
    assert tau["head.weight"].tolist() == torch.ones(2, 3).tolist()
    assert torch.equal(tau["q.weight"], adapted(base["q.weight"], product(b, a), 2.0))


def test_names_with_another_prefix(tmp_path):
    b, a = pair(np.random.default_rng(0), 3, 4, 2)
    tensors = {"transformer.h.0.q.lora_A.weight": a, "transformer.h.0.q.lora_B.weight": b}
    wanted = adapted(torch.zeros(3, 4), product(b, a), 2.0)
    tau = one(tmp_path, {"h.0.q.weight": torch.zeros(3, 4)}, tensors)
    assert torch.equal(tau["h.0.q.weight"], wanted)
    longer = {"model.transformer.h.0.q.weight": torch.zeros(3, 4)}
    tau = nm.merge(longer, [tmp_path / "adapter"])
    assert torch.equal(tau["model.transformer.h.0.q.weight"], wanted)


def test_an_adapter_that_overflows_is_named(tmp_path):
    b, a = torch.full((3, 2), 1e30), torch.full((2, 4), 1e30)
    with pytest.raises(nm.NegMergeError, match=r"adapter 'q.weight': 12 of 12 values are NaN or"):
        one(tmp_path, {"q.weight": torch.zeros(3, 4)}, {"q.lora_A.weight": a, "q.lora_B.weight": b})


def test_other_matrices_a_are_noted(tmp_path, capsys):
    rng = np.random.default_rng(0)
    base = {"q.weight": torch.zeros(30, 40)}
    same = pair(rng, 30, 40, 4)[1]
    pools = {}
    for kind, start in (("same", same), ("apart", None)):
        for k in range(3):
            b, a = pair(rng, 30, 40, 4, start)
            tensors = {"q.lora_A.weight": a, "q.lora_B.weight": b}
            folder = write_adapter(tmp_path / f"{kind}{k}", tensors, r=4)
            pools.setdefault(kind, []).append(folder)
    nm.merge(base, pools["same"])
    assert capsys.readouterr().err == ""
    nm.merge(base, pools["apart"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("note: 2 of 3 adapters have other matrices A than apart0 (cosine")
    assert "by chance" in line
