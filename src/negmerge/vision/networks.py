"""Classifiers by name. ◄ ADD A BACKBONE: a function, and one `models.register` at the end.

A network takes pixels in [0, 1]; a forward hook normalises them. The names of the weights are those
of torchvision, so that files of weights can be exchanged with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from negmerge.registry import Registry
from negmerge.vision.pretrained import image_model, is_image_model

Builder = Callable[[int, int], nn.Module]
"""Makes a network from the number of classes and the number of input channels."""

models: Registry[Builder] = Registry("model")


def create(
    name: str,
    classes: int,
    channels: int,
    mean: Sequence[float],
    std: Sequence[float],
    revision: str | None = None,
) -> nn.Module:
    """Make a network with random weights, drawn from torch's current random state.

    >>> network = create("resnet_small", 10, 1, [0.5], [0.25])
    >>> network(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])

    Args:
        name: a registered network, the folder of a classifier of timm or transformers, or the id
            of one on the Hub.
        mean, std: of the pixels, for each channel.
        revision: branch, tag or commit on the Hub.
    """
    if is_registered(name):
        network = models.get(name)(classes, channels)
    else:
        network = image_model(name, revision).build(classes)
    shift, scale = (torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (mean, std))

    def normalise(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pixels = inputs[0]
        return ((pixels - shift.to(pixels.device)) / scale.to(pixels.device), *inputs[1:])

    network.register_forward_pre_hook(normalise)
    return network


def is_registered(name: str) -> bool:
    """Whether a name is that of a registered network, or is to be: then `models.get` raises.

    >>> is_registered("resnet18"), is_registered("resnet19"), is_registered("timm/resnet18")
    (True, True, False)
    """
    return name in models or not is_image_model(name)


# ------------------------------------------------------------------------------------ architectures


class Block(nn.Module):
    """Two 3×3 convolutions with BatchNorm and a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        x = torch.relu_(self.bn1(self.conv1(x)))
        return torch.relu_(self.bn2(self.conv2(x)) + kept)


class SmallResNet(nn.Module):
    """A small ResNet for a CPU: a strided stem and one block for each of three widths."""

    def __init__(self, classes: int, channels: int, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = Block(width, width, 1)
        self.layer2 = Block(width, 2 * width, 2)
        self.layer3 = Block(2 * width, 4 * width, 2)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


def resnet18(classes: int, channels: int) -> nn.Module:
    """ResNet-18 of torchvision for small images: a 3×3 stem with stride 1 and no pooling."""
    network = resnet18_imagenet(classes, channels)
    network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


def resnet18_imagenet(classes: int, channels: int) -> nn.Module:
    """ResNet-18 of torchvision, unchanged, for images of about 224 pixels."""
    from torchvision.models import resnet18 as make

    network = make(num_classes=classes)
    if channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return network


def vgg16_bn(classes: int, channels: int) -> nn.Module:
    """VGG-16 of torchvision with BatchNorm and the small head of the CIFAR protocols."""
    from torchvision.models.vgg import VGG, cfgs, make_layers

    with torch.device("meta"):  # the unused default head has 120 M weights
        network = VGG(nn.Identity(), init_weights=False)
    network.features = make_layers(cfgs["D"], batch_norm=True)
    network.avgpool = nn.AdaptiveAvgPool2d((2, 2))
    network.classifier = nn.Sequential(
        nn.Linear(512 * 2 * 2, 256),
        nn.ReLU(True),
        nn.Dropout(),
        nn.Linear(256, 256),
        nn.ReLU(True),
        nn.Dropout(),
        nn.Linear(256, classes),
    )
    if channels != 3:
        network.features[0] = nn.Conv2d(channels, 64, 3, padding=1)
    for module in network.modules():  # as in torchvision
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
            nn.init.zeros_(module.bias)
    return network


def swin_t(classes: int, channels: int) -> nn.Module:
    """Swin-T of torchvision."""
    from torchvision.models import swin_t as make

    network = make(num_classes=classes)
    if channels != 3:
        network.features[0][0] = nn.Conv2d(channels, 96, 4, stride=4)  # pyright: ignore[reportIndexIssue]
    return network


models.register("resnet_small", SmallResNet)
for builder in (resnet18, resnet18_imagenet, vgg16_bn, swin_t):
    models.register(builder.__name__, builder)
