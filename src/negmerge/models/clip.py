"""CLIP as a classifier: open_clip's image encoder with a frozen zero-shot head for each data set.

The state is what the task-vector protocol leaves of a CLIP: the image encoder, and of the text side
all but its transformer. The names are open_clip's, so that its files load.
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
"""Parts of a CLIP that only read text."""


class ClipClassifier(nn.Module):
    """An image encoder and the heads that read it; pixels in [0, 1] to logits.

    clip: an open_clip model, whose encoder is used, not copied.
    heads: for each set, [classes, features], already times exp(logit_scale).
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
        if hasattr(self.visual, "output_tokens"):  # CoCa's captions need them, a head does not
            self.visual.output_tokens = False  # pyright: ignore[reportArgumentType]
        for name, parameter in clip.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, head in heads.items():
            self.register_buffer(f"head_{name}", head, persistent=False)
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def features(self, pixels: Tensor) -> Tensor:
        """What the encoder makes of images, not normalised."""
        return self.visual((pixels - self.mean) / self.std)

    def classify(self, features: Tensor, head: str) -> Tensor:
        """Logits of the classes of one set."""
        return functional.normalize(features, dim=-1) @ self.get_buffer(f"head_{head}").T

    def forward(self, pixels: Tensor) -> Tensor:
        return self.classify(self.features(pixels), "forget")

    def reading(self, head: str) -> nn.Module:
        """The same network, read by another head."""
        return Reading(self, head)


class Reading(nn.Module):
    """A network read by one of its heads."""

    def __init__(self, network: ClipClassifier, head: str) -> None:
        super().__init__()
        self.network, self.head = network, head

    def forward(self, pixels: Tensor) -> Tensor:
        return self.network.classify(self.network.features(pixels), self.head)


def reader(model: nn.Module, name: str) -> nn.Module:
    """A network as it reads the set of that name: a CLIP has a head for each, others have one."""
    return model.reading(name) if isinstance(model, ClipClassifier) else model


def trainable(name: str, freeze: Freeze) -> bool:
    """Whether fine-tuning may change a tensor of the state: the paper freezes text and attention.

    >>> trainable("visual.transformer.resblocks.0.attn.in_proj_weight", "attention")
    False
    >>> trainable("visual.transformer.resblocks.0.ln_1.weight", "attention")
    True
    """
    if not name.startswith("visual."):
        return False
    return freeze == "nothing" or ".attn." not in name


def freeze_parts(network: nn.Module, freeze: Freeze) -> None:
    """Let only the trainable tensors require a gradient."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(trainable(name, freeze) and parameter.requires_grad)
    names = [name for name, _ in network.named_parameters()]
    if freeze == "attention" and not any(".attn." in name for name in names):
        raise OptionError(
            "clip.freeze attention: this image encoder has no attention layers; set it to nothing"
        )


def count_frozen(network: nn.Module) -> dict[str, int]:
    """Elements of the state and how many of them fine-tuning leaves alone."""
    free = {name for name, p in network.named_parameters() if p.requires_grad}
    sizes = {name: tensor.numel() for name, tensor in network.state_dict().items()}
    frozen = sum(size for name, size in sizes.items() if name not in free)
    return {"elements": sum(sizes.values()), "frozen": frozen}
