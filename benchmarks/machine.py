"""What a measurement ran on, for the record."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path


def describe() -> str:
    """Processor, cores, Python and date on one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    processor = names[0] if names else platform.processor()
    return f"{processor}, {cores} cores, Python {platform.python_version()}, {date.today()}"
