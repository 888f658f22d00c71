"""Saving a training costs little time, loses nothing, and its errors are told."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from negmerge.errors import FileError, ValueRangeError
from negmerge.training import states
from negmerge.training.feeds import DatasetFeed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import READ_EVERY, train
from negmerge.training.states import Position, StateSaver, load_state
from negmerge.training.weights import load_tensors


def trained_pair(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimiser that has moments."""
    torch.manual_seed(seed)
    model = nn.Linear(50, 40)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.randn(3, 50)).sum().backward()
    optimizer.step()
    return model, optimizer


class SlowDisk:
    """Holds each write until it is released; counts the writes that are under way at once."""

    def __init__(self, monkeypatch) -> None:
        self.released, self.under_way, self.most = threading.Event(), 0, 0
        self.write = states.save_tensors
        monkeypatch.setattr(states, "save_tensors", self)

    def __call__(self, *arguments) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        assert self.released.wait(30)
        self.write(*arguments)
        self.under_way -= 1


def test_what_is_written_is_the_state_at_the_time_of_the_save(tmp_path, monkeypatch):
    disk, path = SlowDisk(monkeypatch), tmp_path / "state"
    model, optimizer = trained_pair()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with StateSaver(path, model, optimizer, 0) as saver:
        saver.save(Position(3, 24, 1.5, 2.0))
        with torch.no_grad():
            for weight in model.parameters():  # the training goes on while the disk is slow
                weight += 1
        optimizer.step()
        assert not path.exists()
        disk.released.set()
    again, moments = trained_pair(1)
    assert load_state(path, again, moments) == Position(3, 24, 1.5, 2.0)
    for name, value in before.items():
        assert torch.equal(again.state_dict()[name], value)
    found = moments.state_dict()["state"][0]
    assert found["step"] == 1
    assert not list(tmp_path.glob(".*"))


def test_one_save_at_a_time_and_none_while_one_is_under_way(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    model, optimizer = trained_pair()
    with StateSaver(tmp_path / "state", model, optimizer, 1e-9) as saver:
        saver.cost = 0.0  # the interval is over at once
        assert saver.due()
        saver.save(Position())
        assert not saver.due()
        disk.released.set()
        given_up = time.monotonic() + 30
        while not saver.due():
            assert time.monotonic() < given_up
            saver.cost = 0.0
        saver.save(Position(step=1))
    assert disk.most == 1
    assert load_state(tmp_path / "state", *trained_pair()).step == 1


def test_the_interval_is_a_hundred_times_the_cost(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(states.time, "monotonic", lambda: now)
    model, optimizer = trained_pair()
    size = 3 * model.weight.nbytes + 3 * model.bias.nbytes + 8  # weights, moments, two counters
    with StateSaver(tmp_path / "state", model, optimizer, 15.0) as saver:
        now += 14.9
        assert not saver.due()
        now += 0.2
        assert saver.due()
        assert saver.cost == pytest.approx(size / states.ASSUMED_SPEED)
        saver.cost = 2.0  # as if a save had taken two seconds
        for later in (100.0, 84.8):
            assert not saver.due()
            now += later
        assert not saver.due()
        now += 0.2
        assert saver.due()


@pytest.mark.parametrize("every", [15.0, 1e6])
def test_nothing_is_saved_for_a_short_training(every, tmp_path, monkeypatch):
    monkeypatch.setattr(states, "save_tensors", None)
    feed = DatasetFeed(TensorDataset(torch.randn(8, 2), torch.arange(8) % 2))
    settings = HyperParameters(epochs=3, batch=4)
    state = tmp_path / "state"
    train(nn.Linear(2, 2), feed, settings, seed=0, state=state, save_every=every)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_stops_the_training_with_one_line(tmp_path: Path):
    """The limit of the size of a file stands for a full disk."""
    feed = DatasetFeed(TensorDataset(torch.randn(8, 500), torch.arange(8) % 2))
    settings = HyperParameters(epochs=500, batch=4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    seen: list[int] = []
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(FileError, match=r"state: cannot write: File too large$"):
            train(
                nn.Linear(500, 2), feed, settings, seed=0, state=tmp_path / "state", save_every=0,
                advance=seen.append,
            )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sum(seen) < 8 * 500
    assert not list(tmp_path.iterdir())
    assert not [t for t in threading.enumerate() if "state of a training" in t.name]


class Bomb(nn.Module):
    """A linear layer whose loss is not finite at one call."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.at, self.calls = nn.Linear(2, 2), at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * (float("nan") if self.calls == self.at + 1 else 1.0)


@pytest.mark.parametrize("step", [0, 1, READ_EVERY - 1, READ_EVERY, 99])
def test_a_loss_that_is_not_finite_is_an_error_that_names_its_step(step, tmp_path):
    feed = DatasetFeed(TensorDataset(torch.randn(400, 2), torch.arange(400) % 2))
    settings = HyperParameters(epochs=1, batch=4, lr=1e-3)
    state = tmp_path / "state"
    with pytest.raises(ValueRangeError, match=rf"the loss is nan at step {step}; use a smaller"):
        train(Bomb(step), feed, settings, seed=0, state=state, save_every=0)
    if step:  # what was saved before is finite
        assert all(tensor.isfinite().all() for tensor in load_tensors(state)[0].values())
    else:
        assert not state.exists()


def test_losses_of_steps_that_are_not_read_are_in_the_mean():
    """The mean of the last epoch, compared with a plain sum."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(520, 3, generator=generator), torch.arange(520) % 2)
    losses: list[float] = []

    def objective(model, batch, epoch):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        losses.append(float(loss.detach()))
        return loss

    settings = HyperParameters(epochs=2, batch=4, lr=0.01)
    done = train(nn.Linear(3, 2), DatasetFeed(data), settings, seed=0, objective=objective)
    assert done.loss == sum(losses[130:]) / 130
