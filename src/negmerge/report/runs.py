"""What is there of a run, finished or not, as plain data."""

from __future__ import annotations

from typing import Any

from negmerge.recipe import load_recipe
from negmerge.rundir import Run


def describe_run(run: Run) -> dict[str, Any]:
    """What is there of a run, as plain data; the scores if it is finished."""
    pool = sorted(run.folder.glob("pool/*/*.json"))
    return {
        "kind": "run",
        "finished": run.finished,
        "base": run.base.exists(),
        "retrain": run.retrain.exists(),
        "members": len(pool),
        "members_planned": len(load_recipe(run.recipe).pool.members()),
        "rivals": sorted(p.name for p in run.folder.glob("rivals/*/")),
        "patches": sorted(p.stem for p in run.folder.glob("patches/*.safetensors")),
        "sweeps": sorted(p.stem for p in run.folder.glob("sweeps/*.csv")),
        "scores": run.scores if run.finished else None,
    }
