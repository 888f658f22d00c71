"""A run that searches λ to the limit, with confidence, and with recalibrated statistics."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

import negmerge as nm
from negmerge.checkpoints.names import is_statistic
from negmerge.errors import OptionError
from negmerge.runs.checks import check_buffers
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.training.weights import load_tensors
from running import negmerge_here
from toys import SMALL, toy_scenario

RECIPE = """
title: A tiny run
data: {name: fashion_small, limit: {train: 400, test: 100}}
split: {forget: {fraction: 0.2}, validation: 0.2}
train: {epochs: 4, batch: 32, lr: 0.05, augment: {crop: 0, flip: false}}
retrain: null
pool:
  settings: {batch: 16, lr: 0.05, augment: {crop: 0, flip: false}}
  grid: {epochs: [1, 2]}
methods:
  - consensus
  - single_best
  - {name: gradient_ascent, tune: true, options: {epochs: 1}}
search: {criterion: keep_retain, samples: 100, tries: 2}
buffers: recalibrate
workers: 1
"""


def scores_of(run: Path) -> dict:
    return json.loads((run / "scores.json").read_text())


def sweep_of(run: Path, title: str) -> list[dict[str, float]]:
    with (run / "sweeps" / f"{title}.csv").open() as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("refine")
    (place / "tiny.yaml").write_text(RECIPE)
    negmerge_here(place, "unlearn", "tiny.yaml", "--out", "run")
    return place / "run"


def test_every_method_and_member_is_searched_to_the_limit(run: Path):
    members = [row["id"] for row in scores_of(run)["pool"]]
    for title in ("consensus", *(f"member-{id}" for id in members)):
        rows = sweep_of(run, title)
        assert rows[0]["scale"] == 0
        assert 2 <= len(rows) <= 12
        assert rows[0].keys() >= {"scale", "acc_retain", "acc_forget", "acc_holdout"}
        assert not [name for name in rows[0] if "." in name]
    for method in scores_of(run)["methods"][:2]:
        swept = method["method"] if "member" not in method else f"member-{method['member']}"
        rows = sweep_of(run, swept)
        limit = 0.95 * rows[0]["acc_retain"]
        chosen = next(row for row in rows if row["scale"] == method["scale"])
        assert chosen["acc_retain"] >= limit - 1e-9
        left = (chosen["acc_retain"] - limit) / (rows[0]["acc_retain"] - limit)
        assert method["unused"] == pytest.approx(100 * left)
    assert "The λ of the members" not in (run / "report" / "index.html").read_text()


def test_the_written_model_has_the_reported_scores(run: Path):
    """Its statistics are those of the held-out images, and its weights those of θ − λτ."""
    recipe, row = load_recipe(run / "recipe.yaml"), scores_of(run)["methods"][0]
    assert recipe.buffers == "recalibrate"
    assert row["scale"] > 0
    scenario = recipe.make_scenario()
    path = run / "unlearned" / "model.safetensors"
    measured = scenario.measure(scenario.model(path), "report").row()
    assert {k: row[k] for k in measured} == measured
    tau = nm.TaskVector.load(run / "patches" / "consensus.safetensors")
    assert not [name for name in tau if is_statistic(name)]
    applied = nm.apply(run / "base.safetensors", -row["scale"] * tau)
    written, _ = load_tensors(path)
    assert written.keys() == applied.keys()
    for name, tensor in written.items():
        same = torch.equal(tensor, torch.as_tensor(applied[name]))
        assert same != (is_statistic(name) or name.endswith("num_batches_tracked")), name
    negmerge_here(run.parent, "verify", "run")


def test_another_policy_or_confidence_measures_again_and_trains_nothing(run: Path):
    before = scores_of(run)["methods"]
    changes = ["--set", "buffers=keep", "--set", "search.confidence=0.95"]
    trained = {path: path.stat().st_mtime_ns for path in run.glob("pool/*/*.safetensors")}
    negmerge_here(run.parent, "unlearn", "tiny.yaml", "--out", "run", *changes)
    assert trained == {path: path.stat().st_mtime_ns for path in run.glob("pool/*/*.safetensors")}
    rows = sweep_of(run, "consensus")
    low = 0.95 * rows[0]["acc_retain"]
    after = scores_of(run)["methods"]
    chosen = next(row for row in rows if row["scale"] == after[0]["scale"])
    assert chosen["acc_retain.low"] >= low - 1e-9
    assert all(row["acc_retain.low"] < row["acc_retain"] for row in rows[1:])
    assert after[0]["scale"] <= before[0]["scale"]
    table = (run / "report" / "tables" / "sweeps.csv").read_text()
    assert "acc_retain" in table
    assert "acc_retain.low" not in table
    tried = after[2]["tried"]
    assert all("acc_retain.low" not in one and "acc_retain" in one for one in tried)


def test_a_model_without_statistics_is_told():
    with toy_scenario():
        recipe = Recipe.model_validate(SMALL | {"buffers": "recalibrate"})
        with pytest.raises(OptionError, match="buffers: got recalibrate, and the model has no Bat"):
            check_buffers(recipe, recipe.make_scenario())
        check_buffers(Recipe.model_validate(SMALL), recipe.make_scenario())
