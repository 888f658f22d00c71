"""How far a long job is: a bar on a terminal, JSON lines for machines, silence otherwise."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Literal, Protocol

Mode = Literal["auto", "json", "quiet"]


class Progress(Protocol):
    """Told how much is done: bytes, or samples."""

    def __enter__(self) -> Progress: ...
    def __exit__(self, *error: object) -> None: ...
    def stage(self, name: str, total: int, unit: str = "bytes") -> None: ...
    def advance(self, count: int) -> None: ...


class Quiet:
    """Says nothing."""

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *error: object) -> None: ...
    def stage(self, name: str, total: int, unit: str = "bytes") -> None: ...
    def advance(self, count: int) -> None: ...


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
    """The way to show progress: `auto` is a bar if standard error is a terminal."""
    if mode == "json":
        return JsonLines()
    return Bar() if mode == "auto" and sys.stderr.isatty() else Quiet()
