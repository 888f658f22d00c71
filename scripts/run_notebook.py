"""Run examples/forget_a_class.ipynb from nothing, and check what it shows.

    python scripts/run_notebook.py             # the outputs in the repository stay
    python scripts/run_notebook.py --record    # writes the outputs into the notebook

The last cell asserts that the class was forgotten; a cell that fails stops the script.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "forget_a_class.ipynb"
LIMIT = 1800
"""Seconds that a cell may take on a busy machine; all cells take minutes on an idle one."""


def run(notebook: nbformat.NotebookNode) -> float:
    """Run all cells in an empty folder; return the seconds."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="negmerge-notebook-") as folder:
        os.environ["NEGMERGE_CACHE"] = str(Path(folder, "cache"))
        os.environ["JUPYTER_PLATFORM_DIRS"] = "1"  # else a library warns
        client = NotebookClient(
            notebook, timeout=LIMIT, record_timing=False, resources={"metadata": {"path": folder}}
        )
        client.execute()
        seconds = time.perf_counter() - begun
        for cell in notebook.cells:
            tidy(cell, folder)
    return seconds


def tidy(cell: nbformat.NotebookNode, folder: str) -> None:
    """Remove from a cell what differs from run to run: progress, and the folder of this run."""
    kept = []
    for output in cell.get("outputs", []):
        if output.get("name") == "stderr":
            continue  # progress and its estimates
        if "text" in output:
            output["text"] = output["text"].replace(f"{folder}/", "")
        kept.append(output)
    if "outputs" in cell:
        cell["outputs"] = kept


def check(notebook: nbformat.NotebookNode) -> None:
    """End if the notebook does not show its table, its picture and its last line."""
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kinds = {kind for output in shown for kind in output.get("data", {})}
    said = "".join(output.get("text", "") for output in shown)
    if not {"text/html", "image/png"} <= kinds or not re.search(r"^forgotten$", said, re.MULTILINE):
        raise SystemExit(
            f"{NOTEBOOK}: table, picture or last line is missing; run it with --record"
        )


def main() -> None:
    """Run, check, and keep the outputs if asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write the outputs")
    record = parser.parse_args().record
    kept = nbformat.read(NOTEBOOK, as_version=4)
    made = nbformat.from_dict(kept.copy())
    seconds = run(made)
    check(made)
    if record:
        nbformat.write(made, NOTEBOOK)
    else:
        check(nbformat.read(NOTEBOOK, as_version=4))
    print(f"{NOTEBOOK.name}: every cell ran, {seconds:.0f} s")


if __name__ == "__main__":
    main()
