"""A feed of images, augmented for training and unchanged for evaluation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from negmerge.training.feeds import Batch, Indices
from negmerge.training.hyperparameters import Augmentation
from negmerge.vision.datasets import Images
from negmerge.vision.transforms import crop_and_flip, rand_augment, to_floats


class ImageFeed:
    """A feed of some images of a data set.

    Args:
        indices: positions of the images of this feed, in the order of evaluation.
        crop, flip: the augmentation, for hyper-parameters that leave it None.
    """

    def __init__(self, images: Images, indices: Indices, crop: int = 0, flip: bool = False) -> None:
        self.images, self.indices = images, np.asarray(indices, np.int64)
        self.crop, self.flip = crop, flip

    def __len__(self) -> int:
        return len(self.indices)

    def train_batch(self, picked: Indices, seed: int, augment: Augmentation) -> Batch:
        pixels, chosen = self.images.pixels, self.indices[picked]
        padding = self.crop if augment.crop is None else augment.crop
        flip = self.flip if augment.flip is None else augment.flip
        batch = crop_and_flip(pixels, chosen, seed, padding, flip)
        if augment.randaugment is not None:
            batch = rand_augment(batch, chosen, seed, augment.randaugment)
        return self._batch(batch, chosen)

    def test_batch(self, picked: Indices) -> Batch:
        chosen = self.indices[picked]
        return self._batch(self.images.pixels[chosen], chosen)

    def _batch(self, pixels: NDArray[np.uint8], chosen: Indices) -> Batch:
        labels = torch.from_numpy(self.images.labels[chosen])
        return to_floats(torch.from_numpy(pixels)), labels
