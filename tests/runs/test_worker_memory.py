"""The memory of a worker: kept during a step, returned after it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np

from negmerge.runs.executors.worker import keep_freed_memory, return_freed_memory


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


keep_freed_memory()
before = resident()
blocks = [np.ones(125_000) for _ in range(200)]
last = np.ones(1000)
held = resident()
del blocks
kept = resident()
return_freed_memory()
print(held - before, held - kept, kept - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="malloc of the GNU C library")
def test_memory_is_kept_until_the_step_is_done():
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    used, early, returned = map(float, found.stdout.split())
    assert used > 190
    assert early < 20
    assert returned > 150
