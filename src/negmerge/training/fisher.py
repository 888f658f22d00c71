"""The diagonal of the empirical Fisher information of a model."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from negmerge.errors import ValueRangeError, quoted
from negmerge.support.progress import Advance
from negmerge.training.feeds import Feed, Indices
from negmerge.training.loop import Objective, deterministic
from negmerge.training.samples import to_device
from negmerge.training.weights import named_weights

SAMPLES = 256
"""The largest number of samples of a set."""


def fisher_diagonal(
    model: nn.Module,
    feed: Feed,
    picked: Indices,
    objective: Objective,
    advance: Advance = lambda count: None,
) -> dict[str, Tensor]:
    """Return the mean over samples of the squared gradient of the loss, by name of a weight.

    The gradient is that of one sample at a time, in evaluation mode and without augmentation.

    >>> from torch.utils.data import TensorDataset
    >>> from negmerge.training.feeds import DatasetFeed
    >>> from negmerge.training.hyperparameters import HyperParameters
    >>> from negmerge.training.loop import cross_entropy
    >>> feed = DatasetFeed(TensorDataset(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])))
    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> fisher_diagonal(model, feed, np.arange(2), cross_entropy(HyperParameters()))
    {'weight': tensor([[1.2500], [1.2500]])}

    Args:
        feed: the samples; `picked` are the positions of those that are used.
        objective: the loss of a batch.
        advance: called with 1 after each sample.
    """
    weights = {
        name: weight for name, weight in named_weights(model).items() if weight.requires_grad
    }
    device = next(iter(weights.values())).device
    totals = {
        name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in weights.items()
    }
    model.eval()
    with deterministic():
        for position in picked:
            inputs, targets = feed.test_batch(np.array([position]))
            loss = objective(model, (to_device(inputs, device), targets.to(device)), 0)
            found = torch.autograd.grad(loss, [*weights.values()], materialize_grads=True)
            for total, gradient in zip(totals.values(), found, strict=True):
                total += gradient.float().square()
            advance(1)
    means = {name: (total / len(picked)).detach().cpu() for name, total in totals.items()}
    for name, mean in means.items():
        if not bool(mean.isfinite().all()):
            raise ValueRangeError(
                f"fisher: the gradient of {quoted(name)} is not finite; the original is damaged"
            )
    return means
