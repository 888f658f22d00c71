"""Grad-CAM of networks for images: CNN, ViT or Swin, recognised by the outputs of their layers.

Selvaraju et al., "Grad-CAM: Visual Explanations from Deep Networks", ICCV 2017, computed by the
package grad-cam. The paper names no layer for its Figure 3: here it is the last feature map of a
CNN, and the input of the last attention (`ln_1` or `norm1` of the last block) of a transformer.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from negmerge.errors import MismatchError

BEFORE_ATTENTION = ("ln_1", "norm1", "layer_norm1", "layernorm_before")
POOLS = (nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveMaxPool2d)
SIDE = 112
"""Height and width of a picture, in pixels."""

Reshape = Callable[[Tensor], Tensor]


def grad_cam(network: nn.Module, inputs: Tensor, labels: Tensor) -> NDArray[np.float32]:
    """Return how much each pixel contributes to the given classes: a map in [0, 1] for each image.

    >>> import torch
    >>> from negmerge.vision.networks import create
    >>> network = create("resnet_small", 10, 3, [0.5] * 3, [0.25] * 3)
    >>> grad_cam(network, torch.rand(2, 3, 32, 32), torch.tensor([3, 8])).shape
    (2, 32, 32)
    """
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    network.eval().requires_grad_(True)
    layer, reshape = map_layer(network, inputs)
    classes: list[Any] = [ClassifierOutputTarget(int(label)) for label in labels]
    with GradCAM(network, [layer], reshape) as cam:
        return cam(inputs, classes)


def map_layer(network: nn.Module, inputs: Tensor) -> tuple[nn.Module, Reshape | None]:
    """Return the layer for Grad-CAM, and a function that makes its output a map.

    A map is (images, channels, height, width); the class token of a transformer is left out.
    """
    outputs: list[tuple[str, nn.Module, tuple[int, ...]]] = []

    def record(name: str, module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor) and output.shape[:1] == inputs.shape[:1]:
            outputs.append((name, module, tuple(output.shape)))

    with ExitStack() as hooks:
        for name, module in network.named_modules():
            if name:
                hooks.enter_context(module.register_forward_hook(partial(record, name)))
        network(inputs)
    for name, module, shape in reversed(outputs):
        if isinstance(module, nn.LayerNorm) and name.endswith(BEFORE_ATTENTION):
            if len(shape) == 4:
                return module, lambda x: x.permute(0, 3, 1, 2)
            for extra in (0, 1):
                if isqrt(shape[1] - extra) ** 2 == shape[1] - extra:
                    return module, partial(_square, extra=extra)
    for _, module, shape in reversed(outputs):
        if len(shape) == 4 and min(shape[2:]) > 1 and not isinstance(module, POOLS):
            return module, None
    raise MismatchError(f"{type(network).__name__}: no layer has a map of the image as its output")


def _square(tokens: Tensor, extra: int) -> Tensor:
    """Make a map of (images, tokens, channels), without the first `extra` tokens."""
    side = isqrt(tokens.shape[1] - extra)
    return tokens[:, extra:].transpose(1, 2).unflatten(2, (side, side))


def picture(pixels: Tensor, heat: NDArray[np.float32] | None = None) -> bytes:
    """Return an image as PNG, with a map over it if one is given.

    >>> import torch
    >>> picture(torch.zeros(1, 28, 28))[1:4]
    b'PNG'

    Args:
        pixels: (channels, height, width), one or three channels.
        heat: (height, width), in [0, 1].
    """
    from PIL import Image

    plain = pixels.detach().float().cpu().numpy().transpose(1, 2, 0)
    low, high = float(plain.min()), float(plain.max())
    if low < 0 or high > 1:
        plain = (plain - low) / (high - low)
    colours = np.ascontiguousarray(np.broadcast_to(plain, (*plain.shape[:2], 3)), np.float32)
    if heat is not None:
        from pytorch_grad_cam.utils.image import show_cam_on_image

        shown = show_cam_on_image(colours, heat, use_rgb=True, image_weight=0.55)
    else:
        shown = np.round(255 * colours).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(shown).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(
        out, "PNG", optimize=True
    )
    return out.getvalue()
