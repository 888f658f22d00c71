"""What the command line prints, for people and for machines."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from negmerge.errors import printable


def plain(text: str) -> str:
    """A text that rich shows as it is: neither markup nor control characters.

    >>> plain("[class 3] \\x1b")
    '\\\\[class 3] \\\\x1b'
    """
    from rich.markup import escape

    return escape(printable(text))


def show(tables: list[Any]) -> None:
    """Print tables and lines for people; on a pipe they keep their width."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables:
        console.print(table, markup=not isinstance(table, str), highlight=False)


def say(result: dict[str, Any], line: str, as_json: bool) -> None:
    """Print a result, for people or for machines."""
    print(json.dumps({"event": "result"} | result) if as_json else printable(line))


def warn(line: str) -> None:
    """Print a line about something that deserves attention."""
    print(f"warning: {line}", file=sys.stderr)


@contextmanager
def unattended() -> Iterator[None]:
    """Let nothing ask the user: for the block, standard input is empty.

    Libraries ask whether to run the Python of a model, and take what is piped in for the answer.

    >>> with unattended():
    ...     input("Do you wish to run the custom code? ")
    Traceback (most recent call last):
    EOFError: EOF when reading a line
    """
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before
