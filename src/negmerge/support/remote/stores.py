"""What a store says of a URL: whether it is a file or a folder, its files, sizes and versions."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from negmerge.errors import FileError, NegMergeError, OptionError, one_line, printable, quoted
from negmerge.support.reading import open_regular
from negmerge.support.remote.urls import checked, is_http, join, shown

MAX_FILES = 1_000_000
"""The largest number of files of a folder."""
CONTENT_TAGS = ("ETag", "etag", "md5Hash", "content_md5", "generation", "blob_id", "VersionId")
"""What stores call a value that changes with the content of a file."""
TIMES = ("mtime", "LastModified", "Last-Modified", "last_modified", "modified", "updated", "ino")
"""What stores call the time of the last change; an inode is another file of the same time."""
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


@dataclass(frozen=True)
class RemoteFile:
    """A file of a store.

    Args:
        path: its path in the store.
        name: its name below the URL, with slashes; the last part of the URL if that is the file.
        size: the number of bytes.
        tag: changes with the content; empty if the store does not tell.
        info: all that the store says.
    """

    path: str
    name: str
    size: int
    tag: str
    info: Mapping[str, Any] = field(compare=False, repr=False)


class Store:
    """A URL, and the file system of fsspec that it belongs to.

    >>> import fsspec
    >>> fsspec.filesystem("memory").pipe_file("/pool/a.bin", b"abc")
    >>> Store("memory://pool").files()[0].name, Store("memory://pool/a.bin").kind
    ('a.bin', 'file')

    Args:
        url: as the user wrote it; errors show it without secrets.
    """

    def __init__(self, url: str) -> None:
        self.url = checked(url)
        self.shown = shown(self.url)
        import fsspec

        try:
            fs, path = fsspec.core.url_to_fs(self.url)
        except ImportError as error:  # such as: Install s3fs to access S3
            raise OptionError(f"{self.shown}: {one_line(error)}") from None
        except ValueError as error:
            raise OptionError(f"{self.shown}: {one_line(error)}") from None
        except Exception as error:  # a file system may connect already
            raise self.failure(error) from None
        self.fs: Any = fs
        self.path = str(path)

    def failure(self, error: Exception, name: str = "", what: str = "cannot be read") -> FileError:
        """Return the error for an exception of the store, in one line without secrets."""
        where = join(self.shown, printable(name)) if name else self.shown
        if isinstance(error, FileNotFoundError):
            return FileError(f"{where}: no such file or folder")
        why = one_line(error)
        if isinstance(error, PermissionError):
            return FileError(f"{where}: {what}: {why}; check the credentials of this store")
        return FileError(f"{where}: {what}: {why}")

    @contextmanager
    def reporting(self, name: str = "", what: str = "cannot be read") -> Iterator[None]:
        """Turn the exceptions of a block into a `FileError`."""
        try:
            yield
        except NegMergeError:
            raise
        except Exception as error:  # botocore, aiohttp and others have many types
            raise self.failure(error, name, what) from None

    # ------------------------------------------------------------------------------------- looking

    @cached_property
    def kind(self) -> Literal["file", "folder", "missing"]:
        """What the URL is, when it was first asked."""
        try:
            return "folder" if self._info()["type"] == "directory" else "file"
        except FileNotFoundError:
            return "missing"
        except Exception as error:  # as in `reporting`
            raise self.failure(error) from None

    def files(self, deep: bool = True) -> list[RemoteFile]:
        """Return the file, or the files of the folder, sorted by name.

        Args:
            deep: whether the files of folders in the folder are among them.
        """
        with self.reporting():
            if self.kind == "missing":
                raise FileNotFoundError
            if self.kind == "file":
                return [self._file(self._info(), self.shown.rpartition("/")[2])]
            self.fs.invalidate_cache()
            if deep:
                infos = [*self.fs.find(self.path, detail=True).values()]
            else:
                infos = [i for i in self.fs.ls(self.path, detail=True) if i["type"] != "directory"]
            # Some stores have an empty object for the folder itself.
            infos = [i for i in infos if not str(i["name"]).endswith("/")]
        if len(infos) > MAX_FILES:
            raise FileError(f"{self.shown}: has more than {MAX_FILES:,} files, which is the limit")
        prefix = self.fs._strip_protocol(self.path).rstrip("/") + "/"
        found = [self._file(info, str(info["name"]).removeprefix(prefix)) for info in infos]
        check_names([file.name for file in found], self.shown)
        return sorted(found, key=lambda file: file.name)

    def names(self, pattern: str) -> list[str]:
        """Return the sorted names in this folder that match a pattern such as `*.safetensors`."""
        with self.reporting():
            self.fs.invalidate_cache()
            paths = [str(path).rstrip("/") for path in self.fs.ls(self.path, detail=False)]
        wanted = re.compile(".*".join(map(re.escape, pattern.split("*"))))
        names = (path.rpartition("/")[2] for path in paths)
        found = sorted(name for name in names if wanted.fullmatch(name))
        check_names(found, self.shown)
        return found

    def _info(self) -> dict[str, Any]:
        self.fs.invalidate_cache()
        return self.fs.info(self.path)

    def _file(self, info: Mapping[str, Any], name: str) -> RemoteFile:
        where = self.shown if self.kind == "file" else join(self.shown, printable(name))
        if info["type"] != "file":
            raise FileError(f"{where}: is neither a file nor a folder; remove it, or copy the file")
        if not isinstance(info.get("size"), int):
            raise FileError(f"{where}: the store does not tell its size; download it first")
        return RemoteFile(str(info["name"]), name, info["size"], tag_of(info), info)

    # ------------------------------------------------------------------------------------- reading

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Return a range of a file; raises what the store raises."""
        if is_http(self.url):  # `cat_file` would read all that a server sends that ignores ranges
            options = {"cache_type": "none", "size": file.size}
            with self.fs.open(file.path, "rb", **options) as opened:
                opened.seek(start)
                return opened.read(stop - start)
        return self.fs.cat_file(file.path, start=start, end=stop)

    def check_content(self, file: RemoteFile, path: Path) -> None:
        """Raise unless a local file has the checksum that the store gives, if it gives one."""
        for algorithm, wanted in checksums(file.info).items():
            found = digest(path, algorithm, file.size)
            if found != wanted and not (algorithm == "md5" and self._is_encrypted(file)):
                raise FileError(
                    f"{self.where(file)}: the bytes that arrived have {algorithm} {found}, the "
                    f"store says {wanted}; run again"
                )

    def where(self, file: RemoteFile) -> str:
        """The URL of a file, as errors show it."""
        return self.shown if self.kind == "file" else join(self.shown, file.name)

    def _is_encrypted(self, file: RemoteFile) -> bool:
        """Whether S3 encrypts an object with a key; then its entity tag is not its MD5."""
        if not hasattr(self.fs, "call_s3"):
            return False
        bucket, key, _ = self.fs.split_path(file.path)
        with self.reporting(file.name):
            head = self.fs.call_s3("head_object", Bucket=bucket, Key=key)
        return "SSECustomerAlgorithm" in head or "kms" in head.get("ServerSideEncryption", "")


