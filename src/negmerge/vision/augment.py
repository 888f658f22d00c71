"""Augmentation of whole pictures for CLIP: timm's and torchvision's, from PIL image to PIL image.

Both draw from the global generators of Python, numpy and torch; the caller seeds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal

from negmerge.training.hyperparameters import Augmentation

Library = Literal["timm", "torchvision"]
"""The library whose RandAugment is used."""

LEAST = 0.9
"""The smallest share of the area in open_clip's random resized crop."""
LARGEST_MAGNITUDE: dict[Library, int] = {"timm": 10, "torchvision": 30}
"""The largest magnitude m of each RandAugment; timm would lower a larger one to 10."""


@lru_cache(16)
def make_transform(
    library: Library, augment: Augmentation, size: int, mean: tuple[float, ...], grey: bool
) -> Callable[[Any], Any]:
    """Return the augmentation of a training picture in colour.

    With timm's RandAugment it is timm's training transform as the authors of NegMerge use it: a
    random crop of 0.08 to 1 of the area, mirrored with probability 0.5. Otherwise it is that of
    open_clip, a random crop of 0.9 to 1 of the area, followed by torchvision's RandAugment if the
    member has it.

    Args:
        augment: whether there is RandAugment, and `flip`, which overrides the default.
        mean: the mean of the pixels; timm fills with it what an operation leaves empty.
        grey: whether the data set is grey; its pictures are resized first for timm, as the authors
            do for MNIST.
    """
    if augment.randaugment is None or library == "torchvision":
        return _open_clip(augment, size)
    from timm.data.transforms_factory import transforms_imagenet_train
    from torchvision.transforms import Compose, Resize

    strength = augment.randaugment
    found: Any = transforms_imagenet_train(
        img_size=size,
        hflip=0.0 if augment.flip is False else 0.5,
        auto_augment=f"rand-m{strength.m}-n{strength.n}-mstd0.5",
        mean=mean,
        separate=True,
    )
    crop_and_flip, operations, _ = found  # the third makes tensors and normalises
    for operation in operations.transforms[0].ops:
        if operation.name == "Posterize":
            operation.aug_fn = partial(_posterize, operation.aug_fn)
    return Compose([*([Resize(size)] if grey else []), crop_and_flip, operations])


def _posterize(posterize: Callable[..., Any], image: Any, bits: int, **options: Any) -> Any:
    """Apply timm's operation, also with 0 bits, to which it rounds magnitudes below 2.5.

    No bits are left then, and the image is black. Later versions of Pillow refuse 0 bits.
    """
    return posterize(image, bits, **options) if bits else image.point(lambda value: 0)


def _open_clip(augment: Augmentation, size: int) -> Callable[[Any], Any]:
    from torchvision.transforms import (
        Compose,
        InterpolationMode,
        RandAugment,
        RandomHorizontalFlip,
        RandomResizedCrop,
    )

    bicubic = InterpolationMode.BICUBIC
    steps: list[Any] = [RandomResizedCrop(size, scale=(LEAST, 1.0), interpolation=bicubic)]
    if augment.flip:
        steps.append(RandomHorizontalFlip())
    if augment.randaugment is not None:
        steps.append(RandAugment(augment.randaugment.n, augment.randaugment.m))
    return Compose(steps)
