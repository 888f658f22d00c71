"""The interface of executors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from negmerge.runs.records import Done
from negmerge.runs.steps import Step, T
from negmerge.runs.watch import Watch


class Executor(AbstractContextManager["Executor"], ABC):
    """Runs steps; as a context manager it releases its workers at the end."""

    @abstractmethod
    def run(
        self, steps: Sequence[Step[T]], watch: Watch, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[T]]]:
        """Yield the position and the result of each step, in the order in which they finish.

        Args:
            steps: the steps.
            watch: is told what happens to the steps.
            stage_size: the number of steps of the stage, including those done in an earlier run;
                the number of `steps` if not given. It determines the number of threads of each
                step, on which the last bits of a training depend.
        """

    def __exit__(self, *error: object) -> None:
        """Release the workers."""
