"""Classifiers of timm and transformers forget, and the libraries open what the run writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

import image_folders
from negmerge.errors import NegMergeError
from negmerge.runs.recipe import load_recipe
from negmerge.runs.store import Run
from negmerge.scenarios.base import Given, ToTrain
from negmerge.training.weights import save_model
from negmerge.vectors.apply import apply
from negmerge.vectors.task_vector import TaskVector
from running import negmerge

CLASSES = ["t-shirt or top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker",
           "bag", "ankle boot"]  # fmt: skip
RECIPE = """
title: A folder forgets
data: {name: fashion_small, limit: {train: 120, test: 60}}
split: {forget: {fraction: 0.2}}
model: {name: FOLDER, knows: KNOWS}
train: {epochs: 1, batch: 40, lr: 0.02}
pool: {settings: {batch: 8, lr: 0.05}, grid: {epochs: [1, 2]}}
methods: [consensus]
search: {count: 3}
workers: 1
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("folders")
    return {name: make(place / name) for name, make in image_folders.MAKERS.items()}


def recipe_of(folder: Path, knows: bool, *changes: str):
    text = RECIPE.replace("FOLDER", str(folder)).replace("KNOWS", str(knows).lower())
    path = folder.parent / f"{folder.name}-{knows}.yaml"
    path.write_text(text)
    return load_recipe(path, changes)


def test_a_classifier_that_knows_the_data_forgets(folders, tmp_path):
    """A ViT of transformers, with a licence in its card, through the command line."""
    folder = folders["vit"]
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "recipe.yaml").write_text(recipe_of(folder, True).dump())
    negmerge(tmp_path, "unlearn", "recipe.yaml", "--out", "run")
    run = Run(tmp_path / "run")
    out = run.unlearned.parent
    assert {path.name for path in out.iterdir()} == {
        "model.safetensors", "config.json", "preprocessor_config.json", "README.md",
    }  # fmt: skip
    assert run.result.retrain is None  # nobody knows how it was trained
    assert run.result.splits.licence == "mit"
    metadata = yaml.safe_load((out / "README.md").read_text().split("---\n")[1])
    assert metadata["library_name"] == "transformers"
    assert metadata["license"] == "mit"
    assert metadata["pipeline_tag"] == "image-classification"
    assert f"λ = {run.result.first.scale:g}" in (out / "README.md").read_text()

    # transformers opens the result, and sees what the run saw.
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    theirs = AutoModelForImageClassification.from_pretrained(out, local_files_only=True).eval()
    assert list(theirs.config.id2label.values()) == CLASSES
    scenario = load_recipe(run.recipe).make_scenario()
    ours = scenario.model(run.unlearned).eval()
    pixels, _ = scenario.eval_sets("report")["forget"].test_batch(list(range(3)))
    images = [(255 * one).round().byte().permute(1, 2, 0).numpy() for one in pixels]
    processor = AutoImageProcessor.from_pretrained(out, local_files_only=True, use_fast=False)
    inputs = processor(images, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        assert torch.allclose(theirs(inputs).logits, ours(pixels).logits, atol=1e-4)

    # The patch fits the folder itself, under the names of its file.
    tau = TaskVector.load(run.patch("consensus"))
    apply(folder, -run.result.first.scale * tau, tmp_path / "applied")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "applied").state_dict()
    assert all(torch.equal(weight, theirs.state_dict()[name]) for name, weight in again.items())


def test_timm_opens_what_a_run_writes_with_a_new_head(tmp_path):
    folder = image_folders.timm_resnet(tmp_path / "timm", classes=7)
    scenario = recipe_of(folder, False).make_scenario()
    weights = tmp_path / "model.safetensors"
    ours = scenario.model().eval()
    save_model(weights, ours, {"id": "a"})
    assert [path.name for path in scenario.export(weights)] == ["config.json"]

    import timm

    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert theirs.num_classes == 10
    assert theirs.pretrained_cfg["label_names"] == CLASSES
    data = timm.data.resolve_model_data_config(theirs)
    assert [*data["input_size"]] == [3, 32, 32]
    assert data["mean"] == pytest.approx((0.25, 0.5, 0.5))
    pixels, _ = scenario.eval_sets("report")["forget"].test_batch(list(range(3)))
    mean, std = (torch.tensor(data[k])[:, None, None] for k in ("mean", "std"))
    with torch.inference_mode():
        assert torch.allclose(theirs((pixels - mean) / std), ours(pixels), atol=1e-4)


