"""The diagonal Fisher information, against numpy for a logistic regression."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from negmerge.errors import ValueRangeError
from negmerge.training.feeds import DatasetFeed
from negmerge.training.fisher import fisher_diagonal
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import cross_entropy

LOSS = cross_entropy(HyperParameters())


def data(count: int = 20, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=draw)
    return inputs, torch.randint(classes, (count,), generator=draw)


def test_it_is_the_mean_of_squared_gradients_of_single_samples():
    inputs, labels = data()
    torch.manual_seed(0)
    model, picked, done = nn.Linear(4, 3), np.array([0, 3, 7, 19]), []
    found = fisher_diagonal(
        model, DatasetFeed(TensorDataset(inputs, labels)), picked, LOSS, done.append
    )
    x, y = inputs.numpy().astype(np.float64)[picked], labels.numpy()[picked]
    weight, bias = (p.detach().numpy().astype(np.float64) for p in (model.weight, model.bias))
    logits = x @ weight.T + bias
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    errors = shares - np.eye(3)[y]  # the gradient of the cross-entropy in the logits
    np.testing.assert_allclose(found["bias"], (errors**2).mean(0), rtol=1e-4)
    gradients = errors[:, :, None] * x[:, None, :]
    np.testing.assert_allclose(found["weight"], (gradients**2).mean(0), rtol=1e-4)
    mean_first = (gradients.mean(0)) ** 2  # a batch of all samples would give this
    assert not np.allclose(found["weight"], mean_first, rtol=0.1)
    assert done == [1, 1, 1, 1]


def test_the_model_is_left_as_it_was_and_frozen_weights_have_no_information():
    inputs, labels = data(classes=2)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2))
    model[0].weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    feed = DatasetFeed(TensorDataset(inputs, labels))
    found = [fisher_diagonal(model, feed, np.arange(6), LOSS) for _ in range(2)]
    assert found[0].keys() == {"0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])  # no dropout
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_gradient_that_is_not_finite_is_an_error():
    inputs, labels = data()
    inputs[2] = float("inf")
    feed = DatasetFeed(TensorDataset(inputs, labels))
    with pytest.raises(ValueRangeError, match=r"^fisher: the gradient of 'weight' is not finite"):
        fisher_diagonal(nn.Linear(4, 3), feed, np.arange(4), LOSS)
