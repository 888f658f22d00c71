"""How long it takes to open a data set as large as ImageNet, the first and the second time.

    python benchmarks/large_sets.py [--folder FOLDER] [--repeats N]

Makes an image folder with as many files as ImageNet (1,331,167 tiny pictures, 5 GB of disk) unless
FOLDER has one, opens what a CLIP run needs of it, and compares the check of the folder with a bare
walk in the same run. Writes benchmarks/results/large_sets.md.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import machine
from PIL import Image

from negmerge.vision.places import Local

RESULTS = Path(__file__).parent / "results"
CLASSES, SPLITS = 1000, {"train": 1_281_167, "val": 50_000}
PROBE = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
from negmerge.vision.datasets import load, load_some, resolve
from negmerge.vision.splits import balanced
begun = time.perf_counter()
source, where = resolve("imagenet"), {"root": Path(sys.argv[1]), "cache": Path(sys.argv[2])}
held_out = load(source, "train", part="held_out", **where)
rng = np.random.default_rng(0)
test, _ = load_some(source, "test", lambda labels: balanced(labels, 2000, rng), **where)
seconds = time.perf_counter() - begun
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([seconds, memory, len(held_out), len(test)]))
"""


def make_tree(root: Path) -> None:
    """Write the image folder."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (10, 200, 30)).save(buffer, "PNG")
    for split, total in SPLITS.items():
        for number in range(CLASSES):
            folder = root / split / f"n{number:08d}"
            folder.mkdir(parents=True)
            for k in range(total // CLASSES + (number < total % CLASSES)):
                (folder / f"{folder.name}_{k}.png").write_bytes(buffer.getvalue())


def folders_of(root: Path) -> list[str]:
    """The folders of the classes."""
    return [f"{root}/{split}/n{number:08d}" for split in SPLITS for number in range(CLASSES)]


def list_folder(folder: str) -> int:
    """List a folder."""
    return len(os.listdir(folder))  # noqa: PTH208 - a million files


def stat_folder(folder: str) -> int:
    """List a folder, and look at each file."""
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_ino > 0 for entry in entries)


def with_threads(root: Path, count: int) -> int:
    """Look at each file, in threads."""
    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(stat_folder, folders_of(root)))


def lists_and_text(root: Path) -> int:
    """The check as it was before: a list of all names, all stats, and one text for the hash."""
    found = sorted(f"{here}/{name}" for here, _, names in os.walk(root) for name in names)
    stats = [(name, os.stat(name)) for name in found]  # noqa: PTH116 - as it was
    json.dumps([str(root), [(name, s.st_size, s.st_mtime_ns) for name, s in stats]]).encode()
    "".join(f"{s.st_ino} {s.st_ctime_ns}\n" for _, s in stats).encode()
    return len(found)


def seconds(run: Callable[[], object]) -> float:
    """The seconds of a call."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def opened(root: Path, cache: Path) -> list[float]:
    """Seconds, memory in MB and numbers of images of an opening in a process of its own."""
    command = [sys.executable, "-c", PROBE, str(root.parent), str(cache)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def noticed(root: Path) -> tuple[bool, bool]:
    """Whether an edit in place is seen by the stats of the folders, and by the snapshot."""
    victim = root / "train" / "n00000007" / "n00000007_3.png"
    content, before = victim.read_bytes(), victim.stat()

    def state() -> tuple[list[tuple[int, int]], str]:
        stats = [Path(folder).stat() for folder in folders_of(root)]
        return [(s.st_mtime_ns, s.st_ctime_ns) for s in stats], Local(root).snapshot().stamp

    first = state()
    victim.write_bytes(content[:-1] + b"!")
    os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = state()
    victim.write_bytes(content)
    return first[0] != second[0], first[1] != second[1]


def main(root: Path, repeats: int) -> None:
    """Measure and write the record."""
    files, begun = sum(SPLITS.values()), time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        first = opened(root, Path(cache))
        again = [opened(root, Path(cache)) for _ in range(repeats)]
    ways: dict[str, Callable[[], object]] = {
        "list the folders (`os.listdir`)": lambda: sum(map(list_folder, folders_of(root))),
        "bare walk: list and stat every file": lambda: sum(map(stat_folder, folders_of(root))),
        "the same in 2 threads": lambda: with_threads(root, 2),
        "the same in 8 threads": lambda: with_threads(root, 8),
        "**the check (`Local.snapshot`)**": Local(root).snapshot,
        "the check before: lists and one text": lambda: lists_and_text(root),
        "stat of the 2,000 folders only": lambda: [os.stat(f) for f in folders_of(root)],  # noqa: PTH116
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):  # in turn, so that other work on the machine meets all of them
        for way, run in ways.items():
            times[way].append(seconds(run))
    middle = {way: median(found) for way, found in times.items()}
    bare = middle["bare walk: list and stat every file"]
    rows = [
        {"way": way, "seconds": f"{value:.2f}", "to the bare walk": f"{value / bare:.2f}"}
        for way, value in middle.items()
    ]
    by_folders, by_files = noticed(root)
    second = median(found[0] for found in again)
    memory = max(found[1] for found in again)
    says = {True: "is seen", False: "is not seen"}
    load = os.getloadavg()[0]
    minutes = (time.perf_counter() - begun) / 60
    paragraphs = [
        "# Opening a data set of a million files",
        f"`python benchmarks/large_sets.py --repeats {repeats}` on {machine.describe()}, "
        f"{minutes:.0f} minutes, beside other work (load {load:.1f}): compare within the tables. "
        f"An image folder of {files:,} pictures of 8 × 8 pixels in 2,000 folders, whose entries "
        f"are in the memory of the system. A CLIP run opens {first[2]:,.0f} validation images of "
        f"the training split and {first[3]:,.0f} of 50,000 test images, at 224 pixels.",
        machine.markdown_table(
            [
                {
                    "opening": "first time: look at all files, list, decode, look again",
                    "seconds": f"{first[0]:.1f}",
                    "memory, MB": f"{first[1]:.0f}",
                },
                {
                    "opening": f"second time, in a new process (median of {repeats})",
                    "seconds": f"{second:.1f}",
                    "memory, MB": f"{memory:.0f}",
                },
            ]
        ),
        f"The second time is {first[0] / second:.1f} times faster. It consists of the check that "
        f"no file has changed. Medians of {repeats}:",
        machine.markdown_table(rows),
        "The check looks at every file: an edit in place that keeps size and time "
        f"{says[by_folders]} in the stats of the folders, and {says[by_files]} by the check.",
    ]
    text = "\n\n".join(part.strip() for part in paragraphs) + "\n"
    (RESULTS / "large_sets.md").write_text(text)
    print(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="of the tree; without it, a temporary one")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    place = Path(given.folder or tempfile.mkdtemp(prefix="large-sets-")).resolve() / "imagenet"
    try:
        if not place.is_dir():
            make_tree(place)
        main(place, given.repeats)
    finally:
        if given.folder is None:
            shutil.rmtree(place.parent)
