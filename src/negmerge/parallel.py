"""Work for threads, results in order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from negmerge.errors import OptionError

MOST_WORKERS = 1024
"""More threads or processes than that only take memory."""

T = TypeVar("T")
R = TypeVar("R")
W = TypeVar("W")


def ordered(
    work: Iterable[T], run: Callable[[W, T], R], make_worker: Callable[[], W], workers: int
) -> Iterator[R]:
    """Run all work on threads, each with its own worker; yield results in the order of the work.

    >>> list(ordered(range(4), lambda _, x: x * x, lambda: None, 2))
    [0, 1, 4, 9]

    Only a few results are computed ahead, so that memory stays bounded.
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


def available_workers(wanted: int | None) -> int:
    """The number asked for, or one for each core this process may use."""
    if wanted is None:
        return len(os.sched_getaffinity(0))
    if not 1 <= wanted <= MOST_WORKERS:
        raise OptionError(f"workers {wanted}: wanted at least 1 and at most {MOST_WORKERS}")
    return wanted
