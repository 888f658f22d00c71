"""Feeds: what the training loop and the evaluation take their batches from.

A feed knows its samples, cuts an epoch into steps and fetches a step's batch; all of it follows
from (seed, epoch), so that a training can stop and go on anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from negmerge.data.draws import seed_of
from negmerge.data.transforms import (
    as_input,
    crop_and_flip,
    own_random_state,
    rand_augment,
    seed_torch,
)
from negmerge.hyperparameters import Augmentation, HyperParameters

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from negmerge.data.datasets import Images

Indices = NDArray[np.int64]
Batch = tuple[Tensor, Tensor]


class Feed(Protocol):
    """A source of batches."""

    def __len__(self) -> int: ...
    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch: ...
    def test_batch(self, picked: Indices) -> Batch: ...


class ImageFeed:
    """Some images of a data set, augmented in training, as they are in evaluation.

    images: the whole set. indices: the ones this feed has, in the order of evaluation.
    crop, flip: the data set's own augmentation, unless the hyper-parameters say otherwise.
    """

    def __init__(self, images: Images, indices: Indices, crop: int = 0, flip: bool = False) -> None:
        self.images, self.indices = images, np.asarray(indices, np.int64)
        self.crop, self.flip = crop, flip

    def __len__(self) -> int:
        return len(self.indices)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        chosen = self.indices[picked]
        padding = self.crop if augment.crop is None else augment.crop
        flip = self.flip if augment.flip is None else augment.flip
        batch = crop_and_flip(self.images.pixels, chosen, seed, padding, flip)
        if augment.randaugment is not None:
            batch = rand_augment(batch, chosen, seed, augment.randaugment)
        return as_input(batch), torch.from_numpy(self.images.labels[chosen])

    def test_batch(self, picked: Indices) -> Batch:
        chosen = self.indices[picked]
        return as_input(self.images.pixels[chosen]), torch.from_numpy(self.images.labels[chosen])


class DatasetFeed:
    """Any map-style torch Dataset of (input, label); its own transforms are seeded by the sample.

    >>> from torch.utils.data import TensorDataset
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.arange(4)))
    >>> feed.test_batch(np.array([1, 3]))[1].tolist()
    [1, 3]
    """

    def __init__(self, dataset: Dataset[Any], indices: Indices | None = None) -> None:
        self.dataset = dataset
        size = len(dataset)  # pyright: ignore[reportArgumentType]
        self.indices = np.arange(size) if indices is None else np.asarray(indices, np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self._collate([self._item(i, seed) for i in self.indices[picked]])

    def test_batch(self, picked: Indices) -> Batch:
        return self._collate([self._item(i, 0) for i in self.indices[picked]])

    def _item(self, index: int, seed: int) -> Any:
        with own_random_state():
            seed_torch(seed_of(seed, int(index)))
            return self.dataset[int(index)]

    @staticmethod
    def _collate(items: Sequence[Any]) -> Batch:
        inputs = torch.stack([torch.as_tensor(item[0]) for item in items])
        return inputs, torch.tensor([int(item[1]) for item in items])


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