@pytest.mark.parametrize("name", image_folders.MAKERS)
def test_training_starts_from_the_folder_and_knowing_is_the_folder(name, folders):
    trained, known = (recipe_of(folders[name], knows).make_scenario() for knows in (False, True))
    for scenario in (trained, known):
        scenario.check()
        assert scenario.source.channels == 3
        assert scenario.source.mean[0] == 0.25
    assert isinstance(trained.original(), ToTrain)
    assert isinstance(trained.reference(), ToTrain)
    original = known.original()
    assert isinstance(original, Given)
    assert original.weights == folders[name]
    assert known.reference() is None
    start, given = trained.model().state_dict(), known.model(original.weights).state_dict()
    assert all(torch.equal(start[key], given[key]) for key in start)
    assert trained.identity[:3] == known.identity[:3]
    assert trained.identity[3] == trained.folder.fingerprint


def refused(folder: Path, *changes: str, knows: bool = True) -> str:
    with pytest.raises(NegMergeError) as error:
        recipe_of(folder, knows, *changes).make_scenario().check()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_fit_is_one_line(folders, tmp_path):
    seven = image_folders.vit(tmp_path / "seven", classes=7)
    assert "has 7 classes, the data has 10; wanted a classifier of the data" in refused(seven)
    mixed = [*CLASSES[1:], CLASSES[0]]
    other = image_folders.vit(tmp_path / "other", id2label=dict(enumerate(mixed)))
    assert "has the classes of the data in another order: class 0 is 'trouser'" in refused(other)
    init = f"model.init={tmp_path}/x.safetensors"
    assert "has its own weights" in refused(folders["vit"], init, knows=False)
    assert "model.knows: is for a folder" in refused(folders["vit"], "model.name=resnet18")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no config.json" in refused(empty)
    assert "unknown model 'resnet81'" in refused(folders["vit"], "model.name=resnet81")
    away = refused(folders["vit"], "model.name=someone/missing")
    assert "no such folder, and the Hub does not give it" in away


def test_a_folder_is_data(tmp_path):
    """Configurations that name files, code or other models are refused, and nothing is opened."""
    for k, (fields, why) in enumerate({
        '{"architecture": "hf-hub:someone/model"}': "timm has no architecture",
        '{"architecture": "local-dir:/tmp"}': "timm has no architecture",
        '{"model_args": {"checkpoint": "/etc/passwd"}}': "wanted a number, a flag or a word",
        '{"model_args": {"depth": {"a": 1}}}': "wanted a number, a flag or a word",
        '{"num_classes": -1}': "wanted the number of classes",
        '{"model_args": {"no_such_argument": 3}}': "timm cannot open the model",
        '{"model_args": {"stem_width": 100000}}': "config.json wants (200000,)",
    }.items()):  # fmt: skip
        folder = image_folders.timm_resnet(tmp_path / f"timm{k}", **json.loads(fields))
        assert why in refused(folder)
    for k, (fields, why) in enumerate({
        '{"backbone": "someone/model"}': "backbone: is not supported",
        '{"quantization_config": {"load_in_4bit": true}}': "quantization_config: is not supported",
        '{"model_type": "unknown", "auto_map": {"AutoConfig": "evil.Config"}}': "cannot open",
        '{"hidden_size": 200000}': "describes a network of ",
        '{"model_type": "llama"}': "cannot open",
    }.items()):  # fmt: skip
        folder = image_folders.vit(tmp_path / f"vit{k}", **json.loads(fields))
        (folder / "evil.py").write_text("raise SystemExit('code of the folder was run')")
        assert why in refused(folder)
    pickled = image_folders.timm_resnet(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "has no model.safetensors; make one from a pickle" in refused(pickled)
