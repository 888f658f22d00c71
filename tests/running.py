"""The command line in a process of its own or in this one, with a cache of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import prestarted
from negmerge.cli import main

WORKERS = 2
"""The number of worker processes that a run is expected to start at most."""


def start_python(
    place: Path, *words: str, plain: bool = False, spares: int = 0, **environment: str
) -> subprocess.Popen[str] | prestarted.Process:
    """Begin Python in a folder.

    Args:
        words: its arguments; `-m` or `-c` comes first.
        plain: start Python anew, as a user does, although it takes longer.
        spares: the number of workers that it will need.
    """
    variables = os.environ | environment
    if not plain and (process := prestarted.start([*words], place, variables, spares)):
        return process
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=place,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def start(
    place: Path, *arguments: str, plain: bool = False, **environment: str
) -> subprocess.Popen[str] | prestarted.Process:
    """Begin a command in a folder."""
    spares = WORKERS if "unlearn" in arguments else 0
    ours = {"NEGMERGE_CACHE": str(place / "cache"), "COLUMNS": "150"} | environment
    return start_python(place, "-m", "negmerge.cli", *arguments, plain=plain, spares=spares, **ours)


def negmerge(
    place: Path, *arguments: str, code: int = 0, plain: bool = False, **environment: str
) -> tuple[str, str]:
    """Run a command in a folder to its end, which must be this code; what it says."""
    return ended(start(place, *arguments, plain=plain, **environment), code)


def python(
    place: Path, *words: str, code: int = 0, spares: int = 0, **environment: str
) -> tuple[str, str]:
    """Run Python in a folder to its end, as `negmerge` does with a command."""
    return ended(start_python(place, *words, spares=spares, **environment), code)


def ended(process: subprocess.Popen[str] | prestarted.Process, code: int) -> tuple[str, str]:
    """Wait for the end of a process."""
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == code, err or out
    return out, err


def negmerge_here(place: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run a command in a folder as `negmerge` does, but in this process, which is quicker."""
    out, err, ended = StringIO(), StringIO(), 0
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.MonkeyPatch.context() as patch,
        chdir(place),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        patch.setenv("NEGMERGE_CACHE", str(place / "cache"))
        patch.setenv("COLUMNS", "150")
        try:
            main(list(arguments))
        except SystemExit as ending:
            ended = ending.code
        finally:
            signal.signal(signal.SIGTERM, before)
    assert ended == code, err.getvalue() or out.getvalue()
    return out.getvalue(), err.getvalue()
