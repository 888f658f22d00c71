"""The progress of a long job: a bar on a terminal, lines in a log, or JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, Self

from rich import filesize

from negmerge.errors import printable

Mode = Literal["auto", "json", "quiet"]
Advance = Callable[[int], None]
"""Called with the number of bytes, samples or steps that were done."""
Facts = Mapping[str, float]
"""Numbers about work in progress, such as the epoch and the loss."""

MOST_ROWS = 12
"""The largest number of running units that a terminal shows one by one."""
FIRST, EVERY = 10.0, 30.0
"""Seconds from the start of a stage to its first line, and between two lines."""


class Progress(Protocol):
    """Receives the stages of a job, the amount of work done, and notes for the user."""

    def __enter__(self) -> Progress: ...
    def __exit__(self, *error: object) -> None: ...
    def stage(self, name: str, total: int, unit: str = "bytes") -> None: ...
    def advance(self, count: int) -> None: ...
    def note(self, text: str, **facts: Any) -> None: ...
    def unit_changed(self, name: str, state: str, **facts: Any) -> None: ...


def tell(advance: Advance, **facts: float) -> None:
    """Tell facts to whoever takes the progress of a piece of work, if they are interested.

    >>> tell(print, epoch=3, loss=0.25)

    Args:
        advance: the function that is called with amounts of work; it may have a method `tell`.
        facts: the numbers.
    """
    told = getattr(advance, "tell", None)
    if told is not None:
        told(facts)


class Quiet:
    """Shows no progress, only notes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        """Begin a stage; `total` is the amount of work in a unit, such as samples."""
        self.name, self.total, self.unit, self.done = name, total, unit, 0

    def advance(self, count: int) -> None:
        """Add to the amount of work done."""

    def note(self, text: str, **facts: Any) -> None:
        """Print a note; a JSON line has the facts of the note as fields."""
        print(f"note: {printable(text)}", file=sys.stderr, flush=True)

    def unit_changed(self, name: str, state: str, **facts: Any) -> None:
        """A unit of the stage, such as the training of a member, has another state or facts."""


class CallbackProgress(Quiet):
    """Calls a function with the amount of work done, such as `advance` of a larger job."""

    def __init__(self, advance: Advance) -> None:
        self.callback = advance

    def advance(self, count: int) -> None:
        self.callback(count)


class JsonLines(Quiet):
    """JSON lines on standard error, at most twice a second and at the end of a stage."""

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        super().stage(name, total, unit)
        self.begun = self.printed = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.printed >= 0.5 or self.done >= self.total:
            self.printed = now
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

    def unit_changed(self, name: str, state: str, **facts: Any) -> None:
        line = {"event": "unit", "stage": self.name, "name": name, "state": state} | facts
        print(json.dumps(line), file=sys.stderr, flush=True)


class Lines(Quiet):
    """A line on standard error after 10 seconds of a stage and every 30 seconds, for logs.

    A stage starts with its first `advance`: starting processes is not counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        super().stage(name, total, unit)
        self.begun: float | None = None

    def advance(self, count: int) -> None:
        now = self.clock()
        self.done += count
        if self.begun is None:
            self.begun, self.before, self.due = now, self.done, now + FIRST
        if self.begun < now >= self.due and self.before < self.done < self.total:
            self.due = now + EVERY
            left = (self.total - self.done) * (now - self.begun) / (self.done - self.before)
            in_bytes = self.unit == "bytes"
            of = filesize.decimal(self.total) if in_bytes else f"{self.total:,} {self.unit}"
            share = f"{100 * self.done / self.total:.0f} % of {of}"
            line = f"{self.name}: {share}, about {format_duration(left)} left"
            print(printable(line), file=sys.stderr, flush=True)


class Bar(Quiet):
    """A bar with the amount done, the speed and the time left; appears after a second of work."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.unit = "bytes"
        self.begun = time.monotonic()
        self.rows: dict[str, Any] = {}
        """The rows of the units that are running, by name."""

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        self._remove_rows()
        if self.bar is not None and unit != self.unit:
            self.bar.stop()
            self.bar = None
        super().stage(name, total, unit)
        self.shown = 0.0
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

    def unit_changed(self, name: str, state: str, **facts: Any) -> None:
        if self.bar is None:
            return
        text = f"  {describe_unit(name, state, facts)}"
        if state == "running" and name in self.rows:
            self.bar.update(self.rows[name], description=text)
        elif state == "running" and len(self.rows) < MOST_ROWS:
            self.rows[name] = self.bar.add_task(text, total=None)
        elif state != "running" and name in self.rows:
            self.bar.remove_task(self.rows.pop(name))

    def _remove_rows(self) -> None:
        for row in self.rows.values():
            self.bar.remove_task(row)
        self.rows.clear()

    def _appear(self) -> None:
        from rich import progress
        from rich.console import Console

        if self.unit == "bytes":
            amounts = (progress.DownloadColumn(), progress.TransferSpeedColumn())
        else:
            amounts = (progress.MofNCompleteColumn(), progress.TextColumn(self.unit))
        self.bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            *amounts,
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = self.bar.add_task(self.name, total=self.total)
        self.bar.start()


def describe_unit(name: str, state: str, facts: Mapping[str, Any]) -> str:
    """Return one line about a unit of work.

    >>> describe_unit("member 3 of 9", "running", {"epoch": 4, "epochs": 10, "loss": 0.1234})
    'member 3 of 9: running, epoch 4 of 10, loss 0.123'
    >>> describe_unit("sweeps/ties", "running", {"node": "b", "attempt": 2})
    'sweeps/ties: running on b, attempt 2'
    """
    words = f"{name}: {state}" + (f" on {facts['node']}" if facts.get("node") else "")
    if facts.get("attempt", 1) > 1:
        words += f", attempt {facts['attempt']}"
    if "epoch" in facts and "epochs" in facts:
        words += f", epoch {facts['epoch']:.0f} of {facts['epochs']:.0f}"
    if "loss" in facts:
        words += f", loss {facts['loss']:.3g}"
    return printable(words + (f": {facts['error']}" if facts.get("error") else ""))


def make_progress(mode: Mode = "auto") -> Progress:
    """Make a progress display: for `auto` a bar on a terminal, otherwise lines."""
    if mode == "json":
        return JsonLines()
    if mode == "quiet":
        return Quiet()
    return Bar() if sys.stderr.isatty() else Lines()


def format_duration(seconds: float) -> str:
    """Format a duration.

    >>> format_duration(8), format_duration(200), format_duration(4000)
    ('8 s', '3 min', '1 h 7 min')
    """
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if seconds < 3600 else f"{minutes // 60} h {minutes % 60} min"
