"""Encoded pictures to arrays of one size and one number of channels."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError, shown

# Raised when the same file would decode to other pixels: part of the cache's key.
VERSION = 1

# Pillow also opens formats that start other programs (EPS); pictures of data sets are these.
FORMATS = ("PNG", "JPEG", "WEBP", "PPM", "BMP", "GIF", "TIFF")


@dataclass(frozen=True)
class Picture:
    """One picture, not yet decoded: its bytes or its file, and where it stands in its split."""

    index: int
    data: bytes | None
    path: str | None

    def name(self) -> str:
        """What to call it in an error.

        >>> Picture(7, b"", "a.png").name()
        "image 7 ('a.png')"
        """
        return f"image {self.index}" + (f" ({shown(self.path)})" if self.path else "")


def decode(picture: Picture, size: int, channels: int) -> NDArray[np.uint8]:
    """Decode one picture to (size, size, channels); the wrong size is resized and cropped.

    The shorter side is resized (bicubic, antialiased), then the centre is cut out. A picture that
    has the size already keeps its pixels.

    >>> dot = bytes.fromhex("424d1e000000000000001a0000000c000000010001000100180000ff7f00")
    >>> decode(Picture(0, dot, None), size=1, channels=3).tolist()
    [[[127, 255, 0]]]

    Args:
        picture: bytes or file of any common picture format, 8 bits a channel.
        size: height and width wanted.
        channels: 1 for grey, 3 for colour.
    """
    from PIL import Image, ImageOps

    try:
        file = picture.path if picture.data is None else io.BytesIO(picture.data)
        if file is None:
            raise FileError("neither bytes nor a file")
        with Image.open(file, formats=FORMATS) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith(("I", "F")):
                raise FileError(f"got mode {image.mode}, wanted 8 bits a channel; convert it")
            if "transparency" in image.info:  # Pillow warns when a palette loses it in one step
                image = image.convert("RGBA")
            image = _square(image.convert("L" if channels == 1 else "RGB"), size)
            return np.asarray(image, dtype=np.uint8).reshape(size, size, channels)
    except Exception as error:  # a broken picture makes Pillow's parsers raise nearly anything
        why = " ".join(str(error).split()) or type(error).__name__
        raise FileError(f"{picture.name()}: cannot be decoded: {why}") from error


def decode_all(
    pictures: Iterable[list[Picture]], size: int, channels: int
) -> Iterator[NDArray[np.uint8]]:
    """Decode lists of pictures side by side in threads, and give them back in order."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for part in pictures:
            yield np.stack(list(pool.map(lambda one: decode(one, size, channels), part)))


def _square(image, size: int):
    from PIL import Image

    width, height = image.size
    if (width, height) == (size, size):
        return image
    short = min(width, height)
    # Integer division as in torchvision's Resize, so that the pixels are the same.
    width, height = size * width // short, size * height // short
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
