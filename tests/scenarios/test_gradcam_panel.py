"""The Grad-CAM panel of a run: images of stated classes, and conflict with its own λ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clips import make_clip, make_sets
from negmerge.errors import OptionError
from negmerge.runs.context import Context
from negmerge.runs.executors import InProcess
from negmerge.runs.pipeline import unlearn
from negmerge.runs.recipe import load_recipe
from negmerge.runs.store import Run
from negmerge.support.progress import Quiet

TINY = """
data: {name: mnist, root: data, limit: {test: 50}}
model: {name: clip}
clip: {control: {name: cifar10, root: data}}
pool:
  settings: {epochs: 2, batch: 16, lr: 1.0e-3, optimizer: adamw}
  grid: {augment.randaugment.m: [2, 8]}
methods: [consensus, conflict]
search: {scales: [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("panel")
    make_sets(folder / "data")
    make_clip(folder / "clip", folder / "data", folder / "cache")
    (folder / "tiny.yaml").write_text(TINY)
    return folder


@pytest.fixture
def draw(place: Path, monkeypatch) -> Callable[..., tuple[Run, dict[str, Any]]]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))

    def make(*changes: str) -> tuple[Run, dict[str, Any]]:
        """Run the recipe in the same folder: only the steps that changed are made."""
        recipe = load_recipe("tiny.yaml", changes)
        scenario = recipe.make_scenario()
        scenario.check()
        run = Run("run")
        with run.locked():
            unlearn(Context(recipe, scenario, run, InProcess(scenario), Quiet()))
        run = Run("run")  # nothing is remembered
        return run, json.loads((run.data / "gradcam.json").read_text())

    return make


def test_images_of_stated_classes(draw):
    run, panel = draw("gradcam.classes=['3', '1']")
    shown = [row["cells"][0]["caption"] for row in panel["rows"]]
    assert shown == ["3", "3", "1", "1"]  # the order of the recipe
    assert "evenly spaced images of 3 and 1 of the reported forget set" in panel["text"]
    scales = {row.method: row.scale for row in run.result.methods}
    assert (
        f"conflict {scales['conflict']:.4g}, consensus {scales['consensus']:.4g}." in panel["text"]
    )
    run.verify()


def test_without_classes_images_of_the_whole_set(draw):
    _, panel = draw()
    assert len(panel["rows"]) == 4
    assert "on evenly spaced images of the reported forget set" in panel["text"]


def test_conflict_has_its_own_scale_if_the_recipe_does_not_compare_it(draw):
    coarse = "search.scales=[0.0, 1.0, 2.0]"
    searched, _ = draw(coarse)
    wanted = searched.result.method("conflict").scale
    run, panel = draw("methods=[consensus]")  # its coarse grid is the one above
    assert f"conflict {wanted:.4g}, consensus " in panel["text"]
    assert not (run.folder / "sweeps/conflict.csv").exists()
    run.verify()


def test_a_class_that_the_forget_set_does_not_have(draw):
    with pytest.raises(OptionError, match=r"gradcam.classes: got 'cloud', wanted names of classes"):
        draw("gradcam.classes=[cloud]")
