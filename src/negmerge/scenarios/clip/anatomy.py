"""The share of zeros in the parts of an image encoder's task vector, as in the paper's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean, stdev

from negmerge.checkpoints.names import layer_of
from negmerge.vectors.task_vector import TaskVector


def anatomy(tau: TaskVector) -> dict[str, dict[str, float]]:
    """Return the percentage of zeros by part: early, middle and late layers, stem, MLPs.

    Each part has the share of its elements and, as in the paper's tables, the mean of its tensors;
    with several tensors also their standard deviation, and with several layers that of the means
    of the layers.
    """
    seen = {name: layer_of(name) for name in tau.entries if name.startswith("visual.")}
    depth = 1 + max((layer[1] for layer in seen.values() if layer is not None), default=0)

    def place(name: str) -> str:
        layer = seen.get(name)
        return "" if layer is None else ("early", "middle", "late")[3 * layer[1] // depth]

    def component(name: str) -> str:
        stem = name.startswith(("visual.conv1.", "visual.trunk.patch_embed."))
        return "stem" if stem else "mlp" if ".mlp." in name else ""

    groups = tau.sparsity(by=place) | tau.sparsity(by=component)
    zeros = {name: 100 * one.tensor_mean for name, one in tau.sparsity(by="tensor").items()}
    spread = _deviations(zeros, place) | _deviations(zeros, component)
    return {
        name: {"elements": 100 * found.element_weighted, "tensors": 100 * found.tensor_mean}
        | spread[name]
        for name, found in sorted(groups.items())
        if name
    }


def _deviations(
    zeros: Mapping[str, float], group: Callable[[str], str]
) -> dict[str, dict[str, float]]:
    """The standard deviations of groups of tensors: over their tensors, and over their layers.

    Args:
        zeros: the percentage of zeros by tensor.
        group: from the name of a tensor to that of its group.
    """
    found: dict[str, dict[str, float]] = {}
    for name in {group(tensor) for tensor in zeros}:
        own = {tensor: share for tensor, share in zeros.items() if group(tensor) == name}
        layers: dict[object, list[float]] = {}
        for tensor, share in own.items():
            layers.setdefault(layer_of(tensor), []).append(share)
        means = [mean(shares) for shares in layers.values()]
        found[name] = {"tensors_std": stdev(own.values())} if len(own) > 1 else {}
        found[name] |= {"layers_std": stdev(means)} if len(means) > 1 else {}
    return found
