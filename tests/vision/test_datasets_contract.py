"""Requirements for every registered data set."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image

from negmerge.cli.listing import KINDS
from negmerge.scenarios.clip.prompts import prompts_of
from negmerge.vision.datasets import datasets, load, resolve
from negmerge.vision.places import ASSETS, Hub, find
from negmerge.vision.splits import held_out_of

# Columns and splits of the data sets on the Hub that are not read.
ALSO_COLUMNS = {"cifar100": ["coarse_label"]}
ALSO_SPLITS = {
    "svhn": ["extra"],
    "imagenet": ["test"],
    "cars": ["contrast", "gaussian_noise"],
    "eurosat": ["contrast", "motion_blur"],
    "gtsrb": ["contrast", "pixelate"],
    "resisc45": ["contrast", "spatter"],
}
CLASSES = ["one", "two", "three"]


def pictures(count: int, channels: int, seed: int) -> list[np.ndarray]:
    shape = (20, 30) if channels == 1 else (20, 30, 3)
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]


def png(pixels: np.ndarray) -> dict[str, object]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def mirror(folder: Path, source, also_columns=(), also_splits=(), count: int = 3) -> None:
    """Write a tiny data set with the layout of this one on the Hub."""
    inner = folder / (source.config or "data")
    inner.mkdir(parents=True)
    labels = [source.label, *also_columns]
    features = Features(
        {source.image: ImageFeature(), **{name: ClassLabel(names=CLASSES) for name in labels}}
    )
    for seed, split in enumerate([source.train, source.test, *also_splits]):
        cells = [png(one) for one in pictures(count + seed, source.channels, seed)]
        rows = {source.image: cells}
        rows |= {name: [k % 3 for k in range(len(cells))] for name in labels}
        if source.id:
            rows[source.id] = [str(k) for k in range(len(cells))]
            features[source.id] = Value("string")
        table = Dataset.from_dict(rows, features=features)
        table.to_parquet(inner / f"{split}-00000-of-00001.parquet")


@pytest.mark.parametrize("name", list(datasets))
def test_every_entry_is_complete(name):
    source = datasets.get(name)
    assert source.name == name
    assert source.summary.endswith(".")
    assert re.search(r"\d", source.summary), "how many images"
    assert source.licence
    assert len(source.mean) == len(source.std) == source.channels
    assert all(0 < m < 1 and 0 < s < 1 for m, s in zip(source.mean, source.std, strict=True))
    assert 0 <= source.crop < source.size
    if source.hub is None:
        assert (ASSETS / name / "LICENSE").is_file(), "an embedded set brings its licence"
    else:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", source.hub)


@pytest.mark.parametrize("name", [name for name in datasets if datasets.get(name).hub])
def test_every_entry_loads_from_a_copy_with_the_layout_of_the_hub(name, tmp_path):
    source = datasets.get(name)
    root = tmp_path / "mirrors"
    also = ALSO_COLUMNS.get(name, ()), ALSO_SPLITS.get(name, ())
    mirror(root / name, source, *also)
    for seed, split in enumerate(("train", "test")):
        images = load(source, split, root=root, cache=tmp_path / "cache")
        assert images.pixels.shape == (3 + seed, source.size, source.size, source.channels)
        assert images.pixels.dtype == np.uint8
        assert images.pixels.flags.c_contiguous
        assert not images.pixels.flags.writeable
        assert images.labels.dtype == np.int64
        assert images.labels.tolist() == [k % 3 for k in range(3 + seed)]
        assert images.classes == tuple(CLASSES)
        assert len(images) == 3 + seed


def test_the_listing_says_where_an_entry_was_checked():
    listed = KINDS["datasets"]()
    assert {name: entry["checked"] for name, entry in listed.items()} == {
        name: datasets.get(name).checked for name in datasets
    }
    datasets.register("birds", replace(datasets.get("mnist"), name="birds", checked=None))
    try:
        assert KINDS["datasets"]()["birds"]["checked"] == "unchecked"
    finally:
        del datasets._entries["birds"]


CLIP_SETS = ["cars", "dtd", "eurosat", "gtsrb", "mnist", "resisc45", "sun397", "svhn", "imagenet"]


@pytest.mark.parametrize("name", CLIP_SETS)
def test_data_sets_of_the_clip_scenario_as_inputs_of_a_clip_model(name, tmp_path):
    """Three channels, the size of the model; `held_out` decodes only the validation images."""
    mirror(tmp_path / name, datasets.get(name), (), ALSO_SPLITS.get(name, ()), count=32)
    source = resolve(name, size=16, channels=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    options = {"root": tmp_path, "cache": tmp_path / "cache"}
    whole = load(source, "train", **options)
    part = load(source, "train", part="held_out", **options)
    held_out = np.sort(held_out_of(32)[1])
    assert len(held_out) == 3
    assert whole.pixels.shape == (32, 16, 16, 3)
    np.testing.assert_array_equal(part.pixels, whole.pixels[held_out])
    np.testing.assert_array_equal(part.labels, whole.labels[held_out])
    assert part.classes == whole.classes
    words = prompts_of(name).words(whole.classes)
    assert [CLASSES[k] in own[0] for k, own in enumerate(words)] == [True] * 3


@pytest.mark.parametrize("name", [name for name in datasets if datasets.get(name).hub])
def test_without_a_local_copy_the_location_is_the_hub(name, monkeypatch):
    monkeypatch.delenv("NEGMERGE_DATA", raising=False)
    source = datasets.get(name)
    assert find(source, revision="abc") == Hub(name, source.hub, source.config, "abc")
