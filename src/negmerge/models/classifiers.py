"""Classifiers by name. ◄ ADD A BACKBONE: one function and one line of the registry.

Networks take pixels in [0, 1] and normalise them in a forward hook, so that the names of their
weights are those of torchvision and a file of theirs loads anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from negmerge.errors import MismatchError
from negmerge.registry import Registry

Builder = Callable[[int, int], nn.Module]
"""From the number of classes and of input channels to a network."""

models: Registry[Builder] = Registry("model")


def create(
    name: str, classes: int, channels: int, mean: Sequence[float], std: Sequence[float]
) -> nn.Module:
    """Build a network with fresh weights from torch's current random state.

    >>> network = create("resnet_small", 10, 1, [0.5], [0.25])
    >>> network(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])

    classes: outputs. channels: of the input images. mean, std: of the pixels, by channel.
    """
    network = models.get(name)(classes, channels)
    shift = torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1)
    scale = torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1)

    def normalise(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pixels = inputs[0]
        return ((pixels - shift.to(pixels.device)) / scale.to(pixels.device), *inputs[1:])

    network.register_forward_pre_hook(normalise)
    return network


def channels_last(network: nn.Module) -> nn.Module:
    """Lay 2-D convolutions out channels last, which ran 1.7 times as fast on a CPU."""
    for parameter in network.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)
    return network


def final_linear(network: nn.Module) -> tuple[str, nn.Linear]:
    """The name and the module of the last linear layer, which gives the logits.

    >>> final_linear(models.get("resnet_small")(10, 3))[0]
    'fc'
    """
    found = [(n, m) for n, m in network.named_modules() if isinstance(m, nn.Linear)]
    if not found:
        raise MismatchError(f"{type(network).__name__}: has no linear layer to end in")
    return found[-1]


def resize(network: nn.Module, outputs: int) -> None:
    """Give the last linear layer so many outputs: the last ones go, or fresh ones are added.

    >>> network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    >>> resize(network, 4)
    >>> network(torch.zeros(1, 3)).shape
    torch.Size([1, 4])
    """
    layer = final_linear(network)[1]
    kept = min(layer.out_features, outputs)
    like = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    new = nn.Linear(layer.in_features, outputs, bias=layer.bias is not None, **like)
    with torch.no_grad():
        for name, weight in list(layer.named_parameters(recurse=False)):
            fresh = new.get_parameter(name)
            fresh[:kept] = weight[:kept]
            setattr(layer, name, fresh.requires_grad_(weight.requires_grad))
    layer.out_features = outputs


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
    """A ResNet for desks without a GPU: a strided stem, then one block at each of three widths."""

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
    """torchvision's ResNet-18 for small images: a 3×3 stem with stride 1 and no pooling."""
    network = resnet18_imagenet(classes, channels)
    network.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    network.maxpool = nn.Identity()
    return network


def resnet18_imagenet(classes: int, channels: int) -> nn.Module:
    """torchvision's ResNet-18 as it is, for images of about 224 pixels."""
    from torchvision.models import resnet18 as make

    network = make(num_classes=classes)
    if channels != 3:
        network.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    return network


def vgg16_bn(classes: int, channels: int) -> nn.Module:
    """torchvision's VGG-16 with BatchNorm and the small head of the CIFAR protocols."""
    from torchvision.models.vgg import VGG, cfgs, make_layers

    with torch.device("meta"):  # its own head has 120 M weights, which nobody needs
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
    for module in network.modules():  # as torchvision does it
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, 0.01)
            nn.init.zeros_(module.bias)
    return network


def swin_t(classes: int, channels: int) -> nn.Module:
    """torchvision's Swin-T."""
    from torchvision.models import swin_t as make

    network = make(num_classes=classes)
    if channels != 3:
        network.features[0][0] = nn.Conv2d(channels, 96, 4, stride=4)  # pyright: ignore[reportIndexIssue]
    return network


models.register("resnet_small", SmallResNet)
models.register("resnet18", resnet18)
models.register("resnet18_imagenet", resnet18_imagenet)
models.register("vgg16_bn", vgg16_bn)
models.register("swin_t", swin_t)
