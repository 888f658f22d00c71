"""What a machine has: cores, memory, disks and GPUs; torch is not imported to find out."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")
"""Where Linux tells the limits of a container."""
PATIENCE = 10
"""Seconds to wait for the tool of the driver."""


@dataclass(frozen=True)
class Memory:
    """Bytes of memory; the limit of a container counts."""

    total: int
    available: int


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver reports it; bytes of memory."""

    name: str
    total: int
    free: int


def memory() -> Memory | None:
    """Return the memory of this machine, or of the container; None if it is not known.

    >>> found = memory()
    >>> found is None or 0 < found.available <= found.total
    True
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    available = total
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("MemAvailable:")]
        available = 1024 * int(line.split()[1])
    with suppress(OSError, ValueError):  # "max": no limit
        limit = int((GROUP / "memory.max").read_text())
        used = int((GROUP / "memory.current").read_text())
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return Memory(total, min(available, total))


def gpus() -> list[Gpu]:
    """Return the GPUs that the driver of NVIDIA reports; none without its tool `nvidia-smi`."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = ["--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603 (the driver's own tool)
            [tool, *asked], capture_output=True, text=True, timeout=PATIENCE, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    found: list[Gpu] = []
    for line in done.stdout.splitlines():
        with suppress(ValueError):
            name, total, free = (part.strip() for part in line.rsplit(",", 2))
            found.append(Gpu(name, int(total) << 20, int(free) << 20))
    return found


def free_disk(path: Path) -> int | None:
    """Return the free bytes of the disk of a path, which need not exist; None if unknown."""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            return shutil.disk_usage(place).free
    return None


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder; links are not followed."""
    try:
        if not path.is_dir() or path.is_symlink():
            return path.lstat().st_size
        return sum(size_of(inner) for inner in path.iterdir())
    except OSError:  # removed meanwhile, or not readable
        return 0
