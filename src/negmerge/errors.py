"""The exceptions of the package, and functions that make text safe for error messages."""

from __future__ import annotations

import re

_PASSWORD = re.compile(r"//[^/\s@]*:[^/\s@]*@")
_SIGNED = re.compile(r"(?i)\?[^\s'\"]*(?:signature|sig|token|credential|secret|key)=[^\s'\"]*")

_SHOWN: dict[str, str] = {}
"""Paths of fetched files, and the URLs that errors show instead; see `show_instead`."""


class NegMergeError(Exception):
    """An error that the user can correct; the message is one line.

    >>> raise NegMergeError("pool is empty")
    Traceback (most recent call last):
    negmerge.errors.NegMergeError: pool is empty
    """

    def __init__(self, *parts: object, **named: object) -> None:
        texts = (without_secrets(as_shown(p)) if isinstance(p, str) else p for p in parts)
        super().__init__(*texts, **named)


class FileError(NegMergeError):
    """A file is missing, malformed, changed while it was read, or cannot be written."""


class MismatchError(NegMergeError):
    """Files do not fit together: keys, shapes and dtypes differ, or the base is another one."""


class ValueRangeError(NegMergeError):
    """A number cannot be used: NaN, infinity, overflow, a negative scale."""


class OptionError(NegMergeError):
    """An option, a rule or a name does not exist, or a value is not allowed."""


def show_instead(path: str, text: str) -> None:
    """Show a text instead of a path in all errors from now on.

    The files of a URL are read from a folder of this machine, whose path says nothing to the user.
    """
    for written in {path, ascii(path)[1:-1]}:
        _SHOWN[written] = text


def as_shown(text: str) -> str:
    """Replace the paths of `show_instead` in a text.

    >>> show_instead("/scratch/1f/content", "s3://bucket/pool")
    >>> as_shown("/scratch/1f/content/a.safetensors: contains no tensors")
    's3://bucket/pool/a.safetensors: contains no tensors'
    """
    for path, other in _SHOWN.items():
        text = text.replace(path, other)
    return text


def without_secrets(text: str) -> str:
    """Remove the passwords and signatures of URLs from a text.

    >>> without_secrets("GET https://user:pw@host/a?X-Amz-Signature=1f failed")
    'GET https://host/a failed'
    """
    return _SIGNED.sub("", _PASSWORD.sub("//", text))


FINAL = (MismatchError, OptionError, ValueRangeError)
"""Errors that the same work would meet again, on any machine."""


def printable(text: str) -> str:
    """Escape the characters that could control a terminal.

    >>> printable("a\\x1b[31mb – λ")
    'a\\\\x1b[31mb – λ'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return the type and the message of an exception on one line.

    >>> one_line(ValueError("no such\\n file"))
    'ValueError: no such file'
    """
    text = printable(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def quoted(name: object, limit: int = 120) -> str:
    """Quote a name and escape its control characters.

    >>> quoted("a\\x1b[31mb")
    "'a\\\\x1b[31mb'"
    """
    text = ascii(str(name))
    return text if len(text) <= limit else text[: limit - 1] + "…"
