"""Decoded images on disk: written whole or not at all, opened in milliseconds.

An entry is named by the files it was decoded from: their paths, sizes and times of writing. Size
and time can stay the same while the content changes, so the entry also notes what the system
records of every change (inode and ctime) and a hash of the files' bytes. If inodes and ctimes are
as noted, nothing changed and no file is read. If they differ, the files are read and hashed: the
same bytes (the set was copied back, or got other permissions) keep the entry, others are decoded.
Of a set above `places.READ_AGAIN` bytes no hash is noted, and it is decoded again in both cases.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.data.places import Seen
from negmerge.errors import FileError
from negmerge.files import atomic_folder, sync, write, write_file
from negmerge.reading import read_json

FORMAT = "negmerge-images/2"


@dataclass(frozen=True)
class Images:
    """Labelled images, decoded.

    >>> from negmerge.data.datasets import load, resolve
    >>> images = load(resolve("fashion_small"), "test", cache=getfixture("tmp_path"))
    >>> images.pixels.shape, images.classes[images.labels[0]]
    ((2500, 28, 28, 1), 'ankle boot')

    Args:
        pixels: (n, height, width, channels), read-only, mapped from the cache.
        labels: places in `classes`.
        ids: the set's own names of its images, if it has them.
        classes: names as the set spells them; show them with `errors.printable`.
        fingerprint: of pixels and labels, the same on every machine.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    ids: NDArray[np.str_] | None
    classes: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)


def cache_folder(given: Path | None = None) -> Path:
    """Where decoded images are kept: as given, else `NEGMERGE_CACHE`, else the user's cache.

    >>> cache_folder(Path("here"))
    PosixPath('here')
    """
    if given is not None:
        return given
    if named := os.environ.get("NEGMERGE_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "negmerge" / "data"


def open_entry(entry: Path, seen: Seen) -> Images | None:
    """The images of a cache entry, memory-mapped; none if it is missing, partial or damaged.

    None too if the files that it was decoded from are not as they are seen now.

    Sizes and times of the files are compared with those noted when they were written. If they
    differ (the entry was copied, or something wrote to it) the content has to have its hash.
    """
    try:
        notes = read_json(entry / "entry.json")
        hashes: dict[str, str] = notes["hashes"]
        arrays = {name: _open_array(entry / f"{name}.npy") for name in hashes}
        as_written = _stamps(entry, hashes) == notes["stamps"]
        if (
            notes["format"] == FORMAT
            and (as_written or _hashes(arrays) == hashes)
            and _same_source(entry, notes, seen)
        ):
            return Images(
                pixels=arrays["pixels"],
                labels=arrays["labels"],
                ids=arrays.get("ids"),
                classes=tuple(notes["classes"]),
                fingerprint=_fingerprint(hashes),
            )
    except (FileError, OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        pass  # whatever is wrong with it, it is made again
    return None


def _same_source(entry: Path, notes: dict[str, Any], seen: Seen) -> bool:
    known = notes["source"]
    if known["stamp"] == seen.stamp:
        return True
    if known["content"] is None or known["content"] != seen.content:
        return False
    known["stamp"] = seen.stamp  # so that the files are not read every time
    with suppress(FileError):  # a cache that others keep may be read-only
        write_file(entry / "entry.json", json.dumps(notes, indent=1).encode())
    return True


def write_entry(
    entry: Path,
    parts: Iterable[NDArray[np.uint8]],
    shape: tuple[int, int, int, int],
    labels: NDArray[np.int64],
    ids: NDArray[np.str_] | None,
    classes: tuple[str, ...],
    seen: Seen,
) -> None:
    """Write an entry part by part; it takes its name only when it is whole.

    seen: the files that it is decoded from, as they were before.
    """
    with _kept(entry.parent):
        if entry.exists():
            shutil.rmtree(entry)  # damaged or out of date, or it would have been used
        need, free = math.prod(shape), shutil.disk_usage(entry.parent).free
        if free < need:
            room = f"{need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({room})")
    with atomic_folder(entry) as folder, _kept(entry.parent):
        _write_pixels(folder / "pixels.npy", parts, shape)
        np.save(folder / "labels.npy", labels, allow_pickle=False)
        if ids is not None:
            np.save(folder / "ids.npy", ids, allow_pickle=False)
        hashes = _hashes({file.stem: _open_array(file) for file in sorted(folder.iterdir())})
        notes = {
            "format": FORMAT,
            "classes": classes,
            "hashes": hashes,
            "stamps": _stamps(folder, hashes),
            "source": {"stamp": seen.stamp, "content": seen.content},
        }
        (folder / "entry.json").write_text(json.dumps(notes, indent=1))
        for file in folder.iterdir():
            sync(file)


@contextmanager
def only_one(entry: Path) -> Iterator[None]:
    """Let one process at a time make an entry; the others wait for it."""
    with _kept(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(entry.with_name(f".{entry.name}.lock"), flags, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _kept(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{folder}: cannot keep data there: {error.strerror or error}; make room, "
            "or set NEGMERGE_CACHE to another folder"
        ) from error


def _write_pixels(
    path: Path, parts: Iterable[NDArray[np.uint8]], shape: tuple[int, int, int, int]
) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        for part in parts:
            write(file.fileno(), part.data)


def _open_array(path: Path) -> NDArray[Any]:
    # A plain view: indexing a memmap object costs much more than indexing an array.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _stamps(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    found = {name: (folder / f"{name}.npy").stat() for name in names}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def _hashes(arrays: dict[str, NDArray[Any]]) -> dict[str, str]:
    return {name: _hash(array) for name, array in arrays.items()}


def _hash(array: NDArray[Any]) -> str:
    total = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
    total.update(np.ascontiguousarray(array).view(np.uint8).data)
    return total.hexdigest()


def _fingerprint(hashes: dict[str, str]) -> str:
    return hashlib.sha256(f"{hashes['pixels']} {hashes['labels']}".encode()).hexdigest()
