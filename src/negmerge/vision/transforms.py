"""Augmentation of images, and their conversion to inputs; random numbers follow from the sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from negmerge.training.hyperparameters import RandAugment
from negmerge.training.seeds import draws, fork_random_state, seed_torch

Pixels = NDArray[np.uint8]


def crop_and_flip(
    pixels: Pixels, picked: NDArray[Any], seed: int, padding: int, flip: bool
) -> Pixels:
    """Return copies of images, each shifted at random over a zero border and mirrored at random.

    >>> images = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4, 1)
    >>> crop_and_flip(images, np.array([1]), 0, 0, False)[0, 0, :, 0].tolist()
    [16, 17, 18, 19]

    Args:
        pixels: all images, (n, height, width, channels).
        picked: positions of the wanted images.
        seed: of the epoch.
        padding: the largest shift.
        flip: whether to mirror half of the images.
    """
    if not (padding or flip):
        return pixels[picked]
    out = np.zeros((len(picked), *pixels.shape[1:]), np.uint8)
    height, width = pixels.shape[1:3]
    chance = draws(seed, picked, 3)
    shifts = (chance[:, :2] % np.uint64(2 * padding + 1)).astype(np.int64) - padding
    mirrored = (chance[:, 2] & np.uint64(1)).astype(bool) & flip
    for k, (image, (down, right)) in enumerate(zip(picked, shifts, strict=True)):
        top, left = max(down, 0), max(right, 0)
        bottom, end = height + min(down, 0), width + min(right, 0)
        part = pixels[image, top - down : bottom - down, left - right : end - right]
        if mirrored[k]:
            out[k, top:bottom, width - end : width - left] = part[:, ::-1]
        else:
            out[k, top:bottom, left:end] = part
    return out


def rand_augment(batch: Pixels, picked: NDArray[Any], seed: int, strength: RandAugment) -> Pixels:
    """Apply torchvision's RandAugment to each image.

    >>> images = np.full((1, 8, 8, 3), 100, np.uint8)
    >>> rand_augment(images, np.array([4]), 0, RandAugment(n=2, m=9)).shape
    (1, 8, 8, 3)

    Args:
        picked: their positions in the data set.
        seed: of the epoch.
    """
    from PIL import Image
    from torchvision.transforms.v2 import RandAugment as Operation

    out, transform = np.empty_like(batch), Operation(strength.n, strength.m)
    seeds = draws(seed, picked, 1)[:, 0] >> np.uint64(1)
    with fork_random_state():
        for image, target, own in zip(batch, out, seeds, strict=True):
            seed_torch(int(own))
            picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
            target[:] = np.asarray(transform(picture)).reshape(image.shape)
    return out


def to_floats(pixels: Tensor) -> Tensor:
    """Return bytes as floats in [0, 1], channels first in the shape and last in memory.

    >>> to_floats(torch.full((1, 2, 2, 1), 51, dtype=torch.uint8)).max().item()
    0.20000000298023224

    Args:
        pixels: (n, height, width, channels), on any device.
    """
    # A GPU multiplies by 1 / 255 if 255 is a number; a tensor gives the bits of a division.
    most = torch.full((), 255.0, device=pixels.device)
    return pixels.permute(0, 3, 1, 2).to(torch.float32).div_(most)
