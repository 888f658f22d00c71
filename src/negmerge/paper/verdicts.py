"""Measured numbers beside known ones, each with its tolerance and a verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from negmerge.support.terminal import escape_markup

HEADINGS = ("", "measured", "known", "tolerance", "verdict")
COLOURS = {"pass": "green", "differs": "red"}


@dataclass(frozen=True)
class Compared:
    """A measured number and the known one.

    >>> Compared("Cars", 59.63, 59.6, 1.0).verdict, Compared("members", 31, 30).verdict
    ('pass', 'differs')

    Args:
        name: what was measured.
        measured: None if it could not be measured.
        known: None if there is no number to compare with.
        tolerance: the largest difference that passes.
        source: where the known number comes from.
    """

    name: str
    measured: float | None
    known: float | None
    tolerance: float = 0.0
    source: str = ""

    @property
    def verdict(self) -> str:
        """`pass` or `differs`; `not checked` without a measurement, empty without a known one."""
        if self.known is None:
            return ""
        if self.measured is None:
            return "not checked"
        rounding = 1e-9 * max(abs(self.known), 1.0)
        return "pass" if abs(self.measured - self.known) <= self.tolerance + rounding else "differs"

    def tree(self) -> dict[str, Any]:
        """Return the fields and the verdict as JSON values."""
        return asdict(self) | {"verdict": self.verdict}

    def cells(self) -> list[str]:
        """Return the cells of a table with `HEADINGS`."""
        tolerance = "" if self.known is None else f"± {self.tolerance:g}" if self.tolerance else "="
        return [self.name, _text(self.measured), _text(self.known), tolerance, self.verdict]


def _text(value: float | None) -> str:
    """Format a number.

    >>> _text(10961529), _text(27.397), _text(0.9), _text(None)
    ('10,961,529', '27.397', '0.9', '–')
    """
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{round(value, 3):,}"


@dataclass(frozen=True)
class Comparison(ABC):
    """Numbers that were compared, and notes about them."""

    rows: list[Compared]
    notes: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing that was compared differs."""
        return not any(row.verdict == "differs" for row in self.rows)

    @abstractmethod
    def tree(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""


def markdown(rows: Sequence[Compared]) -> str:
    """Return a Markdown table."""
    lines = [HEADINGS, ("---", "---:", "---:", "---", "---"), *(row.cells() for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rendered(title: str, rows: Sequence[Compared]) -> Table:
    """Return the table for the terminal."""
    grid = Table(title=escape_markup(title), title_justify="left")
    for heading in HEADINGS:
        grid.add_column(heading, justify="right" if heading in HEADINGS[1:3] else "left")
    for row in rows:
        *cells, verdict = map(escape_markup, row.cells())
        colour = COLOURS.get(verdict)
        grid.add_row(*cells, f"[{colour}]{verdict}[/]" if colour else verdict)
    return grid
