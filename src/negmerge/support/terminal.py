"""Printing to the terminal: text, tables, JSON lines."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from negmerge.errors import printable


def escape_markup(text: str) -> str:
    """Escape rich markup and control characters.

    >>> escape_markup("[class 3] \\x1b")
    '\\\\[class 3] \\\\x1b'
    """
    from rich.markup import escape

    return escape(printable(text))


def print_tables(tables: list[Any]) -> None:
    """Print tables and lines; if standard output is not a terminal, 160 columns wide."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in tables:
        console.print(table, markup=not isinstance(table, str), highlight=False)


def print_result(result: dict[str, Any], line: str, as_json: bool) -> None:
    """Print a result as a line of text, or as a JSON line."""
    print(json.dumps({"event": "result"} | result) if as_json else printable(line))


def print_warning(line: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {line}", file=sys.stderr)


@contextmanager
def without_stdin() -> Iterator[None]:
    """Make standard input empty during the block, so that no library can ask the user.

    Libraries ask whether to run the Python code of a model, and accept piped input as the answer.

    >>> with without_stdin():
    ...     input("Do you wish to run the custom code? ")
    Traceback (most recent call last):
    EOFError: EOF when reading a line
    """
    before, sys.stdin = sys.stdin, io.StringIO()
    try:
        yield
    finally:
        sys.stdin = before


@contextmanager
def with_terminal() -> Iterator[None]:
    """Give standard input back during the block, for a question of the command line itself."""
    before, sys.stdin = sys.stdin, sys.__stdin__
    try:
        yield
    finally:
        sys.stdin = before
