"""Speed of `apply` compared with copying the base, and of one pass compared with merge and apply.

    python benchmarks/applying.py            everything; files are written to a cache folder
    python benchmarks/applying.py --clean    remove that folder

Each pair is measured alternately in one process, with warm caches. Both outputs are new files, made
without preallocating (`apply` reserves space itself) and without fsync, as `cp` writes; a second
column adds fsync to both. Ratios are medians over the pairs. The results are written to
benchmarks/results/applying.json and applying.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe, markdown_table

import negmerge as nm
from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.dtypes import FLOAT_NAMES, narrow
from negmerge.checkpoints.fingerprint import fingerprint_of
from negmerge.checkpoints.header import build_header
from negmerge.vectors.entry import Entry
from negmerge.vectors.origin import Origin

RESULTS = Path(__file__).parent / "results"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "negmerge-bench/applying"
PAIRS = 9
GOALS = {"sparse": 0.6, "dense": 0.4}
DENSITY = {"sparse": 0.15, "dense": 1.0, "listed": 0.01}


def llama() -> dict[str, tuple[int, ...]]:
    """Shapes of a small Llama: 238 M parameters."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (32000, 1024)}
    for i in range(16):
        shapes |= {f"layers.{i}.{part}": (1024, 1024) for part in "qkvo"}
        shapes |= {f"layers.{i}.{part}": (2816, 1024) for part in ("up", "gate")}
        shapes |= {f"layers.{i}.down": (1024, 2816), f"layers.{i}.norm": (1024,)}
    return shapes


def write_weights(path: Path, dtype: str, seed: int, change: float = 0.0) -> None:
    """Random weights; models of one pool differ by `change`."""
    if path.exists():
        return
    shapes = llama()
    header, _ = build_header({name: (dtype, shape) for name, shape in shapes.items()}, {})
    base, own = np.random.default_rng(0), np.random.default_rng(seed)
    waiting = path.with_suffix(".part")
    with waiting.open("wb") as file:
        file.write(header)
        for name in names_in_order(header):
            size = int(np.prod(shapes[name]))
            weights = base.standard_normal(size, np.float32) * np.float32(0.02)
            if change:
                weights += own.standard_normal(size, np.float32) * np.float32(change)
            file.write(narrow(weights.astype(np.float64), dtype).tobytes())
    waiting.replace(path)


def names_in_order(header: bytes) -> list[str]:
    """The names of a header in the order of their data."""
    fields = json.loads(header[8:])
    fields.pop("__metadata__", None)
    return sorted(fields, key=lambda name: fields[name]["data_offsets"][0])


def write_patch(path: Path, base: Path, kind: str) -> None:
    """A patch of one density for a base."""
    if path.exists():
        return
    with Checkpoint(base) as model:
        fingerprint = fingerprint_of(model)
    draw = np.random.default_rng(1)
    entries = {}
    for name, shape in llama().items():
        flat = draw.standard_normal(int(np.prod(shape)), np.float32) * np.float32(1e-3)
        if kind != "dense":
            flat[draw.random(flat.size, np.float32) > DENSITY[kind]] = 0
        entries[name] = Entry.of(flat, shape, "dense" if kind == "dense" else "sparse")
    tau = nm.TaskVector(entries, Origin("uniform", 1, fingerprint))
    tau.save(path, "dense" if kind == "dense" else "auto" if kind == "listed" else "sparse")


def seconds(run: Callable[[], Any], written: Path, durable: bool) -> float:
    """The time of a run that writes a new file."""
    written.unlink(missing_ok=True)
    begun = time.perf_counter()
    run()
    if durable:
        with written.open("rb+") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - begun


def shares(base: Path, patch: Path, work: Path, durable: bool) -> dict[str, Any]:
    """`apply` and a copy of the base, alternately."""
    tau, out, copy = -0.5 * nm.TaskVector.load(patch), work / "out.safetensors", work / "copy"
    nm.apply(base, tau, out)  # loads compiled code and the page cache
    copied, ours = [], []
    for _ in range(3 if durable else PAIRS):
        copied.append(seconds(lambda: shutil.copyfile(base, copy), copy, durable))
        ours.append(seconds(lambda: nm.apply(base, tau, out), out, durable))
    ratios = [one / two for one, two in zip(copied, ours, strict=True)]
    return {
        "share": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "seconds": statistics.median(ours),
        "copy_seconds": statistics.median(copied),
    }


