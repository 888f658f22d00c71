"""Where work runs: in this process, or in local processes, behind one `map`.

Work is a function of (context, item, advance). The context, such as data and a network, is made
once in each worker; items and results are small.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol

from negmerge.errors import NegMergeError

Advance = Callable[[int], None]
Work = Callable[[Any, Any, Advance], Any]


class Executor(Protocol):
    """Maps work over items; results come as they are done, with the item's place.

    of: how many items there are with those done in an earlier run. It decides the threads of each,
        on which the last bits of a training depend.
    """

    def map(
        self, work: Work, items: Sequence[Any], advance: Advance, of: int | None = None
    ) -> Iterator[Any]: ...
    def __enter__(self) -> Executor: ...
    def __exit__(self, *error: object) -> None: ...


class InProcess:
    """One item after another, here.

    >>> with InProcess(10) as executor:
    ...     list(executor.map(lambda base, item, advance: base + item, [1, 2], print))
    [(0, 11), (1, 12)]
    """

    def __init__(self, context: Any) -> None:
        self.context = context

    def map(
        self, work: Work, items: Sequence[Any], advance: Advance, of: int | None = None
    ) -> Iterator[Any]:
        for place, item in enumerate(items):
            yield place, work(self.context, item, advance)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None: ...


class LocalProcesses:
    """As many processes as workers, each with its share of the cores.

    make: called in each process, gives the context; it and the items are sent there, so they must
        be plain data and module-level functions.
    cores: shared by the processes that are busy; two of one thread train more than one of two.
    """

    def __init__(self, make: Callable[[], Any], workers: int, cores: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.counts: Any = spawn.SimpleQueue()
        start = (make, self.counts, os.getpid(), spawn.Value("i", 0))
        self.workers, self.cores = workers, cores
        self.pool = ProcessPoolExecutor(workers, spawn, _start, start)

    def map(
        self, work: Work, items: Sequence[Any], advance: Advance, of: int | None = None
    ) -> Iterator[Any]:
        threads = max(self.cores // min(self.workers, of or len(items)), 1)
        places: dict[Future[Any], int] = {}
        try:
            with _deaf():  # a worker that starts now leaves interrupts to us from the beginning
                for place, item in enumerate(items):
                    places[self.pool.submit(_work, work, item, threads)] = place
            pending = set(places)
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                while not self.counts.empty():
                    advance(self.counts.get())
                for future in done:
                    yield places[future], future.result()
        except BrokenProcessPool:
            raise NegMergeError(
                "a worker process died: it was killed, or memory ran out (fewer workers need less);"
                " run the same command again, it goes on where it stopped. (In a script, call it"
                " under `if __name__ == '__main__':`, or every worker begins the script anew.)"
            ) from None

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            # Interrupted or failed: what is being trained is saved in its own files; do not wait.
            for process in list((self.pool._processes or {}).values()):  # no other way to them
                process.terminate()
        self.pool.shutdown(wait=True, cancel_futures=True)


def processes_for(workers: int | None, cores: int, jobs: int, gpus: int = 0) -> int:
    """How many processes: one for each GPU, or for each core if there is none.

    >>> processes_for(None, 8, 27), processes_for(None, 8, 2), processes_for(3, 8, 27)
    (8, 2, 3)
    >>> processes_for(None, 64, 27, gpus=4)
    4
    """
    return max(min(gpus or cores, jobs) if workers is None else workers, 1)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore interrupts in the block, as processes that are started in it will go on to do."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_context: Any = None
_counts: Any = None


def keep_memory() -> None:
    """Let the process keep what it frees, for its next step; without it, every layer's memory goes
    back to the system and is faulted in anew, which can cost half as much as the computation."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def _start(make: Callable[[], Any], counts: Any, parent: int, started: Any) -> None:
    """Prepare a worker: it dies with its parent, leaves interrupts to it, and has one GPU."""
    global _context, _counts
    death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_memory()
    import torch

    with started.get_lock():
        number = started.value
        started.value += 1
    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
    _counts = counts
    _context = make()


def _work(work: Work, item: Any, threads: int) -> Any:
    import torch

    torch.set_num_threads(threads)
    try:
        return work(_context, item, _counts.put)
    except (RuntimeError, MemoryError) as error:  # of torch: out of memory, shapes, devices
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise NegMergeError(f"{type(error).__name__} in a worker: {reason}") from error
