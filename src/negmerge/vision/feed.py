"""A feed of images, augmented for training and unchanged for evaluation."""

from __future__ import annotations

import numpy as np
import torch

from negmerge.training.feeds import Batch, Indices
from negmerge.training.hyperparameters import Augmentation
from negmerge.vision.datasets import Images
from negmerge.vision.transforms import as_input, crop_and_flip, rand_augment


class ImageFeed:
    """A feed of some images of a data set.

    Args:
        images: all images of the data set.
        indices: positions of the images of this feed, in the order of evaluation.
        crop, flip: the augmentation, for hyper-parameters that leave it None.
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
