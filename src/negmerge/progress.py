"""How far a long job is: a bar on a terminal, a line now and then in a pipe, JSON for machines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

from negmerge.errors import printable

Mode = Literal["auto", "json", "quiet"]

FIRST, EVERY = 10.0, 30.0
"""Seconds of work until a stage has its first line, and between two lines."""


class Progress(Protocol):
    """Told how much is done: bytes, or samples."""

    def __enter__(self) -> Progress: ...
    def __exit__(self, *error: object) -> None: ...
    def stage(self, name: str, total: int, unit: str = "bytes") -> None: ...
    def advance(self, count: int) -> None: ...
    def note(self, text: str, **facts: Any) -> None: ...


class Quiet:
    """Shows no progress; notes appear."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *error: object) -> None: ...
    def stage(self, name: str, total: int, unit: str = "bytes") -> None: ...
    def advance(self, count: int) -> None: ...

    def note(self, text: str, **facts: Any) -> None:
        """Say what deserves attention before work begins; facts: the same for machines."""
        print(f"note: {printable(text)}", file=sys.stderr, flush=True)


class JsonLines(Quiet):
    """One JSON object a line on standard error, at most twice a second and at each end."""

    def __enter__(self) -> JsonLines:
        return self

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        self.name, self.total, self.done, self.unit = name, total, 0, unit
        self.begun = self.said = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.said >= 0.5 or self.done >= self.total:
            self.said = now
            rate = self.done / max(now - self.begun, 1e-9)
            line = {
                "event": "progress",
                "stage": self.name,
                self.unit: self.done,
                "total": self.total,
                f"{self.unit}_per_second": round(rate),
                "seconds_remaining": round((self.total - self.done) / rate, 1) if rate else None,
            }
            print(json.dumps(line), file=sys.stderr, flush=True)

    def note(self, text: str, **facts: Any) -> None:
        line = {"event": "note", "text": text} | facts
        print(json.dumps(line), file=sys.stderr, flush=True)


class Lines(Quiet):
    """A line on standard error when a stage lasts, and every 30 seconds: for pipes and logs.

    Time runs from the first piece of work, so that a stage whose processes start slowly is not
    taken for a long one.

    clock: gives the seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock

    def __enter__(self) -> Lines:
        return self

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        self.name, self.total, self.done, self.unit = name, total, 0, unit
        self.begun: float | None = None

    def advance(self, count: int) -> None:
        now = self.clock()
        self.done += count
        if self.begun is None:
            self.begun, self.before, self.due = now, self.done, now + FIRST
        if self.begun < now >= self.due and self.before < self.done < self.total:
            self.due = now + EVERY
            left = (self.total - self.done) * (now - self.begun) / (self.done - self.before)
            of = human(self.total) if self.unit == "bytes" else f"{self.total:,} {self.unit}"
            share = f"{100 * self.done / self.total:.0f} % of {of}"
            line = f"{self.name}: {share}, about {lasting(left)} left"
            print(printable(line), file=sys.stderr, flush=True)


class Bar(Quiet):
    """A bar with what is done, how fast, and time left; it appears after a second of work."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.unit = "bytes"
        self.begun = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        if self.bar is not None and unit != self.unit:
            self.bar.stop()
            self.bar = None
        self.name, self.total, self.done, self.shown, self.unit = name, total, 0, 0.0, unit
        if self.bar is not None:
            self.bar.reset(self.task, description=name, total=total)

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self.bar is None and now - self.begun > 1:
            self._appear()
        if self.bar is not None and (now - self.shown > 0.1 or self.done >= self.total):
            self.shown = now
            self.bar.update(self.task, completed=self.done)

    def note(self, text: str, **facts: Any) -> None:
        if self.bar is None:
            super().note(text)
        else:  # above the bar
            line = f"note: {printable(text)}"
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _appear(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        if self.unit == "bytes":
            amounts = (DownloadColumn(), TransferSpeedColumn())
        else:
            amounts = (MofNCompleteColumn(), TextColumn(self.unit))
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *amounts,
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.bar.add_task(self.name, total=self.total)
        self.bar.start()


def make_progress(mode: Mode = "auto") -> Progress:
    """The way to show progress: `auto` is a bar on a terminal, and lines elsewhere."""
    if mode == "json":
        return JsonLines()
    if mode == "quiet":
        return Quiet()
    return Bar() if sys.stderr.isatty() else Lines()


def human(count: Any) -> str:
    """A number of bytes for people.

    >>> human(37_763_689)
    '37.8 MB'
    """
    units = ["bytes", "kB", "MB", "GB", "TB"]
    power = min(len(str(int(count))) - 1, 14) // 3
    return f"{count / 1000**power:.{min(power, 1)}f} {units[power]}"


def lasting(seconds: float) -> str:
    """A time for people.

    >>> lasting(8), lasting(200), lasting(4000)
    ('8 s', '3 min', '1 h 7 min')
    """
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if seconds < 3600 else f"{minutes // 60} h {minutes % 60} min"
