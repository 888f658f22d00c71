"""The exceptions of the package, and functions that make text safe for error messages."""

from __future__ import annotations


class NegMergeError(Exception):
    """An error that the user can correct; the message is one line.

    >>> raise NegMergeError("pool is empty")
    Traceback (most recent call last):
    negmerge.errors.NegMergeError: pool is empty
    """


class FileError(NegMergeError):
    """A file is missing, malformed, changed while it was read, or cannot be written."""


class MismatchError(NegMergeError):
    """Files do not fit together: keys, shapes and dtypes differ, or the base is another one."""


class ValueRangeError(NegMergeError):
    """A number cannot be used: NaN, infinity, overflow, a negative scale."""


class OptionError(NegMergeError):
    """An option, a rule or a name does not exist, or a value is not allowed."""


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
