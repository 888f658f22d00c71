"""The three policies for BatchNorm statistics on the demo: kept, merged, recalibrated.

    python benchmarks/buffers.py [--seeds 0 1 2] [--runs FOLDER] [--study FOLDER]

Runs the merge rules of the recipe `demo` with each policy, from the same pools, with λ by two
criteria, on data that is not reported. `--study` takes the pools of a study of the demo. An
interrupted command resumes when it is repeated.
Writes benchmarks/results/buffers.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from desk_cifar10 import spread
from machine import describe, markdown_table

from negmerge.runs.context import Context
from negmerge.runs.executors.choose import make_executor
from negmerge.runs.pipeline import unlearn
from negmerge.runs.recipe import load_recipe
from negmerge.runs.result import RunResult
from negmerge.runs.store import Run
from negmerge.support.progress import make_progress

RESULTS = Path(__file__).parent / "results"
POLICIES = ("keep", "merge", "recalibrate")
CRITERIA = ("match_holdout", "keep_retain")
RULES = ("consensus", "uniform", "ties", "magmax")
METRICS = ("acc_retain", "acc_forget", "acc_test", "mia", "avg_gap", "scale", "evaluations")


def run(
    seed: int, criterion: str, policy: str, folder: Path, reuse: Sequence[Path] = ()
) -> RunResult:
    """One run; all runs of a seed share the trainings, and their results are stored separately.

    `reuse` are folders of other runs, whose trainings are used again.
    """
    kept = folder / f"demo-{seed}-{criterion}-{policy}.json"
    if not kept.exists():
        changes = [f"seed={seed}", f"search.criterion={criterion}", f"buffers={policy}"]
        recipe = load_recipe("demo", [*changes, f"methods=[{', '.join(RULES)}]"])
        store = Run(folder / f"demo-{seed}", reuse)
        with make_progress() as progress, store.locked():
            scenario = recipe.make_scenario(progress)
            with make_executor(recipe, scenario, store, progress) as executor:
                unlearn(Context(recipe, scenario, store, executor, progress, illustrated=False))
        kept.write_text(json.dumps(store.result.tree()))
    return RunResult.model_validate_json(kept.read_text())


def rows_of(result: RunResult) -> dict[str, dict[str, Any]]:
    """The numbers of one run, by method."""
    rows = {row.method: row.model_dump(mode="json") for row in result.methods}
    return {name: {k: row.get(k) for k in METRICS} for name, row in rows.items()}


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """The means over the seeds, and the differences of Avg. Gap to `keep`, paired by seed."""
    rows: list[dict[str, str]] = []
    for rule in RULES:
        for policy in POLICIES:
            own = [one[rule] for one in runs[policy]]
            cells = {"rule": rule, "buffers": policy}
            cells |= {name: spread([row[name] for row in own]) for name in METRICS}
            kept = [one[rule]["avg_gap"] for one in runs["keep"]]
            gaps = [row["avg_gap"] - before for row, before in zip(own, kept, strict=True)]
            cells["avg_gap − keep"] = "" if policy == "keep" else _differences(gaps)
            rows.append(cells)
    return markdown_table(rows)


def _differences(values: list[float]) -> str:
    mean, signed = statistics.mean(values), ", ".join(f"{value:+.2f}" for value in values)
    return f"{mean:+.2f} ({signed})"


def page(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    seeds = ", ".join(map(str, record["seeds"]))
    lines = [
        "# BatchNorm statistics: kept, merged, recalibrated",
        "",
        f"`{record['command']}` on {record['machine']}, {record['minutes']:.0f} minutes, seeds "
        f"{seeds}; mean ± standard deviation over the seeds, and for Avg. Gap the difference to "
        "`buffers: keep` of each seed (below 0: nearer to the retrained model).",
        "",
        "The recipe `demo` with its merge rules; λ by `strategy: refine`. `recalibrate` uses the "
        "held-out images, without their labels.",
    ]
    for criterion, runs in record["runs"].items():
        lines += ["", f"## λ by {criterion}", "", table(runs)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs/buffers"))
    parser.add_argument("--study", type=Path, help="the folder of a study of the demo to reuse")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    found: dict[str, dict[str, list[Any]]] = {}
    for seed in given.seeds:
        for criterion in CRITERIA:
            for policy in POLICIES:
                reuse = [] if given.study is None else [given.study / f"seed-{seed}"]
                result = run(seed, criterion, policy, given.runs, reuse)
                own = found.setdefault(criterion, {}).setdefault(policy, [])
                own.append(rows_of(result))
                print(seed, criterion, policy, f"{time.monotonic() - begun:.0f} s", flush=True)
                print("\n".join(result.warnings))
    record = {
        "command": f"python benchmarks/buffers.py --seeds {' '.join(map(str, given.seeds))}",
        "machine": describe(),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "seeds": given.seeds,
        "runs": found,
    }
    (RESULTS / "buffers.json").write_text(json.dumps(record, indent=1) + "\n")
    (RESULTS / "buffers.md").write_text(page(record))


if __name__ == "__main__":
    main()
