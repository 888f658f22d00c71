"""A whole run on Ray through the command line: the bytes of a local run, also when it is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from running import negmerge, start

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
TINY = """
title: A tiny run
data: {name: fashion_small, limit: {train: 300, test: 100}}
split: {forget: {fraction: 0.2}, validation: 0.1}
train: {epochs: 4, batch: 32, lr: 0.05}
pool:
  settings: {batch: 16, lr: 0.05, momentum: 0.9}
  grid: {epochs: [2, 3], label_smoothing: [0.0, 0.1]}
methods: [consensus, ties, single_best, gradient_ascent]
search: {stop: 1.0, count: 5, samples: 60}
threads: 1
"""
RAY = ("--set", "executor.kind=ray")


def hashes(run: Path) -> tuple[str, dict[str, str]]:
    manifest = json.loads((run / "manifest.json").read_text())
    own = {k: v["sha256"] for k, v in manifest["files"].items() if k.endswith("tensors")}
    return manifest["result"], own


def processes_with(mark: str) -> list[str]:
    """The processes that have a text among their variables."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.with_name("cmdline").read_text(errors="replace"))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_driver_is_killed_and_the_next_one_continues(tmp_path: Path, number: int):
    (tmp_path / "tiny.yaml").write_text(TINY)
    negmerge(tmp_path, "unlearn", "tiny.yaml", "--out", "local")
    mark = f"{tmp_path}-{number}"
    command = ("unlearn", "tiny.yaml", "--out", "run", *RAY)
    process = start(tmp_path, *command, plain=True, NEGMERGE_MARK=mark)
    run = tmp_path / "run"
    end = time.monotonic() + 120
    while not list(run.glob("pool/*/*.safetensors")):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130), err
    end = time.monotonic() + 40
    while left := processes_with(mark):
        assert time.monotonic() < end, left
        time.sleep(0.2)
    made = {path: path.stat().st_mtime_ns for path in run.glob("pool/*/*.safetensors")}
    assert made
    negmerge(tmp_path, *command, plain=True)
    assert all(path.stat().st_mtime_ns == then for path, then in made.items())
    assert hashes(run) == hashes(tmp_path / "local")
    assert not list(run.rglob("*.negmerge-tmp"))
    negmerge(tmp_path, "verify", "run")
    assert "executor" not in (run / "recipe.yaml").read_text()
    # The finished run is the same run for the local executor.
    negmerge(tmp_path, "unlearn", "tiny.yaml", "--out", "run")
