"""The desk study: real CIFAR-10, a small ResNet, three seeds, records and a class.

    NEGMERGE_DATA=FOLDER python benchmarks/desk_cifar10.py [--seeds 0 1 2] [--runs FOLDER]

Runs the shipped recipes `desk_cifar10` and `desk_cifar10_class` with λ by `oracle`, as the paper's
tables have it, and once more from the same pools with λ chosen on data that is not reported; the
merges also with BatchNorm statistics merged like weights instead of the original's.
Interrupted, it goes on. Writes benchmarks/results/desk_cifar10.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from machine import describe

import negmerge as nm
from negmerge.evaluation.scores import METRICS
from negmerge.progress import make_progress
from negmerge.report.tables import grouped, scores_table

RESULTS = Path(__file__).parent / "results"
MERGED = "oracle, BatchNorm statistics merged"
STUDIES = {
    "desk_cifar10": (
        "10 % random records (layout of Table 2)",
        {
            "oracle": ["search.criterion=oracle"],
            "match_holdout": ["search.criterion=match_holdout"],
            MERGED: [
                "search.criterion=oracle",
                "buffers=merge",
                "methods=[consensus, single_best, uniform, ties, magmax]",
            ],
        },
    ),
    "desk_cifar10_class": (
        "a whole class (layout of Table B13)",
        {
            "oracle": ["search.criterion=oracle"],
            "keep_retain": ["search.criterion=keep_retain"],
        },
    ),
}
KEPT = (*METRICS, "avg_gap", "splits", "scale", "sparsity", "seconds", "cost_ratio")
KEPT += ("evaluations", "edge", "settings", "options", "tried")


def run(recipe: str, seed: int, way: str, folder: Path) -> dict[str, Any]:
    """One run; the pool is shared by all ways to choose, scores are kept apart."""
    kept = folder / f"{recipe}-{seed}-{way.replace(', ', '-').replace(' ', '_')}.json"
    if not kept.exists():
        changes = [f"seed={seed}", *STUDIES[recipe][1][way]]
        with make_progress() as progress:
            done = nm.run(recipe, folder / f"{recipe}-{seed}", changes, progress)
        kept.write_text(json.dumps(done.scores))
    return json.loads(kept.read_text())


def rows_of(scores: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The numbers of one run, by row of the table."""
    rows = {"original": scores["original"], "retrain": scores["retrain"]}
    rows |= {row["method"]: row for group in grouped(scores["methods"]) for row in group}
    return {name: {k: row.get(k) for k in KEPT} for name, row in rows.items()}


def spread(values: list[float]) -> str:
    """Mean and standard deviation over the seeds, if there are several."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def table(runs: list[dict[str, dict[str, Any]]]) -> list[str]:
    """A Markdown table, mean ± standard deviation over seeds."""
    lines = [
        "| method | splits | D_r | D_f | D_test | MIA | Avg. Gap | λ | zero % | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in runs[0]:
        splits = {"original": "all", "retrain": "retain"}
        cells = [name, splits.get(name) or runs[0][name]["splits"]]
        cells += [spread([r[name][m] for r in runs]) for m in (*METRICS, "avg_gap")]
        for key in ("scale", "sparsity"):
            known = [r[name][key] for r in runs if r[name][key] is not None]
            cells.append(spread(known) if known else "")
        cells.append(f"{statistics.mean(r[name]['seconds'] for r in runs):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/desk"))
    given = parser.parse_args()
    went_on = given.runs.exists()
    given.runs.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    found: dict[str, dict[str, list[Any]]] = {}
    for seed in given.seeds:
        for recipe, (_, ways) in STUDIES.items():
            for way in ways:
                scores = run(recipe, seed, way, given.runs)
                found.setdefault(recipe, {}).setdefault(way, []).append(rows_of(scores))
                print(recipe, seed, way, f"{time.monotonic() - begun:.0f} s", flush=True)
                for part in scores_table(scores):
                    print(part) if isinstance(part, str) else None
    kept, minutes = RESULTS / "desk_cifar10.json", (time.monotonic() - begun) / 60
    if went_on and (before := json.loads(kept.read_text()))["seeds"] == given.seeds:
        minutes += before["minutes"]
    seeds = " ".join(map(str, given.seeds))
    command = f"NEGMERGE_DATA=FOLDER python benchmarks/desk_cifar10.py --seeds {seeds}"
    record = {
        "command": command,
        "machine": describe(),
        "minutes": round(minutes, 1),
        "seeds": given.seeds,
        "runs": found,
    }
    kept.write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        "# Desk CIFAR-10, measured",
        "",
        f"`{command}` on {describe()}, {minutes:.0f} minutes, seeds "
        f"{', '.join(map(str, given.seeds))}; mean ± standard deviation over the seeds (split, "
        "original, retrained model and pool all differ).",
        "",
        "11,200 of the 50,000 training images (1,120 of them held out), 3,000 test images, a "
        "ResNet of 78 k weights, no augmentation, 20 epochs; a pool of 9. Grouped by the data a "
        "method uses; each rival is the best of three tries over its published range by the same "
        "criterion (those that use retain data train 5 epochs instead of the published 10).",
    ]
    for recipe, (title, _) in STUDIES.items():
        for way, runs in found[recipe].items():
            looked = " (chosen on the reported data)" if "oracle" in way else ""
            lines += ["", f"## {title[0].upper() + title[1:]}, λ by {way}{looked}", ""]
            lines += table(runs)
    (RESULTS / "desk_cifar10.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
