"""What a tensor's name says about its place in the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable


def layer_of(name: str) -> tuple[str, int] | None:
    """The layer a tensor is in: where it is counted, and its number there.

    >>> layer_of("visual.transformer.resblocks.11.mlp.c_fc.weight")
    ('visual.transformer.resblocks.', 11)
    >>> layer_of("layer2.0.downsample.1.weight"), layer_of("layer3.conv1.weight")
    (('layer2.', 0), ('layer', 3))
    >>> layer_of("conv1.weight") is None
    True
    """
    parts = name.split(".")
    for k, part in enumerate(parts[:-1]):
        before = "".join(f"{p}." for p in parts[:k])
        if part.isdecimal():
            return before, int(part)
        stage = re.fullmatch(r"(\D+)(\d+)", part)
        if stage is not None and len(parts) > k + 2 and not parts[k + 1].isdecimal():
            return before + stage[1], int(stage[2])
    return None


def is_adapter(names: Iterable[str]) -> bool:
    """Whether there are low-rank matrices (LoRA) among tensors.

    >>> is_adapter(["base_model.model.layers.0.q_proj.lora_A.weight"]), is_adapter(["a.weight"])
    (True, False)
    """
    low_rank = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}
    return any(low_rank.intersection(name.split(".")) for name in names)


def depth_by(names: Iterable[str]) -> Callable[[str], str]:
    """The depth of each tensor of a model: its layer's number, with its path if there are several.

    >>> names = ["blocks.3.weight", "head.weight"]
    >>> [*map(depth_by(names), names)]
    ['3', 'none']
    >>> depth_by(["features.0.weight", "classifier.0.weight"])("features.0.weight")
    'features.0'
    """
    one_stack = len({layer[0] for layer in map(layer_of, names) if layer is not None}) == 1

    def depth(name: str) -> str:
        layer = layer_of(name)
        if layer is None:
            return "none"
        return str(layer[1]) if one_stack else f"{layer[0]}{layer[1]}"

    return depth


def component_of(name: str) -> str:
    """What a tensor is within its layer: the rest of its name, without numbers, weight or bias.

    >>> component_of("visual.transformer.resblocks.11.mlp.c_fc.weight"), component_of("visual.proj")
    ('mlp.c_fc', 'visual.proj')
    >>> component_of("layer1.conv1.weight"), component_of("layer2.0.downsample.0.weight")
    ('conv1', 'downsample')
    """
    layer = layer_of(name)
    rest = name if layer is None else name.removeprefix(f"{layer[0]}{layer[1]}").lstrip(".")
    parts = rest.split(".")
    if parts[-1] in ("weight", "bias"):
        parts.pop()
    named = [part for part in parts if not part.isdigit()]
    if not named and layer is not None:  # the layer is the module itself
        named = [part for part in layer[0].split(".") if part]
    return ".".join(named) or name


def is_statistic(name: str) -> bool:
    """Whether a tensor holds BatchNorm's running statistics.

    >>> is_statistic("bn1.running_var")
    True
    """
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def is_variance(name: str) -> bool:
    """Whether a tensor must not become negative."""
    return name.rpartition(".")[2] == "running_var"
