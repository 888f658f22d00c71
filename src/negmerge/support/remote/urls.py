"""URLs as text: what is one, its parts, and its form without secrets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeGuard

from negmerge.errors import OptionError, printable, without_secrets

WRAPPERS = frozenset(
    {
        "async_wrapper", "asyncwrapper", "asynclocal", "blockcache", "cached", "dask", "data",
        "dir", "filecache", "generic", "libarchive", "reference", "simplecache", "tar", "zip",
    }
)  # fmt: skip
"""Schemes of fsspec whose files are inside other files, or are read by another scheme."""
LONGEST = 2000
Place = Path | str
"""A file or folder: a path on this machine, or the text of a URL."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+._-]*(://|::.*://)")
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/{1,2}[^/]")
_USER = re.compile(r"(?i)^((?:https?|ftp|sftp|ssh|smb|webhdfs)://)[^/?#]*@")


def is_url(place: object) -> TypeGuard[str]:
    """Whether a value is the text of a URL.

    >>> is_url("s3://bucket/base.safetensors"), is_url("base.safetensors"), is_url(None)
    (True, False, False)
    """
    return isinstance(place, str) and _URL.match(place) is not None


def is_http(url: str) -> bool:
    """Whether a URL is that of a web server, where `?` begins a query."""
    return url.lower().startswith(("http://", "https://"))


def refuse_url(path: object, remedy: str) -> None:
    """Raise if a value is a URL, or a `Path` of one, whose slashes are joined.

    >>> from pathlib import Path
    >>> refuse_url(Path("s3://bucket/run"), "name a folder")
    Traceback (most recent call last):
    negmerge.errors.OptionError: s3:/bucket/run: is a URL; name a folder
    """
    if is_url(path) or _COLLAPSED.match(str(path)):
        raise OptionError(f"{shown(str(path))}: is a URL; {remedy}")


def checked(url: str) -> str:
    """Return a URL without the slash at its end; raise if it cannot name one file or folder.

    >>> checked("s3://bucket/model/")
    's3://bucket/model'
    >>> checked("simplecache::s3://bucket/model")
    Traceback (most recent call last):
    negmerge.errors.OptionError: simplecache::s3://bucket/model: joins several ...
    """
    text = shown(url)
    scheme, _, rest = url.partition("://")
    if not url.isprintable() or len(url) > LONGEST:
        raise OptionError(
            f"{text[:100]}: wanted a URL of printable characters, at most {LONGEST} of them"
        )
    if "::" in scheme or "::" in rest or scheme.lower() in WRAPPERS:
        raise OptionError(
            f"{text}: joins several file systems, or names a file inside another; wanted a plain "
            "URL, such as s3://bucket/model"
        )
    url = url.rstrip("/")
    name = name_of(url)
    if name in ("", ".", "..") or url.endswith(":") or "\\" in name or len(name.encode()) > 255:
        raise OptionError(f"{text}: names no file or folder; wanted such as {scheme}://a/b")
    return url


def shown(url: str) -> str:
    """Return a URL as errors show it: without user, password and query.

    >>> shown("https://user:secret@host/a.safetensors?X-Amz-Signature=1")
    'https://host/a.safetensors'
    >>> shown("abfs://container@account/a.safetensors")
    'abfs://container@account/a.safetensors'
    """
    text = without_secrets(_USER.sub(r"\1", url))
    return printable(re.sub(r"[?#].*", "", text) if is_http(text) else text)


def has_secret(url: str) -> bool:
    """Whether a URL has a user, a password or a query, which may be a signature."""
    return shown(url) != printable(url)


def name_of(url: str) -> str:
    """Return the last part of a URL, as a local copy would be called.

    >>> name_of("s3://bucket/pool/a.safetensors"), name_of("https://host/a?x=1/2")
    ('a.safetensors', 'a')
    >>> name_of("hf://someone/model@v1")  # the model, not its version
    'model'
    """
    text = shown(url).rstrip("/")
    name = text.rpartition("/")[2]
    return name.partition("@")[0] if text.startswith("hf://") and text.count("/") == 3 else name


def parent_of(url: str) -> str:
    """Return a URL as errors show it, without its last part.

    >>> parent_of("s3://bucket/pool/a.safetensors")
    's3://bucket/pool'
    """
    return shown(url).rstrip("/").rpartition("/")[0]


def join(url: str, name: str) -> str:
    """Return the URL of a file in a folder."""
    return f"{url.rstrip('/')}/{name}"
