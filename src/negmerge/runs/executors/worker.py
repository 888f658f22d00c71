"""What every worker of an executor does: threads, memory, the log of a step, errors of one line."""

from __future__ import annotations

import ctypes
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from negmerge import plugins
from negmerge.errors import NegMergeError
from negmerge.runs.records import Done
from negmerge.runs.steps import Step, T
from negmerge.runs.watch import Report
from negmerge.support.files import report_write_errors
from negmerge.support.progress import Facts


def run_step(
    step: Step[T], scenario: Any, threads: int, report: Report, log: StepLog | None = None
) -> Done[T]:
    """Run a step with a number of threads, and write its log."""
    import torch

    torch.set_num_threads(threads)
    try:
        with one_line_errors():
            if log is None:
                return step.run(scenario, report)
            with log.written(step.label, threads):
                return step.run(scenario, Report(report.advance, log.noting(report)))
    finally:
        return_freed_memory()


class StepLog:
    """The log of a step: when and where each attempt began, epochs and losses, how it ended.

    Args:
        folder: the folder of the logs of a run.
        label: the label of the step, which names the file.
        node: the node that runs the step.
        redirect: whether the log also gets what libraries print while the step runs.
    """

    def __init__(self, folder: Path, label: str, node: str, redirect: bool = False) -> None:
        self.path = folder / log_name(label)
        self.node, self.redirect = node, redirect

    @contextmanager
    def written(self, label: str, threads: int) -> Iterator[None]:
        """Write the log of one attempt."""
        with report_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            opened = self.path.open("ab", buffering=0)  # a full disk is met when a line is written
        with opened as self._file:
            self._line(f"{label} begins on {self.node}, process {os.getpid()}, threads: {threads}")
            begun = time.monotonic()
            try:
                with _redirected(self._file.fileno()) if self.redirect else _nothing():
                    yield
            except BaseException as error:
                with suppress(NegMergeError):  # the error of the step is what matters
                    self._line(f"failed after {time.monotonic() - begun:.1f} s")
                    self._write("".join(traceback.format_exception(error)))
                raise
            self._line(f"done after {time.monotonic() - begun:.1f} s")

    def noting(self, report: Report) -> Any:
        """Return a function that writes facts to the log and passes them on."""

        def tell(facts: Facts) -> None:
            self._line(", ".join(f"{name} {value:g}" for name, value in facts.items()))
            report.tell(facts)

        return tell

    def _line(self, text: str) -> None:
        self._write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _write(self, text: str) -> None:
        with report_write_errors(self.path):
            self._file.write(text.encode(errors="backslashreplace"))


def log_name(label: str) -> str:
    """Return the name of the log file of a step.

    >>> log_name("member 3 of 9"), log_name("sweeps/consensus")
    ('member-3-of-9.log', 'sweeps-consensus.log')
    """
    return re.sub(r"[^A-Za-z0-9_]+", "-", label)[:150] + ".log"


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _redirected(descriptor: int) -> Iterator[None]:
    """Let standard output and standard error of this process go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in (1, 2)]
    try:
        for number in (1, 2):
            os.dup2(descriptor, number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, before in zip((1, 2), kept, strict=True):
            os.dup2(before, number)
            os.close(before)


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of this machine, or the one that NEGMERGE_NODE gives it."""
    return environment.get("NEGMERGE_NODE") or socket.gethostname()


def keep_freed_memory() -> None:
    """Make malloc keep freed memory while a step of a run trains a model.

    Otherwise every layer's memory is returned to the system and faulted in again, which can cost
    half as much as the computation.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_mmap_threshold, 1 << 30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def return_freed_memory() -> None:
    """Return the memory that `keep_freed_memory` kept to the system: the next step needs other."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@contextmanager
def one_line_errors() -> Iterator[None]:
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
