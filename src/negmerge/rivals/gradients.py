"""The gradient of the loss over a whole set, for SalUn and influence unlearning."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from negmerge.support.progress import Advance
from negmerge.training.feeds import Feed, Indices
from negmerge.training.loop import deterministic
from negmerge.training.outputs import logits_of
from negmerge.training.samples import to_device


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable weights, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def loss_gradient(model: nn.Module, feed: Feed, picked: Indices) -> Tensor:
    """The gradient of the summed cross-entropy of samples without augmentation, as a vector."""
    weights = list(trainable(model).values())
    inputs, labels = feed.test_batch(picked)
    device = weights[0].device
    logits = logits_of(model, to_device(inputs, device)).float()
    loss = nn.functional.cross_entropy(logits, labels.to(device), reduction="sum")
    found = torch.autograd.grad(loss, weights, materialize_grads=True)
    vector = torch.cat([gradient.reshape(-1) for gradient in found])
    return vector.to(torch.promote_types(vector.dtype, torch.float32))


def total_gradient(
    model: nn.Module, feed: Feed, batch: int, advance: Advance = lambda count: None
) -> Tensor:
    """The gradient of the summed cross-entropy of a whole feed, with the model in evaluation mode.

    `batch`, the number of samples per step, changes only the rounding of the result.

    >>> from torch.utils.data import TensorDataset
    >>> from negmerge.training.feeds import DatasetFeed
    >>> feed = DatasetFeed(TensorDataset(torch.ones(6, 1), torch.zeros(6, dtype=torch.int64)))
    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> total_gradient(model, feed, batch=4)
    tensor([-3.,  3.])
    """
    model.eval()
    total = torch.zeros(())
    with deterministic():
        for start in range(0, len(feed), batch):
            picked = np.arange(start, min(start + batch, len(feed)))
            total = total + loss_gradient(model, feed, picked)
            advance(len(picked))
    return total
