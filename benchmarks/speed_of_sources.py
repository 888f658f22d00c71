"""The speed of two states of the source, measured alternately in one run.

    python benchmarks/speed_of_sources.py OLD NEW    # folders that contain the package `negmerge`

Each round starts a process with one of the two sources, which merges, applies and trains through
the public API only. Writes the median time of each part and the median of the ratios new / old of
the rounds to benchmarks/results/speed_of_sources.md. Both must compute the same results
(`benchmarks/bits.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe, markdown_table

RESULTS = Path(__file__).parent / "results"
ROUNDS = 9

POOL = """
import sys, numpy as np
from pathlib import Path
from safetensors.numpy import save_file
draw = np.random.default_rng(0)
shapes = {f"blocks.{k}.{n}": s for k in range(8) for n, s in (("fc", (3072, 768)), ("b", (3072,)))}
base = {k: draw.standard_normal(s, dtype=np.float32) for k, s in shapes.items()}
save_file(base, "base.safetensors")
for k in range(6):
    save_file({n: v + 0.01 * draw.standard_normal(v.shape, dtype=np.float32)
               for n, v in base.items()}, f"model{k}.safetensors")
"""

PARTS = """
import json, time, warnings
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import negmerge as nm
warnings.simplefilter("ignore")
models = sorted(Path(".").glob("model*.safetensors"))
times = {}
def measured(name, work, repeats=5):
    work()  # compiles, fills caches
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        found.append(time.perf_counter() - begun)
    times[name] = min(found)
for rule in ("consensus", "uniform", "magmax", "ties"):
    measured(f"merge, {rule}", lambda: nm.merge("base.safetensors", models, rule),
             2 if rule == "ties" else 5)
tau = nm.merge("base.safetensors", models)
def applied():
    Path("out.safetensors").unlink(missing_ok=True)
    nm.apply("base.safetensors", -0.5 * tau, "out.safetensors")
measured("apply, sparse patch", applied)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3, 2), torch.nn.ReLU(), torch.nn.Flatten(),
                              torch.nn.Linear(32 * 15 * 15, 10))
data = TensorDataset(torch.randn(512, 3, 32, 32), torch.arange(512) % 10)
sets = {"forget": data, "test": data}
pool = nm.Pool(grid={"epochs": [2, 3]}, settings={"lr": 0.01, "batch": 64})
measured("unlearn: pool, merge, search and scores",
         lambda: nm.unlearn(network, sets, pool=pool), 3)
print(json.dumps(times))
"""


def round_of(source: Path, folder: Path) -> dict[str, float]:
    """The times of one process with a source."""
    variables = os.environ | {"PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
    variables |= {"NUMBA_CACHE_DIR": str(folder / f"compiled-{abs(hash(source))}")}
    command = [sys.executable, "-c", PARTS]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{source}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    given = parser.parse_args()
    found: list[tuple[dict[str, float], dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-c", POOL], cwd=folder, check=True)
        for number in range(ROUNDS):
            pair: dict[Path, dict[str, float]] = {}
            order = [given.old.resolve(), given.new.resolve()]
            for source in order if number % 2 else reversed(order):
                pair[source] = round_of(source, folder)
            found.append((pair[order[0]], pair[order[1]]))
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = []
    for part in found[0][0]:
        ratios = [new[part] / old[part] for old, new in found]
        rows.append(
            {
                "part": part,
                "old, median s": f"{statistics.median(old[part] for old, _ in found):.3f}",
                "new, median s": f"{statistics.median(new[part] for _, new in found):.3f}",
                "new / old, median": f"{statistics.median(ratios):.3f}",
                "least": f"{min(ratios):.3f}",
                "largest": f"{max(ratios):.3f}",
            }
        )
    old, new = map(commit_of, (given.old, given.new))
    text = (
        "# Speed of two sources, measured\n\n"
        f"`python benchmarks/speed_of_sources.py OLD NEW` on {describe()}: commit {new} compared "
        f"with {old}, {ROUNDS} alternating rounds.\n\n{markdown_table(rows)}\n"
    )
    (RESULTS / "speed_of_sources.md").write_text(text)
    print(text)


def commit_of(folder: Path) -> str:
    """The commit that a folder was checked out from."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
