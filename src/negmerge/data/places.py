"""Where a data set lies: a path, a mirror folder, this package, or the Hub.

Nothing heavy is imported here: a cache hit has to know the place, not to read it.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from negmerge.errors import FileError, printable, shown
from negmerge.files import file_digest

if TYPE_CHECKING:
    from negmerge.data.datasets import Source

ASSETS = Path(str(files("negmerge") / "assets"))
READ_AGAIN = 4 << 30
"""Bytes of a set whose files are read to see whether they changed; decoding them takes minutes."""


@dataclass(frozen=True)
class Seen:
    """A place as it was at one moment.

    Args:
        identity: what names a cache entry: for files their names, sizes and times.
        stamp: a hash of what the system notes of every change to a file (inode and ctime); unlike
            the time of the last write, no program can set it back.
        names: the files, if they can be read.
        size: their bytes.
    """

    identity: object
    stamp: str = ""
    names: tuple[str, ...] = ()
    size: int = 0

    @cached_property
    def content(self) -> str | None:
        """A hash of all bytes; None if there are more than `READ_AGAIN`.

        >>> place = getfixture("tmp_path") / "a"
        >>> _ = place.write_bytes(b"1")
        >>> before = Local(place).look().content
        >>> _ = place.write_bytes(b"2")
        >>> Local(place).look().content == before
        False
        """
        if self.size > READ_AGAIN:
            return None
        total = hashlib.sha256()
        for name in self.names:
            total.update(f"{file_digest(Path(name))} {name}\n".encode(errors="surrogateescape"))
        return total.hexdigest()


@dataclass(frozen=True)
class Local:
    """A folder or one parquet file on this machine."""

    path: Path

    def __str__(self) -> str:
        return printable(str(self.path))

    def look(self) -> Seen:
        """Every file's name, size and time, and what the system notes of its last change."""
        found = files_of(self.path) if self.path.is_dir() else [str(self.path)]
        try:
            stats = [(name, os.stat(name)) for name in found]  # noqa: PTH116 - a million files
        except OSError as error:
            where = shown(error.filename)
            raise FileError(f"{self}: cannot be read: {where}: {error.strerror}") from error
        stamp = hashlib.sha256()
        for _, s in stats:
            stamp.update(f"{s.st_ino} {s.st_ctime_ns}\n".encode())
        regular = [(name, s.st_size) for name, s in stats if stat.S_ISREG(s.st_mode)]
        return Seen(
            [str(self.path), [(name, s.st_size, s.st_mtime_ns) for name, s in stats]],
            stamp.hexdigest(),
            tuple(name for name, _ in regular),
            sum(size for _, size in regular),
        )


@dataclass(frozen=True)
class Hub:
    """A data set on the Hugging Face Hub, and where it was sought before."""

    name: str
    id: str
    config: str | None
    revision: str | None
    sought: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return f"huggingface.co/datasets/{printable(self.id)}"

    def look(self) -> Seen:
        """The set's address; without a revision, what was fetched first stays in use."""
        return Seen([self.id, self.config, self.revision])


def find(source: Source, root: Path | None = None, revision: str | None = None) -> Local | Hub:
    """The first place that has the set: path, mirror, package, Hub.

    >>> from negmerge.data.datasets import resolve
    >>> find(resolve("fashion_small")).path.name
    'fashion_small'
    >>> find(resolve("someone/birds", size=64), revision="v2")
    Hub(name='someone/birds', id='someone/birds', config=None, revision='v2', sought=())

    Args:
        source: what to find.
        root: folder of mirrors, `<root>/<name>` or `<root>/<Hub id>`; then `NEGMERGE_DATA`.
        revision: branch, tag or commit on the Hub.
    """
    sought = _candidates(source, root)
    for path in sought:
        if path.exists():
            inner = path / source.config if source.config else path
            return Local((inner if inner.is_dir() else path).resolve())
    if source.hub is None:
        places = ", ".join(shown(path) for path in sought)
        raise FileError(f"data set {shown(source.name)}: not found; looked for {places}")
    return Hub(source.name, source.hub, source.config, revision, tuple(sought))


def _candidates(source: Source, root: Path | None) -> list[Path]:
    paths: list[Path] = []
    embedded = ASSETS / source.name
    if source.hub is None and not embedded.is_dir():
        paths.append(Path(source.name).expanduser())
    for mirrors in _mirrors(root):
        paths += [mirrors / name for name in (source.name, source.hub) if name]
    if embedded.is_dir():
        paths.append(embedded)
    return list(dict.fromkeys(paths))


def _mirrors(root: Path | None) -> list[Path]:
    given = {"data.root": root, "NEGMERGE_DATA": os.environ.get("NEGMERGE_DATA")}
    folders = {name: Path(folder).expanduser() for name, folder in given.items() if folder}
    for name, folder in [*folders.items()][:1]:  # the other one only helps out
        if not folder.is_dir():
            raise FileError(f"{shown(folder)}: no such folder; {name} names a folder of data sets")
    return list(folders.values())


def files_of(folder: Path) -> list[str]:
    """All files under a folder but the hidden ones, in order; as text, for there may be a million.

    >>> (getfixture("tmp_path") / "a").touch()
    >>> [os.path.basename(name) for name in files_of(getfixture("tmp_path"))]
    ['a']
    """
    found: list[str] = []
    for here, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [f"{here}/{name}" for name in names if name[0] != "."]
    return sorted(found)
