"""Files that appear whole or not at all.

A file or folder is written under a temporary name beside its place, flushed to the disk and
renamed. The temporary name is fixed, and the temporary file or folder itself is locked: a second
run on the same output is refused, and what a killed run left behind is taken over by the next one.
No lock has a file of its own, so none can stay behind, but on NFS, where a folder cannot be locked:
there a run locks the file `.lock` in its folder, which stays and blocks nothing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from negmerge.errors import FileError, shown
from negmerge.interrupts import undisturbed
from negmerge.reading import open_regular

SUFFIX = ".negmerge-tmp"
LOCK = ".lock"
"""A file in a folder that is locked in its place, where folders cannot be locked."""
_LIBC = ctypes.CDLL(None)


def temporary(path: Path) -> Path:
    """The name under which a file waits until it is whole.

    >>> temporary(Path("out/patch.safetensors")).name
    '.patch.safetensors.negmerge-tmp'
    """
    if path.name in ("", "..") or "\0" in str(path):
        raise FileError(f"{shown(path)}: cannot be the name of an output; name a file or folder")
    return path.with_name(f".{path.name}{SUFFIX}")


@contextmanager
def atomic(path: Path, *, durable: bool = True) -> Iterator[int]:
    """Open a descriptor for writing; the file takes its name only if the block succeeds.

    >>> with atomic(getfixture("tmp_path") / "a") as fd:
    ...     write(fd, b"whole")

    durable: wait for the disk, so that the file survives a power cut too.
    """
    path = Path(path)
    waiting, descriptor = temporary(path), None
    try:
        with told_plainly(path):
            with undisturbed():
                descriptor = _open_locked(path)
            yield descriptor
            if durable:
                os.fsync(descriptor)
            waiting.replace(path)
            if durable:
                sync(path.parent)
    except BaseException:
        if descriptor is not None:  # else it may be another run's
            waiting.unlink(missing_ok=True)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` only if the block succeeds.

    >>> with atomic_folder(getfixture("tmp_path") / "model") as folder:
    ...     _ = (folder / "config.json").write_text("{}")
    """
    path = Path(path)
    waiting, descriptor = temporary(path), None
    try:
        with told_plainly(path):
            with undisturbed():
                _need_empty(path)
                descriptor = _make_locked(waiting)
            yield waiting
            waiting.replace(path)
            sync(path.parent)
    except BaseException:
        if descriptor is not None:  # else it may be another run's
            shutil.rmtree(waiting, ignore_errors=True)
        raise
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def alone_in(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Let one process at a time work in a folder, which must be there.

    >>> with alone_in(getfixture("tmp_path"), wait=False):
    ...     pass

    wait: for the process that works there; otherwise this is an error.
    """
    with ExitStack() as stack:
        with told_plainly(folder):
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            if not _lock(descriptor, folder, wait):
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(folder / LOCK, flags, 0o666)
                stack.callback(os.close, descriptor)
                _lock(descriptor, folder, wait)
        yield


@contextmanager
def told_plainly(path: Path) -> Iterator[None]:
    """Turn a failure of the disk into one line that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise FileError(f"{where}: cannot write: {error.strerror or error}") from error


def write(descriptor: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all of it, at an offset or at the end."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        if offset is None:
            done = os.write(descriptor, view)
        else:
            done = os.pwrite(descriptor, view, offset)
            offset += done
        view = view[done:]


def reserve(descriptor: int, nbytes: int) -> None:
    """Ask for the room of a file at once, which makes writing it faster; a mere hint.

    The file grows only as it is written: after a power cut it is short, not full of zeros.
    """
    keep_size = 1  # FALLOC_FL_KEEP_SIZE
    _LIBC.fallocate(descriptor, keep_size, ctypes.c_int64(0), ctypes.c_int64(nbytes))


def write_file(path: Path, data: bytes) -> None:
    """Write a small file in one go, atomically."""
    with atomic(path) as descriptor:
        write(descriptor, data)


def take_over(source: Path, path: Path) -> None:
    """Give a finished file a second name, or copy it where it cannot have one; atomically."""
    waiting = temporary(path)
    with told_plainly(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting.unlink(missing_ok=True)
        try:
            os.link(source, waiting)
        except OSError:  # another disk, or one without links
            shutil.copyfile(source, waiting)
        waiting.replace(path)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise FileError(f"{path}: cannot read: {error.strerror}") from None


def sync(path: Path) -> None:
    """Make a file, or a rename in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_locked(path: Path) -> int:
    _need_folder(path)
    if path.is_dir():
        raise FileError(f"{path}: is a folder; name a file")
    if path.exists() and not path.is_file():
        raise FileError(f"{path}: is not a regular file; name another")
    descriptor = _open_and_lock(temporary(path))
    os.ftruncate(descriptor, 0)
    return descriptor


def same_file(one: Path, two: Path) -> bool:
    """Whether two names are one existing file."""
    try:
        return one.samefile(two)
    except (OSError, ValueError):
        return False


def _need_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise FileError(f"{path}: the folder {path.parent} does not exist; make it first")


def _need_empty(path: Path) -> None:
    _need_folder(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileError(f"{path}: exists and is not an empty folder; remove it or name another")


def _make_locked(waiting: Path) -> int:
    """Make the temporary folder, or take over and empty one that a killed run left; locked."""
    while True:
        with suppress(FileExistsError):
            waiting.mkdir()
        try:
            # A link under the temporary name could lead to a folder that must not be emptied.
            descriptor = os.open(waiting, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError:
            raise FileError(f"{waiting}: is in the way and not a folder; remove it") from None
        try:
            _lock(descriptor, waiting, wait=False)
            # Another run may have renamed or removed the folder between open and lock.
            if os.path.samestat(os.fstat(descriptor), waiting.stat()):
                for path in waiting.iterdir():
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, folder: Path, wait: bool) -> bool:
    """Lock a folder by an open descriptor; False on NFS, which locks only what can be written."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise FileError(f"{folder}: another run is writing this output; wait for it") from None
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return False
    return True


def _open_and_lock(path: Path) -> int:
    while True:
        # A link under the temporary name could lead to a file that must not be overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another run may have renamed or removed the file between open and lock.
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                os.close(descriptor)
                raise FileError(f"{path}: is in the way and not a regular file; remove it")
            if os.path.samestat(found, path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise FileError(f"{path}: another run is writing this output; wait for it") from None
        except FileNotFoundError:
            pass
        os.close(descriptor)
