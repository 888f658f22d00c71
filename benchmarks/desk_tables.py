"""The paper's tables on a desk: CIFAR-10 and the shipped CLIP, at the desk recipes' own size.

    NEGMERGE_DATA=FOLDER python benchmarks/desk_tables.py [TABLE ...] [--seeds 0 1] [--runs FOLDER]

Makes the tables as `negmerge reproduce TABLE` does, here with several seeds; tables that need the
same run share it. Interrupted, it goes on. Records of other tables are kept. Writes
benchmarks/results/desk_tables.json and .md; the runs with their pages stay in the folder of runs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pandas as pd
from desk_cifar10 import spread
from machine import describe

from negmerge.progress import make_progress
from negmerge.report.export import Table
from negmerge.reproduction.compare import METRICS, beside
from negmerge.reproduction.experiments import experiments
from negmerge.reproduction.reproduce import Reproduction, reproduce

RESULTS = Path(__file__).parent / "results"
COUNTED = ("B1", "B4")
"""Tables with which everything that their runs measured is recorded."""
COSTS = ("acc_forget", "acc_retain", "scale", "sparsity", "seconds_merge", "evaluations")


def record(made: Reproduction, seeds: list[int], minutes: float) -> dict[str, Any]:
    """What came out of one table; `minutes` is small if other tables made its runs before."""
    measured = [m for m in METRICS if m in made.frame]
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
    """For every recipe, what each method came to and took, seed by seed."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for page in made.pages:
        folder = page.parents[1]
        scores = json.loads((folder / "scores.json").read_text())
        rows = found.setdefault(folder.name.split("-")[0], {})
        for row in ({"method": "original"} | scores["original"], *scores["methods"]):
            rows.setdefault(row["method"], []).append({k: row.get(k) for k in COSTS})
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A table of the paper in Markdown."""
    metrics = [m for m in METRICS if any(row.get(m) is not None for row in rows)]
    words = [k for k in rows[0] if not k.startswith(METRICS)]
    cells = [
        {k: str(row.get(k) or "") for k in words} | {m: beside(row, m) for m in metrics}
        for row in rows
    ]
    return Table("", "", pd.DataFrame(cells)).markdown()


def costs_table(methods: dict[str, list[dict[str, Any]]]) -> str:
    """Everything a run measured, mean ± standard deviation over the seeds, in Markdown."""
    cells: list[dict[str, str]] = []
    for method, rows in methods.items():
        known = {k: [row[k] for row in rows if row[k] is not None] for k in COSTS}
        cells.append({"method": method} | {k: spread(v) if v else "" for k, v in known.items()})
    return Table("", "", pd.DataFrame(cells)).markdown()


def page(tables: dict[str, dict[str, Any]]) -> str:
    """The record, for reading."""
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
