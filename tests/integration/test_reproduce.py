"""The paper's tables on tiny settings: from the recipe to the table beside the published one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from clips import make_sets
from negmerge.data.places import ASSETS
from negmerge.errors import NegMergeError
from negmerge.models.weights import load_tensors
from negmerge.reproduction.compare import METRICS
from negmerge.reproduction.experiments import experiment, experiments, published
from negmerge.reproduction.reproduce import Reproduction, rendered, reproduce, total
from negmerge.reproduction.spread import drawn
from negmerge.rundir import Run

NOT_OURS = {"paper_number", "paper_config"}


SMALL = ["pool.settings.epochs=1", "search.count=3", "search.limit=null", "workers=1"]
CLASSIFIER = [
    "data.limit={train: 300, test: 100}", "data.root=data", "train.epochs=2", "search.samples=60",
    "search.tries=2",
    *SMALL,
]  # fmt: skip
CLIP = [
    "data.root=data", "data.limit={train: 64, test: 40}", "search.samples=40",
    "clip.control={name: cifar10, root: data, limit: {test: 40}}", *SMALL,
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Mirrors with few pictures; the tables share what they run."""
    folder = tmp_path_factory.mktemp("desk")
    about = load_tensors(ASSETS / "desk_clip/class_embeddings.safetensors")[1]
    make_sets(folder / "data", 300, 100, json.loads(about["classes"]))
    return folder


