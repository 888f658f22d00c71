"""Steps that do next to nothing, of every kind, and write down that they were run.

They are in a module of their own, so that worker processes can import them.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from negmerge.errors import FileError, OptionError
from negmerge.runs.records import Cost, Done
from negmerge.runs.steps import Advance, FileStep, ModelStep, Step, ValueStep
from negmerge.support.files import report_write_errors
from negmerge.support.progress import tell


def make_scenario() -> Any:
    """All that a step of this module needs of a scenario."""
    return SimpleNamespace(unit="samples")


@dataclass(frozen=True)
class Fake(Step[Any]):
    """A step that is not done if `log.poison` names it.

    Args:
        key: what names it.
        out: its file.
        log: gets a line of every run: key, process, threads.
        samples: its size.
    """

    key: str
    out: Path
    log: Path
    samples: int = 1

    def size(self, scenario: Any) -> int:
        return self.samples

    def _work(self, advance: Advance) -> None:
        poison = self.log.with_suffix(".poison")
        if poison.exists() and self.key in poison.read_text().split():
            raise OptionError(f"{self.key}: poisoned")
        if poison.exists() and f"!{self.key}" in poison.read_text().split():
            raise FileError("the disk is full")
        with self.log.open("a") as file:
            file.write(f"{self.key} {os.getpid()} {torch.get_num_threads()}\n")
        self.out.parent.mkdir(parents=True, exist_ok=True)
        advance(self.samples)


class FakeValue(Fake, ValueStep[str]):
    """Gives its key."""

    value_type = str

    def run(self, scenario: Any, advance: Advance) -> Done[str]:
        self._work(advance)
        return Done(self.key, 0.5)


class FakeFile(Fake, FileStep):
    """Writes its key to its file, after one evaluation."""

    def run(self, scenario: Any, advance: Advance) -> Done[int]:
        self._work(advance)
        self.out.write_text(self.key)
        return Done(1, 0.5)


class FakeMerge(FakeFile):
    """The same in the process of the run."""

    in_main_process = True


class FakeModel(Fake, ModelStep):
    """Writes a model, and its record beside it."""

    trains = True

    @property
    def title(self) -> str:
        return f"model {self.key}"

    def run(self, scenario: Any, advance: Advance) -> Done[Cost]:
        self._work(advance)
        record = {"id": self.key, "samples": self.samples, "seconds": 0.5}
        self.cost_file.write_text(json.dumps(record))
        self.out.write_text(self.key)
        return Done(Cost.model_validate(record), 0.5)

    def find_cost(self) -> Cost | None:
        if not (self.out.exists() and self.out.read_text() == self.key):
            return None
        cost = self.read_cost()
        return cost if cost.id == self.key else None


class Waiting(FakeModel):
    """Waits until `log.go` exists; with `scratch` in the poison it writes to the node's scratch."""

    def run(self, scenario: Any, advance: Advance) -> Done[Cost]:
        poison = self.log.with_suffix(".poison")
        scratch = os.environ.get("NEGMERGE_SCRATCH")
        if scratch and poison.exists() and "scratch" in poison.read_text():
            write_to_scratch(Path(scratch))
        done = super().run(scenario, advance)
        tell(advance, epoch=1, epochs=1, loss=0.5)
        while not self.log.with_suffix(".go").exists():
            time.sleep(0.02)
        return done


class Unreadable(FakeModel):
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("nobody can read this")


def write_to_scratch(scratch: Path) -> None:
    with report_write_errors(scratch):
        scratch.write_bytes(b"anything")
