"""The names of tensors: the layer of a tensor, and its component within the layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

EMBEDDINGS = {
    "embed_tokens", "embed_in", "wte", "wpe", "word_embeddings", "tok_embeddings", "shared",
    "token_embedding", "position_embedding", "position_embeddings", "token_type_embeddings",
}  # fmt: skip
"""The names of modules that are embeddings."""


def layer_of(name: str) -> tuple[str, int] | None:
    """The layer of a tensor: the name up to the number of the layer, and the number.

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
    """Whether some of the names are those of low-rank matrices (LoRA).

    >>> is_adapter(["base_model.model.layers.0.q_proj.lora_A.weight"]), is_adapter(["a.weight"])
    (True, False)
    """
    low_rank = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}
    return any(low_rank.intersection(name.split(".")) for name in names)


def is_embedding(name: str) -> bool:
    """Whether a tensor is the weight of an embedding, by the names that transformers uses.

    >>> is_embedding("model.embed_tokens.weight"), is_embedding("lm_head.weight")
    (True, False)
    """
    module, _, last = name.rpartition(".")
    return last == "weight" and module.rpartition(".")[2] in EMBEDDINGS


def depth_by(names: Iterable[str]) -> Callable[[str], str]:
    """A function from the name of a tensor to its depth: the number of its layer.

    If a model has several numbered stacks of layers, the depth includes the name of the stack.

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
    """The part of a layer that a tensor belongs to: its name without layer, numbers, weight, bias.

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
    if not named and layer is not None:  # the layer itself has the weight
        named = [part for part in layer[0].split(".") if part]
    return ".".join(named) or name


def is_statistic(name: str) -> bool:
    """Whether a tensor is a running mean or variance of BatchNorm.

    >>> is_statistic("bn1.running_var")
    True
    """
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def is_variance(name: str) -> bool:
    """Whether a tensor is a running variance of BatchNorm, which must not be negative."""
    return name.rpartition(".")[2] == "running_var"
