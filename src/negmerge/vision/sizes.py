"""Sizes of registered data sets, for estimates before the data is downloaded."""

from __future__ import annotations

from negmerge.errors import OptionError, quoted
from negmerge.vision.datasets import DataSize, datasets
from negmerge.vision.settings import Data


def size_of(data: Data) -> DataSize:
    """Return how many images of a data set a recipe uses, and the number of classes.

    >>> size_of(Data(name="cifar10", limit={"train": 1000}))
    DataSize(train=1000, test=10000, classes=10)
    >>> size_of(Data(name="/mirrors/cars"))
    Traceback (most recent call last):
    negmerge.errors.OptionError: data set '/mirrors/cars': the number of images is not known...
    """
    counts = datasets.get(data.name).counts if data.name in datasets else None
    if counts is None:
        raise OptionError(
            f"data set {quoted(data.name)}: the number of images is not known; register the data "
            "set with `counts`"
        )
    return counts._replace(**{k: v for k, v in data.limit if v is not None})
