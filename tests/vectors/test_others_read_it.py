"""What comes out is read by transformers, open_clip and safetensors as it is."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import negmerge as nm
from negmerge.cli import main


@pytest.fixture
def folders(tmp_path):
    """A Hugging Face model in shards with tied embeddings, and three fine-tuned ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    pool = []
    for k in range(3):
        torch.manual_seed(k + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn_like(parameter).abs()
        model.save_pretrained(tmp_path / f"m{k}", max_shard_size="15KB")
        pool.append(tmp_path / f"m{k}")
    return tmp_path / "base", pool


def test_transformers_reads_a_sharded_folder(folders, tmp_path):
    from transformers import GPT2LMHeadModel

    base, pool = folders
    index = json.loads((base / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    tau = nm.merge(base, pool)
    assert tau.nonzero
    for out, options in ((tmp_path / "kept", {}), (tmp_path / "cut", {"shard_size": 30_000})):
        nm.apply(base, -0.5 * tau, out, **options)
        before = GPT2LMHeadModel.from_pretrained(base).state_dict()
        loaded = GPT2LMHeadModel.from_pretrained(out)
        assert loaded.lm_head.weight is loaded.transformer.wte.weight, "tied weights stay tied"
        after = loaded.state_dict()
        for name in tau:
            wanted = (before[name].double() - 0.5 * tau[name].double()).float()
            assert torch.equal(after[name], wanted), name
    kept = json.loads((tmp_path / "kept" / "model.safetensors.index.json").read_text())
    assert kept == index
    assert (tmp_path / "cut" / "config.json").read_text() == (base / "config.json").read_text()


def test_the_model_card_is_of_the_output_not_of_the_base(folders, tmp_path):
    base, pool = folders
    (base / "README.md").write_text("The best model.")
    nm.merge(base, pool, out=tmp_path / "p.safetensors", quorum=0.6)
    command = ["apply", str(base), str(tmp_path / "p.safetensors"), "--negate", "0.5"]
    for out in ("one", "two"):
        (tmp_path / out).mkdir()
        main([*command, "--dtype", "bfloat16", "-o", str(tmp_path / out / "model")])
    done = nm.apply(base, -0.5 * nm.TaskVector.load(tmp_path / "p.safetensors"), tmp_path / "three")
    cards = [
        (tmp_path / out / "README.md").read_text() for out in ("one/model", "two/model", "three")
    ]
    assert cards[0] == cards[1], "the same text wherever it is written"
    assert "best" not in cards[0]
    origin = nm.TaskVector.load(tmp_path / "p.safetensors").origin
    for words in (
        f"`base`, fingerprint `{origin.base}`",
        "`p.safetensors`",
        "`consensus` of 3",
        "quorum=0.6",
        "0.5, subtracted",
        "negmerge apply base p.safetensors --negate 0.5 --dtype bfloat16 -o model",
    ):
        assert words in cards[0]
    assert f"{done.changed:,} of " in cards[2]
    assert "-o three" in cards[2]
    nm.apply(base, 0.5 * nm.merge(base, pool), tmp_path / "four")
    assert "a task vector in memory" in (tmp_path / "four" / "README.md").read_text()


def test_shards_respect_their_size_and_match_the_single_file(folders, tmp_path):
    base, pool = folders
    tau = nm.merge(base, pool, out=tmp_path / "p")
    for arguments in (["-o", "one.safetensors"], ["-o", "many", "--shard-size", "12kB"]):
        arguments[1] = str(tmp_path / arguments[1])
        main(["apply", str(base), str(tmp_path / "p"), "--negate", "1", *arguments])
    whole = load_file(tmp_path / "one.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in whole.values())
    seen = {}
    for shard in sorted((tmp_path / "many").glob("*.safetensors")):
        part = load_file(shard)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 12_000
        with safe_open(shard, "pt") as file:
            assert file.metadata()["format"] == "pt"
        seen |= part
    assert seen.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(seen[name], whole[name]) for name in whole)
    assert tau.origin.n == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_output_formats(folders, tmp_path, dtype):
    from transformers import GPT2LMHeadModel

    base, pool = folders
    tau = nm.merge(base, pool)
    nm.apply(base, 0 * tau, tmp_path / "out", dtype=dtype)
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype="auto")
    before = GPT2LMHeadModel.from_pretrained(base).state_dict()
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(value, before[name].to(getattr(torch, dtype))), name


def test_open_clip_reads_the_file(tmp_path):
    import open_clip

    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        vision = {"image_size": 16, "patch_size": 8, "width": 32, "layers": 1, "head_width": 16}
        text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
        return open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text)

    base = make(0)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    for k in range(3):
        state = {
            n: v + 0.01 * torch.rand_like(v) if v.is_floating_point() else v
            for n, v in base.state_dict().items()
        }
        save_file(state, tmp_path / f"m{k}.safetensors")
    tau = nm.merge(tmp_path / "base.safetensors", sorted(tmp_path.glob("m*.safetensors")))
    nm.apply(tmp_path / "base.safetensors", -0.3 * tau, tmp_path / "out.safetensors")
    model = make(9)
    open_clip.load_checkpoint(model, str(tmp_path / "out.safetensors"), strict=True)
    with tau.applied(base, -0.3):
        for name, value in model.state_dict().items():
            assert torch.equal(value, base.state_dict()[name]), name


def test_pickles_are_converted_only_when_trusted(tmp_path, capsys):
    weights = {"module.w": torch.arange(6.0).reshape(2, 3).t(), "module.n": torch.tensor(3)}
    torch.save({"state_dict": weights, "epoch": 4}, tmp_path / "a.pt")
    out = tmp_path / "a.safetensors"
    with pytest.raises(SystemExit) as stop:
        main(["convert", str(tmp_path / "a.pt"), "-o", str(out)])
    assert stop.value.code == 2
    assert "--trust" in capsys.readouterr().err
    main(
        ["convert", str(tmp_path / "a.pt"), "--trust", "--strip-prefix", "module.", "-o", str(out)]
    )
    found = load_file(out)
    assert torch.equal(found["w"], weights["module.w"])
    assert found["n"] == 3


class _Evil:
    def __reduce__(self):
        return (print, ("this must never run",))


def test_code_in_a_pickle_never_runs(tmp_path, capsys):
    torch.save({"w": torch.ones(2), "x": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(SystemExit) as stop:
        main(
            ["convert", str(tmp_path / "evil.pt"), "--trust", "-o", str(tmp_path / "o.safetensors")]
        )
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert "never run" not in printed.out
    assert len(printed.err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["evil.pt"]
