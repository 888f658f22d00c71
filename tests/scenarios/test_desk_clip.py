"""The CLIP inside the package: its files, what it knows, and the script that makes it."""

from __future__ import annotations

import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torchvision.transforms.v2.functional import normalize

from negmerge.errors import NegMergeError
from negmerge.support.progress import Quiet
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.weights import load_tensors
from negmerge.vision.datasets import load, resolve
from negmerge.vision.places import ASSETS

FOLDER = ASSETS / "desk_clip"
SETS = ("cifar10", "fashion_mnist", "mnist")


@cache
def desk_clip() -> nn.Module:
    return open_clip.create_model(f"local-dir:{FOLDER}").eval()


def embeddings() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors, metadata = load_tensors(FOLDER / "class_embeddings.safetensors")
    return tensors, {key: json.loads(value) for key, value in metadata.items()}


def test_it_is_small():
    assert sum(f.stat().st_size for f in FOLDER.iterdir()) <= 8_000_000
    assert 1e6 < sum(p.numel() for p in desk_clip().visual.parameters()) < 3e6
    assert {t.dtype for t in load_tensors(FOLDER / "open_clip_model.safetensors")[0].values()} == {
        torch.float16
    }


def test_class_embeddings_are_the_text_towers():
    tensors, about = embeddings()
    assert tensors.keys() == {*SETS, "logit_scale"}
    assert tensors["logit_scale"].equal(desk_clip().logit_scale)
    tokenizer = open_clip.get_tokenizer(f"local-dir:{FOLDER}")
    for name in SETS:
        names, templates = about["classes"][name], about["templates"][name]
        assert tensors[name].shape == (len(names), 128)
        assert torch.allclose(tensors[name].norm(dim=1), torch.ones(len(names)))
        with torch.inference_mode():
            texts = [tokenizer([t.format(c) for t in templates]) for c in names]
            means = [desk_clip().encode_text(t, normalize=True).mean(0) for t in texts]
        expected = nn.functional.normalize(torch.stack(means), dim=1)
        assert torch.allclose(tensors[name], expected, atol=1e-5), name


def test_it_refuses_words_it_never_saw():
    tokenizer = open_clip.get_tokenizer(f"local-dir:{FOLDER}")
    assert tokenizer("A photo of the cat.").shape == (1, 24)
    with pytest.raises(Exception, match="vocab"):
        tokenizer("a photo of a spaceship.")


def test_it_knows_clothes_it_has_not_seen(tmp_path):
    config = json.loads((FOLDER / "open_clip_config.json").read_text())["preprocess_cfg"]
    source = resolve("fashion_small", size=32, channels=3, mean=config["mean"], std=config["std"])
    images = load(source, "test", cache=tmp_path)
    tensors, about = embeddings()
    assert list(images.classes) == about["classes"]["fashion_mnist"]
    pixels = torch.from_numpy(images.pixels[::5].copy()).permute(0, 3, 1, 2) / 255
    with torch.inference_mode():
        seen = desk_clip().encode_image(normalize(pixels, config["mean"], config["std"]))
    said = (seen @ tensors["fashion_mnist"].T).argmax(1).numpy()
    assert np.mean(said == images.labels[::5]) > 0.75


@pytest.fixture
def mirrors(tmp_path: Path) -> Path:
    """Three data sets of the right names: some of the embedded clothes."""
    for split, rows in {"train": 128, "test": 60}.items():
        table = pq.read_table(ASSETS / "fashion_small" / f"{split}.parquet").slice(0, rows)
        for name in SETS:
            (tmp_path / "mirrors" / name).mkdir(parents=True, exist_ok=True)
            pq.write_table(table, tmp_path / "mirrors" / name / f"{split}.parquet")
    return tmp_path / "mirrors"


def test_the_script_makes_a_model_or_refuses(mirrors, tmp_path):
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "make_desk_clip.py"))
    settings = script["SETTINGS"].model_copy(update={"epochs": 2, "batch": 64})
    assert isinstance(settings, HyperParameters)

    def make(name: str, least: float) -> dict[str, float]:
        counts = dict.fromkeys(SETS, 96)
        where = {"root": mirrors, "cache": tmp_path / "cache", "progress": Quiet()}
        return script["make"](tmp_path / name, settings, counts, least, **where)

    scores = make("one", 0)
    assert scores.keys() == set(SETS)
    assert f"{scores['mnist']:.2f} % of 60" in (tmp_path / "one" / "README.md").read_text()
    model = open_clip.create_model(f"local-dir:{tmp_path / 'one'}")
    assert all(p.isfinite().all() for p in model.parameters())
    make("two", 0)
    for file in (tmp_path / "one").iterdir():
        if file.name == "README.md":  # says how long it took
            continue
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    with pytest.raises(NegMergeError, match="wanted at least 101; nothing is written"):
        make("three", 101)
    assert not (tmp_path / "three").exists()
    with pytest.raises(NegMergeError, match="exists; remove it"):
        make("one", 0)
