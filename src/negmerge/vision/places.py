"""Locations of data sets: a path or URL, a folder of copies, this package, or the Hub.

Only light modules are imported here: opening a cached data set needs its location, not a reader. A
folder may have a million files. Its snapshot reads the attributes of every file, because those of
a folder do not change with the content of its files, and keeps two hashes instead of the names.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from json.encoder import encode_basestring_ascii as as_json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from negmerge.errors import FileError, printable, quoted
from negmerge.support.files import file_digest
from negmerge.support.progress import Progress
from negmerge.support.remote.scratch import Wanted, fetch_all
from negmerge.support.remote.stores import Store
from negmerge.support.remote.urls import Place, is_url, join, shown

if TYPE_CHECKING:
    from negmerge.vision.source import Source

ASSETS = Path(str(files("negmerge") / "assets"))
MAX_HASHED = 4 << 30
"""The largest data set, in bytes, whose files are hashed to find out whether they changed."""
MAX_HASHED_FILES = 500_000
"""The largest number of files that are hashed; a million files take a minute to open."""
MANY = 100_000
"""The number of files from which on a snapshot is used again; see `Local.snapshot`."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a location at one moment.

    Args:
        identity: a hash of what names a cache entry: for files their names, sizes and times.
        stamp: a hash of the inode and ctime of every file. The system changes a ctime with every
            change of a file; unlike a modification time, no program can set it back.
        place: the folder or file; None if the location is not on this machine.
        count: the number of files.
        size: the sum of the sizes of the regular files, in bytes.
        begun: the hash object of `identity`, which `key` continues.
    """

    identity: str
    stamp: str = ""
    place: Path | None = None
    count: int = 0
    size: int = 0
    begun: Any = field(default=None, compare=False, repr=False)

    def key(self, *parts: object) -> str:
        """Return a hash of the identity and of other parts, for the name of a cache entry.

        >>> snapshot = Hub("birds", "someone/birds", None, "v2").snapshot()
        >>> text = '[["someone/birds", null, "v2"], "train", 32]'
        >>> snapshot.key("train", 32) == hashlib.sha256(text.encode()).hexdigest()
        True
        """
        digest = self.begun.copy()
        digest.update(f", {json.dumps(parts)[1:]}".encode())
        return digest.hexdigest()

    @cached_property
    def content(self) -> str | None:
        """A hash of the content of all files; None if they are too large or too many."""
        if self.place is None or self.size > MAX_HASHED or self.count > MAX_HASHED_FILES:
            return None
        total = hashlib.sha256()
        for name, found in walk(self.place):
            if stat.S_ISREG(found.st_mode):
                digest = file_digest(Path(name))
                total.update(f"{digest} {name}\n".encode(errors="surrogateescape"))
        return total.hexdigest()


@dataclass(frozen=True)
class Local:
    """A folder or a parquet file on this machine."""

    path: Path

    def __str__(self) -> str:
        return printable(str(self.path))

    def snapshot(self, fresh: bool = True) -> Snapshot:
        """Return the names, sizes, times and inodes of all files, as hashes.

        Args:
            fresh: if False, the last snapshot of a folder with `MANY` files is used again for as
                long as it took: the splits of a data set are opened one after the other.
        """
        ended, seconds, known = _LAST.get(self.path, (0.0, 0.0, None))
        begun = time.monotonic()
        if known is not None and not fresh and begun - ended < seconds:
            return known
        found = self._look()
        if found.count >= MANY:
            ended = time.monotonic()
            _LAST[self.path] = (ended, ended - begun, found)
        return found

    def _look(self) -> Snapshot:
        # The identity is the hash of json.dumps([str(path), [[name, size, mtime], ...]]), and the
        # text is hashed in parts.
        identity, stamp = hashlib.sha256(), hashlib.sha256()
        identity.update(f"[[{as_json(str(self.path))}, [".encode())
        names: list[str] = []
        stamps: list[str] = []
        count = size = 0
        try:
            for name, found in walk(self.path):
                comma = ", " if count else ""
                names.append(f"{comma}[{as_json(name)}, {found.st_size}, {found.st_mtime_ns}]")
                stamps.append(f"{found.st_ino} {found.st_ctime_ns}\n")
                count += 1
                if stat.S_ISREG(found.st_mode):
                    size += found.st_size
                if len(names) == HASHED_TOGETHER:
                    identity.update("".join(names).encode())
                    stamp.update("".join(stamps).encode())
                    names.clear()
                    stamps.clear()
        except OSError as error:
            where = quoted(error.filename)
            raise FileError(f"{self}: cannot be read: {where}: {error.strerror}") from error
        identity.update(f"{''.join(names)}]]".encode())
        stamp.update("".join(stamps).encode())
        digests = identity.hexdigest(), stamp.hexdigest()
        return Snapshot(*digests, place=self.path, count=count, size=size, begun=identity)


_LAST: dict[Path, tuple[float, float, Snapshot]] = {}
"""When the last snapshot of a large folder ended, how many seconds it took, and the snapshot."""
HASHED_TOGETHER = 1000
"""How many files are hashed at once, which is faster than one by one."""


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face Hub.

    Args:
        name: the name in the recipe.
        id, config, revision: what to download.
        searched: the paths and URLs where the data set was not found.
    """

    name: str
    id: str
    config: str | None
    revision: str | None
    searched: tuple[Place, ...] = ()

    def __str__(self) -> str:
        return f"huggingface.co/datasets/{printable(self.id)}"

    def snapshot(self, fresh: bool = True) -> Snapshot:
        """Return the address; without a revision, the first download stays in use."""
        begun = hashlib.sha256(f"[{json.dumps([self.id, self.config, self.revision])}".encode())
        return Snapshot(begun.hexdigest(), begun=begun)


