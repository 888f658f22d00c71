"""Decoding of pictures to arrays of one size and one number of channels."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError
from negmerge.support.parallel import run_in_order, worker_count
from negmerge.support.reading import read_bytes

MAX_PICTURE = 256 << 20
"""The largest encoded picture, in bytes."""
MAX_RATIO = 1000
"""The largest ratio of the sides of a picture: a line of pixels, resized until its shorter side has
the size of the input, would need gigabytes."""
VERSION = 1
"""Part of the names of cache entries; to be raised when a picture decodes to other pixels."""

# Other formats of Pillow are not allowed: some of them (EPS) start other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "PPM", "BMP", "GIF", "TIFF")

Fit = Literal["crop", "squash"]
Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class Picture:
    """An encoded picture: its name in error messages, and its content or its file."""

    name: str
    data: bytes | None = None
    path: str | None = None


def decode(
    picture: Picture,
    size: int,
    channels: int,
    fit: Fit = "crop",
    interpolation: Interpolation = "bicubic",
) -> NDArray[np.uint8]:
    """Decode a picture to (size, size, channels), resized with antialiasing if it is not that size.

    >>> dot = bytes.fromhex("424d1e000000000000001a0000000c000000010001000100180000ff7f00")
    >>> decode(Picture("dot", dot), size=1, channels=3).tolist()
    [[[127, 255, 0]]]
    >>> decode(Picture("image 3", b"not a picture"), size=1, channels=3)
    Traceback (most recent call last):
    negmerge.errors.FileError: image 3: cannot be decoded: cannot identify image file

    Args:
        picture: in one of `FORMATS`, with 8 bits per channel.
        channels: 1 for grey, 3 for colour.
        fit: `crop` resizes the shorter side and crops the centre; `squash` resizes both sides.
    """
    with _one_line_errors(picture):
        image = _square(_open(picture, channels), size, fit, interpolation)
        return np.asarray(image, dtype=np.uint8).reshape(size, size, channels)


def open_image(picture: Picture) -> Any:
    """Decode a picture at its own size to a PIL image in colour.

    >>> dot = bytes.fromhex("424d1e000000000000001a0000000c000000010001000100180000ff7f00")
    >>> open_image(Picture("dot", dot)).size
    (1, 1)

    Args:
        picture: in one of `FORMATS`, with 8 bits per channel.
    """
    with _one_line_errors(picture):
        return _open(picture, channels=3)


def read_picture(picture: Picture) -> bytes:
    """Return the encoded content of a picture."""
    with _one_line_errors(picture):
        return _bytes(picture)


def decode_all(
    parts: Iterable[list[Picture]],
    size: int,
    channels: int,
    fit: Fit = "crop",
    interpolation: Interpolation = "bicubic",
) -> Iterator[NDArray[np.uint8]]:
    """Decode lists of pictures in threads; yield one array for each list, in order.

    >>> dot = bytes.fromhex("424d1e000000000000001a0000000c000000010001000100180000ff7f00")
    >>> [part.shape for part in decode_all([[Picture("dot", dot)] * 2], size=4, channels=1)]
    [(2, 4, 4, 1)]
    """

    def run(_: None, part: list[Picture]) -> NDArray[np.uint8]:
        return np.stack([decode(picture, size, channels, fit, interpolation) for picture in part])

    return run_in_order(parts, run, lambda: None, worker_count(None))


@contextmanager
def _one_line_errors(picture: Picture) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # Pillow raises many types for broken pictures
        why = " ".join(str(error).split()).partition(" <_io")[0] or type(error).__name__
        raise FileError(f"{picture.name}: cannot be decoded: {why}") from error


def _open(picture: Picture, channels: int) -> Any:
    """Return a PIL image, upright, in grey or in colour."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(_bytes(picture)), formats=FORMATS) as image:
        if max(image.size) > MAX_RATIO * min(image.size):
            got = " × ".join(map(str, image.size))
            raise ValueError(f"got {got} pixels, wanted sides of at most {MAX_RATIO} : 1; crop it")
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith(("I", "F")):
            raise ValueError(f"got mode {image.mode}, wanted 8 bits per channel; convert it")
        opaque: Any = image
        if "transparency" in image.info:  # without this step Pillow warns
            opaque = image.convert("RGBA")
        return opaque.convert("L" if channels == 1 else "RGB")


def _bytes(picture: Picture) -> bytes:
    if picture.data is not None:
        return picture.data
    if picture.path is None:
        raise ValueError("it has neither content nor a file")
    if "://" not in picture.path:
        return read_bytes(picture.path, MAX_PICTURE)
    import fsspec  # an image folder on the Hub

    with fsspec.open(picture.path, "rb") as file:
        return file.read()  # pyright: ignore[reportAttributeAccessIssue]


def _square(image: Any, size: int, fit: Fit, interpolation: Interpolation) -> Any:
    from PIL import Image

    width, height = image.size
    if (width, height) == (size, size):
        return image
    resampling = Image.Resampling[interpolation.upper()]
    if fit == "squash":
        return image.resize((size, size), resampling)
    short = min(width, height)
    # Rounded down as in torchvision's Resize, which gives the same pixels.
    width, height = size * width // short, size * height // short
    image = image.resize((width, height), resampling)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
