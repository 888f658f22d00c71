"""Executors run steps: in this process or in local processes.

◄ ADD AN EXECUTOR. Subclass `Executor`. Each worker makes the scenario once, with its data and
networks; steps and their results are small and can be pickled.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from negmerge import plugins
from negmerge.errors import NegMergeError
from negmerge.plugins import LoadedPlugins
from negmerge.runs.records import Done
from negmerge.runs.steps import Step, T
from negmerge.support.processes import end_with_parent
from negmerge.support.progress import Advance


class Executor(AbstractContextManager["Executor"], ABC):
    """Runs steps; as a context manager it releases its workers at the end."""

    @abstractmethod
    def run(
        self, steps: Sequence[Step[T]], advance: Advance, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[T]]]:
        """Yield the position and the result of each step, in the order in which they finish.

        Args:
            steps: the steps.
            advance: called with each amount of work that is done.
            stage_size: the number of steps of the stage, including those done in an earlier run;
                the number of `steps` if not given. It determines the number of threads of each
                step, on which the last bits of a training depend.
        """

    def __exit__(self, *error: object) -> None:
        """Release the workers."""


class InProcess(Executor):
    """Runs one step after the other in this process."""

    def __init__(self, scenario: Any) -> None:
        self.scenario = scenario

    def run(
        self, steps: Sequence[Step[T]], advance: Advance, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[T]]]:
        for position, step in enumerate(steps):
            yield position, step.run(self.scenario, advance)


class OnlyWorker(InProcess):
    """Runs the steps of a recipe in this process, which needs no time to start.

    Args:
        scenario: what the steps run on.
        cores: the number of threads of each step.
        feed_workers: see `LocalProcesses`.
    """

    def __init__(self, scenario: Any, cores: int, feed_workers: int | None = None) -> None:
        super().__init__(scenario)
        self.cores, self.feed_workers = cores, feed_workers

    def run(
        self, steps: Sequence[Step[T]], advance: Advance, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[T]]]:
        import torch

        from negmerge.training.prefetch import set_feed_workers

        keep_freed_memory()
        before = torch.get_num_threads()
        torch.set_num_threads(self.cores)
        set_feed_workers(self.feed_workers)
        try:
            with _one_line_errors():
                yield from super().run(steps, advance, stage_size)
        finally:
            torch.set_num_threads(before)
            set_feed_workers(None)


class LocalProcesses(Executor):
    """Runs steps in processes that share the cores.

    Args:
        make_scenario: a function that can be pickled; each process calls it once.
        workers: the number of processes.
        cores: the number of cores that the busy processes share.
        feed_workers: the number of workers that prepare the batches of a training; see `prefetch`.
    """

    def __init__(
        self,
        make_scenario: Callable[[], Any],
        workers: int,
        cores: int,
        feed_workers: int | None = None,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.counts: Any = spawn.SimpleQueue()
        # LoadedPlugins comes first: the objects after it may be defined by a plug-in.
        facts = (self.counts, os.getpid(), spawn.Value("i", 0), feed_workers)
        start = (LoadedPlugins(), make_scenario, *facts)
        self.workers, self.cores = workers, cores
        self.pool = ProcessPoolExecutor(workers, spawn, _start_worker, start)

    def run(
        self, steps: Sequence[Step[T]], advance: Advance, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[T]]]:
        threads = max(self.cores // min(self.workers, stage_size or len(steps)), 1)
        positions: dict[Future[Done[T]], int] = {}
        try:
            with _ignored_interrupts():  # workers that start here inherit it
                for position, step in enumerate(steps):
                    positions[self.pool.submit(_run_step, step, threads)] = position
            pending = set(positions)
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                while not self.counts.empty():
                    advance(self.counts.get())
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
_counts: Any = None


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next training step.

    Otherwise every layer's memory is returned to the system and faulted in again, which can cost
    half as much as the computation.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def _start_worker(
    _: LoadedPlugins,
    make_scenario: Callable[[], Any],
    counts: Any,
    parent: int,
    started: Any,
    feed_workers: int | None,
) -> None:
    """Prepare a worker: it exits with its parent, ignores interrupts and uses one GPU."""
    global _scenario, _counts
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
    _counts = counts
    _scenario = make_scenario()


def _run_step(step: Step[T], threads: int) -> Done[T]:
    import torch

    torch.set_num_threads(threads)
    with _one_line_errors():
        return step.run(_scenario, _counts.put)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn errors of plug-ins and of torch (memory, shapes, devices) into one line."""
    try:
        yield
    except NegMergeError:
        raise
    except Exception as error:
        if (line := plugins.failure(error)) is not None:
            raise NegMergeError(line) from error
        if not isinstance(error, RuntimeError | MemoryError):
            raise
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NegMergeError(f"{type(error).__name__} in a step of the run: {reason}") from error
