"""CLIP as a classifier: open_clip's image encoder with a frozen zero-shot head for each data set.

As in the task-vector protocol, the state has the image encoder and the text encoder without its
transformer. Tensors have open_clip's names, so that its files load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from negmerge.errors import OptionError

Freeze = Literal["attention", "nothing"]
TEXT = ("transformer", "text", "text_decoder")
"""Modules of a CLIP model that only process text and are not kept."""


class ClipClassifier(nn.Module):
    """An image encoder with one head for each data set: from pixels in [0, 1] to logits.

    Args:
        clip: an open_clip model; its encoder is used, not copied.
        heads: by set, [classes, features], already times exp(logit_scale).
        mean, std: of the pixels, by channel.
    """

    visual: nn.Module
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        clip: nn.Module,
        heads: Mapping[str, Tensor],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        for name, module in clip.named_children():
            if name not in TEXT:
                self.add_module(name, module)
        if hasattr(self.visual, "output_tokens"):  # only CoCa's captions need tokens
            self.visual.output_tokens = False  # pyright: ignore[reportArgumentType]
        for name, parameter in clip.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, head in heads.items():
            self.register_buffer(f"head_{name}", head, persistent=False)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def features(self, pixels: Tensor) -> Tensor:
        """The features of images, not normalised."""
        return self.visual((pixels - self.mean) / self.std)

    def classify(self, features: Tensor, head: str) -> Tensor:
        """The logits of features, by one head."""
        return functional.normalize(features, dim=-1) @ self.get_buffer(f"head_{head}").T

    def forward(self, pixels: Tensor, head: str = "forget") -> Tensor:
        return self.classify(self.features(pixels), head)


def trainable(name: str, freeze: Freeze) -> bool:
    """Whether fine-tuning may change a tensor: those of the text encoder never change.

    >>> trainable("visual.transformer.resblocks.0.attn.in_proj_weight", "attention")
    False
    >>> trainable("visual.transformer.resblocks.0.ln_1.weight", "attention")
    True
    """
    return name.startswith("visual.") and (freeze == "nothing" or ".attn." not in name)


def freeze_parts(network: nn.Module, freeze: Freeze) -> None:
    """Turn off the gradients of all parameters that are not trainable."""
    parameters = dict(network.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(trainable(name, freeze) and parameter.requires_grad)
    if freeze == "attention" and not any(".attn." in name for name in parameters):
        raise OptionError(
            "clip.freeze: got attention, but the image encoder has no attention layers; set it to "
            "nothing"
        )


def count_frozen(network: nn.Module) -> dict[str, int]:
    """Count the elements of the state, and those that fine-tuning does not change."""
    free = {name for name, p in network.named_parameters() if p.requires_grad}
    sizes = {name: tensor.numel() for name, tensor in network.state_dict().items()}
    frozen = sum(size for name, size in sizes.items() if name not in free)
    return {"elements": sum(sizes.values()), "frozen": frozen}
