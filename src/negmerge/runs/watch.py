"""What happens to the steps of a stage while they run: started, advanced, failed, done.

Executors tell a `Watch`. The watch of a run shows the progress, and `status.py` writes it to a file
that `negmerge status` reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from negmerge.runs.records import Number, Record
from negmerge.support.progress import Advance, Facts


class Unit(Record):
    """A step as people see it; `status.json` has a list of them.

    Args:
        name: the title of the step.
        size: the amount of work.
        state: `waiting`, `running`, `failed` (it is tried again) or `done`.
        done: the amount of work done, in the attempt that is running.
        node: the machine, or the node of a cluster, that runs it.
        attempt: the number of the attempt, from 1.
        begun: the time at which the attempt began, in seconds since 1970.
        facts: what the step tells about itself, such as the epoch and the loss.
        error: why the last attempt failed.
    """

    name: str
    size: int
    state: Literal["waiting", "running", "failed", "done"] = "waiting"
    done: int = 0
    node: str = ""
    attempt: int = 0
    begun: Number = 0.0
    facts: dict[str, Number] = Field(default_factory=dict[str, Number])
    error: str = ""


def facts_of(unit: Unit) -> dict[str, Any]:
    """Return what people want to know of a unit beside its name and state.

    >>> facts_of(Unit(name="member 1 of 2", size=10, node="a", facts={"loss": 0.5}))
    {'node': 'a', 'attempt': 0, 'error': '', 'loss': 0.5}
    """
    return {"node": unit.node, "attempt": unit.attempt, "error": unit.error, **unit.facts}


class Report:
    """Takes the reports of one step: called with amounts of work, told facts."""

    def __init__(self, advance: Advance, tell: Callable[[Facts], None]) -> None:
        self.advance, self.tell = advance, tell

    def __call__(self, count: int) -> None:
        self.advance(count)


class Watch:
    """Receives what happens to the steps of a stage; steps are named by their position.

    >>> watch = Watch([Unit(name=f"member {k} of 2", size=10) for k in (1, 2)])
    >>> watch.started(1, "node-a")
    >>> watch.report(1)(4)
    >>> watch.units[1].state, watch.units[1].done, watch.units[1].node
    ('running', 4, 'node-a')

    Args:
        units: the steps.
        advance: called with each amount of work; negative if the work of an attempt is lost.
        changed: called with each unit that starts, tells facts, fails or is done.
    """

    def __init__(
        self,
        units: list[Unit],
        advance: Advance = lambda count: None,
        changed: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        self.units, self._advance, self._changed = units, advance, changed

    def report(self, position: int) -> Report:
        """Return what a step calls with its progress."""
        return Report(
            lambda count: self.advance(position, count), lambda facts: self.tell(position, facts)
        )

    def started(self, position: int, node: str = "") -> None:
        """A step begins, or begins again, on some node."""
        unit = self.units[position]
        self._forget(unit)
        unit.state, unit.node, unit.begun = "running", node, time.time()
        unit.attempt += 1
        self._changed(unit)

    def advance(self, position: int, count: int) -> None:
        """A step has done some amount of work."""
        self.units[position].done += count
        self._advance(count)

    def tell(self, position: int, facts: Facts) -> None:
        """A step tells facts about itself."""
        unit = self.units[position]
        unit.facts = unit.facts | dict(facts)  # another thread may be writing the old ones
        self._changed(unit)

    def failed(self, position: int, error: str) -> None:
        """An attempt has failed; what it has done is lost, or counted when it is resumed."""
        unit = self.units[position]
        self._forget(unit)
        unit.state, unit.error = "failed", error
        self._changed(unit)

    def finished(self, position: int) -> None:
        """A step is done, and recorded."""
        self.units[position].state = "done"
        self._changed(self.units[position])

    def _forget(self, unit: Unit) -> None:
        if unit.done:
            self._advance(-unit.done)
        unit.done, unit.facts = 0, {}
