"""Fetched files on this machine: fetched once, used by several processes, removed when in the way.

    SCRATCH/URL/VERSION/content/NAME    the file or folder; complete, because VERSION is renamed
    SCRATCH/URL/VERSION/entry.json      the URL without secrets; names, sizes and tags of the files
    SCRATCH/URL/VERSION/lock            every process that uses the entry holds a shared lock
    SCRATCH/URL/lock                    a process that fetches the URL holds the lock

URL and VERSION are hashes: of the URL, and of names, sizes and tags. An entry never changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from negmerge.errors import FileError, show_instead
from negmerge.support.files import (
    link_or_copy,
    raise_open_file_limit,
    report_write_errors,
    write_file,
)
from negmerge.support.progress import Progress, Quiet
from negmerge.support.reading import MAX_LIST, read_json
from negmerge.support.remote.hub import SCHEME, hub_source
from negmerge.support.remote.ranges import Fetch, check_space, check_unchanged, fetch_files
from negmerge.support.remote.stores import RemoteFile, Store
from negmerge.support.remote.urls import name_of, parent_of
from negmerge.support.systems import NO_FOLLOW, POSIX, fcntl

NEW = ".new-"
"""The beginning of the names of folders that are being fetched."""
SPARE = 0.05
"""The share of the disk that entries nobody uses make way for."""
WRITTEN = 315532800
"""The time of every fetched file, in seconds since 1970: the version is in its path."""
_used: dict[Path, int] = {}
"""The entries that this process uses, with the descriptors of their locks."""
_turn = threading.Lock()


def scratch() -> Path:
    """Return the folder of fetched files: `NEGMERGE_SCRATCH`, or one in the user's cache."""
    if named := os.environ.get("NEGMERGE_SCRATCH"):
        return Path(named).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser().absolute() / "negmerge" / "remote"


def url_of(path: Path) -> str | None:
    """Return the URL of a fetched file or folder, without secrets; None for other paths.

    >>> url_of(Path("pool/a.safetensors")) is None
    True
    """
    path = path.absolute()
    if path.parent.name != "content" or not path.is_relative_to(scratch()):
        return None
    with suppress(FileError, KeyError):
        return str(read_json(path.parent.parent / "entry.json", MAX_LIST)["url"])
    return None


def given_name(path: Path) -> str:
    """Return how a command names a model: by the last part of its path, or by id and commit.

    >>> given_name(Path("pool/a.safetensors"))
    'a.safetensors'
    """
    source = hub_source(url_of(path) or "")
    if source is None:
        return path.absolute().name
    return source if source.count("/") == 1 else f"{SCHEME}{source}"


def local(url: str, progress: Progress | None = None, deep: bool = True) -> Path:
    """Fetch a file or folder if it is not here, and return its path on this machine.

    Args:
        url: the file or folder.
        progress: shows how much has arrived.
        deep: whether the files of folders in the folder are fetched, too.
    """
    store = Store(url)
    return fetch_all([Wanted(store, store.files(deep), deep)], progress)[0]


@dataclass(frozen=True)
class Wanted:
    """A file, or some files of a folder, as they were when the store was asked."""

    store: Store
    files: list[RemoteFile]
    deep: bool = True


def fetch_all(wanted: Sequence[Wanted], progress: Progress | None = None) -> list[Path]:
    """Fetch what is not here, and return the paths of files and folders on this machine.

    An entry stays until this process ends.
    """
    if not POSIX:
        raise FileError(
            f"{wanted[0].store.shown}: URLs need locks, which this system lacks; copy it"
        )
    raise_open_file_limit()
    shows, root = progress or Quiet(), scratch()
    entries = [Entry(root, one) for one in wanted]
    with _turn, ExitStack() as stack:
        missing: dict[Path, Entry] = {}
        locked: set[Path] = set()
        # In one order, so that two processes never wait for each other.
        for entry in sorted(entries, key=lambda entry: entry.place):
            if entry.place in missing or entry.use():
                continue
            if entry.home not in locked:
                stack.enter_context(entry.fetching(shows))
                locked.add(entry.home)
            if not entry.use():  # another process may have fetched it while this one waited
                missing[entry.place] = entry
        if missing:
            _fetch(root, [*missing.values()], shows)
    return [entry.path for entry in entries]


