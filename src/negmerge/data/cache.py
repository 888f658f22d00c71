"""Decoded images on disk: written whole or not at all, opened in milliseconds."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError
from negmerge.files import atomic_folder, write

FORMAT = "negmerge-images/1"


@dataclass(frozen=True)
class Images:
    """Labelled images, decoded.

    >>> from negmerge.data.datasets import load, resolve
    >>> images = load(resolve("fashion_small"), "test", cache=getfixture("tmp_path"))
    >>> images.pixels.shape, images.classes[images.labels[0]]
    ((2500, 28, 28, 1), 'ankle boot')
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


def open_entry(entry: Path) -> Images | None:
    """The images of a cache entry, memory-mapped; none if it is missing, partial or damaged.

    The files' sizes and times are compared with those noted when they were written. If the times
    differ (the entry was copied, or something wrote to it) the content is hashed and compared.
    """
    try:
        notes = json.loads((entry / "entry.json").read_bytes())
        if notes["format"] != FORMAT:
            return None
        arrays = {name: _open_array(entry / f"{name}.npy") for name in notes["files"]}
        images = Images(
            pixels=arrays["pixels"],
            labels=arrays["labels"],
            ids=arrays.get("ids"),
            classes=tuple(notes["classes"]),
            fingerprint=notes["fingerprint"],
        )
        if _stamps(entry, notes["files"]) == notes["files"] or _digest(arrays) == notes["digest"]:
            return images
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        pass
    return None


def write_entry(
    entry: Path,
    batches: Iterable[NDArray[np.uint8]],
    shape: tuple[int, int, int, int],
    labels: NDArray[np.int64],
    ids: NDArray[np.str_] | None,
    classes: tuple[str, ...],
) -> None:
    """Write an entry batch by batch; it takes its name only when it is whole."""
    if entry.exists():
        shutil.rmtree(entry)  # open_entry found it damaged, and the caller holds its lock
    with atomic_folder(entry) as folder:
        _write_pixels(folder / "pixels.npy", batches, shape)
        np.save(folder / "labels.npy", labels, allow_pickle=False)
        if ids is not None:
            np.save(folder / "ids.npy", ids, allow_pickle=False)
        names = [name for name in ("pixels", "labels", "ids") if name != "ids" or ids is not None]
        arrays = {name: _open_array(folder / f"{name}.npy") for name in names}
        notes = {
            "format": FORMAT,
            "fingerprint": _digest({name: arrays[name] for name in ("pixels", "labels")}),
            "digest": _digest(arrays),
            "classes": classes,
            "files": _stamps(folder, names),
        }
        (folder / "entry.json").write_text(json.dumps(notes, indent=1))
        for file in folder.iterdir():
            _sync(file)


@contextmanager
def only_one(entry: Path) -> Iterator[None]:
    """Let one process at a time make an entry; the others wait for it."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(
            entry.with_name(f".{entry.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
    except OSError as error:
        raise FileError(
            f"{entry.parent}: cannot keep decoded images there: {error.strerror}; set "
            "NEGMERGE_CACHE to a folder that can be written"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write_pixels(
    path: Path, batches: Iterable[NDArray[np.uint8]], shape: tuple[int, int, int, int]
) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.flush()
        for batch in batches:
            write(file.fileno(), batch.data)


def _open_array(path: Path) -> NDArray[Any]:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _stamps(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    found = {name: (folder / f"{name}.npy").stat() for name in names}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def _digest(arrays: dict[str, NDArray[Any]]) -> str:
    total = hashlib.sha256()
    for name, array in arrays.items():
        total.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).data.cast("B"))
    return total.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
