"""The gradient of a model over a whole set: what SalUn ranks and influence functions weigh."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from negmerge.data.feeds import Feed, Indices
from negmerge.data.samples import to_device
from negmerge.models.outputs import logits_of
from negmerge.training import deterministic


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that may change, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def loss_gradient(model: nn.Module, feed: Feed, picked: Indices) -> Tensor:
    """The gradient of the summed cross-entropy of some samples, as they are, as one vector."""
    weights = list(trainable(model).values())
    inputs, labels = feed.test_batch(picked)
    device = weights[0].device
    logits = logits_of(model, to_device(inputs, device)).float()
    loss = nn.functional.cross_entropy(logits, labels.to(device), reduction="sum")
    found = torch.autograd.grad(loss, weights, materialize_grads=True)
    vector = torch.cat([gradient.reshape(-1) for gradient in found])
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


def total_gradient(
    model: nn.Module,
    feed: Feed,
    batch: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """The same over a whole feed, the model in evaluation mode.

    >>> from torch.utils.data import TensorDataset
    >>> from negmerge.data.feeds import DatasetFeed
    >>> feed = DatasetFeed(TensorDataset(torch.ones(6, 1), torch.zeros(6, dtype=torch.int64)))
    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> total_gradient(model, feed, batch=4)
    tensor([-3.,  3.])

    batch: samples at a time; it does not change the result but for rounding.
    """
    model.eval()
    total = torch.zeros(())
    with deterministic():
        for start in range(0, len(feed), batch):
            picked = np.arange(start, min(start + batch, len(feed)))
            total = total + loss_gradient(model, feed, picked)
            advance(len(picked))
    return total
