"""The executor that runs steps on a Ray cluster.

A process of its own, `ray_bridge.py`, is connected to the cluster: a process whose cluster is lost
is killed by Ray, and the run must survive that. The bridge is then started again, connects when the
cluster is back, and gets the steps that are not done.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from negmerge.errors import FileError, NegMergeError, OptionError
from negmerge.plugins import LoadedPlugins
from negmerge.runs.cores import Cores
from negmerge.runs.executors.base import Executor
from negmerge.runs.executors.settings import ExecutorSettings
from negmerge.runs.records import Done
from negmerge.runs.steps import Step, T
from negmerge.runs.watch import Watch
from negmerge.support.files import file_digest

ANSWER = 120.0
"""Seconds to wait for the answer of a cluster; Ray waits forever for a server of another kind."""
LOSSES = 3
"""How often the cluster may be lost before a step is done; then the run stops."""
VISIBLE = 60.0
"""Seconds until a file that a node wrote must be visible here."""


@dataclass(frozen=True)
class Job:
    """What every worker of a cluster gets.

    Args:
        plugins: imports the plug-ins that the user named, when it is unpickled.
        make_scenario: a function that can be pickled; each worker calls it once.
        settings: the section `executor` of the recipe.
        workers: the largest number of steps at a time; None: as many as the cluster holds.
        feed_workers: the number of workers that prepare the batches of a training.
        folder: a folder that all nodes must see, if any.
        logs: the folder of the logs of the steps, if any.
    """

    plugins: LoadedPlugins
    make_scenario: Callable[[], Any]
    settings: ExecutorSettings
    workers: int | None = None
    feed_workers: int | None = None
    folder: Path | None = None
    logs: Path | None = None


class RayCluster(Executor):
    """Runs steps on a Ray cluster.

    Args:
        job: what the workers get.
        threads: the number of threads of each step, if it is fixed.
        note: called with news for the user, such as a lost node.
    """

    def __init__(self, job: Job, threads: int | None, note: Callable[[str], None]) -> None:
        self.job, self.note = job, note
        self._bridge: Any = None
        self._pipe: Any = None
        found = self._connect()
        self.cores = Cores(max(found["cpus"], 1), job.workers or max(found["cpus"], 1), threads)
        self.largest = max(found["largest"], 1)
        """The CPUs of the largest node."""

    def run(
        self, steps: Sequence[Step[T]], watch: Watch, stage_size: int | None = None
    ) -> Iterator[tuple[int, Done[T]]]:
        shared = self.cores.threads(stage_size or len(steps))
        threads = self.cores.fixed or min(shared, self.largest)
        left, losses = dict(enumerate(steps)), 0
        while left:
            try:
                self._pipe.send(("run", [*left.items()], threads))
                while left:
                    kind, *content = self._pipe.recv()
                    if kind == "done":
                        position, done, files = content
                        for path, digest in files.items():
                            wait_for_file(path, digest)
                        losses = 0
                        del left[position]
                        yield position, done
                    elif kind == "error":
                        raise NegMergeError(content[0])
                    elif kind == "note":
                        self.note(content[0])
                    else:
                        getattr(watch, kind)(*content)
            except (EOFError, ConnectionError):
                for position in left:
                    if watch.units[position].state == "running":
                        watch.failed(position, "the cluster is lost")
                losses += 1
                if losses == LOSSES:
                    log = "" if self.job.logs is None else f"; its log is {self.job.logs}/ray.log"
                    raise NegMergeError(
                        f"the cluster was lost {LOSSES} times before a step was done{log}; run the "
                        "same command again, it continues where it stopped"
                    ) from None
                self.note("the connection to the cluster is lost; trying to connect again")
                self._connect()

    def __exit__(self, kind: object = None, *error: object) -> None:
        """Release the cluster; after an error, without waiting for steps that are running."""
        if kind is None:
            try:
                self._pipe.send(("stop",))
                self._bridge.join(30)
            except (OSError, ValueError):  # the bridge has ended
                pass
        self._stop()

    def _stop(self) -> None:
        if self._bridge is not None:
            self._bridge.terminate()  # Ray ends the workers of a driver that has ended
            self._bridge.join(15)
            if self._bridge.is_alive():
                self._bridge.kill()
                self._bridge.join()
            self._pipe.close()
            self._bridge = None

    def _connect(self) -> dict[str, Any]:
        """Start the bridge; return what it says about the cluster, or raise its error."""
        deadline, first = time.monotonic() + self.job.settings.patience, self._bridge is None
        while True:
            self._stop()
            spawn = multiprocessing.get_context("spawn")
            self._pipe, other = spawn.Pipe()
            from negmerge.runs.executors.ray_bridge import bridge

            self._bridge = spawn.Process(target=bridge, args=(self.job, other, os.getpid()))
            self._bridge.start()
            other.close()
            content: Any
            try:
                kind, content = "lost", f"no Ray cluster answers within {ANSWER:.0f} s"
                if self._pipe.poll(ANSWER):
                    kind, content = self._pipe.recv()
            except (EOFError, ConnectionError):
                kind, content = "lost", "the process that connects to the cluster has died"
            if kind == "ready":
                return content
            if kind == "error" or first or time.monotonic() > deadline:
                self._stop()
                raise OptionError(f"executor.address {self.job.settings.address}: {content}")
            time.sleep(2)


def wait_for_file(path: Path, digest: str) -> None:
    """Wait until a file that a node wrote is visible here with the same content.

    File systems of networks may show other machines an older state for some seconds.
    """
    deadline = time.monotonic() + VISIBLE
    while True:
        with suppress(OSError, FileError):  # the folder itself may be not visible yet
            os.listdir(path.parent)  # asks the server again  # noqa: PTH208
            if path.is_file() and file_digest(path) == digest:
                return
        if time.monotonic() > deadline:
            raise FileError(
                f"{path}: a node has written it, and it is not visible here after {VISIBLE:.0f} s; "
                "name a run directory on a file system that all nodes share"
            )
        time.sleep(0.2)
