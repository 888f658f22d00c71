"""The status of a run: a file that the run writes while it works, and `negmerge status` reads."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from negmerge.errors import FileError, NegMergeError
from negmerge.runs.records import Record, read_record
from negmerge.runs.store import Run
from negmerge.runs.watch import Unit, facts_of
from negmerge.support.files import atomic_file, write_fully
from negmerge.support.progress import describe_unit, format_duration

STATES = ("done", "running", "failed", "waiting")
EVERY = 2.0
"""Seconds between two writes of the status."""
SILENCE = 30.0
"""A run whose status is older than this number of seconds is not working any more."""


Moment = Annotated[float, Field(ge=0, le=1e11)]
"""Seconds since 1970; the differences of two are finite."""
Amount = Annotated[int, Field(ge=0)]


class Status(Record):
    """The content of the file.

    Args:
        host, pid: the process that drives the run.
        written, begun: when the file was written and when the stage began, in seconds since 1970.
        stage: the title of the stage.
        unit: what is counted, such as samples.
        total, done: the amount of work of the stage.
        units: the steps of the stage that were not done when it began.
    """

    format: Literal["negmerge-status/1"]
    host: str
    pid: int
    written: Moment
    begun: Moment
    stage: str
    unit: str
    total: Amount
    done: Amount
    units: list[Unit]

    @property
    def working(self) -> bool:
        """Whether the run has given a sign of life recently, and its process exists."""
        if self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists():
            return not Path("/proc/self").exists()  # only Linux tells
        # A time in the future is that of a clock that was wrong, and not a sign of life.
        return abs(time.time() - self.written) < SILENCE

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the end of the stage, if anything is done."""
        spent = self.written - self.begun
        return (self.total - self.done) * spent / self.done if self.done > 0 else None


def status_file(store: Run) -> Path:
    """Return the path of the status of a run."""
    return store.states / "status.json"


def read_status(store: Run) -> Status | None:
    """Return the status of an unfinished run; None if it has not written any."""
    path = status_file(store)
    try:
        return read_record(path, Status, "remove it")
    except FileError:
        if path.exists():
            raise
        return None  # a run that ends removes it


def refuse_second_driver(store: Run) -> None:
    """Raise if a process on another machine works on the run.

    The lock of the folder keeps away processes of this machine. A shared file system may not
    promise locks between machines; the status, which is written every two seconds, tells there.
    """
    try:
        found = read_status(store)
    except NegMergeError:  # damaged: it will be replaced
        return
    if found is not None and found.host != socket.gethostname() and found.working:
        raise FileError(
            f"{store.folder}: process {found.pid} on {found.host} works on this run; wait for it, "
            f"or until it has given no sign for {SILENCE:.0f} s"
        )


class StatusWriter:
    """Writes the status of a run every two seconds, from a thread of its own."""

    def __init__(self, store: Run) -> None:
        self.path = status_file(store)
        self.stage = ("starting", "steps", 0, time.time())
        self.units: list[Unit] = []
        self._ended = threading.Event()

    def begin(self, title: str, unit: str, total: int, units: list[Unit]) -> None:
        """Begin a stage."""
        self.units, self.stage = units, (title, unit, total, time.time())
        self.write()

    def write(self) -> None:
        """Write the file; a status that cannot be written does not stop a run."""
        title, unit, total, begun = self.stage
        tree = {
            "format": "negmerge-status/1",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "written": time.time(),
            "begun": begun,
            "stage": title,
            "unit": unit,
            "total": total,
            "done": sum(one.size if one.state == "done" else one.done for one in self.units),
            "units": [one.model_dump() for one in self.units],
        }
        with suppress(OSError, NegMergeError), atomic_file(self.path, durable=False) as descriptor:
            write_fully(descriptor, json.dumps(tree).encode())

    @contextmanager
    def running(self) -> Iterator[StatusWriter]:
        """Write the status until the end of the block."""

        def repeat() -> None:
            while not self._ended.wait(EVERY):
                self.write()

        self.write()  # a driver on another machine, which starts now, too, sees it
        thread = threading.Thread(target=repeat, name="status", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join()


def describe(run: Run, status: Status | None) -> Iterator[str]:
    """Yield lines about a run: its stage, the time left, and the steps of the stage.

    Args:
        run: the run.
        status: its status, if it is not finished and has written one.
    """
    if run.finished:
        yield f"{run.folder}: finished; page: {run.page}"
        return
    if status is None:
        yield f"{run.folder}: not finished; run the same command again, it continues"
        return
    ago = format_duration(time.time() - status.written)
    if not status.working:
        yield f"{run.folder}: stopped {ago} ago; run the same command again, it continues"
    else:
        yield f"{run.folder}: process {status.pid} on {status.host}, last sign {ago} ago"
    count = Counter(unit.state for unit in status.units)
    counts = ", ".join(f"{count[state]} {state}" for state in STATES if count[state])
    share = f"{100 * status.done / max(status.total, 1):.0f} % of {status.total:,} {status.unit}"
    left = status.seconds_left
    rest = f", about {format_duration(left)} left" if left and status.working else ""
    yield f"{status.stage}: {share}{rest} ({counts})"
    for unit in status.units:
        if unit.state in ("running", "failed"):
            done = f" ({100 * unit.done / max(unit.size, 1):.0f} %)"
            yield f"  {describe_unit(unit.name, unit.state, facts_of(unit))}{done}"