def _fetch(root: Path, entries: Sequence[Entry], progress: Progress) -> None:
    fetches = [fetch for entry in entries for fetch in entry.begin()]
    need = sum(fetch.file.size for fetch in fetches)
    make_room(root, need, entries[0].wanted.store.shown, {entry.home for entry in entries})
    if fetches:
        progress.stage("fetching", need)
    try:
        fetch_files(fetches, progress)
    except FileError:
        for entry in entries:  # a file that is replaced can fail in many ways
            entry.check_unchanged()
        raise
    for entry in entries:
        entry.check_unchanged()
        entry.end()


class Entry:
    """One version of a URL in the scratch folder, which need not be there."""

    def __init__(self, root: Path, wanted: Wanted) -> None:
        self.wanted, self.url = wanted, wanted.store.url
        listing = [[file.name, file.size, file.tag] for file in wanted.files]
        # Without a tag nobody knows whether a file has changed: it is used by this process only.
        known = all(file.tag for file in wanted.files)
        self.record = {"url": wanted.store.shown, "files": listing}
        version = _hash([wanted.store.kind, listing, "" if known else uuid.uuid4().hex])
        self.home = root / _hash(self.url)
        self.place = self.home / version
        self.new = self.home / f"{NEW}{version}"
        self.path = self.place / "content" / name_of(self.url)

    def target(self, place: Path, file: RemoteFile) -> Path:
        """The path of a file, in `place` or in `new`."""
        path = place / "content" / name_of(self.url)
        return path if self.wanted.store.kind == "file" else path / file.name

    def use(self) -> bool:
        """Lock the entry until the process ends; False if it is not here or not complete."""
        show_instead(str(self.place / "content"), parent_of(self.url))
        if not self._is_complete():
            return False
        path = self.place / "lock"
        try:
            with _reporting_locks(self.place):
                if self.place not in _used:
                    descriptor = _lock(path, fcntl.LOCK_SH | fcntl.LOCK_NB, create=False)
                    _used[self.place] = descriptor
                os.utime(path)  # the time of the last use
                # Another process may have removed the entry before it was locked.
                return os.path.samestat(os.fstat(_used[self.place]), path.stat())
        except (FileNotFoundError, BlockingIOError):
            return False

    def _is_complete(self) -> bool:
        """Whether the files have their sizes: an entry can be damaged by a power cut."""
        with suppress(OSError):
            files = self.wanted.files
            sizes = all(self.target(self.place, f).stat().st_size == f.size for f in files)
            return sizes and self.path.exists()
        return False

    @contextmanager
    def fetching(self, progress: Progress) -> Iterator[None]:
        """Lock the URL, or wait for the process that fetches it."""
        with report_write_errors(self.home):
            self.home.mkdir(parents=True, exist_ok=True)
        with _reporting_locks(self.home):
            path = self.home / "lock"
            try:
                descriptor = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                shown = self.wanted.store.shown
                progress.note(f"waiting for another process that fetches {shown}")
                descriptor = _lock(path, fcntl.LOCK_EX)
        try:
            self._clean()
            yield
        finally:
            self._clean()
            os.close(descriptor)

    def _clean(self) -> None:
        """Remove the folders that this process, or a killed one, did not complete."""
        for left in self.home.glob(f"{NEW}*"):
            shutil.rmtree(left, ignore_errors=True)

    def begin(self) -> list[Fetch]:
        """Make the new folder, with the files that other versions have; return the others."""
        with report_write_errors(self.new):
            self.new.mkdir()
            if self.wanted.store.kind == "folder":  # also without files
                (self.new / "content" / name_of(self.url)).mkdir(parents=True)
        known = self._known_files() if self.wanted.store.kind == "folder" else {}
        missing: list[Fetch] = []
        for file in self.wanted.files:
            target = self.target(self.new, file)
            with suppress(KeyError, FileError):  # the other version may be removed meanwhile
                if file.tag:
                    link_or_copy(known[file.name, file.size, file.tag], target)
                    continue
            missing.append(Fetch(self.wanted.store, file, target))
        return missing

    def _known_files(self) -> dict[tuple[str, int, str], Path]:
        """The files of other versions of the folder, by name, size and tag."""
        found: dict[tuple[str, int, str], Path] = {}
        for record in self.home.glob("*/entry.json"):
            with suppress(FileError, KeyError, TypeError, ValueError, OSError):
                for name, size, tag in read_json(record, MAX_LIST)["files"]:
                    path = record.parent / "content" / name_of(self.url) / name
                    if path.is_file() and path.stat().st_size == size:
                        found[name, size, tag] = path
        return found

    def check_unchanged(self) -> None:
        """Raise if the store has other files now."""
        check_unchanged(self.wanted.store, self.wanted.files, self.wanted.deep)

    def end(self) -> None:
        """Rename the new folder, which is complete, and use it."""
        with report_write_errors(self.new):
            for file in self.wanted.files:
                os.utime(self.target(self.new, file), (WRITTEN, WRITTEN))
        write_file(self.new / "entry.json", (json.dumps(self.record) + "\n").encode())
        with report_write_errors(self.place):
            # The lock is taken before the folder has its name: nobody can remove it in between.
            descriptor = _lock(self.new / "lock", fcntl.LOCK_SH)
            if self.place.exists():  # not complete
                shutil.rmtree(self.place)
            self.new.rename(self.place)
            if (before := _used.pop(self.place, None)) is not None:
                os.close(before)
            _used[self.place] = descriptor


