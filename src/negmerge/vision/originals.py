"""The original pictures of a data set: encoded, at their own sizes, for augmentation of the whole.

A split is copied once into an entry of the cache (`cache.py`): one array of encoded bytes, and
where each picture ends. Every process maps the arrays into memory. Each picture is decoded once
when it is copied, so that a damaged one is found before a training begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError
from negmerge.support.parallel import run_in_order, worker_count
from negmerge.support.progress import Progress, Quiet
from negmerge.support.remote.urls import Place
from negmerge.vision.cache import (
    cache_folder,
    new_entry,
    open_array,
    open_arrays,
    open_or_make,
    write_array,
)
from negmerge.vision.datasets import Source, file_name
from negmerge.vision.decode import VERSION, Picture, open_image, read_picture
from negmerge.vision.places import Hub, Local, Snapshot, find

ARRAYS = ("encoded", "ends", "sizes", "labels", "names")


@dataclass(frozen=True)
class Originals:
    """The encoded pictures of a split, with labels.

    >>> import tempfile
    >>> from negmerge.vision.datasets import resolve
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = load_originals(resolve("fashion_small"), "test", cache=Path(folder))
    ...     open_image(found.picture(0)).size, found.classes[found.labels[0]]
    ((28, 28), 'ankle boot')

    Args:
        entry: the folder of the cache.
        encoded: the bytes of all pictures, one after the other.
        ends: where each picture ends.
        sizes: width and height of each picture.
        labels: indices into `classes`.
        names: the name of each picture in error messages.
        classes: names as the data set spells them.
        fingerprint: a hash of pixels and labels, the same on every machine.
    """

    entry: Path
    encoded: NDArray[np.uint8]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]
    names: NDArray[np.str_]
    classes: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.entry, self.classes, self.fingerprint)  # arrays are not copied

    def picture(self, position: int) -> Picture:
        """Return one picture."""
        start = int(self.ends[position - 1]) if position else 0
        data = self.encoded[start : int(self.ends[position])].tobytes()
        return Picture(str(self.names[position]), data)


def load_originals(
    source: Source,
    split: Literal["train", "test"],
    *,
    root: Place | None = None,
    revision: str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Originals:
    """Load the original pictures of a split: copy them into the cache the first time.

    Args:
        source, split, root, revision, cache: as in `datasets.load`.
        progress: shows how many pictures are read.
    """
    place = find(source, root, revision, progress)
    snapshot = place.snapshot()
    columns = (source.train, source.test, source.image, source.label)
    share = () if source.test_share is None else (["test_share", source.test_share],)
    digest = snapshot.key(split, columns, VERSION, "originals", *share)
    entry = cache_folder(cache) / f"{file_name(source)}-{split}-originals-{digest[:20]}"
    made = (entry, source, split, place, snapshot, progress or Quiet())
    return open_or_make(entry, lambda: _open(entry, snapshot), lambda: _copy(*made))


def _open(entry: Path, snapshot: Snapshot) -> Originals | None:
    found = open_arrays(entry, snapshot)
    if found is None or {*ARRAYS} != found[0].keys() or "pictures" not in found[1]:
        return None
    return _reopen(entry, tuple(found[1]["classes"]), str(found[1]["pictures"]))


def _reopen(entry: Path, classes: tuple[str, ...], fingerprint: str) -> Originals:
    """Open an entry that was checked, perhaps by another process."""
    try:
        arrays = [open_array(entry / f"{name}.npy") for name in ARRAYS]
    except (OSError, ValueError) as error:
        raise FileError(f"{entry}: was changed during the run; run again") from error
    return Originals(entry, *arrays, classes=classes, fingerprint=fingerprint)


def _check(_: None, pictures: list[Picture]) -> list[tuple[str, bytes, tuple[int, int], bytes]]:
    """Decode pictures; return the name, the content, the size and a hash of the pixels of each."""
    found: list[tuple[str, bytes, tuple[int, int], bytes]] = []
    for picture in pictures:
        data = read_picture(picture)
        image = open_image(Picture(picture.name, data))
        pixels = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).digest()
        found.append((picture.name, data, image.size, pixels))
    return found


def _copy(
    entry: Path,
    source: Source,
    split: str,
    place: Local | Hub,
    snapshot: Snapshot,
    progress: Progress,
) -> None:
    from negmerge.vision.reading import open_rows

    lengths: list[int] = []
    sizes: list[tuple[int, int]] = []
    names: list[str] = []
    content = hashlib.sha256()
    with open_rows(place, source, split, progress=progress) as rows:

        def encoded() -> Iterator[NDArray[np.uint8]]:
            progress.stage(f"reading {file_name(source)} {split}", len(rows.labels), "images")
            for part in run_in_order(rows.read(0), _check, lambda: None, worker_count(None)):
                for name, data, size, pixels in part:
                    yield np.frombuffer(data, np.uint8)
                    lengths.append(len(data))
                    sizes.append(size)
                    names.append(name)
                    content.update(pixels)
                    progress.advance(1)

        notes: dict[str, Any] = {"classes": rows.classes}
        with new_entry(entry, snapshot.size, notes, place, snapshot) as folder:
            write_array(folder / "encoded.npy", (), encoded())
            arrays = {
                "ends": np.cumsum(lengths, dtype=np.int64),
                "sizes": np.array(sizes, np.int64),
                "labels": rows.labels,
                "names": np.array(names),
            }
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", array, allow_pickle=False)
            content.update(rows.labels.astype("<i8").tobytes())
            notes["pictures"] = content.hexdigest()
