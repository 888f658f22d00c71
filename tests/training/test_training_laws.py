"""A training depends on settings, seed and data only, bit for bit, interrupted or not."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from negmerge.errors import ValueRangeError
from negmerge.training.feeds import DatasetFeed, batches_of, steps_of
from negmerge.training.hyperparameters import Augmentation, HyperParameters, RandAugment
from negmerge.training.loop import train
from negmerge.vision.datasets import Images
from negmerge.vision.feed import ImageFeed
from negmerge.vision.transforms import crop_and_flip, rand_augment


class Net(nn.Module):
    """Every kind of state: convolution, BatchNorm buffers, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def make_images(count: int = 30, size: int = 8, channels: int = 1) -> Images:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, size, size, channels), dtype=np.uint8)
    return Images(pixels, rng.integers(0, 3, count), None, ("a", "b", "c"), "x")


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


class Stop(Exception):
    pass


SETTINGS = {
    "sgd": HyperParameters(epochs=3, batch=8, lr=0.1, schedule="step", label_smoothing=0.1),
    "plain sgd": HyperParameters(epochs=3, batch=8, lr=0.1, momentum=0.0),
    "adamw": HyperParameters(
        epochs=3, batch=8, lr=0.01, optimizer="adamw", schedule="cosine", warmup=3, clip=1.0
    ),
    "augmented": HyperParameters(
        epochs=3,
        batch=8,
        lr=0.1,
        augment=Augmentation(crop=2, flip=True, randaugment=RandAugment(n=2, m=9)),
    ),
    "bfloat16": HyperParameters(epochs=3, batch=8, lr=0.1, precision="bfloat16"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stop_after", [1, 4, 9])
def test_a_resumed_training_equals_an_uninterrupted_one(name, stop_after, tmp_path):
    feed = ImageFeed(make_images(), np.arange(30))
    whole = fresh()
    cost = train(whole, feed, SETTINGS[name], seed=5)

    state, steps = tmp_path / "state", 0

    def stop(count: int) -> None:
        nonlocal steps
        steps += 1
        if steps > stop_after:  # killed after a step, before it was saved
            raise Stop

    with pytest.raises(Stop):
        train(fresh(), feed, SETTINGS[name], seed=5, state=state, save_every=-1, advance=stop)
    torch.manual_seed(99)  # the present random state has no influence
    resumed = Net()
    seen: list[int] = []
    again = train(resumed, feed, SETTINGS[name], seed=5, state=state, advance=seen.append)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    assert (again.samples, again.loss) == (cost.samples, cost.loss)
    assert sum(seen) == cost.samples == 90


def test_seed_and_settings_matter():
    feed = ImageFeed(make_images(), np.arange(30))
    results = set()
    for seed, change in ((0, {}), (1, {}), (0, {"lr": 0.2}), (0, {"weight_decay": 0.1})):
        model = fresh()
        train(model, feed, SETTINGS["sgd"].model_copy(update=change), seed)
        results.add(model.head.weight.sum().item())
    assert len(results) == 4


def test_the_random_state_of_the_caller_is_restored():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    train(fresh_linear(), toy_feed(), HyperParameters(epochs=1, batch=4), seed=0)
    assert torch.equal(torch.rand(2), expected)
    assert not torch.are_deterministic_algorithms_enabled()


def fresh_linear() -> nn.Linear:
    with torch.random.fork_rng():
        return nn.Linear(2, 2)


def toy_feed() -> DatasetFeed:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(8, 2, generator=generator)
    return DatasetFeed(TensorDataset(data, torch.arange(8) % 2))


def test_divergence_is_an_error():
    settings = HyperParameters(epochs=50, batch=4, lr=1e30)
    with pytest.raises(ValueRangeError, match=r"diverged.*smaller learning rate"):
        train(nn.Linear(2, 2), toy_feed(), settings, seed=0)


def test_sgd_equals_that_of_torch():
    """Compare with a hand-written loop on the same batches."""
    settings = HyperParameters(epochs=2, batch=4, lr=0.3, weight_decay=0.01, label_smoothing=0.2)
    feed, ours = toy_feed(), fresh_linear()
    theirs = nn.Linear(2, 2)
    theirs.load_state_dict(ours.state_dict())
    train(ours, feed, settings, seed=1)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.3, momentum=0.9, weight_decay=0.01)
    loss = nn.CrossEntropyLoss(label_smoothing=0.2)
    for epoch in range(2):
        for picked in batches_of(8, settings, 1, epoch):
            x, y = feed.test_batch(picked)
            optimizer.zero_grad()
            loss(theirs(x), y).backward()
            optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)


