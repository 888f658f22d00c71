"""What the benchmarks share: a description of the machine, and Markdown tables."""

from __future__ import annotations

import os
import platform
from datetime import date
from pathlib import Path

import pandas as pd

from negmerge.reports.export import DataTable


def describe() -> str:
    """The processor, the number of cores, the Python version and the date."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    processor = names[0] if names else platform.processor()
    return f"{processor}, {cores} cores, Python {platform.python_version()}, {date.today()}"


def markdown_table(rows: list[dict[str, str]]) -> str:
    """Rows of texts by column as a Markdown table."""
    return DataTable("", "", pd.DataFrame(rows)).markdown()
