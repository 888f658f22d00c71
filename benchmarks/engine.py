"""Speed and memory of the merge engine, compared with reading the files and with mergekit.

    make bench                                     everything; the pool is written to a cache folder
    python benchmarks/engine.py --clean            remove that folder
    python benchmarks/engine.py --skip-mergekit    without mergekit (which takes minutes)

Every number is a ratio to something measured in the same run, because machines are noisy. The
results are written to benchmarks/results/engine.json and engine.md.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe, markdown_table
from safetensors.numpy import save_file

import negmerge as nm

RESULTS = Path(__file__).parent / "results"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "negmerge-bench"
NEGMERGE = [sys.executable, "-m", "negmerge.cli"]


# --------------------------------------------------------------------------------------- the pool


def vit_b32(layers: int = 12, width: int = 768) -> dict[str, tuple[int, ...]]:
    """Shapes of CLIP's ViT-B/32 image tower: 87.8 M parameters."""
    shapes: dict[str, tuple[int, ...]] = {
        "class_embedding": (width,),
        "positional_embedding": (50, width),
        "proj": (width, 512),
        "conv1.weight": (width, 3, 32, 32),
    }
    shapes |= {f"ln_{p}.{k}": (width,) for p in ("pre", "post") for k in ("weight", "bias")}
    for i in range(layers):
        block = f"transformer.resblocks.{i}."
        shapes |= {
            block + "ln_1.weight": (width,),
            block + "ln_1.bias": (width,),
            block + "attn.in_proj_weight": (3 * width, width),
            block + "attn.in_proj_bias": (3 * width,),
            block + "attn.out_proj.weight": (width, width),
            block + "attn.out_proj.bias": (width,),
            block + "ln_2.weight": (width,),
            block + "ln_2.bias": (width,),
            block + "mlp.c_fc.weight": (4 * width, width),
            block + "mlp.c_fc.bias": (4 * width,),
            block + "mlp.c_proj.weight": (width, 4 * width),
            block + "mlp.c_proj.bias": (width,),
        }
    return shapes


def make_pool(folder: Path, layers: int, n: int) -> tuple[Path, list[Path]]:
    """Random weights whose changes are partly shared, so that signs agree about as in the paper."""
    folder.mkdir(parents=True, exist_ok=True)
    base_path, paths = folder / "base.safetensors", [folder / f"m{k}.safetensors" for k in range(n)]
    if all(path.exists() for path in [base_path, *paths]):
        return base_path, paths
    rng = np.random.default_rng(0)
    shapes = vit_b32(layers)

    def normal(seed: np.random.Generator, shape: tuple[int, ...], scale: float) -> np.ndarray:
        return seed.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    base = {name: normal(rng, shape, 2e-2) for name, shape in shapes.items()}
    shared = {name: normal(rng, shape, 2e-4) for name, shape in shapes.items()}
    save_file(base, base_path)
    for k, path in enumerate(paths):
        own = np.random.default_rng(k + 1)
        save_file({m: b + shared[m] + normal(own, b.shape, 3e-4) for m, b in base.items()}, path)
    return base_path, paths


def make_sharded_bf16(folder: Path, base: Path, models: list[Path]) -> tuple[Path, list[Path]]:
    """The same pool in bfloat16, in shards of 50 MB."""
    targets = [folder / path.stem for path in [base, *models]]
    for source, target in zip([base, *models], targets, strict=True):
        if not target.exists():
            other = models[1] if source == models[0] else models[0]
            nothing = 0 * nm.merge(source, [other])
            folder.mkdir(exist_ok=True)
            nm.apply(source, nothing, target, dtype="bfloat16", shard_size=50_000_000)
    return targets[0], targets[1:]


# -------------------------------------------------------------------------------------- measuring