def find(
    source: Source,
    root: Place | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Local | Hub:
    """Return the first location that has a data set: path, local copy, package, Hub.

    A data set at a URL is fetched, once for each process.

    >>> from negmerge.vision.datasets import resolve
    >>> find(resolve("fashion_small")).path.name
    'fashion_small'
    >>> find(resolve("someone/birds", size=64), revision="v2")
    Hub(name='someone/birds', id='someone/birds', config=None, revision='v2', searched=())

    Args:
        source: the data set.
        root: a folder of copies, `<root>/<name>` or `<root>/<Hub id>`, or the URL of one;
            `NEGMERGE_DATA` names a second one.
        revision: branch, tag or commit on the Hub.
        progress: shows how much of a data set at a URL has arrived.
    """
    embedded = ASSETS / source.name
    paths: list[Place] = []
    if source.hub is None and not embedded.is_dir():
        paths.append(source.name if is_url(source.name) else Path(source.name).expanduser())
    for folder in _roots(root) if not is_url(source.name) else ():
        for name in (source.name, source.hub):
            if name:
                paths.append(folder / name if isinstance(folder, Path) else join(folder, name))
    if embedded.is_dir():
        paths.append(embedded)
    for place in paths:
        path = place if isinstance(place, Path) else _fetched(place, progress)
        if path is not None and path.exists():
            inner = path / source.config if source.config else path
            return Local((inner if inner.is_dir() else path).resolve())
    searched = tuple(dict.fromkeys(paths))
    if source.hub is None:
        places = ", ".join(quoted(p if isinstance(p, Path) else shown(p)) for p in searched)
        raise FileError(f"data set {quoted(source.name)}: not found; looked for {places}")
    return Hub(source.name, source.hub, source.config, revision, searched)


def _roots(root: Place | None) -> list[Place]:
    given = {"data.root": root, "NEGMERGE_DATA": os.environ.get("NEGMERGE_DATA")}
    folders: dict[str, Place] = {
        name: folder if is_url(folder) else Path(folder).expanduser()
        for name, folder in given.items()
        if folder
    }
    for name, folder in [*folders.items()][:1]:  # the second folder may be missing
        there = folder.is_dir() if isinstance(folder, Path) else Store(folder).kind == "folder"
        if not there:
            text = folder if isinstance(folder, Path) else shown(folder)
            raise FileError(
                f"{quoted(text)}: no such folder; {name} must name a folder of data sets"
            )
    return list(folders.values())


_FETCHED: dict[str, Path] = {}
"""Where the data sets at URLs are on this machine: a run must not see two versions of one."""


def _fetched(url: str, progress: Progress | None) -> Path | None:
    """Return the path of a data set at a URL on this machine; None if there is none."""
    if url not in _FETCHED:
        store = Store(url)
        if store.kind == "missing":
            return None
        _FETCHED[url] = fetch_all([Wanted(store, store.files())], progress)[0]
    return _FETCHED[url]


def walk(place: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield a file, or all files under a folder without hidden ones, sorted by path, with stats.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Path(folder, "a").mkdir()
    ...     for name in ("a.png", "a/1.png", "b.png", ".c"):
    ...         Path(folder, name).touch()
    ...     [name.removeprefix(folder) for name, _ in walk(Path(folder))]
    ['/a.png', '/a/1.png', '/b.png']
    """
    if place.is_dir():
        yield from _walk(str(place))
    else:
        yield str(place), place.stat()


def _walk(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return  # `datasets` ignores folders that cannot be opened, too
    try:
        with os.scandir(descriptor) as entries:
            # With the "/" of folders, the order is that of the sorted paths.
            listed = sorted(
                (f"{entry.name}/" if _is_folder(entry) else entry.name, entry)
                for entry in entries
                if entry.name[0] != "."
            )
        for name, entry in listed:
            path = f"{folder}/{name}"
            if name[-1] == "/":
                yield from _walk(path[:-1])
                continue
            try:
                found = entry.stat()
            except OSError as error:
                raise OSError(error.errno, error.strerror, path) from None
            yield path, found
    finally:
        os.close(descriptor)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False
