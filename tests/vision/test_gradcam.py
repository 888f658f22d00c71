"""Grad-CAM: choice of the layer and orientation of the map for each architecture."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from negmerge.errors import MismatchError
from negmerge.vision.gradcam import SIDE, grad_cam, map_layer, picture
from negmerge.vision.networks import create


def cnn() -> nn.Module:
    return create("resnet_small", 10, 3, [0.5] * 3, [0.25] * 3)


def vit() -> nn.Module:
    network = VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=10)
    nn.init.normal_(network.heads.head.weight)  # torchvision starts with zeros: no gradient at all
    return network


def swin() -> nn.Module:
    return SwinTransformer([4, 4], 16, [2, 2], [2, 2], [2, 2], num_classes=10)


@pytest.mark.parametrize("make", [cnn, vit, swin])
def test_each_architecture_gives_maps_of_its_images(make):
    torch.manual_seed(0)
    network, image = make(), torch.rand(1, 3, 32, 32)
    labels = torch.arange(10)
    maps = grad_cam(network, image.repeat(10, 1, 1, 1), labels)
    assert maps.shape == (10, 32, 32)
    assert maps.min() >= 0
    assert maps.max() <= 1
    # Negative contributions are cut off, so some maps of an untrained network may be empty.
    shown = [one for one in maps if one.std() > 0.01]
    assert len(shown) >= 3
    assert not np.allclose(shown[0], shown[1], atol=1e-3)  # maps depend on the class
    alone = grad_cam(network, image, labels[:1])
    np.testing.assert_allclose(alone[0], maps[0], atol=1e-4)


def test_the_map_is_largest_at_the_bright_spot():
    """The output of the network is the sum of the brightness."""
    network = nn.Sequential(
        nn.Conv2d(1, 1, 3, padding=1, bias=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(1, 2, bias=False),
    )  # fmt: skip
    with torch.no_grad():
        network[0].weight.fill_(1 / 9)
        network[4].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    image = torch.zeros(1, 1, 16, 16)
    image[0, 0, 2:6, 9:13] = 1
    heat = grad_cam(network, image, torch.tensor([0]))[0]
    row, column = np.unravel_index(heat.argmax(), heat.shape)
    assert 2 <= row < 6
    assert 9 <= column < 13
    assert heat[10:, :6].max() < 0.1


def test_tokens_become_a_map_without_the_class_token():
    layer, reshape = map_layer(vit(), torch.rand(2, 3, 32, 32))
    assert isinstance(layer, nn.LayerNorm)
    tokens = torch.arange(2 * 17 * 3).reshape(2, 17, 3)
    grid = reshape(tokens)
    assert grid.shape == (2, 3, 4, 4)
    assert grid[1, 2, 3, 0] == tokens[1, 1 + 3 * 4 + 0, 2]


def test_windows_become_a_map():
    layer, reshape = map_layer(swin(), torch.rand(2, 3, 64, 32))
    assert isinstance(layer, nn.LayerNorm)
    assert reshape(torch.zeros(2, 8, 4, 5)).shape == (2, 5, 8, 4)


def test_a_network_without_maps_is_refused():
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    with pytest.raises(MismatchError, match="no layer"):
        map_layer(network, torch.rand(2, 1, 4, 4))


@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_are_png_and_repeatable(channels):
    pixels = torch.rand(channels, 8, 8, generator=torch.Generator().manual_seed(0))
    heat = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    for given in (None, heat):
        png = picture(pixels, given)
        assert png == picture(pixels, given)
        assert Image.open(io.BytesIO(png)).size == (SIDE, SIDE)
