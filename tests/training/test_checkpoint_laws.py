"""A checkpoint is the model of a training that is stopped by hand after the same epoch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from negmerge.training.feeds import DatasetFeed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import Trained, train

SAMPLES, BATCH, EPOCHS = 30, 8, 4
STEPS = 4
"""The steps of an epoch."""
SETTINGS = {
    "sgd": HyperParameters(epochs=EPOCHS, batch=BATCH, lr=0.1, schedule="step"),
    "adamw": HyperParameters(
        epochs=EPOCHS, batch=BATCH, lr=0.01, optimizer="adamw", schedule="cosine", warmup=3
    ),
    "linear": HyperParameters(epochs=EPOCHS, batch=BATCH, lr=0.1, schedule="linear", accumulate=2),
}


class Stop(Exception):
    """Ends a training from outside."""


def feed() -> DatasetFeed:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 5, generator=draw)
    return DatasetFeed(torch.utils.data.TensorDataset(x, torch.arange(SAMPLES) % 3))


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))


def weights(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: tensor.clone().numpy() for name, tensor in model.state_dict().items()}


def assert_equal(one: dict[str, np.ndarray], two: dict[str, np.ndarray]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert np.array_equal(value, two[name]), name


def stopped_after(epoch: int, settings: HyperParameters) -> dict[str, np.ndarray]:
    """Train with the schedule of all epochs, and stop after some."""
    model, done = fresh(), 0

    def stop(count: int) -> None:
        nonlocal done
        done += count
        if done == epoch * SAMPLES:
            raise Stop

    with pytest.raises(Stop):
        train(model, feed(), settings, seed=3, advance=stop)
    return weights(model)


class Written(dict[int, dict[str, np.ndarray]]):
    """The checkpoints that a training wrote."""

    def functions(self, *epochs: int):
        def function(epoch: int):
            def write(model: nn.Module, trained: Trained) -> None:
                assert trained.samples == epoch * SAMPLES
                self[epoch] = weights(model)

            return write

        return {epoch: function(epoch) for epoch in epochs}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_checkpoint_is_a_training_that_is_stopped(name):
    settings, written, plain, model = SETTINGS[name], Written(), fresh(), fresh()
    train(plain, feed(), settings, seed=3)
    train(model, feed(), settings, seed=3, checkpoints=written.functions(1, 3))
    assert_equal(weights(model), weights(plain))
    assert {*written} == {1, 3}
    for epoch, found in written.items():
        assert_equal(found, stopped_after(epoch, settings))


@pytest.mark.parametrize("stop_after", range(1, STEPS * EPOCHS))
def test_checkpoints_of_a_training_that_is_killed_after_any_step(stop_after, tmp_path):
    """Only those that are missing are asked for again, as `Training` does."""
    settings, state, written, steps = SETTINGS["adamw"], tmp_path / "state", Written(), 0

    def stop(count: int) -> None:
        nonlocal steps
        steps += 1
        if steps == stop_after:
            raise Stop

    functions = written.functions(1, 3)
    with pytest.raises(Stop):
        train(
            fresh(), feed(), settings, 3, state=state, save_every=0, advance=stop,
            checkpoints=functions,
        )  # fmt: skip
    first, model = {*written}, fresh()
    assert first == {epoch for epoch in (1, 3) if epoch * STEPS < stop_after}
    missing = [epoch for epoch in (1, 3) if epoch not in first]
    train(model, feed(), settings, 3, state=state, checkpoints=written.functions(*missing))
    for epoch, found in written.items():
        assert_equal(found, stopped_after(epoch, settings))
    whole = fresh()
    train(whole, feed(), settings, seed=3)
    assert_equal(weights(model), weights(whole))


def test_a_state_after_a_lost_checkpoint_is_not_used(tmp_path):
    settings, state, written, steps = SETTINGS["sgd"], tmp_path / "state", Written(), 0

    def stop(count: int) -> None:
        nonlocal steps
        steps += 1
        if steps == 3 * STEPS:
            raise Stop

    with pytest.raises(Stop):
        train(fresh(), feed(), settings, 3, state=state, save_every=0, advance=stop)
    counted: list[int] = []
    train(
        fresh(), feed(), settings, 3, state=state, advance=counted.append,
        checkpoints=written.functions(2),
    )  # fmt: skip
    assert len(counted) == STEPS * EPOCHS  # every step again
    assert_equal(written[2], stopped_after(2, settings))
