"""Recalibration: the statistics of BatchNorm are those of the samples, and then as they were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from negmerge.errors import OptionError
from negmerge.training.feeds import DatasetFeed
from negmerge.training.recalibration import normalisations, recalibrated


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4),
        nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2),
    )  # fmt: skip
    with torch.no_grad():
        for layer in normalisations(model):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    return model


def samples(count: int) -> tuple[torch.Tensor, DatasetFeed]:
    images = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(count))
    return images, DatasetFeed(TensorDataset(images, torch.zeros(count, dtype=torch.int64)))


def run(model: nn.Module, batch) -> torch.Tensor:
    return model(batch[0])


@given(st.integers(2, 600))
def test_the_statistics_are_the_means_of_those_of_the_batches(count: int):
    model, (images, feed) = network(), samples(count)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with recalibrated(model, feed, run):
        assert not model[6].training or model.training
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        parts = -(-count // 250)
        means, variances = [], []
        for part in images.tensor_split(parts):
            outputs = model[0](part).detach().double()
            means.append(outputs.mean((0, 2, 3)))
            variances.append(outputs.var((0, 2, 3)))
        assert found["1.running_mean"].double() == pytest.approx(sum(means) / parts, abs=1e-5)
        assert found["1.running_var"].double() == pytest.approx(sum(variances) / parts, abs=1e-5)
        assert int(found["1.num_batches_tracked"]) == parts
        with recalibrated(model, feed, run):
            again = model.state_dict()
            assert all(torch.equal(again[name], own) for name, own in found.items())
    after = model.state_dict()
    assert all(torch.equal(after[name], own) for name, own in before.items())
    assert [layer.momentum for layer in normalisations(model)] == [0.1, 0.1]
    assert all(module.training for module in model.modules())


def test_a_model_is_restored_when_a_batch_fails():
    model, (_, feed) = network().eval(), samples(10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def fails(own: nn.Module, batch) -> None:
        own(batch[0])
        raise ValueError("out of tea")

    with pytest.raises(ValueError, match="out of tea"), recalibrated(model, feed, fails):
        pytest.fail("entered the block")
    assert all(torch.equal(model.state_dict()[name], own) for name, own in before.items())
    assert not any(module.training for module in model.modules())


def test_one_sample_has_no_variance():
    with (
        pytest.raises(OptionError, match="recalibrate needs two samples or more, got 1"),
        recalibrated(network(), samples(1)[1], run),
    ):
        pytest.fail("entered the block")
