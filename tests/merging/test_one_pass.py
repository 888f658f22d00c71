"""A merge straight into a model writes what merge and apply write, and refuses what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import negmerge as nm
from negmerge.cli import main
from negmerge.errors import NegMergeError
from negmerge.merging import engine, one_pass, tiles
from negmerge.merging.rules import rules
from storage import TORCH


def make_pool(folder: Path, dtype: str = "F32", n: int = 3) -> tuple[Path, list[Path]]:
    draw = torch.Generator().manual_seed(3)
    shapes = {"a.weight": (300, 31), "a.bias": (31,), "s": (), "empty": (0, 2)}
    base = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    base |= {"bn.running_var": torch.rand(60, generator=draw) * 0.01}
    models = []
    for k in range(n):
        model = {m: v + 0.1 * torch.randn(v.shape, generator=draw) for m, v in base.items()}
        model["a.weight"][:100] = base["a.weight"][:100]
        models.append(model | {"count": torch.tensor([k, 2])})
    for k, model in enumerate([base | {"count": torch.tensor([9, 2])}, *models]):
        model = {m: v.to(TORCH[dtype]) if v.is_floating_point() else v for m, v in model.items()}
        save_file(model, folder / f"m{k}.safetensors", {"format": "pt", "note": str(k)})
    first, *rest = sorted(folder.glob("m*.safetensors"))
    return first, rest


def test_every_rule_writes_what_merge_and_apply_write(tmp_path):
    base, models = make_pool(tmp_path)
    for rule in rules:
        tau = nm.merge(base, models, rule)
        wanted = nm.apply(base, -0.7 * tau, tmp_path / "two.safetensors")
        found = nm.merge_and_apply(base, models, -0.7, tmp_path / "one.safetensors", rule)
        assert found.out.read_bytes() == wanted.out.read_bytes(), rule
        found.out = wanted.out
        assert found == wanted, rule


@pytest.mark.parametrize("wanted", ["keep", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
@pytest.mark.parametrize("rule", ["consensus", "uniform"])
def test_every_format_is_written_alike(dtype, wanted, rule, tmp_path, monkeypatch):
    for module in (tiles, one_pass, engine):
        monkeypatch.setattr(module, "SEGMENT", 4096)  # several segments for each tensor
    monkeypatch.setattr("negmerge.merging.assembly.SEGMENT", 4096)
    base, models = make_pool(tmp_path, dtype)
    tau = nm.merge(base, models, rule, buffers="merge")
    two = nm.apply(base, -30 * tau, tmp_path / "two.safetensors", dtype=wanted)
    one = nm.merge_and_apply(
        base, models, -30, tmp_path / "one.safetensors", rule, dtype=wanted, buffers="merge"
    )
    assert one.out.read_bytes() == two.out.read_bytes()
    assert (one.clamped, one.changed, one.lost) == (two.clamped, two.changed, two.lost)
    assert one.clamped > 0


@pytest.fixture
def folders(tmp_path):
    """A base and two models as folders of two shards, with other files."""
    for k in range(3):
        draw = torch.Generator().manual_seed(k)
        folder = tmp_path / f"f{k}"
        folder.mkdir()
        weights = {name: torch.randn(50, generator=draw).bfloat16() for name in "abc"}
        shards = {"x.safetensors": ["a", "b"], "y.safetensors": ["c"]}
        for shard, names in shards.items():
            save_file({name: weights[name] for name in names}, folder / shard)
        index = {"weight_map": {n: shard for shard, names in shards.items() for n in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps({"k": k}))
        (folder / "README.md").write_text("the base's")
    return tmp_path / "f0", [tmp_path / "f1", tmp_path / "f2"]


@pytest.mark.parametrize("more", [[], ["--dtype", "float32", "--shard-size", "300B"]])
def test_the_command_writes_a_folder_with_its_other_files(folders, more, tmp_path, capsys):
    base, models = folders
    patch = str(tmp_path / "p.safetensors")
    main(["merge", str(base), *map(str, models), "--rule", "magmax", "-o", patch])
    main(["apply", str(base), patch, "--negate", "0.5", *more, "-o", str(tmp_path / "two")])
    capsys.readouterr()
    both = ["merge", str(base), *map(str, models), "--rule", "magmax", "--negate", "0.5", *more]
    main([*both, "-o", str(tmp_path / "one")])
    assert "θ − 0.5·τ" in capsys.readouterr().out
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / d).iterdir()} for d in ("one", "two"))
    card = one.pop("README.md").decode()
    two.pop("README.md")
    assert one == two
    names = " ".join(sorted(p.name for p in models))
    assert f"negmerge merge f0 {names} --rule magmax --negate 0.5" in card or "f2 f1" in card
    assert "written by `negmerge merge`" in card
    main(["merge", str(base), *map(str, models), "--add", "0.5", "-o", str(tmp_path / "plus")])
    tau = nm.merge(base, models)
    plus = nm.apply(base, 0.5 * tau, tmp_path / "wanted").out
    assert (plus / "x.safetensors").read_bytes() == (
        tmp_path / "plus" / "x.safetensors"
    ).read_bytes()


def test_state_dicts_and_inputs_of_several_formats(tmp_path):
    base = {"w": np.linspace(-1, 1, 70, dtype=np.float32)}
    one, two = ({"w": base["w"] + np.float32(d)} for d in (0.1, 0.3))
    mixed = {"w": torch.from_numpy(two["w"]).bfloat16()}
    tau = nm.merge(base, [one, mixed], "uniform")
    done = nm.merge_and_apply(base, [one, mixed], 2.0, tmp_path / "o.safetensors", "uniform")
    wanted = nm.apply(base, 2.0 * tau)["w"]
    np.testing.assert_array_equal(load_file(done.out)["w"].numpy(), wanted)


def test_a_failure_leaves_nothing(tmp_path):
    base, models = make_pool(tmp_path)
    bad = load_file(models[0])
    bad["a.bias"][3] = float("nan")
    save_file(bad, tmp_path / "nan.safetensors")
    twin = tmp_path / "twin.safetensors"
    twin.write_bytes(models[0].read_bytes())
    before = set(tmp_path.iterdir())
    for pool, scale, wanted in (
        ([*models, tmp_path / "nan.safetensors"], -1, "NaN"),
        ([*models, twin], -1, "same weights"),
        (models, -1e40, "does not fit F32"),
        (models, float("inf"), "finite"),
        ([base, *models], -1, "listed twice"),
    ):
        for out in ("out.safetensors", "folder"):
            with pytest.raises(NegMergeError, match=wanted):
                nm.merge_and_apply(base, pool, scale, tmp_path / out)
            assert set(tmp_path.iterdir()) == before
    with pytest.raises(NegMergeError, match="is also an input"):
        nm.merge_and_apply(base, models, -1, models[1])


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--negate 1 --layout dense", "--layout"),
        ("--negate 1 --values bfloat16", "--values"),
        ("--add 1 --digest", "--digest"),
        ("--add 1 --dry-run", "--dry-run"),
        ("--add 1 --negate 1", "either"),
        ("--negate -1", "≥ 0"),
        ("--dtype float32", "--negate"),
        ("--shard-size 1GB", "--negate"),
        ("--negate 1 --shard-size 1GB", "shards need a folder"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(words, wanted, tmp_path, capsys):
    base, models = make_pool(tmp_path)
    before = set(tmp_path.iterdir())
    out = str(tmp_path / "o.safetensors")
    with pytest.raises(SystemExit) as stop:
        main(["merge", str(base), *map(str, models), *words.split(), "-o", out])
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert wanted in printed
    assert len(printed.splitlines()) == 1
    assert set(tmp_path.iterdir()) == before
