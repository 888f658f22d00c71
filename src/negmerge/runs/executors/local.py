"""The executor that runs steps in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from negmerge.errors import NegMergeError
from negmerge.plugins import LoadedPlugins
from negmerge.runs.cores import Cores
from negmerge.runs.executors.base import Executor
from negmerge.runs.executors.worker import StepLog, keep_freed_memory, node_name, run_step
from negmerge.runs.records import Done
from negmerge.runs.steps import Step, T
from negmerge.runs.watch import Report, Watch
from negmerge.support.processes import end_with_parent


class LocalProcesses(Executor):
    """Runs steps in processes that share the cores.

    Args:
        make_scenario: a function that can be pickled; each process calls it once.
        workers: the number of processes.
        cores: the cores that the busy processes share.
        feed_workers: the number of workers that prepare the batches of a training; see `prefetch`.
        logs: the folder of the logs of the steps, if any.
    """

    def __init__(
        self,
        make_scenario: Callable[[], Any],
        workers: int,
        cores: Cores,
        feed_workers: int | None = None,
        logs: Path | None = None,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.events: Any = spawn.SimpleQueue()
        # LoadedPlugins comes first: the objects after it may be defined by a plug-in.
        facts = (self.events, os.getpid(), spawn.Value("i", 0), feed_workers)
        start = (LoadedPlugins(), make_scenario, *facts)
        self.cores, self.logs = cores, logs
        self.pool = ProcessPoolExecutor(workers, spawn, _start_worker, start)

    def run(
        self, steps: Sequence[Step[T]], watch: Watch, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[T]]]:
        threads = self.cores.threads(stage_size or len(steps))
        positions: dict[Future[Done[T]], int] = {}
        try:
            with _ignored_interrupts():  # workers that start here inherit it
                for position, step in enumerate(steps):
                    work = (step, position, threads, self.logs)
                    positions[self.pool.submit(_run_step, *work)] = position
            pending = set(positions)
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                while not self.events.empty():
                    _pass_on(self.events.get(), watch)
                # Steps that succeeded come first, so that their results are kept.
                for future in sorted(done, key=lambda one: one.exception() is not None):
                    yield positions[future], future.result()
        except BrokenProcessPool:
            raise NegMergeError(
                "a worker process died: it was killed, or memory ran out (fewer workers need less);"
                " run the same command again, it continues where it stopped. (In a script, call it"
                " under `if __name__ == '__main__':`, or every worker runs the script again.)"
            ) from None

    def __exit__(self, kind: object = None, *error: object) -> None:
        """Stop the workers; after an error, without waiting for trainings, which are saved."""
        if kind is not None:
            for process in list((self.pool._processes or {}).values()):  # there is no public way
                process.terminate()
        self.pool.shutdown(wait=True, cancel_futures=True)


def count_processes(workers: int | None, cores: int, steps: int, gpus: int = 0) -> int:
    """Return the number of processes: one for each GPU, or for each core if there is no GPU.

    >>> count_processes(None, 8, 27), count_processes(None, 8, 2), count_processes(3, 8, 27)
    (8, 2, 3)
    >>> count_processes(None, 64, 27, gpus=4)
    4

    Args:
        workers: the number that the recipe asks for, if any.
        cores, gpus: of the machine.
        steps: the number of steps of the largest stage.
    """
    return max(min(gpus or cores, steps) if workers is None else workers, 1)


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Ignore SIGINT in the block; processes that are started in the block ignore it too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_scenario: Any = None
_events: Any = None


def _start_worker(
    _: LoadedPlugins,
    make_scenario: Callable[[], Any],
    events: Any,
    parent: int,
    started: Any,
    feed_workers: int | None,
) -> None:
    """Prepare a worker: it exits with its parent, ignores interrupts and uses one GPU."""
    global _scenario, _events
    end_with_parent(parent)
    keep_freed_memory()
    import torch

    from negmerge.training.prefetch import set_feed_workers

    set_feed_workers(feed_workers)
    with started.get_lock():
        number = started.value
        started.value += 1
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    _events = events
    _scenario = make_scenario()


def _run_step(step: Step[T], position: int, threads: int, logs: Path | None) -> Done[T]:
    _events.put((position, "started", node_name()))
    report = Report(
        lambda count: _events.put((position, "advance", count)),
        lambda facts: _events.put((position, "tell", facts)),
    )
    log = None if logs is None else StepLog(logs, step.label, node_name())
    return run_step(step, _scenario, threads, report, log)


def _pass_on(event: tuple[int, str, Any], watch: Watch) -> None:
    """Tell a watch what a worker tells: a position, the name of a method, and its argument."""
    position, method, value = event
    getattr(watch, method)(position, value)
