"""Writing files and folders so that they appear complete or not at all.

A file or folder is written under a temporary name in the same folder, flushed to the disk and
renamed. The temporary name is fixed, and the temporary file or folder is locked: a second run with
the same output is refused, and the files of a killed run are reused by the next run. A lock needs
no file of its own, except on NFS, where a folder cannot be locked: there a run locks the file
`.lock` in its folder, which stays after the run and blocks nothing.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from negmerge.errors import FileError, quoted
from negmerge.support.interrupts import delay_interrupts
from negmerge.support.reading import open_regular
from negmerge.support.remote.urls import refuse_url
from negmerge.support.systems import (
    BINARY,
    FOLDER,
    LIBC,
    NO_FOLLOW,
    NO_WAIT,
    POSIX,
    fcntl,
    resource,
    write_at,
)

TEMPORARY_SUFFIX = ".negmerge-tmp"
LOCK = ".lock"
"""The file that is locked instead of its folder where folders cannot be locked."""
SCRATCH = ".negmerge-scratch-"
"""The beginning of the names of folders for work in progress."""
NOTHING = -1
"""Instead of a descriptor: nothing is open, or the system opens no folders."""
_worker = ""
"""The part of temporary names that belongs to this worker; see `use_own_names`."""


def use_own_names(worker: str) -> None:
    """Write under temporary names that no other process uses, and lock nothing, from now on.

    For workers on several machines that share a folder: file systems of networks do not promise
    locks. Two workers may write the same file, and the one that ends last replaces it; they must
    write the same bytes.

    Args:
        worker: hexadecimal digits that no other worker has.
    """
    global _worker
    _worker = f"~{worker}"


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files that workers with names of their own left in a folder."""
    with report_write_errors(folder):
        for path in folder.rglob(f".*~*{TEMPORARY_SUFFIX}"):
            if path.is_file():
                path.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """The temporary name of a file or folder.

    >>> temporary_path(Path("out/patch.safetensors")).name
    '.patch.safetensors.negmerge-tmp'
    """
    if path.name in ("", "..") or "\0" in str(path):
        raise FileError(f"{quoted(path)}: cannot be the name of an output; name a file or folder")
    return path.with_name(f".{path.name}{_worker}{TEMPORARY_SUFFIX}")


