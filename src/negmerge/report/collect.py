"""What a run holds, as tables: each is one figure's data, and is exported with the page.

Where a run has no data for a table, `Missing` says why, and so does the page.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from negmerge.criteria import Criterion
from negmerge.errors import FileError, NegMergeError, shown
from negmerge.evaluation.scores import avg_gap
from negmerge.inspection import describe_patch
from negmerge.merge.engine import merge
from negmerge.progress import Progress
from negmerge.reading import MAX_JSON, read_bytes, read_csv, read_json
from negmerge.recipe import Recipe
from negmerge.report.ranking import gap_interval, losses, ranked
from negmerge.report.tables import COLUMNS
from negmerge.rundir import Run
from negmerge.search import read_rows
from negmerge.task_vector import TaskVector

Row = dict[str, Any]

PREFIXES = 10
"""At most so many sizes of pool are merged for the curve of sparsity."""


class Missing(NegMergeError):
    """A part of the page that the run has no data for, and why."""


class NotMeasured(Missing):
    """A part that the scenario does not have; the summary says so."""


def scores_frame(scores: dict[str, Any], criterion: Criterion) -> pd.DataFrame:
    """Original, retrained, then every method, in the order of the criterion.

    What the criterion goes by has a column of its own unless it is one of the others.
    """
    retrain = scores["retrain"]
    rows = [{"method": "original"} | scores["original"]]
    if retrain is not None:
        rows.append({"method": "retrained"} | retrain)
    rows += [dict(row) for row in ranked(scores, criterion)]
    loss = losses(scores, criterion)
    named = {row["method"]: row for row in scores["methods"]}
    told = {name: value for name, value in loss.items() if value is not None}
    apart = told and not any(
        all(named[name][metric] == value for name, value in told.items())
        for metric in ("acc_forget", "avg_gap")
    )
    found: list[dict[str, Any]] = []
    for row in rows:
        one = {"method": row["method"], "data": row.get("splits"), "scale": row.get("scale")}
        for metric in COLUMNS:
            low, high = row["intervals"].get(metric, (None, None))
            one |= {metric: row[metric], f"{metric}_low": low, f"{metric}_high": high}
        if apart:
            one[f"by_{criterion.name}"] = loss.get(row["method"])
        one["avg_gap"] = row.get("avg_gap")
        if retrain is not None and row["method"] != "retrained":
            one["avg_gap_low"], one["avg_gap_high"] = gap_interval(row, retrain)
        for name in ("sparsity", "evaluations", "samples_processed", "cost_ratio", "seconds"):
            one[name] = row.get(name)
        found.append(one)
    return pd.DataFrame(found).dropna(axis=1, how="all")


def members_frame(scores: dict[str, Any], recipe: Recipe) -> pd.DataFrame:
    """Every pool member: what it was trained with, and how it does with its own λ."""
    if not scores["pool"]:
        raise Missing("no pool was trained: all methods are rivals")
    varied = list(recipe.pool.grid)
    rows: list[dict[str, Any]] = []
    for place, member in enumerate(scores["pool"], 1):
        row: dict[str, Any] = {"member": place, "id": member["id"]}
        for name in varied:
            row[name] = _at(member["settings"], name)
        for name in ("scale", *COLUMNS, "avg_gap", "samples", "seconds"):
            row[name] = member.get(name)
        rows.append(row)
    frame = pd.DataFrame(rows).dropna(axis=1, how="all")
    if "acc_forget" not in frame:
        folded = "members were folded and deleted (pool.keep is false)"
        raise Missing("this run did not score its members alone" if recipe.pool.keep else folded)
    return frame


def tries_frame(scores: dict[str, Any]) -> pd.DataFrame:
    """What was tried for every tuned rival, and how it did; `taken` marks the best."""
    rows: list[Row] = []
    for method in scores["methods"]:
        values = method.get("settings", {}) | method.get("options", {})
        for one in method.get("tried") or []:
            row: Row = {"method": method["method"]}
            row["tried"] = ", ".join(f"{k} = {v:g}" for k, v in one["options"].items())
            row |= {k: v for k, v in one.items() if k != "options"}
            row["taken"] = one["options"].items() <= values.items()
            rows.append(row)
    if not rows:
        raise NotMeasured("no rival was tuned")
    return pd.DataFrame(rows)


def sweeps_frame(run: Run, scores: dict[str, Any]) -> pd.DataFrame:
    """What was measured at every λ of every merged method; `chosen` marks the λ that was taken."""
    frames: list[pd.DataFrame] = []
    for method in scores["methods"]:
        if method["scale"] is None or method["criterion"] is None:  # a rival; added without search
            continue
        title, path = method["method"], run.sweep(method["method"])
        if "member" in method:
            path = run.sweep(f"member-{method['member']}")
        if not path.exists():
            raise Missing(f"{path.relative_to(run.folder)} is not there")
        rows: list[Row] = [dict(row) for row in read_rows(path)]
        if scores["retrain"] is not None and "acc_test" in rows[0]:  # as only `oracle` measures it
            rows = [row | {"avg_gap": avg_gap(row, scores["retrain"])} for row in rows]
        frame = pd.DataFrame(rows)
        frame.insert(0, "method", title)
        frame.insert(2, "chosen", frame["scale"] == method["scale"])
        frames.append(frame)
    if not frames:
        raise Missing("no λ was searched")
    return pd.concat(frames, ignore_index=True)


def records(frame: pd.DataFrame) -> list[Row]:
    """The rows of a table.

    >>> records(pd.DataFrame({"a": [1], "b": ["x"]}))
    [{'a': 1, 'b': 'x'}]
    """
    return frame.to_dict("records")  # pyright: ignore[reportReturnType]


def groups(frame: pd.DataFrame, by: str) -> dict[str, list[Row]]:
    """The rows of a table by a column, in the order in which its values appear.

    >>> groups(pd.DataFrame({"a": ["y", "x", "y"], "b": [1, 2, 3]}), "a")["y"]
    [{'a': 'y', 'b': 1}, {'a': 'y', 'b': 3}]
    """
    found: dict[str, list[Row]] = {}
    for row in records(frame):
        found.setdefault(str(row[by]), []).append(row)
    return found


def prefixes_frame(run: Run, scores: dict[str, Any], recipe: Recipe, progress: Progress):
    """Sparsity of the consensus of the first n members, beside that of coin flips.

    What the first member left as it was, frozen weights for one, no coin decides.
    """
    if not scores["pool"]:
        raise Missing("no pool was trained")
    if not recipe.pool.keep:
        raise Missing("members were folded and deleted (pool.keep is false)")
    members = [run.member(member["id"]) for member in scores["pool"]]
    lost = [path for path in (run.base, *members) if not path.exists()]
    if lost:
        raise Missing(f"{lost[0].relative_to(run.folder)} is not there")
    n = len(members)
    sizes = sorted({max(round(n * k / PREFIXES), 1) for k in range(1, PREFIXES + 1)} | {1})
    rows: list[dict[str, float]] = []
    for size in sizes:
        tau = merge(run.base, members[:size], buffers=recipe.buffers, progress=progress)
        sparsity = 100 * tau.sparsity()
        still = rows[0]["sparsity"] if rows else sparsity
        flips = still + (100 - still) * (1 - 2 ** (1 - size))
        rows.append({"members": size, "sparsity": sparsity, "coin_flips": flips})
    return pd.DataFrame(rows)


def sparsity_frame(run: Run, scores: dict[str, Any], by: str) -> pd.DataFrame:
    """The share of zeros of every merged patch by depth or component."""
    rows: list[dict[str, Any]] = []
    for title, tau in _patches(run, scores).items():
        for group, found in tau.sparsity(by=by).items():  # pyright: ignore
            rows.append(
                {
                    "method": title,
                    by: group,
                    "tensors": found.tensors,
                    "elements": found.elements,
                    "nonzero": found.nonzero,
                    "sparsity": 100 * found.element_weighted,
                    "sparsity_tensor_mean": 100 * found.tensor_mean,
                }
            )
    return pd.DataFrame(rows)


def dissent_frame(run: Run, scores: dict[str, Any]) -> pd.DataFrame:
    """How often each member alone kept the others from agreeing."""
    for tau in _patches(run, scores).values():
        about = describe_patch(tau)
        if any("sole_dissent" in member for member in about["members"]):
            places = {member["id"]: k for k, member in enumerate(scores["pool"], 1)}
            rows = [
                {
                    "member": places.get(Path(member["name"]).stem, member["name"]),
                    "sole_dissent": 100 * member["sole_dissent"],
                    "fingerprint": member["fingerprint"],
                }
                for member in about["members"]
            ]
            return pd.DataFrame(rows).sort_values("member", ignore_index=True)
    raise Missing(
        "the rule consensus counts that, from three members on; this run has no such patch"
    )


def attack_frame(run: Run, scores: dict[str, Any]) -> pd.DataFrame:
    """How the true class's probability is spread over retain, forget and test."""
    if scores["original"]["mia"] is None:
        raise NotMeasured("not measured in this scenario")
    path = run.data / "attack.csv"
    if not path.exists():
        raise Missing("this run did not record its histograms")
    kinds = {"low": float, "high": float, "count": int, "member": int}
    rows = [{k: kinds.get(k, str)(v) for k, v in row.items()} for row in read_csv(path)]
    return pd.DataFrame(rows)


