"""The desk study: real CIFAR-10, a small ResNet, three seeds, records and a class.

    NEGMERGE_DATA=FOLDER python benchmarks/desk_cifar10.py [--seeds 0 1 2] [--runs FOLDER]

Runs the recipes `desk_cifar10` and `desk_cifar10_class` with λ by `oracle`, as in the paper's
tables, and again, from the same pools, with λ chosen on data that is not reported; the merges also
with BatchNorm statistics that are merged like weights instead of kept. An interrupted command
resumes when it is repeated. Writes benchmarks/results/desk_cifar10.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from machine import describe, markdown_table

import negmerge as nm
from negmerge.reports.inspection import grouped, notes
from negmerge.runs.result import RunResult
from negmerge.support.progress import make_progress

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
MEASURED = ("acc_retain", "acc_forget", "acc_test", "mia", "avg_gap", "scale", "sparsity")
KEPT = (*MEASURED, "splits", "seconds", "cost_ratio", "evaluations", "edge", "settings", "options")
KEPT += ("tried",)


def run(recipe: str, seed: int, way: str, folder: Path) -> RunResult:
    """One run; all ways to choose λ share the pool, and their results are stored separately."""
    kept = folder / f"{recipe}-{seed}-{way.replace(', ', '-').replace(' ', '_')}.json"
    if not kept.exists():
        changes = [f"seed={seed}", *STUDIES[recipe][1][way]]
        with make_progress() as progress:
            done = nm.run(recipe, folder / f"{recipe}-{seed}", changes, progress)
        kept.write_text(json.dumps(done.result.tree()))
    return RunResult.model_validate_json(kept.read_text())


def rows_of(result: RunResult) -> dict[str, dict[str, Any]]:
    """The numbers of one run, by row of the table."""
    rows = {"original": result.original, "retrain": result.retrain}
    rows |= {row.method: row for group in grouped(result.methods) for row in group}
    trees = {name: row.model_dump(mode="json") for name, row in rows.items() if row is not None}
    return {name: {k: tree.get(k) for k in KEPT} for name, tree in trees.items()}


def spread(values: list[float]) -> str:
    """Mean and standard deviation over the seeds, if there are several."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def table(runs: list[dict[str, dict[str, Any]]]) -> str:
    """A Markdown table, mean ± standard deviation over seeds."""
    splits, rows = {"original": "all", "retrain": "retain"}, list[dict[str, str]]()
    for name, first in runs[0].items():
        cells = {"method": name, "splits": splits.get(name) or first["splits"]}
        for column in MEASURED:
            known = [run[name][column] for run in runs if run[name][column] is not None]
            cells[column] = spread(known) if known else ""
        cells["seconds"] = f"{statistics.mean(run[name]['seconds'] for run in runs):.0f}"
        rows.append(cells)
    return markdown_table(rows)


def page(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    seeds = ", ".join(map(str, record["seeds"]))
    lines = [
        "# Desk CIFAR-10, measured",
        "",
        f"`{record['command']}` on {record['machine']}, {record['minutes']:.0f} minutes, seeds "
        f"{seeds}; mean ± standard deviation over the seeds (split, original, retrained model and "
        "pool all differ).",
        "",
        "11,200 of the 50,000 training images (1,120 of them held out), 3,000 test images, a "
        "ResNet of 78 k weights, no augmentation, 20 epochs; a pool of 9. Grouped by the data a "
        "method uses; each rival is the best of three tries over its published range by the same "
        "criterion (those that use retain data train 5 epochs instead of the published 10).",
    ]
    for recipe, (title, _) in STUDIES.items():
        for way, runs in record["runs"][recipe].items():
            looked = " (chosen on the reported data)" if "oracle" in way else ""
            lines += ["", f"## {title[0].upper() + title[1:]}, λ by {way}{looked}", ""]
            lines.append(table(runs))
    return "\n".join(lines) + "\n"


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
                result = run(recipe, seed, way, given.runs)
                found.setdefault(recipe, {}).setdefault(way, []).append(rows_of(result))
                print(recipe, seed, way, f"{time.monotonic() - begun:.0f} s", flush=True)
                print("\n".join((*notes(result), *result.warnings)))
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
    (RESULTS / "desk_cifar10.md").write_text(page(record))


if __name__ == "__main__":
    main()