@contextmanager
def atomic_file(path: Path, *, durable: bool = True) -> Iterator[int]:
    """A descriptor for writing; the file appears only if the block succeeds.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_file(Path(folder, "a")) as descriptor:
    ...         write_fully(descriptor, b"complete")
    ...     Path(folder, "a").read_text()
    'complete'

    Args:
        path: the file.
        durable: whether to flush the file to the disk, so that it survives a power cut.
    """
    with _renamed(Path(path), folder=False, durable=durable) as descriptor:
        os.ftruncate(descriptor, 0)
        yield descriptor
        if durable:
            os.fsync(descriptor)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` only if the block succeeds.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_folder(Path(folder, "model")) as temporary_folder:
    ...         _ = (temporary_folder / "config.json").write_text("{}")
    ...     Path(folder, "model", "config.json").read_text()
    '{}'
    """
    with _renamed(Path(path), folder=True, durable=True):
        yield temporary_path(Path(path))


@contextmanager
def kept_file(path: Path, waiting: Path) -> Iterator[int]:
    """Like `atomic_file`, with a temporary file that stays if the block fails, to be continued.

    Args:
        path: the file.
        waiting: the temporary file, in a folder on the same disk that the caller has locked. If it
            exists, it keeps its content.
    """
    with report_write_errors(path):
        _check_output(path, folder=False)
        descriptor = os.open(waiting, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        waiting.replace(path)
        sync_to_disk(path.parent)


@contextmanager
def kept_folder(path: Path, waiting: Path) -> Iterator[Path]:
    """Like `atomic_folder`, with a temporary folder that stays if the block fails.

    The arguments are like those of `kept_file`.
    """
    with report_write_errors(path):
        _check_output(path, folder=True)
        waiting.mkdir(exist_ok=True)
        yield waiting
        for file in waiting.iterdir():
            sync_to_disk(file)
        sync_to_disk(waiting)
        waiting.replace(path)
        sync_to_disk(path.parent)


@contextmanager
def _renamed(path: Path, *, folder: bool, durable: bool) -> Iterator[int]:
    """Lock the temporary file or folder; rename it after the block, or remove it on failure."""
    waiting, descriptor, own = temporary_path(path), NOTHING, False
    try:
        with report_write_errors(path):
            _check_output(path, folder)
            with delay_interrupts():
                descriptor, own = _open_locked(waiting, folder), True
            yield descriptor
            if not POSIX:  # Windows renames no open file, and no folder onto another
                descriptor = _close(descriptor)
                if folder and path.exists():
                    path.rmdir()
            waiting.replace(path)
            if durable:
                sync_to_disk(path.parent)
    except BaseException:
        if not POSIX:  # Windows removes no open file
            descriptor = _close(descriptor)
        if own:  # otherwise it may belong to another run
            if folder:
                shutil.rmtree(waiting, ignore_errors=True)
            else:
                waiting.unlink(missing_ok=True)
        raise
    finally:
        _close(descriptor)


def _close(descriptor: int) -> int:
    """Close a descriptor unless it is NOTHING; return NOTHING."""
    if descriptor != NOTHING:
        os.close(descriptor)
    return NOTHING


def _check_output(path: Path, folder: bool) -> None:
    if not path.parent.is_dir():
        refuse_url(
            path, "outputs are on this machine; name a file or folder, and copy it afterwards"
        )
        raise FileError(f"{path}: the folder {path.parent} does not exist; create it first")
    if folder:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileError(f"{path}: exists and is not an empty folder; remove it or name another")
    elif path.is_dir():
        raise FileError(f"{path}: is a folder; name a file")
    elif path.exists() and not path.is_file():
        raise FileError(f"{path}: is not a regular file; name another")


def _open_locked(path: Path, folder: bool) -> int:
    """Create and lock a temporary file or folder, or reuse the one that a killed run left.

    Returns the descriptor; NOTHING for a folder where folders cannot be opened.
    """
    if folder and not POSIX:
        path.mkdir(exist_ok=True)
        _empty(path)
        return NOTHING
    kind = os.O_RDONLY | FOLDER if folder else os.O_RDWR | os.O_CREAT | NO_WAIT | BINARY
    while True:
        if folder:
            with suppress(FileExistsError):
                path.mkdir()
        try:
            # A link with the temporary name could lead to data that must not be overwritten.
            descriptor = os.open(path, kind | NO_FOLLOW, 0o666)
        except OSError as error:
            if not folder:
                raise
            if isinstance(error, FileNotFoundError):
                continue
            raise FileError(f"{path}: exists and is not a folder; remove it") from None
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            if not _worker:
                _lock(descriptor, path, wait=False)
            found = os.fstat(descriptor)
            if not folder and not stat.S_ISREG(found.st_mode):
                raise FileError(f"{path}: exists and is not a regular file; remove it")
            # Another run may have renamed or removed the file between open and lock.
            with suppress(FileNotFoundError):
                if os.path.samestat(found, path.stat()):
                    if folder:
                        _empty(path)
                    stack.pop_all()
                    return descriptor


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def scratch_folder(place: Path) -> Iterator[Path]:
    """A folder in `place` that is removed at the end of the block, with those of killed runs.

    >>> with scratch_folder(Path(tempfile.gettempdir())) as folder:
    ...     folder.is_dir()
    True
    >>> folder.exists()
    False
    """
    with report_write_errors(place):
        for left in place.glob(f"{SCRATCH}*"):
            _remove_abandoned(left)
        path, descriptor = _make_scratch(place)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _make_scratch(place: Path) -> tuple[Path, int]:
    """Make and lock a folder that only this user can read."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))
        # Another run may take the folder for abandoned, and remove it, until it is locked.
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | FOLDER | NO_FOLLOW)
            _lock(descriptor, path, wait=True)
            if path.exists():
                return path, descriptor
            os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Remove a folder of `scratch_folder` whose run was killed."""
    with suppress(OSError, FileError):  # in use, of another user, or removed meanwhile
        descriptor = os.open(path, os.O_RDONLY | FOLDER | NO_FOLLOW)
        try:
            own = os.fstat(descriptor).st_uid == os.geteuid()
            if own and _lock(descriptor, path, wait=False):  # on NFS nobody knows
                shutil.rmtree(path)
        finally:
            os.close(descriptor)


@contextmanager
def lock_folder(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Lock an existing folder, so that one process at a time works in it; wait for it, or raise.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, lock_folder(Path(folder), wait=False):
    ...     pass
    """
    if not POSIX:
        raise FileError(f"{folder}: folders cannot be locked on this system; run this on Linux")
    with ExitStack() as stack:
        with report_write_errors(folder):
            descriptor = os.open(folder, os.O_RDONLY | FOLDER)
            stack.callback(os.close, descriptor)
            if not _lock(descriptor, folder, wait):
                descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | NO_FOLLOW, 0o666)
                stack.callback(os.close, descriptor)
                _lock(descriptor, folder, wait)
        yield


def _lock(descriptor: int, path: Path, wait: bool) -> bool:
    """Lock an open file or folder; False for a folder on NFS, which cannot be locked.

    On Windows nothing is locked.
    """
    if not POSIX:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise FileError(f"{path}: another run is writing this output; wait for it") from None
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return False
    return True


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a FileError that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise FileError(f"{where}: cannot write: {error.strerror or error}") from error


def write_fully(descriptor: int, data: bytes | memoryview, offset: int | None = None) -> None:
    """Write all bytes, at an offset or at the current position."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        if offset is None:
            done = os.write(descriptor, view)
        else:
            done = write_at(descriptor, view, offset)
            offset += done
        view = view[done:]


def preallocate(descriptor: int, nbytes: int) -> None:
    """Reserve disk space for a file, which makes writing faster; failure is ignored.

    The size of the file grows only with writing: after a power cut the file is too short, and not
    filled with zeros.
    """
    keep_size = 1  # FALLOC_FL_KEEP_SIZE
    if hasattr(LIBC, "fallocate"):  # Linux
        LIBC.fallocate(descriptor, keep_size, ctypes.c_int64(0), ctypes.c_int64(nbytes))


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically."""
    with atomic_file(path) as descriptor:
        write_fully(descriptor, data)


def link_or_copy(source: Path, path: Path) -> None:
    """Make a hard link to a finished file, or a copy where links are impossible; atomically."""
    waiting = temporary_path(path)
    with report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting.unlink(missing_ok=True)
        try:
            os.link(source, waiting)
        except OSError:  # another disk, or a file system without links
            shutil.copyfile(source, waiting)
        waiting.replace(path)


def file_digest(*paths: Path | str) -> str:
    """The SHA-256 of a file, or of several files joined, in hexadecimal."""
    digest = hashlib.sha256()
    for path in paths:
        with os.fdopen(open_regular(path), "rb") as file:
            try:
                hashlib.file_digest(file, lambda: digest)
            except OSError as error:
                raise FileError(f"{path}: cannot read: {error.strerror}") from None
    return digest.hexdigest()


def sync_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk.

    Windows flushes only files that are open for writing, and no folders.
    """
    if not POSIX:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def same_file(one: Path, two: Path) -> bool:
    """Whether two paths are one existing file."""
    try:
        return one.samefile(two)
    except (OSError, ValueError):
        return False


def raise_open_file_limit() -> None:
    """Raise the limit of open files as far as the system allows, for pools of sharded models."""
    if resource is None:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError):  # macOS allows fewer than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
