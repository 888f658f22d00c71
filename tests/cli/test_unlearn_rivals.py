"""Rivals through the command line: trained, tuned, scored and grouped beside the merged vectors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from negmerge.merging.engine import merge
from negmerge.runs.context import Context
from negmerge.runs.executors import InProcess
from negmerge.runs.pipeline import unlearn
from negmerge.runs.recipe import load_recipe
from negmerge.runs.store import Run
from negmerge.support.progress import Quiet
from negmerge.training.weights import load_tensors, metadata_of
from negmerge.vectors.task_vector import TaskVector
from running import negmerge

RECIPE = """
title: Rivals
data: {name: fashion_small, limit: {train: 200, test: 60}}
split: {forget: {fraction: 0.2}, validation: 0.1}
train: {epochs: 4, batch: 32, lr: 0.05, augment: {crop: 0, flip: false}}
pool: {settings: {batch: 16, lr: 0.05}, grid: {epochs: [1, 2]}}
methods:
  - consensus
  - {name: finetune, options: {epochs: 1}}
  - {name: gradient_ascent, options: {epochs: 1}}
  - {name: boundary_expand, options: {epochs: 1}}
  - {name: salun, options: {epochs: 1}, tune: true}
  - {name: random_label, label: blind, options: {epochs: 1, use_retain: false}, tune: true}
search: {count: 3, samples: 40, tries: 2}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rivals")
    (folder / "r.yaml").write_text(RECIPE)
    return folder


def test_a_run_with_rivals(place: Path):
    out, _ = negmerge(place, "unlearn", "r.yaml", "--out", "run")
    run = place / "run"
    scores = json.loads((run / "scores.json").read_text())
    rows = {row["method"]: row for row in scores["methods"]}
    assert list(rows) == [
        "consensus", "finetune", "gradient_ascent", "boundary_expand", "salun", "blind",
    ]  # fmt: skip

    assert {name: row["splits"] for name, row in rows.items()} == {
        "consensus": "forget",
        "finetune": "retain",
        "gradient_ascent": "forget",
        "boundary_expand": "forget",
        "salun": "all",
        "blind": "forget",
    }
    order = [out.index(f"│ {name} ") for name in ("salun", "finetune", "blind", "consensus")]
    assert order == sorted(order)  # all, retain, forget, merged

    sizes, ratios = scores["splits"]["sizes"], {}
    for name, row in rows.items():
        if name != "consensus":
            assert row["scale"] is None
            assert row["sparsity"] is None
            assert row["seconds"] > 0
            assert row["avg_gap"] is not None
            assert row["settings"]["batch"] == 32  # the original's
            ratios[name] = row["cost_ratio"] * 4 * sizes["retain"]
    both = sizes["retain"] + sizes["forget"]
    assert ratios["finetune"] == pytest.approx(sizes["retain"])
    assert ratios["gradient_ascent"] == pytest.approx(sizes["forget"])
    assert ratios["salun"] == pytest.approx(2 * (both + sizes["forget"]))  # two tries, two masks

    for name, searched in (("salun", ["lr", "keep"]), ("blind", ["lr"])):
        tried = rows[name]["tried"]
        assert [list(t["options"]) for t in tried] == [searched] * 2
        assert rows[name]["criterion"] == "match_holdout"
        assert rows[name]["evaluations"] == 2
        best = min(tried, key=lambda t: t["loss"])["options"]
        assert best.items() <= (rows[name]["settings"] | rows[name]["options"]).items()
        assert f"{name}: lr = {best['lr']:g}" in out
        assert len(list(run.glob(f"rivals/{name}/*.safetensors"))) == 2
    assert [t["options"]["lr"] for t in rows["blind"]["tried"]] == [1e-5, 1e-2]
    assert rows["finetune"]["tried"] == []

    page = (run / "report/index.html").read_text(encoding="utf-8")
    assert page.count("best of 2 tries") == 2
    tries = pd.read_csv(run / "report/tables/tries.csv")
    assert list(tries["method"]) == ["salun", "salun", "blind", "blind"]
    assert list(tries.groupby("method")["taken"].sum()) == [1, 1]

    (expanded,) = run.glob("rivals/boundary_expand/*.safetensors")
    assert load_tensors(expanded)[0]["fc.weight"].shape[0] == 11
    assert metadata_of(expanded)["outputs"] == "11"
    assert Run(run).verify() >= 10


