"""The steps of a run: each has a key, an output file and a method that does the work.

`context.py` runs steps. The three kinds differ in where `store.py` records that a step is done.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.errors import FileError
from negmerge.runs.records import Cost, Done, read_record
from negmerge.support.files import write_file
from negmerge.support.progress import Advance

if TYPE_CHECKING:
    from negmerge.scenarios.base import Scenario

T = TypeVar("T")


@dataclass(frozen=True)
class Needs:
    """What a step needs on the node that runs it, beside the CPUs of its threads.

    The section `executor` of a recipe can ask for other numbers.

    Args:
        gpus: GPUs, or a share of one, if there are any.
        memory: bytes of memory to reserve; None: no reservation.
    """

    gpus: float = 1.0
    memory: int | None = None


class Step(ABC, Generic[T]):
    """A piece of work that a run does once.

    Attributes:
        key: a hash of everything the result depends on.
        out: the file that holds the result.
        needs: what the node must have.
        in_main_process: whether the step runs in the main process instead of in the executor,
            because it starts threads of its own.
    """

    key: str
    out: Path
    needs: Needs = Needs()
    in_main_process: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """The name of the step for people, such as `member 3 of 9` or `sweeps/consensus`."""
        return f"{type(self).__name__.lower()} {self.key}"

    @abstractmethod
    def size(self, scenario: Scenario) -> int:
        """Return the amount of work, in the unit of the progress bar."""

    @abstractmethod
    def run(self, scenario: Scenario, advance: Advance) -> Done[T]:
        """Do the work; call `advance` with each amount of work that is done."""


class StoredModel:
    """A model of a run; its cost is stored beside it, where other runs find both.

    Attributes:
        key, out: as in `Step`.
        title: such as `member 3 of 9`.
    """

    key: str
    title: str
    out: Path

    @property
    def cost_file(self) -> Path:
        """The file with the cost of the training."""
        return self.out.with_suffix(".json")

    def read_cost(self) -> Cost:
        """Read the cost file."""
        return read_record(self.cost_file, Cost, "remove it and run again")

    def write_cost(self, cost: Mapping[str, Any]) -> None:
        """Write the cost file."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        write_file(self.cost_file, json.dumps(cost, indent=1).encode())

    def find_cost(self) -> Cost | None:
        """Return the cost if the model and the cost file have the key."""
        try:
            cost = self.read_cost()
            with Checkpoint(self.out) as model:
                same = model.metadata.get("id") == self.key
        except (FileError, ValueError):  # there is none, or it is damaged
            return None
        return cost if same and cost.id == self.key else None


class ModelStep(StoredModel, Step[Cost]):
    """A step that makes a model, and perhaps further models on the way.

    Attributes:
        trains: whether the step trains; if not, the model is a copy of given weights.
    """

    trains: bool

    @property
    def label(self) -> str:
        return self.title

    @property
    def models(self) -> tuple[StoredModel, ...]:
        """All models that the step makes; the step is done when all of them are there."""
        return (self,)

    def in_folder(self, old: Path, new: Path) -> ModelStep:
        """Return the same step of another run."""
        place = new / self.out.relative_to(old)
        return replace(self, out=place)  # pyright: ignore (all model steps are dataclasses)


class FileStep(Step[int]):
    """A step that writes a patch or a sweep and returns the number of evaluations it took.

    `journal.json` records the hash of the file and the cost.
    """

    @property
    def title(self) -> str:
        """The title of the method or pool member."""
        return self.out.stem

    @property
    def name(self) -> str:
        """The name of the step in the journal, such as `patches/consensus`."""
        return f"{self.out.parent.name}/{self.title}"

    @property
    def label(self) -> str:
        return self.name


class ValueStep(Step[T]):
    """A step that returns a value; `.state` keeps the value until the run is finished.

    Attributes:
        value_type: the type of the value, as pydantic reads it from JSON.
    """

    value_type: ClassVar[Any]
