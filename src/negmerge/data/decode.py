"""Encoded pictures to arrays of one size and one number of channels."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError
from negmerge.parallel import available_workers, ordered
from negmerge.reading import read_bytes

MAX_PICTURE = 256 << 20
"""Bytes of an encoded picture."""
# Raised when the same file would decode to other pixels: part of the cache's key.
VERSION = 1

# Pillow also opens formats that start other programs (EPS); pictures of data sets are these.
FORMATS = ("PNG", "JPEG", "WEBP", "PPM", "BMP", "GIF", "TIFF")

Fit = Literal["crop", "squash"]
Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class Picture:
    """One picture, not yet decoded: what to call it in an error, and its bytes or its file."""

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
    """Decode one picture to (size, size, channels); another size is resized, antialiased.

    A picture that has the size already keeps its pixels.

    >>> dot = bytes.fromhex("424d1e000000000000001a0000000c000000010001000100180000ff7f00")
    >>> decode(Picture("dot", dot), size=1, channels=3).tolist()
    [[[127, 255, 0]]]
    >>> decode(Picture("image 3", b"not a picture"), size=1, channels=3)
    Traceback (most recent call last):
    negmerge.errors.FileError: image 3: cannot be decoded: cannot identify image file

    Args:
        picture: a common picture format, 8 bits a channel.
        size: height and width wanted.
        channels: 1 for grey, 3 for colour.
        fit: `crop` resizes the shorter side and cuts out the centre, `squash` resizes both sides.
        interpolation: of the resizing.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(_bytes(picture)), formats=FORMATS) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"got mode {image.mode}, wanted 8 bits a channel; convert it")
            if "transparency" in image.info:  # Pillow warns if a palette loses it in one step
                image = image.convert("RGBA")
            image = image.convert("L" if channels == 1 else "RGB")
            image = _square(image, size, fit, interpolation)
            return np.asarray(image, dtype=np.uint8).reshape(size, size, channels)
    except Exception as error:  # a broken picture makes Pillow's parsers raise nearly anything
        why = " ".join(str(error).split()).partition(" <_io")[0] or type(error).__name__
        raise FileError(f"{picture.name}: cannot be decoded: {why}") from error


def decode_all(
    parts: Iterable[list[Picture]],
    size: int,
    channels: int,
    fit: Fit = "crop",
    interpolation: Interpolation = "bicubic",
) -> Iterator[NDArray[np.uint8]]:
    """Decode lists of pictures in threads, and give each list back as one array, in order.

    >>> dot = bytes.fromhex("424d1e000000000000001a0000000c000000010001000100180000ff7f00")
    >>> [part.shape for part in decode_all([[Picture("dot", dot)] * 2], size=4, channels=1)]
    [(2, 4, 4, 1)]
    """

    def run(_: None, part: list[Picture]) -> NDArray[np.uint8]:
        return np.stack([decode(picture, size, channels, fit, interpolation) for picture in part])

    return ordered(parts, run, lambda: None, available_workers(None))


def _bytes(picture: Picture) -> bytes:
    if picture.data is not None:
        return picture.data
    if picture.path is None:
        raise ValueError("there is neither content nor a file name")
    if "://" not in picture.path:
        return read_bytes(picture.path, MAX_PICTURE)
    import fsspec  # an image folder on the Hub is listed, not fetched

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
    # Rounded down as torchvision's Resize does, so that the pixels are the same.
    width, height = size * width // short, size * height // short
    image = image.resize((width, height), resampling)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