def make_room(root: Path, need: int, what: str, locked: Collection[Path]) -> None:
    """Remove entries that no process uses, the longest unused first, if space is scarce.

    They are removed until `SPARE` of the disk would be free afterwards. Raises if the disk has too
    little space for `need` bytes even so.

    Args:
        root: the scratch folder.
        what: the URL that needs the bytes, for the error.
        locked: the folders of URLs that this process has locked.
    """
    with report_write_errors(root):
        for _, place in sorted(_entries(root, locked)):
            usage = shutil.disk_usage(root)
            if usage.free - need >= SPARE * usage.total:
                break
            _remove_unused(place, locked)
    check_space(root, need, what, "set NEGMERGE_SCRATCH to a folder on another disk")


def remove_unused(root: Path) -> None:
    """Remove all entries that no process uses."""
    for _, place in [*_entries(root, ())]:
        if (place / "entry.json").is_file() or place.name.startswith(NEW):
            _remove_unused(place, ())


def _entries(root: Path, locked: Collection[Path]) -> Iterator[tuple[float, Path]]:
    """Yield the time of the last use of each entry, and its folder; what was not completed first.

    The new folders of this process are not among them.
    """
    for place in root.glob("*/*/"):
        is_new = place.name.startswith(NEW)
        if not (is_new and place.parent in locked):
            with suppress(FileNotFoundError):
                yield 0.0 if is_new else (place / "lock").stat().st_mtime, place


def _remove_unused(place: Path, locked: Collection[Path]) -> None:
    """Remove an entry, unless a process uses it or fetches the same URL."""
    locks = [] if place.parent in locked else [place.parent / "lock"]
    locks += [] if place.name.startswith(NEW) else [place / "lock"]
    with suppress(OSError), ExitStack() as stack:
        for path in locks:
            stack.callback(os.close, _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB, create=False))
        shutil.rmtree(place)


def _lock(path: Path, how: int, create: bool = True) -> int:
    """Open a file and lock it; return the descriptor, which holds the lock."""
    made = os.O_CREAT if create else 0
    descriptor = os.open(path, os.O_RDWR | NO_FOLLOW | os.O_CLOEXEC | made, 0o666)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _reporting_locks(path: Path) -> Iterator[None]:
    """As `report_write_errors`, but a missing file and a lock of another process pass."""
    try:
        yield
    except (FileNotFoundError, BlockingIOError):
        raise
    except OSError as error:
        raise FileError(f"{path}: cannot lock: {error.strerror}") from None


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
