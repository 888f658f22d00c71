"""What version 0.2.0 left is understood: recipes, finished runs, runs that were interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from negmerge.runs.context import Context
from negmerge.runs.executors import InProcess
from negmerge.runs.pipeline import finished, unlearn
from negmerge.runs.recipe import load_recipe
from negmerge.runs.store import Run
from negmerge.scenarios.base import identity
from negmerge.support.files import file_digest
from negmerge.support.progress import Quiet

TINY = [
    "data.limit={train: 120, test: 40}",
    "train={epochs: 1, batch: 16, lr: 0.05}",
    "retrain=null",
    "pool={grid: {epochs: [1, 2]}, settings: {batch: 8, lr: 0.05}}",
    "methods=[consensus, greedy]",
    "search={count: 3, samples: 20}",
]


RECIPES = Path(__file__).parents[1] / "recipes"
"""As version 0.2.0 wrote them, with every default."""
CLASSIFY = [
    "split.forget={class: 3, count: 50}",
    "pool.subset={count: 4, seed: 2}",
    "search={criterion: oracle, stop: 0.5, count: 11, limit: 4.0, tries: 3}",
    "buffers=merge",
    "retrain.weights=kept/retrain.safetensors",
]
CLIP = [
    "clip.linear=true",
    "clip.freeze=attention",
    "data.limit={train: 100}",
    "methods=[consensus, {name: greedy, options: {order: soup}}, {name: uniform, add: 0.5}]",
]


@pytest.mark.parametrize(
    ("kind", "shipped", "changes"),
    [("classify", "desk_cifar10", CLASSIFY), ("clip", "clip_vit_b32", CLIP)],
)
def test_a_recipe_is_read_as_it_was_meant(kind: str, shipped: str, changes: list[str]):
    path = RECIPES / f"{kind}-0.2.0.yaml"
    tree = yaml.safe_load(path.read_text())
    assert "scenario" not in tree
    assert (tree["clip"] is None) == (kind == "classify")
    assert {"split", "train", "retrain"} < tree.keys()
    recipe = load_recipe(path)
    assert recipe == load_recipe(shipped, changes)
    assert recipe.scenario == kind
    assert load_recipe(path, ["seed=5"]).seed == 5
    again = yaml.safe_load(recipe.dump())
    assert again["scenario"] == kind
    said = tree.keys() - ({"clip"} if kind == "classify" else {"split", "train", "retrain"})
    for name in said - {"model"}:
        added = {"augmentation": "timm"} if name == "clip" else {}
        assert again[name] == (tree[name] | added if added else tree[name]), name
    assert again["model"].items() <= tree["model"].items()


def test_a_recipe_of_a_module_in_memory_is_read_and_shown(tmp_path: Path):
    """As `nm.unlearn` of version 0.2.0 left it in a run; the page of the run is made from it."""
    tree = yaml.safe_load((RECIPES / "classify-0.2.0.yaml").read_text())
    tree["data"] |= {"name": "own-ba50c1fa3a3af310", "limit": {"train": None, "test": None}}
    tree["model"] |= {"name": "Sequential", "weights": "run/.state/given.safetensors"}
    tree |= {"title": "Sequential: consensus", "retrain": None}
    tree["search"]["criterion"] = "keep_retain"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.title, recipe.criterion) == ("Sequential: consensus", "keep_retain")
    assert len(recipe.pool.members()) == 4


def test_a_finished_run_is_finished(tmp_path: Path):
    run, context = go(tmp_path / "run")
    tree = yaml.safe_load(run.recipe.read_text())
    del tree["scenario"]
    run.recipe.write_text(yaml.safe_dump(tree | {"clip": None}, sort_keys=False))
    manifest = json.loads(run.manifest.read_text())
    assert not finished(run, context.recipe, context.scenario), "the recipe is not the sealed one"
    manifest["files"]["recipe.yaml"]["sha256"] = file_digest(run.recipe)
    run.manifest.write_text(json.dumps(manifest))
    assert finished(run, context.recipe, context.scenario)
    other = load_recipe("demo", [*TINY, "seed=1"])
    assert not finished(run, other, context.scenario)
    assert run.result.first.method == "consensus"


class Stops(Quiet):
    """Ends a run when a stage begins."""

    def __init__(self, stage: str) -> None:
        self.wanted = stage

    def stage(self, name: str, total: int, unit: str = "bytes") -> None:
        if name.startswith(self.wanted):
            raise KeyboardInterrupt


def go(folder: Path, progress: Quiet | None = None) -> tuple[Run, Context]:
    recipe = load_recipe("demo", TINY)
    scenario, store = recipe.make_scenario(), Run(folder)
    context = Context(recipe, scenario, store, InProcess(scenario), progress or Quiet())
    with store.locked():
        try:
            unlearn(context)
        except KeyboardInterrupt:
            assert isinstance(progress, Stops)
    return Run(folder), context


def old_states(context: Context) -> dict[str, Any]:
    """As version 0.2.0 named and wrote what it had measured: scores, and losses of members."""
    store, search = context.store, context.recipe.search
    scored_on, seed = context.scenario.scored_on, context.recipe.seed
    base = file_digest(store.base)
    content = [base, None, 0.0, False, "report", search.samples, seed, None]
    scores = {"acc_forget": 1.0, "intervals": {}, "samples": {}, "bins": []}
    found: dict[str, Any] = {identity(*content, scored_on): scores}
    depends = [scored_on, search.samples, seed, "keep", "retain", 1.0, base]
    for member in store.folder.glob("pool/*/*.safetensors"):
        found[identity("rank", depends, file_digest(member))] = [0.5, 0.1]
    return found


@pytest.mark.parametrize("stage", ["greedy: ranking", "scoring every method"])
def test_what_an_interrupted_run_had_measured_is_not_in_the_way(stage: str, tmp_path: Path):
    run, context = go(tmp_path / "run", Stops(stage))
    assert not run.finished
    left = old_states(context)
    assert len(left) == 3
    for name, tree in left.items():
        (run.states / f"{name}.json").write_text(json.dumps(tree))
    run, _ = go(tmp_path / "run")
    whole, _ = go(tmp_path / "whole")
    assert run.read_manifest().result == whole.read_manifest().result
    assert not run.states.exists(), "what it left is cleared away too"