@given(size=st.integers(1, 200), batch=st.integers(1, 64), epoch=st.integers(0, 3))
def test_an_epoch_has_each_sample_once(size, batch, epoch):
    settings = HyperParameters(batch=batch)
    batches = batches_of(size, settings, 0, epoch)
    assert len(batches) == steps_of(size, batch)
    assert sorted(np.concatenate(batches)) == list(range(size))
    assert size == 1 or batch == 1 or min(map(len, batches)) > 1  # BatchNorm needs two
    assert max(map(len, batches)) <= batch + 1


@pytest.mark.parametrize("schedule", ["step", "cosine", "constant"])
def test_learning_rates_equal_those_of_torch(schedule):
    settings = HyperParameters(lr=0.5, schedule=schedule, milestones=(0.5, 0.75))
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], 0.5)
    scheduler = {
        "step": lambda: torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 30]),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
    }[schedule]()
    for step in range(40):
        assert settings.rate(step, 40) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def test_warm_up_rises_to_the_rate_and_is_capped():
    settings = HyperParameters(lr=1.0, warmup=500)
    rates = [settings.rate(step, 100) for step in range(100)]  # 500 steps are capped at 10
    assert rates[:10] == pytest.approx([0.1 * k for k in range(1, 11)])
    assert set(rates[10:]) == {1.0}


# ------------------------------------------------------------------------------------- augmentation


def naive_crop(image: np.ndarray, down: int, right: int, mirror: bool, padding: int) -> np.ndarray:
    height, width = image.shape[:2]
    padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    part = padded[padding - down :, padding - right :][:height, :width]
    return part[:, ::-1] if mirror else part


@given(seed=st.integers(0, 2**62), padding=st.integers(0, 5), flip=st.booleans())
def test_each_crop_is_one_of_the_possible_ones(seed, padding, flip):
    images = make_images(4, 8, 3)
    out = crop_and_flip(images.pixels, np.arange(4), seed, padding, flip)
    shifts = range(-padding, padding + 1)
    for image, found in zip(images.pixels, out, strict=True):
        assert any(
            np.array_equal(found, naive_crop(image, down, right, mirror, padding))
            for down in shifts
            for right in shifts
            for mirror in ((False, True) if flip else (False,))
        )


def test_crops_are_uniformly_distributed():
    images = np.zeros((4000, 5, 5, 1), np.uint8)
    images[:, 2, 2] = 1  # one lit pixel shows where each image went
    out = crop_and_flip(images, np.arange(4000), 3, 2, True)
    rows = np.bincount(out.argmax(1)[:, :, 0].max(1), minlength=5)
    assert rows.min() > 700
    assert rows.max() < 900  # 800 each


@pytest.mark.parametrize("channels", [1, 3])
def test_augmentation_depends_on_the_sample_not_on_its_batch(channels):
    images = make_images(6, 16, channels)
    strength = RandAugment(n=2, m=10)

    def augmented(picked: list[int]) -> np.ndarray:
        where = np.array(picked)
        return rand_augment(crop_and_flip(images.pixels, where, 7, 2, True), where, 7, strength)

    together, alone = augmented([0, 1, 2, 3]), augmented([2])
    assert np.array_equal(together[2], alone[0])
    assert not np.array_equal(augmented([0])[0], images.pixels[0])


