"""Speed and memory of the merge engine, compared with reading the files and with mergekit.

    make bench                                   everything; pools are written to a cache folder
    python benchmarks/engine.py --only speed     one group of rows (see GROUPS)
    python benchmarks/engine.py --clean          remove the cache folder

Every number is a ratio to something measured in the same run, because machines are noisy: the two
alternate, and the median of their ratios is recorded beside the ratio of the fastest runs. The
results are written to benchmarks/results/engine.json and engine.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_record import as_markdown
from machine import describe
from measuring import (
    alternate,
    command,
    evict,
    median_ratio,
    mergekit,
    peak_anonymous,
    profile,
    read_all,
    run,
)
from pools import CACHE, Pool, files_of, llama, make_holes, make_pool, vit_b32

import negmerge as nm

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Rows = Iterator[Row]


def row(what: str, ratio: float, wanted: str, ok: bool, **facts: Any) -> Row:
    return {"what": what, "ratio": ratio, "wanted": wanted, "reached": ok} | facts


def towers(n: int = 10) -> Pool:
    base, models = make_pool(CACHE / "vit-b32", vit_b32(), 10)
    return base, models[:n]


def language_models(kind: str) -> Pool:
    return make_pool(CACHE / f"llama-{kind}", llama(), 6, getattr(torch, kind), 4)


# ----------------------------------------------------------------------------------------- speed

FLOAT32, BFLOAT16 = "10 towers, float32", "6 language models, bfloat16"
SPEED: list[tuple[str, Callable[[], Pool], str, float]] = [
    (FLOAT32, towers, "consensus", 0.85),
    (FLOAT32, towers, "uniform", 0.7),
    (FLOAT32, towers, "magmax", 0.7),
    ("2 towers, float32", lambda: towers(2), "consensus", 0.5),
    ("3 towers, float32", lambda: towers(3), "consensus", 0.5),
    *(
        (f"6 language models, {kind}", lambda kind=kind: language_models(kind), rule, wanted)
        for kind in ("bfloat16", "float16")
        for rule, wanted in (
            ("consensus", 0.45), ("uniform", 0.35), ("magmax", 0.4), ("ties", 0.05),
        )
    ),
]  # fmt: skip
"""Pool, rule and the share of the read speed that the median must reach."""


def speed(work: Path) -> Rows:
    """Merges in memory, as a share of the speed of reading the files."""
    for pool, make, rule, wanted in SPEED:
        base, models = make()
        files = files_of([base, *models])

        def merge(base: Path = base, models: list[Path] = models, rule: str = rule) -> None:
            nm.merge(base, models, rule)

        read_all(files)
        begun = time.perf_counter()
        merge()  # compiles, and gets its memory from the system
        first = time.perf_counter() - begun
        reading, merging = alternate(
            4 if rule == "ties" else 12, lambda f=files: read_all(f), merge
        )
        share = median_ratio(reading, merging)
        yield row(
            f"merge in memory, {pool}, {rule}: share of the read speed",
            share,
            f"≥ {wanted}",
            share >= wanted,
            of_the_best=reading.best / merging.best,
            seconds=merging.median,
            cpu_seconds=merging.median_cpu,
            read_seconds=reading.median,
            seconds_of_the_first_merge=first,
            where_the_time_goes=profile(merge),
        )


def cold(work: Path) -> Rows:
    """Merges of files that are not in the page cache."""
    for pool, make in (
        (FLOAT32, towers),
        (BFLOAT16, lambda: language_models("bfloat16")),
    ):
        base, models = make()
        files = files_of([base, *models])
        os.sync()
        reading, merging = alternate(
            5,
            lambda f=files: read_all(f),
            lambda b=base, m=models: nm.merge(b, m),
            before=lambda f=files: evict(f),
        )
        share = median_ratio(reading, merging)
        yield row(
            f"merge in memory, {pool}, cold files: share of the speed of a cold read",
            share,
            "≥ 0.9",
            share >= 0.9,
            seconds=merging.median,
            read_seconds=reading.median,
        )


# ----------------------------------------------------------------------------------------- others

STACKED = """
import sys, torch
from safetensors.torch import load_file
base, *models = map(load_file, sys.argv[1:-1])
merged = {}
for name, weight in base.items():
    deltas = torch.stack([model[name] - weight for model in models])
    signs = deltas.sign()
    merged[name] = deltas.mean(0) * ((signs == signs[0]).all(0) & (signs[0] != 0))
