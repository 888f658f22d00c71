"""How `engine.py` measures: times that alternate, peak memory, cold files, and a CPU profile."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pools import CACHE

NEGMERGE = [sys.executable, "-m", "negmerge.cli"]


@dataclass(frozen=True)
class Spent:
    """The seconds of several runs, and the CPU seconds of each (of this process or of children)."""

    wall: list[float]
    cpu: list[float]

    @property
    def best(self) -> float:
        return min(self.wall)

    @property
    def median(self) -> float:
        return float(np.median(self.wall))

    @property
    def median_cpu(self) -> float:
        return float(np.median(self.cpu))


def _cpu() -> float:
    own, children = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return sum(used.ru_utime + used.ru_stime for used in (own, children))


def alternate(
    times: int, *runs: Callable[[], Any], before: Callable[[], Any] | None = None
) -> list[Spent]:
    """Time several functions in turn, so that all see the same noise; `before` is not timed."""
    spent = [Spent([], []) for _ in runs]
    for _ in range(times):
        for run, one in zip(runs, spent, strict=True):
            if before is not None:
                before()
            begun, used = time.perf_counter(), _cpu()
            run()
            one.wall.append(time.perf_counter() - begun)
            one.cpu.append(_cpu() - used)
    return spent


def median_ratio(one: Spent, two: Spent) -> float:
    """Return the median of the ratios of runs that followed each other."""
    return float(np.median(np.array(one.wall) / np.array(two.wall)))


def read_all(paths: list[Path]) -> None:
    """Read all bytes in one thread, with `readinto` a page-aligned buffer that fits the cache."""
    room = np.empty((1 << 18) + 4096, np.uint8)
    skip = -room.ctypes.data % 4096
    buffer = memoryview(room)[skip : skip + (1 << 18)]
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(paths: list[Path]) -> None:
    """Remove files from the page cache; they must have been written to the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def command(*arguments: object) -> list[str]:
    return [*NEGMERGE, *map(str, arguments)]


def run(arguments: list[str], **environment: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True, env=os.environ | environment)


def peak_anonymous(arguments: list[str]) -> int:
    """The peak memory of a command that is not backed by a file, sampled every two milliseconds."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            break
        used = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")]
        peak = max([peak, *used])
        time.sleep(0.002)
    if process.wait():
        raise RuntimeError(f"failed: {' '.join(arguments)}")
    return peak


def mergekit(work: Path, method: str, base: Path, models: list[Path], dtype: str) -> list[str]:
    """The command that merges the same models with mergekit, installed in its own environment."""
    home = CACHE / "mergekit-env"
    if not (home / "bin" / "mergekit-pytorch").exists():
        run([sys.executable, "-m", "venv", str(home)])
        run([str(home / "bin" / "pip"), "install", "-q", "mergekit"])
    density = ", density: 0.2" if method == "ties" else ""
    lines = [f"merge_method: {method}", f"base_model: {base}", f"dtype: {dtype}", "models:"]
    for model in models:
        lines += [f"  - model: {model}", f"    parameters: {{weight: {1 / len(models)}{density}}}"]
    config = work / f"{method}-{dtype}.yml"
    config.write_text("\n".join(lines))
    program = "mergekit-yaml" if base.is_dir() else "mergekit-pytorch"
    return [str(home / "bin" / program), str(config), str(work / f"{method}-{dtype}-out")]


PARTS = {
    "reading: copying from the page cache": ("_copy_to_iter", "copy_page_to_iter", "filemap_"),
    "new memory: clearing pages": ("clear_page", "clear_huge_page", "__folio_alloc"),
}
"""What functions of the kernel do, by the beginnings of their names."""


def profile(run: Callable[[], Any]) -> dict[str, float] | None:
    """The shares of the CPU time of a function by what it is spent on; None without `perf`."""
    perf = shutil.which("perf")
    if perf is None:
        return None
    data = str(CACHE / "perf.data")
    recorder = subprocess.Popen(
        [perf, "record", "-q", "-F", "999", "-o", data, "-p", str(os.getpid())],
        stderr=subprocess.DEVNULL,
    )
    time.sleep(0.5)
    run()
    recorder.send_signal(signal.SIGINT)
    recorder.wait()
    report = subprocess.run(
        [perf, "report", "-i", data, "--no-children", "--sort", "dso,symbol", "-t", "|"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    found: Counter[str] = Counter()
    for line in report.splitlines():
        share, _, rest = line.strip().partition("%|")
        if rest and not line.startswith("#"):
            found[_part(rest)] += float(share)
    return {part: share / 100 for part, share in found.most_common()}


def _part(line: str) -> str:
    place, _, symbol = (text.strip() for text in line.partition("|"))
    name = symbol.partition("] ")[2]
    for part, beginnings in PARTS.items():
        if name.startswith(beginnings):
            return part
    if "kernel" in place:
        return "kernel, other"
    if "JIT" in place:
        return "compiled loops: checksums, widening, folding, writing"
    return "Python" if "python" in place else "libraries"
