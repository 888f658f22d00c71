"""Feeds: sources of batches for training and evaluation.

The batches of an epoch and the random numbers of its samples follow from (seed, epoch), so that a
training can stop and resume at any step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from negmerge.training.hyperparameters import Augmentation, HyperParameters
from negmerge.training.samples import (
    Inputs,
    collate,
    dataset_size,
    joined_inputs,
    read_sample,
    tensors_of,
)
from negmerge.training.seeds import draws, fork_all_random_states, seed_all, seed_of

Indices = NDArray[np.int64]
TrainingSet = Literal["train", "retain", "forget"]
"""The sets on which a model can be trained; `train` is retain ∪ forget."""
MAX_KEPT = 256 << 20
Batch = tuple[Inputs, Tensor]
"""Inputs and labels."""


class Feed(Protocol):
    """A source of batches; `picked` are positions of samples, `seed` is the seed of an epoch."""

    def __len__(self) -> int: ...
    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch: ...
    def test_batch(self, picked: Indices) -> Batch: ...


class _Wrapper:
    """A feed that passes on the batches of another feed."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __len__(self) -> int:
        return len(self.feed)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self.feed.train_batch(picked, seed, augment)

    def test_batch(self, picked: Indices) -> Batch:
        return self.feed.test_batch(picked)


class CachedFeed(_Wrapper):
    """A feed that keeps the test batches of another feed in memory.

    >>> from torch.utils.data import TensorDataset
    >>> feed = CachedFeed(DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.arange(4))))
    >>> feed.test_batch(np.array([1, 3]))[0] is feed.test_batch(np.array([1, 3]))[0]
    True

    A feed with more than `MAX_KEPT` bytes of inputs is not kept at all.
    """

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        self.kept: dict[bytes, Batch] = {}

    def test_batch(self, picked: Indices) -> Batch:
        key = picked.tobytes()
        if key in self.kept:
            return self.kept[key]
        batch = self.feed.test_batch(picked)
        nbytes = sum(tensor.nbytes for tensor in tensors_of(batch[0]))
        if nbytes // len(picked) * len(self.feed) <= MAX_KEPT:
            self.kept[key] = batch
        return batch


class PickedFeed(_Wrapper):
    """The test batches of some samples of another feed.

    >>> from torch.utils.data import TensorDataset
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.arange(4)))
    >>> PickedFeed(feed, np.array([1, 3])).test_batch(np.array([1]))[1].tolist()
    [3]
    """

    def __init__(self, feed: Feed, where: Indices) -> None:
        super().__init__(feed)
        self.where = where

    def __len__(self) -> int:
        return len(self.where)

    def test_batch(self, picked: Indices) -> Batch:
        return self.feed.test_batch(self.where[picked])


def spaced(size: int, most: int) -> Indices:
    """Return at most so many evenly spaced positions.

    >>> spaced(100, 4).tolist(), spaced(2, 4).tolist(), spaced(0, 4).tolist()
    ([0, 33, 66, 99], [0, 1], [])
    """
    return np.unique(np.linspace(0, size - 1, min(most, size)).astype(np.int64))


