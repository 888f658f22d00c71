"""The cost of a run of the classify scenario."""

from __future__ import annotations

from functools import cache, partial

import torch

from negmerge.scenarios.classify.settings import ClassifySettings
from negmerge.scenarios.classify.source import source_of
from negmerge.scenarios.settings import Setup
from negmerge.scenarios.workload import ModelCost, Probe, Workload, model_cost, size_of
from negmerge.vision.networks import create


def workload(settings: ClassifySettings, setup: Setup) -> Workload:
    """Return the cost: the original and the retrained model are trained."""
    size, source = size_of(settings.data), source_of(settings)
    pixels = source.size
    train = round(size.train * (1 - settings.split.validation))
    forget = round(train * (settings.split.forget.fraction or 1 / size.classes))
    sizes = {"forget": forget, "retain": train - forget, "all": train}
    seen = train + (0 if settings.retrain is None else train - forget)
    model, mean = settings.model, [0.5] * source.channels
    probe = Probe(
        model.name,
        partial(create, model.name, size.classes, source.channels, mean, mean, model.revision),
        (source.channels, pixels, pixels),
        size.classes,
    )
    return Workload(
        _cost(model.name, model.revision, size.classes, source.channels, pixels),
        probe,
        sizes,
        trained=settings.train.epochs * seen,
        choosing=train + size.test if setup.uses_reported_data else 3 * setup.samples,
        reported=train + size.test,
        batch=settings.train.batch,
    )


@cache
def _cost(name: str, revision: str | None, classes: int, channels: int, pixels: int) -> ModelCost:
    with torch.device("meta"):
        mean = [0.5] * channels
        network = create(name, classes, channels, mean, mean, revision)
        return model_cost(network, torch.zeros(2, channels, pixels, pixels))