@pytest.fixture
def desk(place: Path, monkeypatch) -> Callable[..., Reproduction]:
    """Make a table of a desk's own recipes, with less of everything."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))

    def make(table: str, *changes: str) -> Reproduction:
        clip = experiment(table).desk[0].load().clip is not None
        small = CLIP if clip else CLASSIFIER
        return reproduce(table, "desk", Path("out"), [*small, *changes])

    return make


def shown(made: Reproduction, capsys) -> str:
    for line in rendered(made):
        Console(width=200).print(line)
    return capsys.readouterr().out


@pytest.mark.tables
@pytest.mark.parametrize("table", experiments())
def test_every_table_on_a_desk(table: str, desk, capsys):
    made = desk(table)
    said = shown(made, capsys)
    assert "The paper does not state" in said
    assert all(page.exists() for page in made.pages)
    for metric in (m for m in METRICS if f"{m}_paper" in made.frame):
        found = made.frame.dropna(subset=metric)
        assert set(map(kind, found.to_dict("records"))) == wanted(table, metric), metric
        assert (found[metric] >= 0).all()
        assert metric == "seconds" or (found[metric] <= 100).all()


def kind(row: Mapping[Any, Any]) -> tuple[str, str]:
    """What tells the methods of a table apart."""
    splits = row.get("splits")
    return row["method"], splits if isinstance(splits, str) else ""


def wanted(table: str, metric: str) -> set[tuple[str, str]]:
    """The methods of which the paper prints a number of its own."""
    rows = [row for row in published()[table]["rows"] if row.get(metric) is not None]
    return {kind(row) for row in rows if row["method"] not in NOT_OURS}


FEW = "pool.subset={count: 3}"


def test_runs_that_need_the_same_training_share_it(desk, place: Path):
    desk("T3", "methods=[uniform]", FEW)
    before = set(place.glob("out/*/"))
    lent = {path.name: path.stat().st_ino for path in place.glob("out/*/pool/*/*.safetensors")}
    desk("T3", "methods=[consensus]", FEW)
    (run,) = {*place.glob("out/*/")} - before
    members = list(run.glob("pool/*/*.safetensors"))
    assert len(members) == 3
    assert all(path.stat().st_ino == lent[path.name] for path in members)  # the same files
    Run(run).verify()


def test_a_figure_over_all_data_sets(desk, place: Path):
    made = desk("F1", "methods=[consensus, uniform]", FEW)
    assert set(made.frame["dataset"]) == {"fashion_mnist", "mnist"}
    members = made.frame[made.frame["method"].str.startswith("member ")]
    assert len(members) == 2 * 3
    assert members["acc_forget"].between(0, 100).all()
    kept = pd.read_csv(place / "out/F1.csv")
    assert list(kept["acc_forget"]) == list(made.frame["acc_forget"])
    svg = (place / "out/F1.svg").read_text()
    assert svg == drawn(made.frame)  # the same bytes
    assert all(name in svg for name in ("fashion_mnist", "mnist", "consensus", "members"))


def test_trials_differ_whatever_seed_is_set(desk, place: Path):
    part = experiment("T2").paper[0]
    assert [part.load(trial, ["seed=7"]).seed for trial in range(3)] == [7, 8, 9]


def test_a_pool_that_two_runs_need_is_estimated_once():
    both, alone = total("C1", "paper"), total("B1", "paper")
    assert both.hours < 1.2 * alone.hours


def test_a_classifier_table(desk, place: Path, capsys):
    made = desk("D4")
    assert list(made.frame["method"]) == ["retrain", "single_best", "negmerge"]
    for metric in ("acc_retain", "acc_forget", "acc_test", "mia", "avg_gap"):
        difference = made.frame[metric] - made.frame[f"{metric}_paper"]
        pd.testing.assert_series_equal(
            made.frame[f"{metric}_difference"], difference, check_names=False
        )
    assert "(95.76)" in shown(made, capsys)
    assert "| negmerge |" in (place / "out/D4.md").read_text()
    assert (place / "out/D4.tex").read_text().count(r"\\") == 4
    before = made.pages[0].stat().st_mtime_ns
    again = desk("D4")  # it goes on, here from the end
    assert again.pages[0].stat().st_mtime_ns == before
    pd.testing.assert_frame_equal(made.frame, again.frame)


def test_clip_tables_and_figures_share_a_run(desk, place: Path, capsys):
    few = ["methods=[consensus, uniform]", "pool.grid={augment.randaugment.m: [1, 4]}"]
    made = {t: desk(t, *few) for t in ("T6", "C3", "F3")}
    assert len({one.pages[0] for one in made.values()}) == 1
    found = made["T6"].frame.dropna(subset="sparsity")
    assert found["layer_group"].tolist() == ["shallow", "middle", "deep"]
    assert set(found["backbone"]) == {"vit_b32"}
    found = made["C3"].frame.dropna(subset="sparsity")
    assert found["component"].tolist() == ["stem", "mlp"]
    assert "Not measured here: 2 of the 4 rows" in shown(made["C3"], capsys)
    page = made["F3"].pages[0]
    assert "Where the models look" in page.read_text(encoding="utf-8")
    assert "index.html" in (place / "out/F3.md").read_text()


def test_the_papers_scale_says_what_it_needs_and_stops(tmp_path: Path):
    command = [sys.executable, "-m", "negmerge.cli", "reproduce", "B13", "--scale", "paper"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=True
    )
    assert "GPU-hours" in done.stdout
    assert "Nothing was begun" in done.stdout
    assert not list(tmp_path.iterdir())


def test_weights_that_only_the_user_has_are_asked_for(tmp_path: Path):
    command = [sys.executable, "-m", "negmerge.cli", "reproduce", "B8", "--scale", "paper", "--yes"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "B8: model.init is not set" in done.stderr
    assert "--set model.init=FILE" in done.stderr
    wrong = [*command, "--set", "model.init=none.safetensors"]
    done = subprocess.run(wrong, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "none.safetensors: not there" in done.stderr


def test_all_data_is_looked_for_before_the_first_run(place: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(tmp_path / "cache"))
    few = tmp_path / "data"
    few.mkdir()
    for name in ("cifar10", "fashion_mnist"):
        (few / name).symlink_to(place / "data" / name)
    changes = [change.replace("root=data", f"root={few}") for change in CLIP]
    changes = [change.replace("root: data", f"root: {few}") for change in changes]
    with pytest.raises(NegMergeError, match="mnist"):
        reproduce("B1", "desk", tmp_path / "out", changes)
    assert not (tmp_path / "out").exists()
    (few / "fashion_mnist").unlink()
    with pytest.raises(NegMergeError, match=r"fashion_mnist.*; .*mnist"):  # all that is missing
        reproduce("B1", "desk", tmp_path / "out", changes)
