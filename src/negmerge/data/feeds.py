"""Feeds: what the training loop and the evaluation take their batches from.

A feed knows its samples, cuts an epoch into steps and fetches a step's batch; all of it follows
from (seed, epoch), so that a training can stop and go on anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from negmerge.data.draws import seed_of
from negmerge.data.samples import Inputs, collate, joined_inputs, read_sample, size_of, tensors_of
from negmerge.data.transforms import (
    as_input,
    crop_and_flip,
    own_random_state,
    rand_augment,
    seed_torch,
    zoom,
)
from negmerge.hyperparameters import Augmentation, HyperParameters

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from negmerge.data.datasets import Images

Indices = NDArray[np.int64]
Batch = tuple[Inputs, Tensor]
"""Inputs and classes."""


class Feed(Protocol):
    """A source of batches."""

    def __len__(self) -> int: ...
    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch: ...
    def test_batch(self, picked: Indices) -> Batch: ...


class ImageFeed:
    """Some images of a data set, augmented in training, as they are in evaluation.

    images: the whole set. indices: the ones this feed has, in the order of evaluation.
    crop, flip: the data set's own augmentation, unless the hyper-parameters say otherwise.
    least: the smallest share of the area that a random resized crop keeps; 1: there is none.
    """

    def __init__(
        self,
        images: Images,
        indices: Indices,
        crop: int = 0,
        flip: bool = False,
        least: float = 1.0,
    ) -> None:
        self.images, self.indices = images, np.asarray(indices, np.int64)
        self.crop, self.flip, self.least = crop, flip, least

    def __len__(self) -> int:
        return len(self.indices)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        chosen = self.indices[picked]
        padding = self.crop if augment.crop is None else augment.crop
        flip = self.flip if augment.flip is None else augment.flip
        batch = crop_and_flip(self.images.pixels, chosen, seed, padding, flip)
        if self.least < 1:
            batch = zoom(batch, chosen, seed, self.least)
        if augment.randaugment is not None:
            batch = rand_augment(batch, chosen, seed, augment.randaugment)
        return as_input(batch), torch.from_numpy(self.images.labels[chosen])

    def test_batch(self, picked: Indices) -> Batch:
        chosen = self.indices[picked]
        return as_input(self.images.pixels[chosen]), torch.from_numpy(self.images.labels[chosen])


class Remembered:
    """A feed that fetches every test batch once and keeps it, for passes over the same samples.

    >>> from torch.utils.data import TensorDataset
    >>> feed = Remembered(DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.arange(4))))
    >>> feed.test_batch(np.array([1, 3]))[0] is feed.test_batch(np.array([1, 3]))[0]
    True

    room: bytes that may be kept; a feed that needs more keeps none.
    """

    def __init__(self, feed: Feed, room: int = 256 << 20) -> None:
        self.feed, self.room = feed, room
        self.kept: dict[bytes, Batch] = {}

    def __len__(self) -> int:
        return len(self.feed)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self.feed.train_batch(picked, seed, augment)

    def test_batch(self, picked: Indices) -> Batch:
        key = picked.tobytes()
        if key in self.kept:
            return self.kept[key]
        batch = self.feed.test_batch(picked)
        nbytes = sum(tensor.nbytes for tensor in tensors_of(batch[0]))
        if nbytes // len(picked) * len(self.feed) <= self.room:
            self.kept[key] = batch
        return batch


class DatasetFeed:
    """Any map-style torch Dataset of a classifier's samples; `samples` says what those are.

    Transforms of the Dataset are seeded by the sample.

    >>> from torch.utils.data import TensorDataset
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.arange(4)))
    >>> feed.test_batch(np.array([1, 3]))[1].tolist()
    [1, 3]

    indices: the samples this feed has, if not all. where: what an error begins with.
    """

    def __init__(
        self, dataset: Dataset[Any], indices: Indices | None = None, where: str = "the data set"
    ) -> None:
        self.dataset, self.where = dataset, where
        if indices is None:
            indices = np.arange(size_of(dataset, where))
        self.indices = np.asarray(indices, np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self._batch(picked, seed)

    def test_batch(self, picked: Indices) -> Batch:
        return self._batch(picked, 0)

    def _batch(self, picked: Indices, seed: int) -> Batch:
        samples: list[tuple[Any, int]] = []
        python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            with own_random_state():
                for index in map(int, self.indices[picked]):
                    own = seed_of(seed, index)
                    seed_torch(own)
                    random.seed(own)
                    np.random.seed(own % 2**32)  # noqa: NPY002 (transforms draw from it)
                    samples.append(read_sample(self.dataset, index, self.where))
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
        inputs, labels = zip(*samples, strict=True)
        return collate(inputs, self.where), torch.tensor(labels)


class Relabelled:
    """A feed whose samples are trained on with other labels.

    >>> from torch.utils.data import TensorDataset
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.arange(4)))
    >>> always_7 = Relabelled(feed, lambda batch, picked, seed: torch.full_like(batch[1], 7))
    >>> always_7.train_batch(np.array([1, 3]), 0, Augmentation())[1].tolist()
    [7, 7]

    label: from a batch, the samples in it and the seed of the epoch to their labels.
    """

    def __init__(self, feed: Feed, label: Callable[[Batch, Indices, int], Tensor]) -> None:
        self.feed, self.label = feed, label

    def __len__(self) -> int:
        return len(self.feed)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        batch = self.feed.train_batch(picked, seed, augment)
        return batch[0], self.label(batch, picked, seed)

    def test_batch(self, picked: Indices) -> Batch:
        return self.feed.test_batch(picked)


class Joined:
    """Several feeds as one, numbered on from one to the next.

    >>> from torch.utils.data import TensorDataset
    >>> feeds = [DatasetFeed(TensorDataset(torch.zeros(n, 2), torch.arange(n))) for n in (4, 3)]
    >>> Joined(feeds).test_batch(np.array([1, 6]))[1].tolist()
    [1, 2]

    mixed: False: an epoch passes over each feed in turn; True: over all samples shuffled together.
    """

    def __init__(self, feeds: Sequence[Feed], mixed: bool = False) -> None:
        self.feeds, self.mixed = feeds, mixed

    def __len__(self) -> int:
        return sum(map(len, self.feeds))

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self._gather(picked, lambda feed, own: feed.train_batch(own, seed, augment))

    def test_batch(self, picked: Indices) -> Batch:
        return self._gather(picked, lambda feed, own: feed.test_batch(own))

    def _gather(self, picked: Indices, fetch: Callable[[Feed, Indices], Batch]) -> Batch:
        batches: list[Batch] = []
        start = 0
        for feed in self.feeds:
            own = picked[(start <= picked) & (picked < start + len(feed))] - start
            start += len(feed)
            if len(own):
                batches.append(fetch(feed, own))
        inputs, labels = zip(*batches, strict=True)
        return joined_inputs(inputs), torch.cat(labels)


def passes_of(feed: Feed) -> list[int]:
    """How many samples each pass of an epoch has: one pass, or one for each feed in turn."""
    if isinstance(feed, Joined) and not feed.mixed:
        return [size for part in feed.feeds for size in passes_of(part)]
    return [len(feed)]


def epoch_of(feed: Feed, settings: HyperParameters, seed: int, epoch: int) -> list[Indices]:
    """The samples of each step of an epoch, one pass after the other.

    >>> from torch.utils.data import TensorDataset
    >>> feeds = [DatasetFeed(TensorDataset(torch.zeros(n, 2), torch.arange(n))) for n in (4, 3)]
    >>> [sorted(b.tolist()) for b in epoch_of(Joined(feeds), HyperParameters(batch=4), 0, 0)]
    [[0, 1, 2, 3], [4, 5, 6]]
    """
    batches: list[Indices] = []
    start = 0
    for size in passes_of(feed):
        batches += [start + picked for picked in batches_of(size, settings, seed, epoch)]
        start += size
    return batches


def steps_of(size: int, batch: int) -> int:
    """The number of batches of an epoch; a rest of one sample joins the batch before it.

    BatchNorm cannot train on a single sample.

    >>> steps_of(10, 4), steps_of(9, 4), steps_of(1, 4)
    (3, 2, 1)
    """
    full, rest = divmod(size, batch)
    return max(full + (rest > 1 or (rest == 1 and batch == 1)), 1)


def batches_of(size: int, settings: HyperParameters, seed: int, epoch: int) -> list[Indices]:
    """The samples of each step of an epoch, shuffled by (seed, epoch).

    >>> [len(b) for b in batches_of(9, HyperParameters(batch=4), seed=0, epoch=0)]
    [4, 5]
    """
    order = np.random.default_rng(seed_of("order", seed, epoch)).permutation(size)
    steps = steps_of(size, settings.batch)
    cuts = [settings.batch * step for step in range(1, steps)]
    return np.split(order.astype(np.int64), cuts)