class Noisy(Dataset):
    """Draws from the generators of Python, numpy and torch."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int):
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]  # noqa: NPY002
        return torch.tensor(drawn), index


def test_random_transforms_of_a_dataset_are_seeded_by_the_sample():
    feed, picked = DatasetFeed(Noisy()), np.array([4, 1])
    before = random.getstate()
    one, _ = feed.test_batch(picked)
    assert random.getstate() == before
    two, _ = feed.test_batch(picked[::-1].copy())
    assert torch.equal(one, two.flip(0))
    assert len(set(one.flatten().tolist())) == 6
    assert not torch.equal(one, feed.train_batch(picked, 3, Augmentation())[0])


@given(parts=st.integers(2, 9), size=st.integers(5, 20), named=st.booleans())
def test_accumulated_parts_give_the_step_of_the_whole_batch(parts: int, size: int, named: bool):
    draw = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 6, generator=draw, dtype=torch.float64)
    labels = torch.arange(size) % 3
    rows = [{"input": x, "label": int(k)} for x, k in zip(inputs, labels, strict=True)]
    feed = DatasetFeed(rows if named else TensorDataset(inputs, labels))
    settings = HyperParameters(epochs=2, batch=7, lr=0.05, optimizer="adamw", clip=0.5)
    trained = {}
    for accumulate in (1, parts):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).double()
        changed = settings.model_copy(update={"accumulate": accumulate})
        done = train(model, feed, changed, seed=0)
        trained[accumulate] = (model.weight.detach(), done.loss, done.samples)
    whole, cut = trained[1], trained[parts]
    torch.testing.assert_close(cut[0], whole[0], rtol=1e-5, atol=1e-7)
    assert cut[1] == pytest.approx(whole[1], rel=1e-5)
    assert cut[2] == whole[2]


class Recorded(DatasetFeed):
    """Notes the samples of every step."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.steps: list[np.ndarray] = []

    def train_batch(self, picked, seed, augment):
        self.steps.append(picked)
        return super().train_batch(picked, seed, augment)


@pytest.mark.parametrize(("size", "batch", "parts"), [(256, 128, 2), (205, 128, 2), (11, 4, 3)])
def test_a_training_equals_a_plain_loop(size: int, batch: int, parts: int):
    """Whole batches, also a smaller last one; rate, clipping and decay of each step written out."""
    draw = torch.Generator().manual_seed(size)
    inputs = torch.randn(size, 6, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, 4, (size,), generator=draw)
    feed = Recorded(TensorDataset(inputs, labels))
    torch.manual_seed(1)
    ours = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    theirs = copy.deepcopy(ours)
    settings = HyperParameters(
        epochs=4, batch=batch, accumulate=parts, lr=0.01, optimizer="adamw", weight_decay=0.1,
        schedule="cosine", warmup=3, clip=0.05, label_smoothing=0.1,
    )  # fmt: skip
    train(ours, feed, settings, seed=4)
    weights, total = list(theirs.parameters()), len(feed.steps)
    means, squares = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for step, picked in enumerate(feed.steps):
        warming, share = (step + 1) / 3, (step - 3) / (total - 3)
        rate = 0.01 * (warming if step < 3 else (1 + math.cos(math.pi * share)) / 2)
        logs = theirs(inputs[picked]).log_softmax(1)
        right = logs[torch.arange(len(picked)), labels[picked]]
        gradients = torch.autograd.grad(-(0.9 * right + 0.1 * logs.mean(1)).mean(), weights)
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
        assert norm > 0.05, "every step is clipped"
        for weight, g, mean, square in zip(weights, gradients, means, squares, strict=True):
            g = g * 0.05 / norm
            mean.mul_(0.9).add_(0.1 * g)
            square.mul_(0.999).add_(0.001 * g * g)
            change = mean / (1 - 0.9 ** (step + 1))
            change /= (square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            weight.data.mul_(1 - 0.1 * rate).sub_(rate * change)
    assert total == 4 * math.ceil(size / batch)
    for one, two in zip(ours.parameters(), weights, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-6)  # the loss is float32


@pytest.mark.parametrize("size", [2, 3, 9, 10, 11, 12])
def test_parts_of_the_last_batch_are_large_enough_for_batch_norm(size: int):
    """The parts of a full batch have two samples; BatchNorm refuses a single one."""
    feed = DatasetFeed(TensorDataset(torch.randn(size, 4), torch.arange(size) % 2))
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    done = train(model, feed, HyperParameters(epochs=1, batch=8, accumulate=4), seed=0)
    assert done.samples == size


def test_an_accumulated_training_resumes_bit_for_bit(tmp_path):
    settings = SETTINGS["adamw"].model_copy(update={"accumulate": 3})
    feed = ImageFeed(make_images(), np.arange(30))
    whole = fresh()
    train(whole, feed, settings, seed=1)
    counted = 0

    def stop(count: int) -> None:
        nonlocal counted
        counted += count
        if counted > 40:
            raise Stop

    state = tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        train(fresh(), feed, settings, seed=1, state=state, save_every=0, advance=stop)
    again = fresh()
    train(again, feed, settings, seed=1, state=state)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_a_field_that_is_not_used_changes_no_id():
    assert "accumulate" not in HyperParameters().model_dump()
    assert HyperParameters(accumulate=2).model_dump()["accumulate"] == 2
