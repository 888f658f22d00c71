"""What can go wrong, in words for the person who has to mend it."""

from __future__ import annotations


class NegMergeError(Exception):
    """Any mistake in the input: what, where, got, wanted, remedy, on one line.

    >>> raise NegMergeError("pool is empty")
    Traceback (most recent call last):
    negmerge.errors.NegMergeError: pool is empty
    """


class FileError(NegMergeError):
    """A file is missing, malformed, changed while it was read, or cannot be written."""


class MismatchError(NegMergeError):
    """Files that have to fit together do not: keys, shapes, dtypes, or another base."""


class ValueRangeError(NegMergeError):
    """A number that no merge can use: NaN, infinity, overflow, a negative scale."""


class OptionError(NegMergeError):
    """An option, a rule or a name that does not exist, or a value it does not take."""


def printable(text: str) -> str:
    """Escape what could move the cursor or the colours of a terminal.

    >>> printable("a\\x1b[31mb – λ")
    'a\\\\x1b[31mb – λ'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def told(error: BaseException, limit: int = 300) -> str:
    """Another library's exception on one line.

    >>> told(ValueError("no such\\n file"))
    'ValueError: no such file'
    """
    text = printable(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(name: object, limit: int = 120) -> str:
    """Quote a name from a file so that control characters cannot reach the terminal.

    >>> shown("a\\x1b[31mb")
    "'a\\\\x1b[31mb'"
    """
    text = ascii(str(name))
    return text if len(text) <= limit else text[: limit - 1] + "…"