def tag_of(info: Mapping[str, Any]) -> str:
    """Return what tells one version of a file from another; empty if the store does not tell.

    >>> tag_of({"name": "a", "ETag": '"1f"', "LastModified": "today"})
    'ETag="1f"'
    >>> tag_of({"name": "a", "size": 3})
    ''
    """
    for names in (CONTENT_TAGS, TIMES, ("created",)):
        if found := [f"{name}={info[name]}" for name in names if info.get(name)]:
            return " ".join(found)
    return ""


def checksums(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksums of a file that its store gives, by algorithm, in hexadecimal.

    The entity tag of S3 is an MD5 unless the object was sent in parts; the tag then has a dash.

    >>> checksums({"ETag": '"900150983cd24fb0d6963f7d28e17f72"', "StorageClass": "STANDARD"})
    {'md5': '900150983cd24fb0d6963f7d28e17f72'}
    >>> checksums({"ETag": '"900150983cd24fb0d6963f7d28e17f72-2"', "StorageClass": "STANDARD"})
    {}
    """
    found: dict[str, str] = {}
    if "StorageClass" in info and (match := _MD5.fullmatch(str(info.get("ETag")))):
        found["md5"] = match[1]  # the entity tags of web servers are anything
    if isinstance(stored := info.get("md5Hash"), str):  # Google
        found["md5"] = base64.b64decode(stored).hex()
    large = info.get("lfs")  # Hugging Face
    sha256 = large.get("sha256") if isinstance(large, Mapping) else getattr(large, "sha256", None)
    if isinstance(sha256, str):
        found["sha256"] = sha256
    elif isinstance(blob := info.get("blob_id"), str) and len(blob) == 40:
        found["git"] = blob
    return found


def digest(path: Path, algorithm: str, size: int) -> str:
    """Return the checksum of a file; `git` is the SHA-1 that git gives to a file."""
    made = hashlib.new("sha1" if algorithm == "git" else algorithm, usedforsecurity=False)
    if algorithm == "git":
        made.update(b"blob %d\0" % size)
    with os.fdopen(open_regular(path), "rb") as file:
        hashlib.file_digest(file, lambda: made)
    return made.hexdigest()


def check_names(names: list[str], where: str) -> None:
    """Raise if a name of a listing could lead out of a folder, or be a file and a folder.

    >>> check_names(["a/b.bin", "../c"], "s3://bucket/pool")
    Traceback (most recent call last):
    negmerge.errors.FileError: s3://bucket/pool: has a file with the name '../c', ...
    """
    known = set(names)
    for name in names:
        parts = name.split("/")
        plain = all(0 < len(p.encode(errors="replace")) < 256 and p.isprintable() for p in parts)
        if not plain or {".", ".."} & {*parts} or "\\" in name or len(name) > 1000:
            raise FileError(
                f"{where}: has a file with the name {quoted(name)}, which no copy can have; rename "
                "or remove it"
            )
        if any("/".join(parts[:k]) in known for k in range(1, len(parts))):
            raise FileError(
                f"{where}: {quoted(name)} is in a folder with the name of a file; rename one"
            )
