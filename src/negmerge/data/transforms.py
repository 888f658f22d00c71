"""From stored pixels to a batch: crop, flip and RandAugment, seeded by (seed, epoch, sample)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from negmerge.data.draws import draws
from negmerge.hyperparameters import RandAugment

Pixels = NDArray[np.uint8]


def seed_torch(seed: int) -> None:
    """Seed torch's generators; `torch.manual_seed` takes a millisecond while no GPU is in use,
    because it notes the call, with its traceback, for when one will be.

    >>> with torch.random.fork_rng(devices=[]):
    ...     seed_torch(3); one = torch.rand(2)
    ...     _ = torch.manual_seed(3); torch.equal(one, torch.rand(2))
    True
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def own_random_state() -> AbstractContextManager[None]:
    """A block whose random numbers leave no trace in torch's generators of the devices in use."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices)


def crop_and_flip(
    pixels: Pixels, picked: NDArray[Any], seed: int, padding: int, flip: bool
) -> Pixels:
    """Copy the picked images, each shifted within a zero border and mirrored at random.

    >>> images = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4, 1)
    >>> crop_and_flip(images, np.array([1]), 0, 0, False)[0, 0, :, 0].tolist()
    [16, 17, 18, 19]

    pixels: all images (n, height, width, channels). picked: the ones wanted. padding: of the crop.
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


def zoom(batch: Pixels, picked: NDArray[Any], seed: int, least: float) -> Pixels:
    """torchvision's random resized crop of each image, bicubic, as open_clip trains.

    >>> images = np.full((1, 8, 8, 3), 100, np.uint8)
    >>> zoom(images, np.array([4]), 0, 0.9).shape
    (1, 8, 8, 3)

    least: the smallest share of the area that is kept.
    """
    from PIL import Image
    from torchvision.transforms.v2 import InterpolationMode, RandomResizedCrop

    crop = RandomResizedCrop(
        batch.shape[1:3], scale=(least, 1.0), interpolation=InterpolationMode.BICUBIC
    )
    seeds = draws(seed, picked, 2)[:, 1] >> np.uint64(1)
    out = np.empty_like(batch)
    with own_random_state():
        for image, target, own in zip(batch, out, seeds, strict=True):
            seed_torch(int(own))
            target[:] = np.asarray(crop(Image.fromarray(image)))
    return out


def rand_augment(batch: Pixels, picked: NDArray[Any], seed: int, strength: RandAugment) -> Pixels:
    """torchvision's RandAugment on each image, as PIL, after crop and flip.

    >>> images = np.full((1, 8, 8, 3), 100, np.uint8)
    >>> rand_augment(images, np.array([4]), 0, RandAugment(n=2, m=9)).shape
    (1, 8, 8, 3)
    """
    from PIL import Image
    from torchvision.transforms.v2 import RandAugment as Operation

    operation = Operation(strength.n, strength.m)
    seeds = draws(seed, picked, 1)[:, 0] >> np.uint64(1)
    out = np.empty_like(batch)
    grey = batch.shape[3] == 1
    with own_random_state():
        for image, target, own in zip(batch, out, seeds, strict=True):
            seed_torch(int(own))
            picture = Image.fromarray(image[:, :, 0] if grey else image)
            changed = np.asarray(operation(picture))
            target[:] = changed[:, :, None] if grey else changed
    return out


def as_input(batch: Pixels) -> Tensor:
    """Pixels as floats in [0, 1], channels first in shape and last in memory.

    >>> as_input(np.full((1, 2, 2, 1), 255, np.uint8)).max().item()
    1.0
    """
    return torch.from_numpy(batch).permute(0, 3, 1, 2).to(torch.float32).div_(255)
