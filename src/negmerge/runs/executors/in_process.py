"""The executors that run steps in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from negmerge.runs.executors.base import Executor
from negmerge.runs.executors.worker import StepLog, keep_freed_memory, node_name, run_step
from negmerge.runs.records import Done
from negmerge.runs.steps import Step, T
from negmerge.runs.watch import Watch


class InProcess(Executor):
    """Runs one step after the other in this process."""

    def __init__(self, scenario: Any) -> None:
        self.scenario = scenario

    def run(
        self, steps: Sequence[Step[T]], watch: Watch, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[T]]]:
        for position, step in enumerate(steps):
            watch.started(position, node_name())
            yield position, step.run(self.scenario, watch.report(position))


class OnlyWorker(InProcess):
    """Runs the steps of a recipe in this process, which needs no time to start.

    Args:
        scenario: what the steps run on.
        threads: the number of threads of each step.
        feed_workers, logs: see `LocalProcesses`.
    """

    def __init__(
        self,
        scenario: Any,
        threads: int,
        feed_workers: int | None = None,
        logs: Path | None = None,
    ) -> None:
        super().__init__(scenario)
        self.threads, self.feed_workers, self.logs = threads, feed_workers, logs

    def run(
        self, steps: Sequence[Step[T]], watch: Watch, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[T]]]:
        import torch

        from negmerge.training.prefetch import set_feed_workers

        keep_freed_memory()
        before = torch.get_num_threads()
        set_feed_workers(self.feed_workers)
        try:
            for position, step in enumerate(steps):
                watch.started(position, node_name())
                log = None if self.logs is None else StepLog(self.logs, step.label, node_name())
                report = watch.report(position)
                yield position, run_step(step, self.scenario, self.threads, report, log)
        finally:
            torch.set_num_threads(before)
            set_feed_workers(None)
