"""Groups of tensors: a few neighbouring layers, or the tensors of one kind of component."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from negmerge.checkpoints.names import component_of, depth_by

MOST_GROUPS = 4
"""The largest number of groups: each is measured several times."""
OTHERS = "others"


def groups_by(by: str, lengths: Mapping[str, float]) -> dict[str, list[str]]:
    """Return the names of the tensors of each group.

    >>> lengths = dict.fromkeys(["stem.weight", "blocks.0.fc1.weight", "blocks.1.fc1.weight"], 1.0)
    >>> groups_by("depth", lengths)
    {'stem': ['stem.weight'], '0': ['blocks.0.fc1.weight'], '1': ['blocks.1.fc1.weight']}
    >>> groups_by("component", lengths)
    {'stem': ['stem.weight'], 'fc': ['blocks.0.fc1.weight', 'blocks.1.fc1.weight']}

    Args:
        by: `depth` or `component`.
        lengths: the squared length of τ in each tensor, in the order of the model.
    """
    return _by_depth([*lengths]) if by == "depth" else _by_component(lengths)


def _by_depth(names: list[str]) -> dict[str, list[str]]:
    """Cut the layers, in the order of the model, into groups of about as many layers each.

    A module outside of numbered layers, such as the first convolution or the head, is a layer.
    """
    depth, layers = depth_by(names), dict[str, list[str]]()
    for name in names:
        layer = depth(name)
        own = (name.rpartition(".")[0] or name) if layer == "none" else layer
        layers.setdefault(own, []).append(name)
    titles, count = [*layers], min(MOST_GROUPS, len(layers))
    cuts = [round(k * len(titles) / count) for k in range(count + 1)] if count else []
    found: dict[str, list[str]] = {}
    for start, stop in pairwise(cuts):
        some = titles[start:stop]
        title = some[0] if len(some) == 1 else f"{some[0]} to {some[-1]}"
        found[title] = [name for layer in some for name in layers[layer]]
    return found


def _by_component(lengths: Mapping[str, float]) -> dict[str, list[str]]:
    """Gather tensors by the first word of their component, without its number.

    The kinds in which τ is shortest are one group if there are too many.
    """
    kinds: dict[str, list[str]] = {}
    for name in lengths:
        word = component_of(name).split(".")[0]
        kinds.setdefault(word.rstrip("0123456789_") or word, []).append(name)
    if len(kinds) <= MOST_GROUPS:
        return kinds
    total = {kind: sum(lengths[name] for name in own) for kind, own in kinds.items()}
    longest = sorted(kinds, key=lambda kind: -total[kind])[: MOST_GROUPS - 1]
    found = {kind: own for kind, own in kinds.items() if kind in longest}
    found[OTHERS] = [name for kind, own in kinds.items() if kind not in longest for name in own]
    return found
