"""Running work in threads, with results in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from negmerge.errors import OptionError

MAX_WORKERS = 1024
"""The largest number of threads or processes."""

T = TypeVar("T")
R = TypeVar("R")
W = TypeVar("W")


def run_in_order(
    work: Iterable[T], run: Callable[[W, T], R], make_worker: Callable[[], W], workers: int
) -> Generator[R]:
    """Run work in threads, and yield the results in the order of the work.

    Few results are computed ahead, so that memory is bounded. `run` gets the worker of its thread,
    such as a buffer, and an item of work.

    >>> list(run_in_order(range(4), lambda _, x: x * x, lambda: None, 2))
    [0, 1, 4, 9]
    """
    local = threading.local()

    def task(item: T) -> R:
        if not hasattr(local, "worker"):
            local.worker = make_worker()
        return run(local.worker, item)

    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in work:
                waiting.append(pool.submit(task, item))
                if len(waiting) > 3 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def worker_count(wanted: int | None) -> int:
    """The requested number of workers, or by default one per core that this process may use."""
    if wanted is None:
        on_linux = hasattr(os, "sched_getaffinity")
        return len(os.sched_getaffinity(0)) if on_linux else os.cpu_count() or 1
    if not 1 <= wanted <= MAX_WORKERS:
        raise OptionError(f"workers {wanted}: wanted 1 to {MAX_WORKERS}")
    return wanted
