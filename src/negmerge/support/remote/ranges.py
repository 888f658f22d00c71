"""Fetching files in ranges, several at a time; a range that fails is fetched again."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from negmerge.errors import FileError
from negmerge.support.files import preallocate, report_write_errors, write_fully
from negmerge.support.parallel import run_in_order
from negmerge.support.progress import Progress
from negmerge.support.remote.stores import RemoteFile, Store

RANGE = 16 << 20
"""The largest number of bytes that are asked for at once."""
STREAMS = 8
"""The number of ranges that are fetched at a time."""
ATTEMPTS, PAUSE = 5, 0.25
"""How often a range is asked for, and the seconds before the second time; they double."""
FINAL = (FileNotFoundError, PermissionError, NotImplementedError, ValueError)
"""Errors that another attempt does not change."""


@dataclass(frozen=True)
class Fetch:
    """A file to fetch, and where to."""

    store: Store
    file: RemoteFile
    target: Path


@dataclass(frozen=True)
class _Range:
    fetch: Fetch
    descriptor: int
    start: int
    stop: int
    last: bool


def fetch_files(fetches: Sequence[Fetch], progress: Progress) -> None:
    """Fetch files into new files, and check their size and the checksum that the store gives.

    Args:
        fetches: the files; the folders of the targets are made.
        progress: is told the bytes that have arrived; its stage has begun.
    """
    with ExitStack() as stack:

        def ranges() -> Iterator[_Range]:
            for fetch in fetches:
                size, target = fetch.file.size, fetch.target
                with _writing(fetch):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                # Closed after the last range; or when all threads have ended, after a failure.
                opened[descriptor] = fetch
                preallocate(descriptor, size)
                for start in range(0, max(size, 1), RANGE):
                    stop = min(start + RANGE, size)
                    yield _Range(fetch, descriptor, start, stop, stop == size)

        opened: dict[int, Fetch] = {}
        stack.callback(lambda: [os.close(descriptor) for descriptor in opened])
        parts = run_in_order(ranges(), _fetch_range, lambda: None, STREAMS)
        for done in stack.enter_context(closing(parts)):
            progress.advance(done.stop - done.start)
            if done.last:
                with _writing(done.fetch):
                    os.fsync(done.descriptor)
                del opened[done.descriptor]
                os.close(done.descriptor)
                done.fetch.store.check_content(done.fetch.file, done.fetch.target)


def _fetch_range(_: None, part: _Range) -> _Range:
    if part.stop > part.start:
        data = _read(part.fetch.store, part.fetch.file, part.start, part.stop)
        with _writing(part.fetch):
            write_fully(part.descriptor, data, part.start)
    return part


@contextmanager
def _writing(fetch: Fetch) -> Iterator[None]:
    """Turn an OSError into an error that names the URL and the folder on this machine."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{fetch.store.where(fetch.file)}: cannot be written to {fetch.target.parent}: "
            f"{error.strerror}; free some space, or use another disk"
        ) from None


def _read(store: Store, file: RemoteFile, start: int, stop: int) -> bytes:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            data = store.read(file, start, stop)
        except Exception as error:  # botocore, aiohttp and others have many types
            if isinstance(error, FINAL) or attempt == ATTEMPTS:
                raise store.failure(error, "" if store.kind == "file" else file.name) from None
        else:
            if len(data) == stop - start:
                return data
            if len(data) > stop - start:
                raise FileError(
                    f"{store.where(file)}: the server does not send ranges of a file, it sent "
                    f"{len(data)} bytes, wanted {stop - start}; download the file first"
                )
            if attempt == ATTEMPTS:
                raise FileError(
                    f"{store.where(file)}: bytes {start} to {stop} came as {len(data)} bytes, "
                    f"{ATTEMPTS} times; run again when the file is complete"
                )
        time.sleep(PAUSE * 2 ** (attempt - 1))
    raise AssertionError


def check_space(folder: Path, need: int, what: str, remedy: str) -> None:
    """Raise if the disk of a folder has too little space for what is to be fetched."""
    with report_write_errors(folder):
        free = shutil.disk_usage(folder).free
    if free < need:
        raise FileError(
            f"{what}: needs {need} bytes, {folder} has {free} free; free some space, or {remedy}"
        )


def check_unchanged(store: Store, before: Sequence[RemoteFile], deep: bool) -> None:
    """Raise if a file of a store has changed since it was looked at."""
    now = {file.name: file for file in store.files(deep)}
    for file in before:
        if (found := now.get(file.name)) is None or (found.size, found.tag) != (
            file.size,
            file.tag,
        ):
            raise FileError(
                f"{store.where(file)}: changed while it was fetched; run again when it is complete"
            )