class Apart(InProcess):
    """Checks that no two steps that may run at the same time write the same file."""

    def run(self, steps, advance, stage_size=None):
        for kind in ("out", "state", "partial"):
            files = [getattr(step, kind) for step in steps if hasattr(step, kind)]
            assert len(set(files)) == len(files), kind
        return super().run(steps, advance, stage_size)


def run_here(place: Path, out: str, *changes: str, reuse_from: Sequence[Path] = ()) -> Path:
    """The same in this process."""
    recipe = load_recipe(place / "r.yaml", changes)
    folder, scenario = Run(place / out, reuse_from), recipe.make_scenario()
    with folder.locked():
        unlearn(Context(recipe, scenario, folder, Apart(scenario), Quiet()))
    assert Run(place / out).verify()
    return place / out


ONLY = "methods=[{name: gradient_ascent, options: {epochs: 1}}]"


def test_run_again_reuses_all_and_lists_only_its_own(place: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    made = {p: p.stat().st_mtime_ns for p in place.glob("run/rivals/*/*")}
    run = run_here(place, "run", ONLY)
    assert made == {p: p.stat().st_mtime_ns for p in place.glob("run/rivals/*/*")}
    files = json.loads((run / "manifest.json").read_text())["files"]
    assert {n.split("/")[1] for n in files if n.startswith("rivals/")} == {"gradient_ascent"}


@pytest.mark.parametrize("keep", ["true", "false"])
def test_what_another_run_has_trained_is_taken_over(keep: str, place: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    monkeypatch.setattr("negmerge.scenarios.data.train", None)  # nothing may be trained
    changes = ["methods=[consensus]", f"pool.keep={keep}"]
    run = run_here(place, f"borrower-{keep}", *changes, reuse_from=[place / "empty", place / "run"])
    ours = TaskVector.load(run / "patches/consensus.safetensors")
    lent = sorted((place / "run").glob("pool/*/*.safetensors"))
    theirs = merge(place / "run/base.safetensors", lent)
    assert (ours.origin.n, ours.nonzero) == (2, theirs.nonzero)
    assert len(list(run.glob("pool/*/*.safetensors"))) == (2 if keep == "true" else 0)


def test_rivals_alone_need_no_pool_and_the_first_makes_the_model(place: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    base, retrain = place / "run/base.safetensors", place / "run/retrain.safetensors"
    given = [f"model.weights={base}", f"retrain.weights={retrain}"]
    run = run_here(place, "alone", ONLY, *given)
    (made_by,) = run.glob("rivals/gradient_ascent/*.safetensors")
    assert (run / "unlearned/model.safetensors").read_bytes() == made_by.read_bytes()
    assert not list(run.glob("pool/*"))
    (row,) = json.loads((run / "scores.json").read_text())["methods"]
    assert row["cost_ratio"] == pytest.approx(36 / (4 * 144))  # an epoch of forget, four of retain


def test_methods_that_come_to_the_same_model_do_not_meet_in_one_file(place: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    names = {
        "consensus": {},
        "uniform": {},
        "finetune": {"options": {"epochs": 1}},
        "random_label": {"options": {"epochs": 1}, "tune": True},
    }
    twice = [{"name": n, "label": f"{n}-{k}"} | more for n, more in names.items() for k in (1, 2)]
    run = run_here(place, "twice", f"methods={json.dumps([*twice, 'greedy', 'single_best'])}")
    rows = json.loads((run / "scores.json").read_text())["methods"]
    assert [row["method"] for row in rows[:4]] == [method["label"] for method in twice[:4]]
    for one, two in zip(rows[:8:2], rows[1:8:2], strict=True):
        for metric in ("acc_forget", "acc_retain", "mia", "scale", "evaluations", "avg_gap"):
            assert one[metric] == two[metric]


@pytest.mark.parametrize("damage", ["{", "[]", "{}"])
def test_a_damaged_record_is_made_again(damage, place: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    for record in (*place.glob("run/rivals/*/*.json"), *place.glob("run/pool/*/*.json")):
        record.write_text(damage)
    assert Run(run_here(place, "run")).finished
    assert all(record.stat().st_size > 9 for record in place.glob("run/rivals/*/*.json"))