def best(times: int, run: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs."""
    spent = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begun)
    return min(spent)


def read_all(paths: list[Path]) -> None:
    """Read all bytes in one thread, with `readinto` a page-aligned buffer that fits the cache."""
    room = np.empty((1 << 18) + 4096, np.uint8)
    skip = -room.ctypes.data % 4096
    buffer = memoryview(room)[skip : skip + (1 << 18)]
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_plainly(paths: list[Path]) -> None:
    """Read all bytes into an ordinary bytearray of 1 MiB."""
    buffer = bytearray(1 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


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


def mergekit(work: Path, method: str, base: Path, models: list[Path], density: str) -> list[str]:
    """The command that merges the same files with mergekit, installed in its own environment."""
    home = CACHE / "mergekit-env"
    if not (home / "bin" / "mergekit-pytorch").exists():
        run([sys.executable, "-m", "venv", str(home)])
        run([str(home / "bin" / "pip"), "install", "-q", "mergekit"])
    lines = [f"merge_method: {method}", f"base_model: {base}", "dtype: float32", "models:"]
    for model in models:
        lines += [f"  - model: {model}", f"    parameters: {{weight: {1 / len(models)}{density}}}"]
    config = work / f"{method}.yml"
    config.write_text("\n".join(lines))
    return [str(home / "bin" / "mergekit-pytorch"), str(config), str(work / f"{method}-out")]


# ------------------------------------------------------------------------------------ the benchmark


def measure(work: Path, with_mergekit: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(what: str, ratio: float, wanted: str, ok: bool, **facts: Any) -> None:
        rows.append({"what": what, "ratio": ratio, "wanted": wanted, "reached": ok} | facts)
        print(
            f"{'ok  ' if ok else 'MISS'} {what}: {ratio:.3g} (wanted {wanted}) {facts}", flush=True
        )

    base, models = make_pool(CACHE / "vit-b32", 12, 10)
    files = [base, *models]
    read_all(files)
    for rule, share in (("consensus", 0.8), ("uniform", 0.7), ("magmax", 0.7)):
        nm.merge(base, models, rule)
        ours, limit = [], []
        for _ in range(12):  # alternate, so that both see the same noise
            limit.append(best(1, lambda: read_all(files)))
            ours.append(best(1, lambda rule=rule: nm.merge(base, models, rule)))
        ratio = min(limit) / min(ours)
        row(
            f"merge in memory, {rule}: share of the read speed",
            ratio,
            f"≥ {share}",
            ratio >= share,
            seconds=min(ours),
            read_seconds=min(limit),
            seconds_of_readinto_a_plain_bytearray=best(2, lambda: read_plainly(files)),
            median_ratio=float(np.median(np.array(limit) / np.array(ours))),
        )
    patch, out = work / "patch.safetensors", work / "out.safetensors"
    commands = {
        rule: command("merge", *files, "-o", work / f"{rule}.safetensors", "--rule", rule)
        for rule in ("consensus", "ties")
    }
    spent = {rule: (run(c), best(3, lambda c=c: run(c)))[1] for rule, c in commands.items()}
    if with_mergekit:
        for rule, method, density, wanted, times in (
            ("consensus", "task_arithmetic", "", 6, 3),
            ("ties", "ties", ", density: 0.2", 30, 1),
        ):
            peer = mergekit(work, method, base, models, density)
            theirs = best(times, lambda peer=peer: run(peer))
            again = best(3, lambda rule=rule: run(commands[rule]))
            ratio = theirs / min(spent[rule], again)
            row(
                f"whole command, {rule}: times faster than mergekit {method}",
                ratio,
                f"≥ {wanted}",
                ratio >= wanted,
                seconds=min(spent[rule], again),
                mergekit_seconds=theirs,
            )
    run(command("merge", *files, "-o", patch))
    peaks = {}
    for n in (2, 10, 30):
        pool = (models * 3)[:n]
        peaks[n] = peak_anonymous(
            command("merge", base, *pool, "-o", work / "n.safetensors", "--allow-duplicates")
        )
    row(
        "peak anonymous memory at n = 30, GB",
        peaks[30] / 1e9,
        "≤ 0.6, within 10 % of n = 2",
        max(peaks.values()) <= 0.6e9 and max(peaks[10], peaks[30]) <= 1.1 * peaks[2],
        gigabytes={n: peak / 1e9 for n, peak in peaks.items()},
    )
    limit_bytes = 200_000_000
    used = peak_anonymous(
        command(
            "merge",
            *files,
            "-o",
            work / "n.safetensors",
            "--rule",
            "uniform",
            "--max-memory",
            "200MB",
        )
    )
    row("peak with --max-memory 200MB, share of it", used / limit_bytes, "≤ 1", used <= limit_bytes)

    tau = nm.TaskVector.load(patch)
    nm.apply(base, -0.5 * tau, out)

    def copy() -> None:
        shutil.copyfile(base, work / "copy")

    def durable_copy() -> None:
        copy()
        with (work / "copy").open("rb+") as file:
            os.fsync(file.fileno())

    copied, durable = best(5, copy), best(5, durable_copy)
    ours = best(5, lambda: nm.apply(base, -0.5 * tau, out))
    whole = best(5, lambda: run(command("apply", base, patch, "--negate", "0.5", "-o", out)))
    row(
        "apply: share of the speed of copying the base",
        copied / ours,
        "≥ 0.5",
        copied / ours >= 0.5,
        seconds=ours,
        copy_seconds=copied,
        copy_and_fsync_seconds=durable,
        share_of_copy_and_fsync=durable / ours,
        whole_command_seconds=whole,
        whole_command_share=copied / whole,
    )
    torch_import = best(3, lambda: run([sys.executable, "-c", "import torch"]))
    help_time = best(5, lambda: run(command("--help")))
    row(
        "--help, share of the time of importing torch",
        help_time / torch_import,
        "≤ 0.2",
        help_time <= 0.2 * torch_import,
        seconds=help_time,
        torch_seconds=torch_import,
    )
    cold = work / "jit"
    cold.mkdir()
    added = (
        best(1, lambda: run(commands["consensus"], NUMBA_CACHE_DIR=str(cold))) - spent["consensus"]
    )
    row("a cold first run adds, seconds", added, "≤ 5", added <= 5)
    rows.append({"what": "growth", "table": growth(work, base, models)})
    return rows


def growth(work: Path, base: Path, models: list[Path]) -> list[dict[str, Any]]:
    """How time and memory grow with the number of models and with their size."""
    small = make_pool(CACHE / "vit-b32-half", 6, 10)
    bf16 = make_sharded_bf16(CACHE / "vit-b32-bf16", base, models)
    table = []
    for label, origin, pool in (
        ("n = 2", base, models[:2]),
        ("n = 10", base, models),
        ("n = 30", base, models * 3),
        ("n = 10, half the layers", *small),
        ("n = 10, bfloat16 in shards", *bf16),
    ):
        nm.merge(origin, pool, allow_duplicates=True)
        files = [
            f
            for p in [origin, *pool]
            for f in ([p] if p.is_file() else sorted(p.glob("*.safetensors")))
        ]
        spent = best(5, lambda o=origin, p=pool: nm.merge(o, p, allow_duplicates=True))
        limit = best(5, lambda f=files: read_all(f))
        arguments = command("merge", origin, *pool, "-o", work / "g", "--allow-duplicates")
        table.append(
            {
                "pool": label,
                "gigabytes": sum(f.stat().st_size for f in files) / 1e9,
                "seconds": spent,
                "read_seconds": limit,
                "share_of_read_speed": limit / spent,
                "peak_gigabytes": peak_anonymous(arguments) / 1e9,
            }
        )
        print(table[-1], flush=True)
    return table


def as_markdown(found: dict[str, Any]) -> str:
    (table,) = (row["table"] for row in found["rows"] if "table" in row)
    lines = [
        "# The merge engine, measured",
        "",
        f"`{found['command']}` on {found['machine']}, {found['minutes']:.0f} minutes. "
        "Pool: a base and 10 ViT-B/32 image towers "
        "(87.8 M float32 parameters, 351 MB each), warm page cache.",
        "",
        markdown_table([_goal(row) for row in found["rows"] if "table" not in row]),
        "",
        "Growth with the number and the size of the models (consensus, patch in memory; the peak "
        "is that of the whole command):",
        "",
        markdown_table([_growth(row) for row in table]),
    ]
    return "\n".join(lines) + "\n"


def _goal(row: dict[str, Any]) -> dict[str, str]:
    shown = {"what", "ratio", "wanted", "reached"}
    return {
        "what": row["what"],
        "measured": f"{row['ratio']:.3g}",
        "wanted": row["wanted"],
        "reached": "yes" if row["reached"] else "no",
        "details": ", ".join(f"{k} {_short(v)}" for k, v in row.items() if k not in shown),
    }


def _growth(row: dict[str, Any]) -> dict[str, str]:
    return {
        "pool": row["pool"],
        "GB read": f"{row['gigabytes']:.2f}",
        "seconds": f"{row['seconds']:.2f}",
        "share of read speed": f"{row['share_of_read_speed']:.2f}",
        "peak anonymous GB": f"{row['peak_gigabytes']:.3f}",
    }


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_short(v)}" for k, v in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clean", action="store_true", help="remove the cached pool and mergekit")
    parser.add_argument("--skip-mergekit", action="store_true")
    options = parser.parse_args()
    if options.clean:
        shutil.rmtree(CACHE, ignore_errors=True)
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        rows = measure(Path(work), not options.skip_mergekit)
    found = {
        "command": "make bench",
        "machine": describe(),
        "minutes": (time.perf_counter() - begun) / 60,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "engine.json").write_text(json.dumps(found, indent=2) + "\n")
    (RESULTS / "engine.md").write_text(as_markdown(found))
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