def measure_apply(work: Path) -> list[dict[str, Any]]:
    """The share of a copy's speed, by format of the base and kind of patch."""
    rows = []
    import numba  # noqa: F401  in a process that has merged, compiled loops are used for any size

    for dtype in ("F32", "BF16", "F16"):
        base = CACHE / f"{dtype}.safetensors"
        write_weights(base, dtype, 0)
        for kind in ("sparse", "dense", "listed"):
            patch = CACHE / f"{dtype}-{kind}.patch"
            write_patch(patch, base, kind)
            for durable in (False, True) if kind in GOALS else (False,):
                row = {"base": dtype, "patch": kind, "fsync": durable}
                row |= shares(base, patch, work, durable)
                if kind in GOALS and not durable:
                    row |= {"wanted": GOALS[kind], "reached": row["share"] >= GOALS[kind]}
                rows.append(row)
                print(row, flush=True)
    return rows


def measure_one_pass(work: Path) -> list[dict[str, Any]]:
    """Merge and apply against one pass, alternately, for a bfloat16 pool of four members."""
    base, models = CACHE / "BF16.safetensors", [CACHE / f"m{k}.safetensors" for k in range(4)]
    for k, path in enumerate(models):
        write_weights(path, "BF16", k + 1, 1e-3)
    rows = []
    for rule in ("consensus", "uniform", "ties"):
        patch, out = work / "patch.safetensors", work / "out.safetensors"

        def both(rule: str = rule, patch: Path = patch, out: Path = out) -> None:
            tau = nm.merge(base, models, rule, out=patch)
            nm.apply(base, -0.5 * tau, out)

        def one(rule: str = rule, out: Path = out) -> None:
            nm.merge_and_apply(base, models, -0.5, out, rule)

        both()
        wanted = out.read_bytes()
        one()
        same = out.read_bytes() == wanted
        del wanted
        two_steps, one_pass = [], []
        for _ in range(3 if rule == "ties" else 5):
            patch.unlink(missing_ok=True)
            two_steps.append(seconds(both, out, durable=False))
            one_pass.append(seconds(one, out, durable=False))
        times = [two / one for two, one in zip(two_steps, one_pass, strict=True)]
        rows.append(
            {
                "rule": rule,
                "times_faster": statistics.median(times),
                "merge_and_apply_seconds": statistics.median(two_steps),
                "one_pass_seconds": statistics.median(one_pass),
                "same_bytes": same,
            }
        )
        print(rows[-1], flush=True)
    return rows


def as_markdown(found: dict[str, Any]) -> str:
    """The tables of the results."""
    names = {short: name for name, short in FLOAT_NAMES.items()}
    applied = [
        {
            "base": names[row["base"]],
            "patch": row["patch"],
            "fsync": "yes" if row["fsync"] else "no",
            "share of a copy's speed, median": f"{row['share']:.2f}",
            "range": f"{row['least']:.2f} to {row['most']:.2f}",
            "wanted": f"≥ {row['wanted']}" if "wanted" in row else "",
            "seconds": f"{row['seconds']:.3f}",
            "copy, seconds": f"{row['copy_seconds']:.3f}",
        }
        for row in found["apply"]
    ]
    passes = [
        {
            "rule": row["rule"],
            "merge + apply, seconds": f"{row['merge_and_apply_seconds']:.2f}",
            "one pass, seconds": f"{row['one_pass_seconds']:.2f}",
            "times faster, median": f"{row['times_faster']:.2f}",
            "same bytes": "yes" if row["same_bytes"] else "no",
        }
        for row in found["one_pass"]
    ]
    return f"""# Applying a patch, measured

`{found["command"]}` on {found["machine"]}, {found["minutes"]:.0f} minutes. A base of 238 M
parameters in one file, warm page cache. `apply` and `shutil.copyfile` of the base alternate,
{PAIRS} pairs (3 with fsync), each to a new file. A sparse patch has 15 % values that are not
zero, a listed one 1 %; values are float32.

{markdown_table(applied)}

A bfloat16 pool of four members, in one process: `nm.merge` to a patch and `nm.apply`, against
`nm.merge_and_apply` (a patch is written with fsync, models without):

{markdown_table(passes)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clean", action="store_true", help="remove the cached files")
    if parser.parse_args().clean:
        shutil.rmtree(CACHE, ignore_errors=True)
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        work = Path(folder)
        found: dict[str, Any] = {"apply": measure_apply(work), "one_pass": measure_one_pass(work)}
    found |= {
        "machine": describe(),
        "command": " ".join(["python", *sys.argv]),
        "minutes": (time.perf_counter() - begun) / 60,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "applying.json").write_text(json.dumps(found, indent=2) + "\n")
    (RESULTS / "applying.md").write_text(as_markdown(found))


if __name__ == "__main__":
    main()
