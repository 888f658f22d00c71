"""A Ray cluster with the nodes a and b, for tests that lose them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Nodes:
    """A cluster with the nodes a and b, in a process of its own."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("cluster_process.py")
        variables = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 40}
        variables |= {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=pipe, stdout=pipe, text=True, env=variables
        )
        assert self.process.stdout is not None
        self.answers = (line for line in self.process.stdout if ":" in line)
        self.address = next(self.answers).strip()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        assert next(self.answers).strip() == self.address

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.stdout.close()  # pyright: ignore


@contextmanager
def running() -> Iterator[Nodes]:
    """A cluster, and the token of it in the variables of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "t" * 40)
        started = Nodes()
        started.tell("add a 1")
        started.tell("add b 1")
        try:
            yield started
        finally:
            started.end()