class DatasetFeed:
    """A feed of a map-style torch Dataset with samples as described in `samples`.

    Random transforms of the Dataset get a seed for each sample.

    >>> from torch.utils.data import TensorDataset
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.arange(4)))
    >>> feed.test_batch(np.array([1, 3]))[1].tolist()
    [1, 3]

    Args:
        indices: positions of the samples of this feed; None: all.
        where: the beginning of an error message.
    """

    def __init__(
        self, dataset: Dataset[Any], indices: Indices | None = None, where: str = "the data set"
    ) -> None:
        self.dataset, self.where = dataset, where
        if indices is None:
            indices = np.arange(dataset_size(dataset, where))
        self.indices = np.asarray(indices, np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self._batch(picked, seed)

    def test_batch(self, picked: Indices) -> Batch:
        return self._batch(picked, 0)

    def _batch(self, picked: Indices, seed: int) -> Batch:
        samples: list[tuple[Any, int]] = []
        with fork_all_random_states():
            for index in map(int, self.indices[picked]):
                seed_all(seed_of(seed, index))
                samples.append(read_sample(self.dataset, index, self.where))
        inputs, labels = zip(*samples, strict=True)
        return collate(inputs, self.where), torch.tensor(labels)


class RelabelledFeed(_Wrapper):
    """A feed with other labels for training.

    >>> from torch.utils.data import TensorDataset
    >>> feed = DatasetFeed(TensorDataset(torch.zeros(4, 2), torch.arange(4)))
    >>> always_7 = RelabelledFeed(feed, lambda batch, picked, seed: torch.full_like(batch[1], 7))
    >>> always_7.train_batch(np.array([1, 3]), 0, Augmentation())[1].tolist()
    [7, 7]

    Args:
        label: returns the labels for a batch, the positions of its samples and the seed of the
            epoch.
    """

    def __init__(self, feed: Feed, label: Callable[[Batch, Indices, int], Tensor]) -> None:
        super().__init__(feed)
        self.label = label

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        batch = self.feed.train_batch(picked, seed, augment)
        return batch[0], self.label(batch, picked, seed)


class JoinedFeed:
    """The concatenation of several feeds.

    >>> from torch.utils.data import TensorDataset
    >>> feeds = [DatasetFeed(TensorDataset(torch.zeros(n, 2), torch.arange(n))) for n in (4, 3)]
    >>> JoinedFeed(feeds).test_batch(np.array([1, 6]))[1].tolist()
    [1, 2]

    Args:
        mixed: True: an epoch shuffles all samples together; False: it has one pass for each feed.
    """

    def __init__(self, feeds: Sequence[Feed], mixed: bool = False) -> None:
        self.feeds, self.mixed = feeds, mixed

    def __len__(self) -> int:
        return sum(map(len, self.feeds))

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self._gather(picked, lambda feed, inner: feed.train_batch(inner, seed, augment))

    def test_batch(self, picked: Indices) -> Batch:
        return self._gather(picked, lambda feed, inner: feed.test_batch(inner))

    def _gather(self, picked: Indices, fetch: Callable[[Feed, Indices], Batch]) -> Batch:
        batches: list[Batch] = []
        start = 0
        for feed in self.feeds:
            inner = picked[(start <= picked) & (picked < start + len(feed))] - start
            start += len(feed)
            if len(inner):
                batches.append(fetch(feed, inner))
        inputs, labels = zip(*batches, strict=True)
        return joined_inputs(inputs), torch.cat(labels)


class PairedFeed:
    """The samples of a feed, each with a random sample of another feed, drawn in each epoch.

    The inputs of a batch are a pair: the inputs of the first feed, and a batch of the second one.

    >>> from torch.utils.data import TensorDataset
    >>> feeds = [DatasetFeed(TensorDataset(torch.zeros(n, 2), torch.arange(n))) for n in (4, 3)]
    >>> (_, (_, others)), labels = PairedFeed(*feeds).train_batch(np.arange(4), 0, Augmentation())
    >>> labels.tolist(), len(others)
    ([0, 1, 2, 3], 4)
    """

    each = 2
    """The number of samples at each position."""

    def __init__(self, feed: Feed, others: Feed) -> None:
        self.feed, self.others = feed, others
        self.lengths = getattr(feed, "lengths", None)

    def __len__(self) -> int:
        return len(self.feed)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Any:
        drawn = draws(seed_of("pairs", seed), picked, 1)[:, 0] % np.uint64(len(self.others))
        inputs, labels = self.feed.train_batch(picked, seed, augment)
        return (inputs, self.others.train_batch(drawn.astype(np.int64), seed, augment)), labels

    def test_batch(self, picked: Indices) -> Batch:
        return self.feed.test_batch(picked)


def passes_of(feed: Feed) -> list[int]:
    """Return the number of samples of each pass of an epoch."""
    if isinstance(feed, JoinedFeed) and not feed.mixed:
        return [size for part in feed.feeds for size in passes_of(part)]
    return [len(feed)]


def epoch_of(feed: Feed, settings: HyperParameters, seed: int, epoch: int) -> list[Indices]:
    """Return the positions of the samples of each step of an epoch, one pass after the other.

    >>> from torch.utils.data import TensorDataset
    >>> feeds = [DatasetFeed(TensorDataset(torch.zeros(n, 2), torch.arange(n))) for n in (4, 3)]
    >>> [sorted(b.tolist()) for b in epoch_of(JoinedFeed(feeds), HyperParameters(batch=4), 0, 0)]
    [[0, 1, 2, 3], [4, 5, 6]]
    """
    batches: list[Indices] = []
    start = 0
    for size in passes_of(feed):
        own = batches_of(size, settings, seed, epoch)
        if (lengths := getattr(feed, "lengths", None)) is not None:
            own = of_similar_length(own, lengths)
        batches += [start + picked for picked in own]
        start += size
    return batches


def steps_of(size: int, batch: int) -> int:
    """Return the number of batches of a pass.

    If one sample remains, it joins the last batch: BatchNorm cannot train on a single sample.

    >>> steps_of(10, 4), steps_of(9, 4), steps_of(1, 4)
    (3, 2, 1)
    """
    full, rest = divmod(size, batch)
    return max(full + (rest > 1 or (rest == 1 and batch == 1)), 1)


def batches_of(size: int, settings: HyperParameters, seed: int, epoch: int) -> list[Indices]:
    """Return the positions of the samples of each step of a pass, shuffled by (seed, epoch).

    >>> [len(b) for b in batches_of(9, HyperParameters(batch=4), seed=0, epoch=0)]
    [4, 5]
    """
    order = np.random.default_rng(seed_of("order", seed, epoch)).permutation(size)
    steps = steps_of(size, settings.batch)
    cuts = [settings.batch * step for step in range(1, steps)]
    return np.split(order.astype(np.int64), cuts)


NEIGHBOURS = 16
"""The number of batches whose samples are sorted by length."""


def of_similar_length(batches: list[Indices], lengths: NDArray[Any]) -> list[Indices]:
    """Exchange samples between some batches in a row, so that a batch needs little padding.

    >>> batches = [np.array([0, 1]), np.array([2, 3])]
    >>> [b.tolist() for b in of_similar_length(batches, np.array([9, 2, 8, 3]))]
    [[1, 3], [2, 0]]
    """
    found: list[Indices] = []
    for first in range(0, len(batches), NEIGHBOURS):
        some = batches[first : first + NEIGHBOURS]
        samples = np.concatenate(some)
        samples = samples[np.argsort(lengths[samples], kind="stable")]
        sorted_batches = np.split(samples, np.cumsum([len(batch) for batch in some])[:-1])
        # The order of the batches follows their first samples, which is random.
        order = np.argsort([batch[0] for batch in some], kind="stable")
        found += [sorted_batches[i] for i in order]
    return found
