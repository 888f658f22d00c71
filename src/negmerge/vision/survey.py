"""A first look at a set of images: how many, of which classes and sizes; nothing is decoded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError, printable
from negmerge.vision.decode import open_image
from negmerge.vision.places import Local
from negmerge.vision.reading import open_rows, split_columns
from negmerge.vision.source import Source
from negmerge.vision.tables import find_split

LOOKED_AT = 32
"""How many pictures are opened to learn the sizes."""
SHOWN = 8
"""How many classes a description names."""


@dataclass(frozen=True)
class ImageSurvey:
    """What a folder of images, or a parquet file, holds.

    Args:
        train, test: the numbers of images; `test` is None if there is no test split.
        classes: the names of the classes.
        smallest: the number of training images of the smallest class.
        side: the median of the shorter sides of some pictures.
        channels: 1 if these pictures are grey, otherwise 3.
    """

    train: int
    test: int | None
    classes: tuple[str, ...]
    smallest: int
    side: int
    channels: int

    def describe(self) -> str:
        """Return one line about the set.

        >>> ImageSurvey(90, None, ("cat", "dog"), 40, 64, 3).describe()
        '90 images of 2 classes (cat, dog), no test images, at least 40 of each class, 64 pixels wide, colour'
        """  # noqa: E501
        shown = ", ".join(self.classes[:SHOWN]) + (", …" if len(self.classes) > SHOWN else "")
        tested = "no test images" if self.test is None else f"{self.test:,} test images"
        colour = "grey" if self.channels == 1 else "colour"
        return (
            f"{self.train:,} images of {len(self.classes):,} classes ({printable(shown)}), "
            f"{tested}, at least {self.smallest:,} of each class, {self.side} pixels wide, {colour}"
        )


def survey_images(path: Path) -> ImageSurvey:
    """Look at a folder of images or a parquet file, as a run would open it.

    Args:
        path: `PATH/<class>/*.png`, or with a folder `train` and perhaps `test` above the classes.
    """
    if not path.exists():
        raise FileError(f"{path}: no such file or folder; name the folder of your images")
    place, source = Local(path.resolve()), Source(name=str(path), size=1)
    columns = split_columns(place, source)
    if path.is_dir() and any(list(names) == ["image"] for names in columns.values()):
        raise FileError(
            f"{path}: has images, but no folders of classes; wanted {path}/<class>/*.png, with at "
            "least two classes"
        )
    with open_rows(place, source, "train") as rows:
        counts = Counter(rows.labels.tolist())
        pictures = next(iter(rows.read(0)), [])
        step = max(len(pictures) // LOOKED_AT, 1)
        opened = [open_image(picture) for picture in pictures[::step]]
        train, classes = len(rows.labels), rows.classes
    test: int | None = None
    if find_split(columns, source.test) is not None:
        with open_rows(place, source, "test") as rows:
            test = len(rows.labels)
    return ImageSurvey(
        train=train,
        test=test,
        classes=classes,
        smallest=min(counts.values()),
        side=round(median(min(image.size) for image in opened)),
        channels=1 if all(_is_grey(np.asarray(image)) for image in opened) else 3,
    )


def _is_grey(pixels: NDArray[np.uint8]) -> bool:
    return bool((pixels == pixels[..., :1]).all())
