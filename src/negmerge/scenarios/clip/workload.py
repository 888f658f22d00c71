"""The cost of a run of the CLIP scenario."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from negmerge.scenarios.clip.classifier import ClipClassifier, Freeze, freeze_parts
from negmerge.scenarios.clip.linearized import LinearizedClassifier
from negmerge.scenarios.clip.pretrained import ClipSource
from negmerge.scenarios.clip.settings import ClipSettings
from negmerge.scenarios.settings import Setup
from negmerge.scenarios.workload import ModelCost, Probe, Workload, model_cost, size_of
from negmerge.training.layers import channels_last

COUNTED_APART = ("visual.", "transformer.", "text.")
"""Weights of the image encoder, and of the text transformer, which is not kept."""


def workload(settings: ClipSettings, setup: Setup) -> Workload:
    """Return the cost: only members are trained, and runs share equal members."""
    clip, size = settings.clip, size_of(settings.data)
    fixed = [settings.data, settings.model, clip.pretrained, clip.freeze, clip.linear, setup.seed]
    fixed.append(clip.augmentation)
    name, pixels = settings.model.name, ClipSource(settings.model.name).size
    probe = Probe(
        f"{name}{', linearised' if clip.linear else ''}",
        partial(_network, name, clip.freeze, clip.linear, size.classes),
        (3, pixels, pixels),
        size.classes,
    )
    return Workload(
        _cost(name),
        probe,
        {"forget": size.train},
        trained=0,
        choosing=2 * setup.samples,
        reported=size.test + size_of(clip.control).test,
        tangent=clip.linear,
        shared=str(fixed),
    )


def _network(name: str, freeze: Freeze, linear: bool, classes: int) -> ClipClassifier:
    """A classifier with random weights and a random head."""
    source = ClipSource(name)
    clip = source.build()  # the classifier leaves out the text transformer
    with torch.no_grad():
        features = clip.get_submodule("visual").eval()(torch.zeros(1, 3, source.size, source.size))
    heads = {"forget": torch.randn(classes, features.shape[1])}
    kind = LinearizedClassifier if linear else ClipClassifier
    network = kind(clip, heads, [0.5] * 3, [0.25] * 3)
    freeze_parts(network, freeze)
    channels_last(network)
    return network.linearise() if isinstance(network, LinearizedClassifier) else network


@cache
def _cost(name: str) -> ModelCost:
    source = ClipSource(name)
    with torch.device("meta"):
        clip = source.build()
        images = torch.zeros(2, 3, source.size, source.size)
        cost = model_cost(clip.get_submodule("visual"), images)
    kept = [p.numel() for name, p in clip.named_parameters() if not name.startswith(COUNTED_APART)]
    return replace(cost, weights=cost.weights + 4.0 * sum(kept))
