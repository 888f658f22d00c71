"""Every registered model trains, saves and loads; the names of weights are those of torchvision."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from torch import nn

from negmerge.errors import NegMergeError
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.layers import final_linear
from negmerge.training.loop import train
from negmerge.training.weights import load_model, load_tensors, save_model
from negmerge.vision.datasets import Images
from negmerge.vision.feed import ImageFeed
from negmerge.vision.networks import create, models


def make(name: str, classes: int = 5) -> nn.Module:
    torch.manual_seed(0)
    return create(name, classes, 3, [0.5] * 3, [0.25] * 3)


@pytest.mark.parametrize("name", list(models))
def test_every_model_trains_and_round_trips(name, tmp_path):
    model = make(name)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    images = Images(pixels, np.arange(4), None, tuple("abcde"), "x")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    settings = HyperParameters(epochs=1, batch=4, lr=0.01)
    train(model, ImageFeed(images, np.arange(4)), settings, seed=0)
    assert any(not torch.equal(v, before[k]) for k, v in model.state_dict().items())
    path = tmp_path / "model.safetensors"
    save_model(path, model, {"id": "a"})
    copy = make(name)
    load_model(path, copy)
    for key, value in model.state_dict().items():
        assert torch.equal(value, copy.state_dict()[key]), key
    assert final_linear(model)[1].out_features == 5
    save_model(tmp_path / "again.safetensors", model, {"id": "a"})
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", list(models))
def test_every_model_takes_grey_images(name):
    model = create(name, 5, 1, [0.5], [0.25]).eval()
    with torch.inference_mode():
        assert model(torch.rand(2, 1, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("resnet18_imagenet", torchvision.models.resnet18),
        ("swin_t", torchvision.models.swin_t),
        ("resnet18", torchvision.models.resnet18),
    ],
)
def test_names_of_weights_are_torchvisions(name, theirs):
    ours = create(name, 1000, 3, [0.5] * 3, [0.5] * 3).state_dict()
    published = theirs().state_dict()
    assert ours.keys() == published.keys()
    other = [k for k in ours if ours[k].shape != published[k].shape]
    assert other == (["conv1.weight"] if name == "resnet18" else [])


def test_the_small_stem_keeps_the_resolution():
    model = create("resnet18", 10, 3, [0.5] * 3, [0.5] * 3)
    shapes = []
    model.layer1.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape[2:])))
    model(torch.zeros(2, 3, 32, 32))
    assert shapes == [(32, 32)]
    head = create("vgg16_bn", 10, 3, [0.5] * 3, [0.5] * 3).classifier
    widths = [(m.in_features, m.out_features) for m in head if isinstance(m, nn.Linear)]
    assert widths == [(2048, 256), (256, 256), (256, 10)]


def test_normalisation_is_inside_the_model():
    torch.manual_seed(0)
    model = create("resnet_small", 3, 1, [0.3], [0.2]).eval()
    torch.manual_seed(0)
    bare = models.get("resnet_small")(3, 1).eval()
    x = torch.rand(2, 1, 28, 28)
    assert torch.allclose(model(x), bare((x - 0.3) / 0.2), atol=1e-6)
    assert model.state_dict().keys() == bare.state_dict().keys()


def test_the_documented_backbone():
    """Run the example of docs/extend.md."""
    text = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    code = re.search(r"## A backbone.*?```python\n(.*?)```", text, re.DOTALL).group(1)
    try:
        exec(compile(code, "extend.md", "exec"), {})  # noqa: S102
        assert make("perceptron")(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
    finally:
        models.remove("perceptron")


def test_init_from_another_number_of_classes(tmp_path):
    path = tmp_path / "imagenet.safetensors"
    save_model(path, create("resnet_small", 7, 3, [0.5] * 3, [0.5] * 3), {})
    model = create("resnet_small", 4, 3, [0.5] * 3, [0.5] * 3)
    head = model.fc.weight.clone()
    load_model(path, model, new_head="fc")
    tensors, _ = load_tensors(path)
    assert torch.equal(model.conv1.weight, tensors["conv1.weight"])
    assert torch.equal(model.fc.weight, head)
    with pytest.raises(NegMergeError, match=r"fc\.bias.*\(7,\).*wants \(4,\)"):
        load_model(path, model)


@pytest.mark.parametrize("outputs", ["many", "-1", "99999999999", "7"])
def test_a_wrong_number_of_outputs_in_the_metadata_is_refused(outputs, tmp_path):
    network, path = make("resnet_small"), tmp_path / "m.safetensors"
    save_model(path, network, {"outputs": outputs})
    with pytest.raises(NegMergeError, match=f"outputs = '{outputs}', but no tensor has that size"):
        load_model(path, network)
