"""What a tensor's name says about its place in the model."""

from __future__ import annotations


def depth_of(name: str) -> str:
    """The first number in a name, as the layer it belongs to.

    >>> depth_of("visual.transformer.resblocks.11.mlp.c_fc.weight"), depth_of("proj")
    ('11', 'none')
    """
    return next((part for part in name.split(".") if part.isdigit()), "none")


def component_of(name: str) -> str:
    """What a tensor is within its layer: the name after the last number, without weight or bias.

    >>> component_of("visual.transformer.resblocks.11.mlp.c_fc.weight"), component_of("visual.proj")
    ('mlp.c_fc', 'visual.proj')
    """
    parts = name.split(".")
    if len(parts) > 1 and parts[-1] in ("weight", "bias"):
        parts.pop()
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return ".".join(parts[last + 1 :] or [part for part in parts if not part.isdigit()] or parts)


def is_statistic(name: str) -> bool:
    """Whether a tensor holds BatchNorm's running statistics.

    >>> is_statistic("bn1.running_var")
    True
    """
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def is_variance(name: str) -> bool:
    """Whether a tensor must not become negative."""
    return name.rpartition(".")[2] == "running_var"
