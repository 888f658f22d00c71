"""What executors cost: many small steps, a pool of trainings, the demo, and merges of large models.

    python benchmarks/scale.py            writes benchmarks/results/scale.json and scale.md
    python benchmarks/scale.py --only units pool

The Ray cluster has two nodes on this machine, with one CPU each (`tests/cluster_process.py`). All
executors of a row run in turn, and the medians of the ratios are recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import describe, markdown_table
from measuring import alternate, command, median_ratio, read_all
from pools import CACHE, files_of, llama, make_holes, make_pool

import negmerge as nm
from negmerge.runs.executors.settings import ExecutorSettings
from negmerge.runs.ranges import cluster_for, merge_on
from negmerge.support.progress import Quiet

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
sys.path.insert(0, str(ROOT / "tests"))
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b" * 40}
POOL = [
    "data.limit={train: 3000, test: 500}", "train={epochs: 4, batch: 64}", "search.count=5",
    "pool.settings={batch: 32}", "pool.grid={epochs: [8, 10], lr: [0.05, 0.02, 0.01]}",
    "methods=[consensus]", "threads=1",
]  # fmt: skip
"""Six trainings of a few seconds each."""
Row = dict[str, Any]


@contextmanager
def cluster() -> Iterator[str]:
    """A cluster of two nodes; yields its address."""
    os.environ.update(TOKEN)
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(ROOT / "tests" / "cluster_process.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=variables) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = (line.strip() for line in process.stdout if ":" in line)
        address = next(answers)
        for name in "ab":
            print(f"add {name} 1", file=process.stdin, flush=True)
            next(answers)
        yield address
        process.stdin.close()


def units(address: str) -> Iterator[Row]:
    """1,000 steps that do next to nothing, on workers that have started."""
    from fakes import FakeValue, make_scenario
    from negmerge.plugins import LoadedPlugins
    from negmerge.runs.executors import Cores, InProcess, LocalProcesses
    from negmerge.runs.executors.ray import Job, RayCluster
    from negmerge.runs.watch import Unit, Watch

    def seconds(executor: Any, folder: Path, count: int = 1000) -> float:
        def steps(tag: str, number: int) -> list[Any]:
            name = f"{tag}{{}}"
            return [
                FakeValue(name.format(k), folder / name.format(k), folder / "log")
                for k in range(number)
            ]

        with executor:
            for few in (4, 4):
                list(executor.run(steps("w", few), Watch([Unit(name="", size=1)] * few), count))
            begun = time.perf_counter()
            list(executor.run(steps("s", count), Watch([Unit(name="", size=1)] * count), count))
            return (time.perf_counter() - begun) / count

    chosen = ExecutorSettings(kind="ray", address=address)
    makers: dict[str, Callable[[], Any]] = {
        "in this process": lambda: InProcess(make_scenario()),
        "2 local processes": lambda: LocalProcesses(make_scenario, 2, Cores(2, 2)),
        "Ray, 2 nodes": lambda: RayCluster(
            Job(LoadedPlugins(), make_scenario, chosen), 1, lambda text: None
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(3):
        for name, make in makers.items():
            with tempfile.TemporaryDirectory() as folder:
                found[name].append(seconds(make(), Path(folder)))
    for name, times in found.items():
        own = 1000 * median(times)
        row = {"what": f"1,000 small steps, {name}: milliseconds for each", "value": own}
        yield row | ({"wanted": "≤ 50", "reached": own <= 50} if "Ray" in name else {})


def unlearn(recipe: str, changes: list[str], executor: list[str], folder: Path) -> float:
    """Run a recipe by the command line; return the seconds."""
    words = [word for change in (*changes, *executor) for word in ("--set", change)]
    command = [
        sys.executable,
        "-m",
        "negmerge.cli",
        "unlearn",
        recipe,
        "--out",
        str(folder),
        *words,
    ]
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun


def compare(
    what: str, recipe: str, changes: list[str], executors: dict[str, list[str]], times: int
) -> Iterator[Row]:
    """Run a recipe with each executor in turn; the first one is the measure of the others."""
    found: dict[str, list[float]] = {name: [] for name in executors}
    hashes: set[str] = set()
    with tempfile.TemporaryDirectory() as place:
        for _ in range(times):
            for name, executor in executors.items():
                folder = Path(place, "run")
                found[name].append(unlearn(recipe, changes, executor, folder))
                files = json.loads((folder / "manifest.json").read_text())["files"]
                own = {k: v["sha256"] for k, v in files.items() if k.endswith(".safetensors")}
                hashes.add(json.dumps(own, sort_keys=True))
                shutil.rmtree(folder)
    first = next(iter(found.values()))
    for name, own in found.items():
        ratio = median(a / b for a, b in zip(own, first, strict=True))
        row = {"what": f"{what}, {name}: times the first", "value": ratio, "seconds": median(own)}
        wanted = {"wanted": "≤ 1.15", "reached": ratio <= 1.15} if "demo" in what else {}
        yield row | ({} if own is first or "Ray" not in name else wanted)
    same = len(hashes) == 1
    what = f"{what}: the same bytes of all models and patches"
    yield {"what": what, "value": float(same), "reached": same}


def pool(address: str) -> Iterator[Row]:
    """Six trainings: one after the other, in two processes, on two nodes."""
    ray = ["executor.kind=ray", f"executor.address={address}"]
    executors = {"2 local processes": ["workers=2"], "one process": ["workers=1"]}
    executors |= {"Ray, 2 nodes": ray}
    yield from compare("a run with six members", "demo", POOL, executors, 3)


def demo(address: str) -> Iterator[Row]:
    """The demo, which every user runs first."""
    ray = ["executor.kind=ray", f"executor.address={address}"]
    executors = {"local": [], "Ray, 2 nodes": ray}
    yield from compare("the demo", "demo", ["threads=1"], executors, 1)


def merging(address: str) -> Iterator[Row]:
    """Merges by one process with 1 and 2 threads, and by two nodes with one CPU each."""
    base, models = make_pool(CACHE / "llama-bfloat16", llama(), 6, torch.bfloat16, 4)
    files = files_of([base, *models])
    settings = ExecutorSettings(kind="ray", address=address)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        out = Path(place, "patch.safetensors")
        cluster, ranges = cluster_for(out, settings, 2, Quiet())
        with cluster:

            def on_nodes() -> None:
                merge_on(cluster, base, models, out=out, ranges=ranges)

            runs = {
                "one process, 1 thread": lambda: nm.merge(base, models, out=out, workers=1),
                "one process, 2 threads": lambda: nm.merge(base, models, out=out, workers=2),
                "Ray, 2 nodes": on_nodes,
            }
            for run in runs.values():
                run()  # compiles, and starts the workers
            reading, *spent = alternate(5, lambda: read_all(files), *runs.values())
    for name, own in zip(runs, spent, strict=True):
        share = median_ratio(reading, own)
        what = f"merge to a patch, 6 language models, {name}: share of the read speed"
        yield {"what": what, "value": share, "seconds": own.median}


def large(address: str) -> Iterator[Row]:
    """Ten models of 7 billion parameters, in files that take no space: the plan and the merge."""
    base, models = make_holes(CACHE / "holes-7b", llama(32, 4096, 11008, 32000), 10)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        merge = command("merge", base, *models, "-o", Path(place, "p.safetensors"))
        merge += ["--max-memory", "1GB"]
        told = subprocess.run([*merge, "--dry-run", "--json"], capture_output=True, check=True)
        plan = json.loads(told.stdout.splitlines()[-1])
        begun = time.perf_counter()
        peak, read = watch(merge)
        seconds = time.perf_counter() - begun
    size = sum(path.stat().st_size for path in (base, *models))
    yield {"what": "10 models of 7 B: bytes read, share of the files", "value": read / size,
           "seconds": seconds, "wanted": "≤ 1.01", "reached": read / size <= 1.01}  # fmt: skip
    yield {"what": "10 models of 7 B: bytes of the plan, share of the files",
           "value": plan["read_bytes"] / size}  # fmt: skip
    yield {"what": "10 models of 7 B: seconds of the plan, share of the measured",
           "value": plan["seconds"] / seconds}  # fmt: skip
    yield {"what": "10 models of 7 B: peak memory, share of --max-memory 1GB", "value": peak / 1e9,
           "wanted": "≤ 1", "reached": peak <= 1e9}  # fmt: skip


def watch(arguments: list[str]) -> tuple[int, int]:
    """Run a command; return its peak of memory that no file backs, and the bytes it read."""
    peak = read = 0
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL) as process:
        place = Path("/proc", str(process.pid))
        while process.poll() is None:
            try:
                lines = (place / "status").read_text().splitlines()
                read = int((place / "io").read_text().split()[1])
            except (OSError, IndexError):
                break
            used = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")]
            peak = max([peak, *used])
            time.sleep(0.01)
    assert process.returncode == 0
    return peak, read


GROUPS: dict[str, Callable[[str], Iterator[Row]]] = {
    "units": units,
    "pool": pool,
    "demo": demo,
    "merging": merging,
    "large": large,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    chosen = parser.parse_args().only
    with cluster() as address:
        for name in chosen:
            rows: list[Row] = []
            for row in GROUPS[name](address):
                rows.append(row)
                print(json.dumps(row, ensure_ascii=False), flush=True)
            record(name, rows)


def record(name: str, rows: list[Row]) -> None:
    """Replace the rows of one group in the record: a long measurement may be stopped."""
    path = RESULTS / "scale.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {name: {"machine": describe(), "rows": rows}}
    found = {group: found[group] for group in GROUPS if group in found}
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (RESULTS / "scale.md").write_text(as_markdown(found))


def as_markdown(record: dict[str, Any]) -> str:
    """The record as a page."""
    text = "# Executors\n\n`python benchmarks/scale.py`: medians of runs in turn.\n"
    for name, group in record.items():
        text += f"\n## {name}\n\n{group['machine']}\n\n"
        rows = [
            {
                "what": row["what"],
                "measured": f"{row['value']:.3g}",
                "seconds": f"{row['seconds']:.1f}" if "seconds" in row else "",
                "wanted": row.get("wanted", ""),
                "reached": {True: "yes", False: "no"}.get(row.get("reached"), ""),
            }
            for row in group["rows"]
        ]
        text += markdown_table(rows)
    return text


if __name__ == "__main__":
    main()