def bins_side_by_side(frame: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """The histograms of some models, a row for each bin with the counts of all sets."""
    found: dict[tuple[str, float], Row] = {}
    for row in records(frame):
        if row["model"] in models:
            own = {"model": row["model"], "low": row["low"], "high": row["high"]}
            one = found.setdefault((row["model"], row["low"]), own)
            one[row["set"]] = row["count"]
            one["taken_for_member"] = bool(row["member"])
    return pd.DataFrame(list(found.values()))


def pictures(run: Run) -> dict[str, Any]:
    """What Grad-CAM saw: columns, and rows of pictures as files."""
    path = run.data / "gradcam.json"
    if not path.exists():
        raise Missing("this run made no pictures")
    found = read_json(path)
    if "missing" in found:
        raise Missing(found["missing"])
    for cell in (cell for row in found["rows"] for cell in row["cells"]):
        cell["inline"] = "data:image/png;base64," + base64.b64encode(_png(run, cell)).decode()
    return found


def _png(run: Run, cell: Row) -> bytes:
    """A picture of the run's own, and nothing else that its name may lead to."""
    path = run.data / cell["file"]
    if path.name != cell["file"] or path.is_symlink():
        raise FileError(f"{path.parent}: {shown(cell['file'])} is not the name of a picture there")
    raw = read_bytes(path, MAX_JSON)
    if not raw.startswith(b"\x89PNG"):
        raise FileError(f"{path}: is not a PNG")
    return raw


def _patches(run: Run, scores: dict[str, Any]) -> dict[str, TaskVector]:
    found: dict[str, TaskVector] = {}
    for method in scores["methods"]:
        if method["scale"] is not None:
            path = run.patch(method["method"])
            if not path.exists():
                raise Missing(f"{path.relative_to(run.folder)} is not there")
            found[method["method"]] = TaskVector.load(path)
    if not found:
        raise Missing("no task vectors were merged: all methods are rivals")
    return found


def _at(tree: dict[str, Any], key: str) -> Any:
    """A dotted key of a tree."""
    value: Any = tree
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            raise FileError(f"pool: a member has no setting {key!r}")
        value = value[part]
    return value if not isinstance(value, dict) else json.dumps(value)
