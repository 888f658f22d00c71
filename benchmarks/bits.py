"""Digests of the results of runs and merges, to compare two states of the source bit by bit.

    NEGMERGE_DATA=data python benchmarks/bits.py before.json
    NEGMERGE_DATA=data python benchmarks/bits.py after.json --against before.json

Both must run on one machine: processors round differently in training. `PYTHONPATH` says which
source is measured. The demo runs whole; desk_cifar10, desk_clip_fashion and its linear form run
with little data; every rule merges a small pool in every number format.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

CLASSIFIER = [
    "data.limit={train: 800, test: 300}", "train.epochs=3", "search.samples=100", "workers=2",
    "pool.grid={epochs: [1, 2], label_smoothing: [0.0, 0.1]}", "search.count=5",
]  # fmt: skip
CLIP = [
    "data.limit={train: 200, test: 100}", "search.samples=60", "pool.settings.epochs=1",
    "clip.control={name: cifar10, limit: {test: 100}}", "search.count=5", "workers=2",
]  # fmt: skip
RUNS = {
    "demo": [],
    "desk_cifar10": CLASSIFIER,
    "desk_clip_fashion": CLIP,
    "desk_clip_fashion_linear": CLIP,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("consensus", {}),
    ("consensus", {"reduce": "min"}),
    ("consensus", {"reduce": "max", "signed": True}),
    ("consensus", {"quorum": 0.6}),
    ("consensus", {"quorum": 0.6, "reduce": "min", "zeros": "abstain"}),
    ("consensus", {"zeros": "abstain"}),
    ("conflict", {}),
    ("conflict", {"quorum": 0.6}),
    ("uniform", {}),
    ("ties", {}),
    ("ties", {"density": 0.5, "scope": "tensor"}),
    ("magmax", {}),
    ("localize", {}),
    ("localize", {"density": 0.3, "scope": "tensor"}),
    ("tall", {}),
    ("tall", {"agree": 1}),
]
FORMATS = ["float64", "float32", "float16", "bfloat16"]


def digest(path: Path) -> str:
    """The SHA-256 of a file; of scores without their seconds."""
    raw = path.read_bytes()
    if path.name == "scores.json":
        raw = json.dumps(without_seconds(json.loads(raw)), sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()


def without_seconds(tree: Any) -> Any:
    """The tree without fields of seconds."""
    if isinstance(tree, dict):
        return {k: without_seconds(v) for k, v in tree.items() if not k.startswith("seconds")}
    return [without_seconds(v) for v in tree] if isinstance(tree, list) else tree


def run_digests(folder: Path) -> dict[str, str]:
    """Weights, sweeps and scores of every run."""
    found: dict[str, str] = {}
    for name, changes in RUNS.items():
        out = folder / name
        given = [text for change in changes for text in ("--set", change)]
        command = [sys.executable, "-c", "from negmerge.cli import main; main()"]
        command += ["unlearn", name, "--out", str(out), *given]
        print(" ".join(command[3:]), flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        for path in sorted(out.rglob("*")):
            if path.suffix in (".safetensors", ".csv") and "report" not in path.parts:
                found[f"{name}/{path.relative_to(out)}"] = digest(path)
        found[f"{name}/scores.json"] = digest(out / "scores.json")
    return found


def make_pool(folder: Path, kind: str) -> tuple[Path, list[Path]]:
    """A base and five members with unchanged elements and an integer buffer."""
    import torch
    from safetensors.torch import save_file

    draw = np.random.default_rng(7)
    base = {"a.weight": (130, 70), "a.bias": (70,), "b.weight": (33, 9, 3, 3), "c": ()}
    made: list[Path] = []
    start = {name: draw.standard_normal(shape) for name, shape in base.items()}
    for k in range(6):
        tensors = {"steps": torch.tensor(k)}
        for name, values in start.items():
            change = draw.standard_normal(values.shape) * 0.02 + 0.01 * np.sign(values)
            change = np.where(draw.random(values.shape) < 0.1, 0.0, change)
            found = torch.tensor(values + (change if k else 0.0))
            tensors[name] = found.to(getattr(torch, kind))
        made.append(folder / f"{kind}-{k}.safetensors")
        save_file(tensors, made[-1])
    return made[0], made[1:]


def rule_digests(folder: Path) -> dict[str, str]:
    """Digests of the patch of every rule in every format and layout, and of the model it gives."""
    import negmerge as nm

    found: dict[str, str] = {}
    for kind in FORMATS:
        base, members = make_pool(folder, kind)
        for rule, options in VARIANTS:
            given = ",".join(f"{k}={v}" for k, v in options.items())
            for layout in ("sparse", "dense"):
                out = folder / "patch.safetensors"
                out.unlink(missing_ok=True)
                tau = nm.merge(base, members, rule, options, out=out, layout=layout)
                found[f"{kind}/{rule}({given})/{layout}"] = digest(out)
            applied = folder / "applied.safetensors"
            nm.apply(base, -0.45 * tau, applied)
            found[f"{kind}/{rule}({given})/applied"] = digest(applied)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier record: name what differs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = rule_digests(Path(folder)) | run_digests(Path(folder))
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} digests")
    if given.against is None:
        return 0
    before = json.loads(given.against.read_text())
    differ = sorted(k for k in before.keys() | found.keys() if before.get(k) != found.get(k))
    for name in differ:
        print(f"differs: {name}")
    print(f"{len(before.keys() | found.keys()) - len(differ)} equal, {len(differ)} differ")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
