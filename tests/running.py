"""The command line in a process of its own, with a cache of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def start(place: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Begin a command in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "negmerge.cli", *arguments],
        cwd=place,
        env=os.environ | {"NEGMERGE_CACHE": str(place / "cache"), "COLUMNS": "150"} | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def negmerge(place: Path, *arguments: str, code: int = 0, **environment: str) -> tuple[str, str]:
    """Run a command in a folder to its end, which must be this code; what it says."""
    process = start(place, *arguments, **environment)
    try:
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == code, err or out
    return out, err
