"""The statistics of BatchNorm, computed again for weights that were changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from negmerge.errors import OptionError
from negmerge.training.feeds import Batch, Feed
from negmerge.training.samples import to_device

BATCH = 250
"""The largest number of samples of a batch whose statistics are averaged."""


def normalisations(model: nn.Module) -> list[_BatchNorm]:
    """Return the layers of a model that keep statistics of their inputs.

    >>> len(normalisations(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    1
    """
    return [
        layer
        for layer in model.modules()
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None
    ]


@contextmanager
def recalibrated(
    model: nn.Module, feed: Feed, run: Callable[[nn.Module, Batch], object]
) -> Iterator[nn.Module]:
    """Replace the statistics of BatchNorm by those of some samples; restore them after the block.

    The statistics are the mean of those of batches of nearly equal size, in the order of the feed,
    so that the same model and samples give the same statistics.

    >>> from torch.utils.data import TensorDataset
    >>> from negmerge.training.feeds import DatasetFeed
    >>> model = nn.BatchNorm1d(1)
    >>> feed = DatasetFeed(TensorDataset(torch.tensor([[2.0], [4.0]]), torch.zeros(2).long()))
    >>> with recalibrated(model, feed, lambda own, batch: own(batch[0])):
    ...     model.running_mean.item(), model.running_var.item()
    (3.0, 2.0)
    >>> model.running_mean.item(), model.running_var.item()
    (0.0, 1.0)

    Args:
        run: runs the model on a batch; labels must not matter.
    """
    layers = normalisations(model)
    if len(feed) < 2:
        raise OptionError(
            f"buffers: recalibrate needs two samples or more, got {len(feed)}; set buffers to keep"
        )
    modes = {module: module.training for module in model.modules()}
    momenta = [layer.momentum for layer in layers]
    saved = [{name: b.clone() for name, b in layer.named_buffers()} for layer in layers]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        model.eval()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
            layer.train()
        with torch.no_grad():
            for picked in np.array_split(np.arange(len(feed)), -(-len(feed) // BATCH)):
                inputs, targets = feed.test_batch(picked)
                run(model, (to_device(inputs, device), targets))
        _restore(modes, layers, momenta)
        yield model
    finally:
        _restore(modes, layers, momenta)
        with torch.no_grad():
            for layer, buffers in zip(layers, saved, strict=True):
                for name, before in buffers.items():
                    layer.get_buffer(name).copy_(before)


def _restore(
    modes: dict[nn.Module, bool], layers: list[_BatchNorm], momenta: list[float | None]
) -> None:
    """Restore the modes of all modules, and the momenta of the layers."""
    for module, training in modes.items():
        module.training = training
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
