"""A feed of original pictures, decoded and augmented whole, in this process or in workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from negmerge.errors import FileError, one_line
from negmerge.training.feeds import Batch, Indices
from negmerge.training.hyperparameters import Augmentation
from negmerge.training.samples import only_tensor
from negmerge.training.seeds import fork_all_random_states, seed_all, seed_of
from negmerge.vision.augment import Library, make_transform
from negmerge.vision.datasets import Source
from negmerge.vision.decode import decode, open_image
from negmerge.vision.originals import Originals
from negmerge.vision.transforms import to_floats

MAX_KEPT = 256 << 20
"""The largest size, in bytes, of decoded pictures that a process keeps in memory."""
SMALL = 64
"""Up to this height and width, augmentation is faster than passing pictures between processes."""


class OriginalFeed:
    """A feed of some pictures of a data set, augmented from their whole originals.

    The random numbers of a picture follow from the seed of the epoch and its position in the data
    set. They are the same in every process.

    Args:
        indices: positions of the pictures of this feed.
        source: the size, the mean and the resizing of the data set.
    """

    def __init__(
        self,
        originals: Originals,
        indices: Indices,
        source: Source,
        library: Library = "timm",
        grey: bool = False,
    ) -> None:
        self.originals, self.indices = originals, np.asarray(indices, np.int64)
        self.source, self.grey = source, grey
        self.library: Library = library
        pixels = originals.sizes[self.indices].prod(axis=1).sum()
        self.kept: dict[int, Any] | None = {} if 4 * pixels <= MAX_KEPT else None
        """Decoded pictures by position; None if they would need too much memory."""

    def __getstate__(self) -> dict[str, Any]:
        # A worker sees each picture too rarely to keep it.
        return self.__dict__ | {"kept": None}

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def in_workers(self) -> bool:
        """Whether the training loop is to get the batches from worker processes."""
        return self.source.size > SMALL or self.kept is None

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        return self.finish(self.prepare(picked, seed, augment))

    def prepare(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        """Decode and augment; the pixels are bytes, (n, height, width, channels)."""
        size, chosen = self.source.size, self.indices[picked]
        options = (self.library, augment, size, self.source.mean, self.grey)
        transform = make_transform(*options)  # pyright: ignore[reportArgumentType] (frozen models)
        pixels = np.empty((len(picked), size, size, 3), np.uint8)
        with fork_all_random_states():
            for target, position in zip(pixels, map(int, chosen), strict=True):
                image = self._image(position)
                seed_all(seed_of(seed, position))
                try:
                    target[:] = np.asarray(transform(image))
                except Exception as error:
                    name = self.originals.names[position]
                    raise FileError(f"{name}: cannot be augmented: {one_line(error)}") from error
        return torch.from_numpy(pixels), torch.from_numpy(self.originals.labels[chosen])

    def finish(self, batch: Batch) -> Batch:
        """Turn the bytes of a prepared batch into floats, on the device that it is on."""
        return to_floats(only_tensor(batch[0], "a feed of pictures")), batch[1]

    def test_batch(self, picked: Indices) -> Batch:
        chosen, source = self.indices[picked], self.source
        options = (source.size, 3, source.fit, source.interpolation)
        pixels = [decode(self.originals.picture(int(k)), *options) for k in chosen]
        batch = torch.from_numpy(np.stack(pixels))
        return to_floats(batch), torch.from_numpy(self.originals.labels[chosen])

    def _image(self, position: int) -> Any:
        if self.kept is None:
            return open_image(self.originals.picture(position))
        if position not in self.kept:
            self.kept[position] = open_image(self.originals.picture(position))
        return self.kept[position]
