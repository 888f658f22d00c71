"""The cache of decoded images: entries are written atomically and opened in milliseconds.

The name of an entry is a hash of the paths, sizes and modification times of the source files. Size
and time can stay the same while the content changes, so an entry also records the inodes and ctimes
of the files, and a hash of their content. If inodes and ctimes are unchanged, the entry is valid,
and no source file is read. If they differ, the source files are hashed: with the same content (a
copy, or other permissions) the entry stays valid, otherwise the images are decoded again. For data
sets larger than `places.MAX_HASHED` bytes or `places.MAX_HASHED_FILES` files no content hash is
recorded; they are decoded again in both cases.

A download that is interrupted leaves its finished parts in `.ENTRY.parts`, beside the entry.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import FileError
from negmerge.support.files import atomic_folder, sync_to_disk, write_file, write_fully
from negmerge.support.reading import read_json
from negmerge.vision.places import Hub, Local, Snapshot

FORMAT = "negmerge-images/2"
T = TypeVar("T")


@dataclass(frozen=True)
class Images:
    """Decoded images with labels.

    >>> import tempfile
    >>> from negmerge.vision.datasets import load, resolve
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     images = load(resolve("fashion_small"), "test", cache=Path(folder))
    >>> images.pixels.shape, images.classes[images.labels[0]]
    ((2500, 28, 28, 1), 'ankle boot')

    Args:
        pixels: (n, height, width, channels), read-only, memory-mapped from the cache.
        labels: indices into `classes`.
        ids: names of the images in the data set; None if it has none.
        classes: names as the data set spells them; print them with `errors.printable`.
        fingerprint: a hash of pixels and labels, the same on every machine.
    """

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    ids: NDArray[np.str_] | None
    classes: tuple[str, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.labels)


def cache_folder(given: Path | None = None) -> Path:
    """Return the given folder, else `NEGMERGE_CACHE`, else `negmerge/data` in the user's cache."""
    if given is not None:
        return given
    if named := os.environ.get("NEGMERGE_CACHE"):
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "negmerge" / "data"


def open_entry(entry: Path, snapshot: Snapshot) -> Images | None:
    """Open an entry; return None if it is missing, damaged, or of other content than the source.

    The sizes and times of the entry's own files are compared with the recorded ones. If they differ
    (the entry was copied or changed), the arrays are hashed and the hashes compared.
    """
    found = open_arrays(entry, snapshot)
    if found is None or not {"pixels", "labels"} <= found[0].keys():
        return None
    arrays, notes = found
    known = "{pixels} {labels}".format(**notes["hashes"])
    fingerprint = hashlib.sha256(known.encode()).hexdigest()
    classes = tuple(notes["classes"])
    return Images(arrays["pixels"], arrays["labels"], arrays.get("ids"), classes, fingerprint)