torch.save(merged, sys.argv[-1])
"""
"""What repositories of papers do: all models in memory, and one stack for each tensor."""


def stacked(work: Path) -> Rows:
    """A merge with torch that holds all models, against the whole command."""
    base, models = towers()
    theirs = [sys.executable, "-c", STACKED, *map(str, [base, *models]), str(work / "stacked")]
    ours = command("merge", base, *models, "-o", work / "consensus.safetensors")
    run(ours)
    # What one command left to be written must not slow down the next one.
    naive, merging = alternate(5, lambda: run(theirs), lambda: run(ours), before=os.sync)
    ratio = median_ratio(naive, merging)
    peaks = peak_anonymous(theirs), peak_anonymous(ours)
    yield row(
        "whole command, consensus: times faster than stacking the models with torch",
        ratio,
        "≥ 10",
        ratio >= 10,
        seconds=merging.median,
        stacked_seconds=naive.median,
        cpu_ratio=naive.median_cpu / merging.median_cpu,
        gigabytes=peaks[1] / 1e9,
        stacked_gigabytes=peaks[0] / 1e9,
    )


def against_mergekit(work: Path) -> Rows:
    """Whole commands against mergekit: a patch of towers, and a merged language model."""
    base, models = towers()
    for rule, method, wanted in (("consensus", "task_arithmetic", 6), ("ties", "ties", 30)):
        out = work / f"{rule}.safetensors"
        ours = command("merge", base, *models, "-o", out, "--rule", rule)
        yield _against(
            f"towers, {rule}", ours, mergekit(work, method, base, models, "float32"), wanted
        )
    base, models = language_models("bfloat16")
    for rule, method, wanted in (("uniform", "task_arithmetic", 8), ("ties", "ties", 40)):
        out = work / "merged"
        ours = command("merge", base, *models[:4], "-o", out, "--rule", rule, "--add", "1")
        peer = mergekit(work, method, base, models[:4], "bfloat16")
        yield _against(f"language models, {rule}, to a model", ours, peer, wanted, out)


def _against(
    what: str, ours: list[str], peer: list[str], wanted: float, out: Path | None = None
) -> Row:
    """Compare two commands; `out` is a folder that ours does not overwrite."""

    def run_ours() -> None:
        if out is not None:
            shutil.rmtree(out, ignore_errors=True)
        run(ours)

    run_ours()
    theirs, mine = alternate(3, lambda: run(peer), run_ours, before=os.sync)
    wall, cpu = median_ratio(theirs, mine), theirs.median_cpu / mine.median_cpu
    return row(
        f"whole command, {what}: times faster than {Path(peer[0]).name} {Path(peer[1]).stem}",
        wall,
        f"≥ {wanted}, wall and CPU",
        min(wall, cpu) >= wanted,
        cpu_ratio=cpu,
        seconds=mine.median,
        cpu_seconds=mine.median_cpu,
        mergekit_seconds=theirs.median,
        mergekit_cpu_seconds=theirs.median_cpu,
    )


# ----------------------------------------------------------------------------------------- memory


def memory(work: Path) -> Rows:
    """Peaks of memory that no file backs, of whole commands."""
    base, models = towers()
    out = work / "n.safetensors"
    peaks = {
        n: peak_anonymous(
            command("merge", base, *(models * 7)[:n], "-o", out, "--allow-duplicates")
        )
        for n in (2, 10, 30, 64)
    }
    yield row(
        "peak anonymous memory at n = 64, GB",
        peaks[64] / 1e9,
        "≤ 0.6, within 10 % of n = 2",
        max(peaks.values()) <= 0.6e9 and max(peaks.values()) <= 1.1 * peaks[2],
        gigabytes={n: peak / 1e9 for n, peak in peaks.items()},
    )
    limited = command("merge", base, *models, "-o", out, "--rule", "uniform")
    used = peak_anonymous([*limited, "--max-memory", "200MB"])
    yield row("peak with --max-memory 200MB, share of it", used / 2e8, "≤ 1", used <= 2e8)
    base, models = make_holes(CACHE / "holes", {"embedding": (500_000_000,)}, 2)
    peaks = {
        rule: peak_anonymous(
            command("merge", base, *models, "-o", out, "--rule", rule, "--allow-duplicates")
        )
        for rule in ("consensus", "uniform", "magmax", "ties", "localize", "tall")
    }
    yield row(
        "peak anonymous memory of a tensor of 0.5 G elements, any rule, GB",
        max(peaks.values()) / 1e9,
        "≤ 0.6",
        max(peaks.values()) <= 0.6e9,
        gigabytes={rule: peak / 1e9 for rule, peak in peaks.items()},
    )


# ----------------------------------------------------------------------------------------- growth


def growth(work: Path) -> Rows:
    """How the time of a merge grows with the number of models, and with their size."""
    base, models = towers()
    yield _growth(
        "the number of models",
        [(f"n = {n}", base, (models * 7)[:n]) for n in (2, 4, 8, 16, 32, 64)],
    )
    sizes = [
        (
            f"{layers} layers",
            *make_pool(CACHE / f"llama-{layers}", llama(layers, words=4096), 3, torch.bfloat16),
        )
        for layers in (1, 4, 16, 32, 76)
    ]
    yield _growth("the size of the models", sizes)


def _growth(what: str, pools: list[tuple[str, Path, list[Path]]]) -> Row:
    table: list[Row] = []
    for label, base, models in pools:
        files = files_of([base, *models])

        def merge(base: Path = base, models: list[Path] = models) -> None:
            nm.merge(base, models, allow_duplicates=True)

        merge()
        reading, merging = alternate(5, lambda f=files: read_all(f), merge)
        table.append(
            {
                "pool": label,
                "gigabytes": sum(f.stat().st_size for f in files) / 1e9,
                "seconds": merging.median,
                "read_seconds": reading.median,
                "share_of_read_speed": median_ratio(reading, merging),
            }
        )
    size, spent = (np.array([one[key] for one in table]) for key in ("gigabytes", "seconds"))
    # The line of the smallest relative errors: a constant, and a time for each byte.
    line = np.linalg.lstsq(np.stack([1 / spent, size / spent], 1), np.ones(len(table)), rcond=None)[
        0
    ]
    off = float(np.max(abs((line[0] + line[1] * size) / spent - 1)))
    return row(
        f"growth with {what}: largest distance from a straight line",
        off,
        "≤ 0.1",
        off <= 0.1,
        table=table,
    )


# ----------------------------------------------------------------------------------- small things


def start(work: Path) -> Rows:
    """The time of commands that do little: `--help`, and a first run that compiles."""
    base, models = towers(2)
    merge = command("merge", base, *models, "-o", work / "first.safetensors")
    run(merge)
    imported, helped = alternate(
        5, lambda: run([sys.executable, "-c", "import torch"]), lambda: run(command("--help"))
    )
    share = median_ratio(helped, imported)
    yield row(
        "--help, share of the time of importing torch",
        share,
        "≤ 0.2",
        share <= 0.2,
        seconds=helped.median,
    )
    folders = iter(range(100))
    usual, first = alternate(
        2, lambda: run(merge), lambda: run(merge, NUMBA_CACHE_DIR=str(work / f"jit{next(folders)}"))
    )
    added = first.median - usual.median
    yield row("a cold first run adds, seconds", added, "≤ 6", added <= 6)


def applying(work: Path) -> Rows:
    """Applying a patch, as a share of the speed of copying the base."""
    base, models = towers()
    tau, out = nm.merge(base, models), work / "out.safetensors"
    nm.apply(base, -0.5 * tau, out)
    copying, ours = alternate(
        5, lambda: shutil.copyfile(base, work / "copy"), lambda: nm.apply(base, -0.5 * tau, out)
    )
    share = median_ratio(copying, ours)
    yield row(
        "apply: share of the speed of copying the base",
        share,
        "≥ 0.5",
        share >= 0.5,
        seconds=ours.median,
        copy_seconds=copying.median,
    )


GROUPS: dict[str, Callable[[Path], Rows]] = {
    "speed": speed,
    "cold": cold,
    "stacked": stacked,
    "mergekit": against_mergekit,
    "memory": memory,
    "growth": growth,
    "apply": applying,
    "start": start,
}
"""The groups of rows, for `--only` and `--skip`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clean", action="store_true", help="remove the cached pools and mergekit")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="measure some rows")
    parser.add_argument("--skip", nargs="+", choices=GROUPS, default=[], help="leave out some rows")
    options = parser.parse_args()
    if options.clean:
        shutil.rmtree(CACHE, ignore_errors=True)
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    for name in options.only or [name for name in GROUPS if name not in options.skip]:
        begun, rows = time.perf_counter(), []
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            for one in GROUPS[name](Path(work)):
                rows.append(one)
                reached = "ok  " if one["reached"] else "MISS"
                print(reached, json.dumps(one, ensure_ascii=False), flush=True)
        record(name, rows, (time.perf_counter() - begun) / 60)


def record(name: str, rows: list[Row], minutes: float) -> None:
    """Replace the rows of one group in the record: a long measurement may be stopped."""
    path = RESULTS / "engine.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    groups = found.get("groups", {}) | {
        name: {"machine": describe(), "minutes": minutes, "rows": rows}
    }
    found = {"command": "make bench", "groups": {k: groups[k] for k in GROUPS if k in groups}}
    path.write_text(json.dumps(found, indent=2) + "\n")
    (RESULTS / "engine.md").write_text(as_markdown(found))


if __name__ == "__main__":
    main()
