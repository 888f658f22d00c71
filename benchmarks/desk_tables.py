"""The paper's tables at desk scale, with CIFAR-10 and the small CLIP of the package.

    NEGMERGE_DATA=FOLDER python benchmarks/desk_tables.py [TABLE ...] [--seeds 0 1] [--runs FOLDER]

Reproduces the tables as `negmerge reproduce TABLE` does, with several seeds; tables share runs. An
interrupted command resumes when it is repeated. The records of other tables are preserved. Writes
benchmarks/results/desk_tables.json and .md; the runs with their pages stay in the folder of runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from desk_cifar10 import spread
from machine import describe, markdown_table

from negmerge.paper.comparison import PRINTED, both_values
from negmerge.paper.experiments import experiments
from negmerge.paper.reproduction import Reproduction, reproduce
from negmerge.runs.store import Run
from negmerge.support.progress import make_progress

RESULTS = Path(__file__).parent / "results"
COUNTED = ("B1", "B4")
"""Tables whose records include all measurements of their runs."""
COSTS = ("acc_forget", "acc_retain", "scale", "sparsity", "seconds_merge", "evaluations")


def record(made: Reproduction, seeds: list[int], minutes: float) -> dict[str, Any]:
    """The record of a table; `minutes` does not include runs that other tables made before."""
    measured = [column for column in PRINTED if column in made.frame]
    frame = made.frame.dropna(subset=measured, how="all") if measured else made.frame
    notes = [note for note in made.notes if not note.startswith("The paper does not state")]
    return {
        "caption": made.caption,
        "seeds": seeds,
        "machine": describe(),
        "minutes": round(minutes, 1),
        "notes": notes,
        "rows": json.loads(frame.to_json(orient="records")),
        "runs": costs(made) if made.table in COUNTED else {},
    }


def costs(made: Reproduction) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """For every recipe, the scores and costs of each method and seed."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for page in made.pages:
        folder = page.parents[1]
        result, rows = Run(folder).result, found.setdefault(folder.name.split("-")[0], {})
        named = [("original", result.original), *((row.method, row) for row in result.methods)]
        for name, row in named:
            tree = row.model_dump(mode="json")
            rows.setdefault(name, []).append({k: tree.get(k) for k in COSTS})
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A table of the paper in Markdown."""
    columns = [column for column in PRINTED if any(row.get(column) is not None for row in rows)]
    words = [k for k in rows[0] if not k.startswith(PRINTED)]
    cells = [
        {k: str(row.get(k) or "") for k in words} | {k: both_values(row, k) for k in columns}
        for row in rows
    ]
    return markdown_table(cells)


def costs_table(methods: dict[str, list[dict[str, Any]]]) -> str:
    """All measurements of a run in Markdown, mean ± standard deviation over the seeds."""
    cells: list[dict[str, str]] = []
    for method, rows in methods.items():
        known = {k: [row[k] for row in rows if row[k] is not None] for k in COSTS}
        cells.append({"method": method} | {k: spread(v) if v else "" for k, v in known.items()})
    return markdown_table(cells)


def page(tables: dict[str, dict[str, Any]]) -> str:
    """The record as Markdown."""
    lines = [
        "# The paper's tables on a desk, measured",
        "",
        "`NEGMERGE_DATA=FOLDER python benchmarks/desk_tables.py TABLE --seeds 0 1 2`; the seeds, "
        "the machine and the minutes are with each table, the minutes being those of the runs "
        "that no earlier table had made. Measured, ± standard deviation over the seeds if there "
        "are several, and in brackets what the paper has with its own networks and data. Rows "
        "that a desk does not reach are left out.",
    ]
    for name in (name for name in experiments() if name in tables):
        one = tables[name]
        seeds = ", ".join(map(str, one["seeds"]))
        lines += ["", f"## {name}: {one['caption']}", ""]
        took = f"{one['minutes']} minutes on " if one["minutes"] else ""
        lines += [f"Seeds {seeds}; {took}{one['machine']}.", ""]
        lines += [table(one["rows"]), ""] if one["rows"] else []
        lines += [f"- {note}" for note in one["notes"]]
        for recipe, methods in one["runs"].items():
            lines += ["", f"All methods of `{recipe}`:", "", costs_table(methods)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", default=list(experiments()))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/reproduce-desk"))
    given = parser.parse_args()
    kept, went_on = RESULTS / "desk_tables.json", given.runs.exists()
    tables = json.loads(kept.read_text()) if kept.exists() else {}
    for name in given.tables:
        begun = time.monotonic()
        with make_progress() as progress:
            made = reproduce(name, "desk", given.runs, (), progress, given.seeds)
        minutes, before = (time.monotonic() - begun) / 60, tables.get(name)
        if went_on and before is not None and {*before["seeds"]} <= {*given.seeds}:
            minutes += before["minutes"]
        tables[name] = record(made, given.seeds, minutes)
        print(name, f"{tables[name]['minutes']} minutes", flush=True)
        kept.write_text(json.dumps(tables, indent=1) + "\n")
        (RESULTS / "desk_tables.md").write_text(page(tables))


if __name__ == "__main__":
    main()
