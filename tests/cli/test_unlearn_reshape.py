"""Task vectors that are changed with data before λ is searched: whole runs, kills, refusals."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import negmerge as nm
from negmerge.checkpoints.groups import groups_by
from negmerge.evaluation.search import read_rows
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.training.weights import load_tensors
from negmerge.vectors.task_vector import TaskVector
from running import negmerge, negmerge_here, start

TOY = str(Path(__file__).parents[1] / "toy.py")
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
  - {name: consensus, retain: 0.5}
  - {name: consensus, retain: 0}
  - {name: consensus, fisher: 1}
  - {name: consensus, groups: depth}
  - {name: uniform, groups: component, fisher: 0.5, retain: 0.25, label: all_three}
search: {criterion: keep_retain, samples: 100}
workers: 1
"""
PLAIN = "consensus"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reshape")
    (folder / "tiny.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    negmerge_here(place, "unlearn", "tiny.yaml", "--out", "run")
    return place / "run"


@pytest.fixture(scope="module")
def rows(run: Path) -> dict[str, dict]:
    return {row["method"]: row for row in json.loads((run / "scores.json").read_text())["methods"]}


def patch(run: Path, title: str) -> TaskVector:
    return TaskVector.load(run / "patches" / f"{title}.safetensors")


def test_every_method_has_its_title_and_says_which_data_it_used(rows: dict[str, dict]):
    assert {title: row["splits"] for title, row in rows.items()} == {
        "consensus": "forget",
        "consensus-retain0_5": "all",
        "consensus-retain0": "all",
        "consensus-fisher1": "all",
        "consensus-depth": "forget",
        "all_three": "all",
    }
    assert "reshaped" not in rows[PLAIN]
    assert rows["all_three"]["reshaped"].keys() == {"retain", "fisher", "groups"}


def test_the_page_and_the_tables_show_the_titles(run: Path, place: Path, rows: dict[str, dict]):
    page = (run / "report" / "index.html").read_text()
    assert all(title in page for title in rows)
    table = (run / "report" / "tables" / "scores.csv").read_text()
    assert "consensus-fisher1,all," in table
    out, _ = negmerge_here(place, "inspect", "run/patches/all_three.safetensors")
    assert "fisher, groups, retain" in out


def test_the_retain_term_is_the_task_vector_of_one_epoch_on_the_retain_set(
    run: Path, rows: dict[str, dict]
):
    row, plain, found = (
        rows["consensus-retain0_5"],
        patch(run, PLAIN),
        patch(run, "consensus-retain0_5"),
    )
    how = row["reshaped"]["retain"]
    assert how["weight"] == 0.5
    assert how["norm"] == pytest.approx(plain.norm())
    recipe = load_recipe(run / "recipe.yaml")
    retained = [
        file
        for file in run.glob("pool/*/*.safetensors")
        if json.loads(file.with_suffix(".json").read_text())["title"] == "retain term"
    ]
    assert len(retained) == 1
    cost = json.loads(retained[0].with_suffix(".json").read_text())
    scenario = recipe.make_scenario()
    assert cost["samples"] == len(scenario.splits.retain)
    assert row["samples_processed"] == rows[PLAIN]["samples_processed"] + cost["samples"]
    base, model = (load_tensors(file)[0] for file in (run / "base.safetensors", retained[0]))
    names = [name for name in plain if base[name].is_floating_point()]
    own = {name: model[name].double() - base[name].double() for name in names}
    length = torch.cat([value.reshape(-1) for value in own.values()]).norm().item()
    assert how["norm_retain"] == pytest.approx(length, rel=1e-5)
    for name in names:
        wanted = plain[name].double() - 0.5 * how["norm"] / length * own[name]
        torch.testing.assert_close(found[name].double(), wanted, rtol=1e-4, atol=1e-7)


def test_a_retain_term_of_zero_is_the_plain_rule(run: Path, rows: dict[str, dict]):
    plain, found = patch(run, PLAIN), patch(run, "consensus-retain0")
    assert all(plain[name].numpy().tobytes() == found[name].numpy().tobytes() for name in plain)
    for field in ("scale", "acc_forget", "acc_retain", "evaluations"):
        assert rows["consensus-retain0"][field] == rows[PLAIN][field]


def test_fisher_weights_shrink_weights_and_leave_buffers(run: Path, rows: dict[str, dict]):
    plain, found = patch(run, PLAIN), patch(run, "consensus-fisher1")
    how = rows["consensus-fisher1"]["reshaped"]["fisher"]
    assert how["samples_forget"] == 64
    assert how["samples_retain"] == 256
    ratios = np.concatenate(
        [(found[name] / plain[name])[plain[name] != 0].numpy().reshape(-1) for name in plain]
    )
    assert 0 <= ratios.min() < 0.2
    assert 0.8 < ratios.max() <= 1
    assert how["mean"] == pytest.approx(float(ratios.mean()), rel=1e-3)


def test_the_factors_are_those_of_the_patch_and_their_evaluations_are_counted(
    run: Path, rows: dict[str, dict]
):
    row, plain, found = rows["consensus-depth"], patch(run, PLAIN), patch(run, "consensus-depth")
    how = row["reshaped"]["groups"]
    assert how["by"] == "depth"
    assert 2 <= len(how["factors"]) <= 4
    network = load_recipe(run / "recipe.yaml").make_scenario().model()
    order = [name for name in network.state_dict() if name in plain and plain[name].any()]
    groups = groups_by("depth", dict.fromkeys(order, 1.0))
    assert {*groups} == {*how["factors"]}
    for group, names in groups.items():
        for name in names:
            torch.testing.assert_close(
                found[name], how["factors"][group] * plain[name], rtol=0, atol=0
            )
    sweep = read_rows(run / "sweeps" / "consensus-depth.csv")
    assert 2 <= row["evaluations"] - len(sweep) <= 30


def test_samples_that_tune_neither_choose_nor_are_reported(run: Path, rows: dict[str, dict]):
    scenario = load_recipe(run / "recipe.yaml").make_scenario()
    parts, tree = scenario.parts, yaml.safe_load(RECIPE) | {"methods": ["consensus"]}
    plain = Recipe.model_validate(tree).make_scenario()
    for name in ("retain", "forget", "holdout"):
        tuned = {*parts.tune[name].tolist()}
        assert tuned
        assert not tuned & {*parts.choose[name].tolist()}
        if parts.holdout_from == "validation" and name != "holdout":
            assert not tuned & {*parts.report[name].tolist()}
        assert len(parts.choose[name]) < len(plain.parts.choose[name])
    for name, reported in plain.parts.report.items():
        assert np.array_equal(parts.report[name], reported)
    scores = json.loads((run / "scores.json").read_text())
    assert scores["splits"]["chosen_on"]["forget"] == len(parts.choose["forget"])
    how = rows["consensus-depth"]["reshaped"]["groups"]
    assert how["samples_forget"] == len(parts.tune["forget"])


def test_the_run_is_complete_and_the_model_is_the_patch_applied(run: Path, place: Path):
    out, _ = negmerge_here(place, "verify", "run")
    assert "match the manifest" in out
    assert not (run / ".state").exists()
    row = next(
        row
        for row in json.loads((run / "scores.json").read_text())["methods"]
        if row["method"] == "all_three"
    )
    model = nm.apply(run / "base.safetensors", -row["scale"] * patch(run, "all_three"))
    scenario = load_recipe(run / "recipe.yaml").make_scenario()
    network = scenario.model()
    network.load_state_dict({name: torch.as_tensor(value) for name, value in model.items()})
    assert scenario.measure(network, "report").values["acc_forget"] == row["acc_forget"]


def test_without_such_a_method_recipes_are_as_before():
    tree = yaml.safe_load(RECIPE) | {
        "methods": ["consensus", {"name": "uniform", "subset": {"count": 1}}]
    }
    recipe = Recipe.model_validate(tree)
    assert yaml.safe_load(recipe.dump())["methods"][0] == {
        "name": "consensus", "options": {}, "label": None, "tune": False, "subset": None,
        "add": None,
    }  # fmt: skip
    scenario = recipe.make_scenario()
    assert scenario.scored_on == scenario.identity
    changed = Recipe.model_validate(tree | {"methods": [{"name": "consensus", "groups": "depth"}]})
    assert changed.make_scenario().identity == scenario.identity
    assert changed.make_scenario().scored_on != scenario.scored_on
    assert load_recipe(None).retain_training is None


NUMBERS = """
title: Numbers are forgotten
scenario: numbers
records: 80
train: {epochs: 40, batch: 32, lr: 0.02}
pool:
  settings: {batch: 32, lr: 0.02}
  grid: {epochs: [2, 4]}
methods:
  - {name: uniform, groups: depth, fisher: 1, retain: 0.5}
  - {name: uniform, groups: component}
search: {strategy: refine, limit: 8.0}
save_every: 0
workers: 1
"""


def test_a_run_killed_in_the_stage_continues_and_ends_with_the_same_result(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(NUMBERS)
    command = ["unlearn", "recipe.yaml", "--plugin", TOY, "--out"]
    negmerge(tmp_path, *command, "whole")
    process = start(tmp_path, *command, "run")
    state = tmp_path / "run" / ".state"
    while process.poll() is None and not list(state.glob("*.csv")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "run" / "manifest.json").exists()
    made = {p: p.stat().st_mtime_ns for p in tmp_path.glob("run/pool/*/*.safetensors")}
    assert len(made) == 3
    negmerge(tmp_path, *command, "run")
    assert all(p.stat().st_mtime_ns == when for p, when in made.items())
    found = [json.loads((tmp_path / r / "manifest.json").read_text()) for r in ("whole", "run")]
    assert found[0]["result"] == found[1]["result"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("methods=[{name: single_best, fisher: 1}]", "'single_best-fisher1': fisher is for merge"),
        ("methods=[{name: salun, retain: 1}]", "'salun-retain1': retain is for merge rules"),
        ("methods=[{name: uniform, add: 1, groups: depth}]", "groups is for merge rules whose"),
        ("methods=[{name: uniform, retain: -1}]", "methods.0.retain: Input should be greater"),
        ("methods=[{name: uniform, groups: layer}]", "methods.0.groups: Input should be 'depth'"),
        ("search.samples=1", "groups: 1 samples of the retain set choose λ, and half"),
    ],
)
def test_what_cannot_be_is_one_line_before_any_work(place: Path, change: str, message: str):
    _, err = negmerge_here(place, "unlearn", "tiny.yaml", "--out", "no", "--set", change, code=2)
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err
    assert not (place / "no").exists()


def test_a_criterion_on_reported_data_has_no_samples_for_groups(place: Path):
    words = ["--set", "search.criterion=oracle", "--set", "retrain={}"]
    _, err = negmerge_here(place, "unlearn", "tiny.yaml", "--out", "no", *words, code=2)
    assert "groups needs samples that are not reported, and criterion oracle chooses on" in err
    assert not (place / "no").exists()


def test_clip_has_no_retain_set_to_train_on(place: Path):
    changes = ["data.name=mnist", "methods=[{name: consensus, fisher: 1}]"]
    words = [word for change in changes for word in ("--set", change)]
    _, err = negmerge_here(place, "unlearn", "desk_clip_fashion", "--out", "no", *words, code=2)
    assert "fisher needs a retain set to train on, which scenario clip does not have" in err