def open_arrays(
    entry: Path, snapshot: Snapshot
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
    """Open the arrays and the notes of an entry; None as in `open_entry`."""
    try:
        notes = read_json(entry / "entry.json")
        hashes: dict[str, str] = notes["hashes"]
        arrays = {name: open_array(entry / f"{name}.npy") for name in hashes}
        if (
            notes["format"] == FORMAT
            and isinstance(notes["classes"], list)
            and (_stamps(entry, hashes) == notes["stamps"] or _hashes(arrays) == hashes)
            and _is_current(entry, notes, snapshot)
        ):
            return arrays, notes
    except (FileError, OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        pass  # the caller writes a damaged entry again
    return None


def _is_current(entry: Path, notes: dict[str, Any], snapshot: Snapshot) -> bool:
    source = notes["source"]
    if source["stamp"] == snapshot.stamp:
        return True
    if source["content"] is None or source["content"] != snapshot.content:
        return False
    source["stamp"] = snapshot.stamp  # the next process need not hash the files
    with suppress(FileError):  # a shared cache may be read-only
        write_file(entry / "entry.json", json.dumps(notes, indent=1).encode())
    return True


def open_or_make(entry: Path, read: Callable[[], T | None], make: Callable[[], None]) -> T:
    """Open an entry; if `read` finds none, make it first, in one process at a time."""
    found = read()
    if found is None:
        with entry_lock(entry):
            found = read()  # another process may have made it meanwhile
            if found is None:
                make()
                found = read()
    if found is None:
        raise FileError(f"{entry}: changed while it was written; run again")
    return found


@contextmanager
def new_entry(
    entry: Path, need: int, notes: dict[str, Any], place: Local | Hub, snapshot: Snapshot
) -> Iterator[Path]:
    """Yield a folder for arrays, `NAME.npy`, which becomes the entry at the end of the block.

    Args:
        entry: the folder of the entry; an existing one is damaged or out of date and is replaced.
        need: about how many bytes will be written.
        notes: `classes`, and what the block adds; stored beside the arrays.
        place: the source; the end of the block raises if its files have changed.
        snapshot: the state of the source files before they were read.
    """
    with _name_folder(entry.parent):
        if entry.exists():
            shutil.rmtree(entry)
        free = shutil.disk_usage(entry.parent).free
        if free < need:
            room = f"{need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({room})")
    with atomic_folder(entry) as folder, _name_folder(entry.parent):
        yield folder
        source = {"stamp": snapshot.stamp, "content": snapshot.content}
        if place.snapshot() != snapshot:
            raise FileError(f"{place}: changed while it was read; run again")
        hashes = _hashes({file.stem: open_array(file) for file in sorted(folder.iterdir())})
        about = {"hashes": hashes, "stamps": _stamps(folder, hashes), "source": source}
        (folder / "entry.json").write_text(json.dumps({"format": FORMAT} | notes | about, indent=1))
        for file in folder.iterdir():
            sync_to_disk(file)


def write_array(path: Path, shape: tuple[int, ...], parts: Iterable[NDArray[np.uint8]]) -> None:
    """Write an array of bytes, (length, *shape), in parts; the length is the sum of theirs."""

    def write_header() -> None:
        file.seek(0)
        header = {"descr": "|u1", "fortran_order": False, "shape": (length, *shape)}
        np.lib.format.write_array_header_1_0(file, header)  # leaves room for any length
        file.flush()

    with path.open("wb") as file:
        length = 0
        write_header()
        for part in parts:
            write_fully(file.fileno(), part.data)
            length += len(part)
        write_header()


def kept_parts(
    entry: Path, facts: object, read: Callable[[int], Iterator[NDArray[np.uint8]]]
) -> Iterator[NDArray[np.uint8]]:
    """Yield the parts of a download; after an interruption, go on where it stopped.

    Each part is stored beside the entry before it is yielded, and appears complete or not at all.

    Args:
        facts: what the parts depend on; parts of other facts are removed.
        read: yields the parts from a row on.
    """
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    folder = _parts_folder(entry) / name
    done = 0
    with _name_folder(entry.parent):
        if not folder.is_dir():
            drop_parts(entry)
            folder.mkdir(parents=True)
    while (part := _open_part(folder / f"{done}.npy")) is not None:
        yield part
        done += len(part)
    for part in read(done):
        buffer = io.BytesIO()
        np.save(buffer, part, allow_pickle=False)
        with _name_folder(entry.parent):
            write_file(folder / f"{done}.npy", buffer.getvalue())
        yield part
        done += len(part)


def drop_parts(entry: Path) -> None:
    """Remove the stored parts of a download."""
    shutil.rmtree(_parts_folder(entry), ignore_errors=True)


def _parts_folder(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.parts")


def _open_part(path: Path) -> NDArray[np.uint8] | None:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None


@contextmanager
def entry_lock(entry: Path) -> Iterator[None]:
    """Hold the lock of an entry; other processes wait."""
    with _name_folder(entry.parent):
        entry.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(entry.with_name(f".{entry.name}.lock"), flags, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextmanager
def _name_folder(folder: Path) -> Iterator[None]:
    """Turn an OSError into an error that names the cache folder and the remedy."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{folder}: the cache cannot be written: {error.strerror or error}; free disk space, "
            "or set NEGMERGE_CACHE to another folder"
        ) from error


def open_array(path: Path) -> NDArray[Any]:
    """Map an array of an entry into memory."""
    # Indexing a plain array is much faster than indexing a memmap object.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


def _stamps(folder: Path, names: Iterable[str]) -> dict[str, list[int]]:
    found = {name: (folder / f"{name}.npy").stat() for name in names}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def _hashes(arrays: dict[str, NDArray[Any]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, array in arrays.items():
        digest = hashlib.sha256(f"{array.dtype.str} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
        found[name] = digest.hexdigest()
    return found
