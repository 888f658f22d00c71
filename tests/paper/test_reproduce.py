"""The paper's tables on tiny settings: from the recipe to the table beside the published one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from clips import make_sets
from negmerge.cli import main
from negmerge.errors import NegMergeError
from negmerge.paper.comparison import PRINTED
from negmerge.paper.experiments import experiment, experiments, published
from negmerge.paper.needs import total
from negmerge.paper.reproduction import Reproduction, rendered, reproduce
from negmerge.paper.spread import panels_figure, spread_figure
from negmerge.paper.timing import merge_seconds
from negmerge.paper.trials import trials_of
from negmerge.runs.recipe import load_recipe
from negmerge.runs.store import Run
from negmerge.support.progress import Quiet
from negmerge.training.weights import load_tensors
from negmerge.vision.places import ASSETS
from running import negmerge

NOT_OURS = {"paper_number"}


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
        small = CLIP if experiment(table).desk[0].load().scenario == "clip" else CLASSIFIER
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
    for metric in (m for m in PRINTED if f"{m}_paper" in made.frame):
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
    readings = experiment(table).readings
    found: set[tuple[str, str]] = set()
    for row in (row for row in published()[table]["rows"] if row.get(metric) is not None):
        names = readings.get(row["method"], [row["method"]])
        found |= {kind({**row, "method": name}) for name in names if name not in NOT_OURS}
    return found


FEW = "pool.subset={count: 3}"


@pytest.mark.tables
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


@pytest.mark.tables
def test_a_figure_over_all_data_sets(desk, place: Path):
    made = desk("F1", "methods=[consensus, uniform]", FEW)
    assert set(made.frame["dataset"]) == {"fashion_mnist", "mnist"}
    members = made.frame[made.frame["method"].str.startswith("member ")]
    assert len(members) == 2 * 3
    assert members["acc_forget"].between(0, 100).all()
    kept = pd.read_csv(place / "out/F1.csv")
    assert list(kept["acc_forget"]) == list(made.frame["acc_forget"])
    svg = (place / "out/F1.svg").read_text()
    assert svg == spread_figure(made.frame)  # the same bytes
    assert all(name in svg for name in ("fashion_mnist", "mnist", "consensus", "members"))


@pytest.mark.slow
def test_a_figure_of_panels(desk, place: Path):
    made = desk("FB1", "methods=[consensus, uniform]", FEW)  # the runs of F1
    svg = (place / "out/FB1.svg").read_text()
    assert svg == panels_figure(made.frame)
    assert svg.count('<g id="axes_') == 2
    eight = pd.concat(made.frame.assign(dataset=f"set {k}") for k in range(8))
    assert panels_figure(eight).count('<g id="axes_') == 8


@pytest.mark.tables
def test_parts_are_made_apart_and_joined(desk, place: Path, tmp_path: Path, monkeypatch):
    few = [*CLIP, "methods=[consensus, uniform]", FEW]
    table = "F1"  # its runs are there, or made now
    monkeypatch.chdir(place)
    whole = reproduce(table, "desk", Path("out"), few)
    for part in (1, 2):
        made = reproduce(table, "desk", tmp_path / str(part), few, part=(part, 2))
        assert f"Part {part} of 2: 1 of the runs." in made.notes
        (missing,) = [note for note in made.notes if note.startswith("Missing: ")]
        assert missing.startswith(
            f"Missing: 1 of the 2 runs, means are over the others. part {3 - part}"
        )
        assert len(made.pages) == 1
    (copied,) = [path for path in (tmp_path / "1").iterdir() if path.is_dir()]
    shutil.copytree(copied, tmp_path / "2" / copied.name)
    both = reproduce(table, "desk", tmp_path / "2", few, part=(2, 2))
    assert not [note for note in both.notes if note.startswith("Missing")]
    pd.testing.assert_frame_equal(both.frame, whole.frame)
    scores = tmp_path / "2" / copied.name / "scores.json"
    scores.write_text(scores.read_text().replace("fashion", "passion").replace("mnist", "mmist"))
    with pytest.raises(NegMergeError, match=r"scores.json: has changed"):
        reproduce(table, "desk", tmp_path / "2", few, part=(2, 2))


@pytest.mark.tables
def test_seeds_give_a_deviation(desk, place: Path, capsys):
    changes = [word for c in (*CLIP, "methods=[consensus]", FEW) for word in ("--set", c)]
    main(["reproduce", "T3", "--out", "out", *changes, "--seeds", "0", "1"])
    said = capsys.readouterr().out
    assert "2 runs with the seeds 0, 1." in said
    frame = pd.read_csv(place / "out/T3.csv").set_index("method")
    found = []
    for scores in place.glob("out/desk_clip_fashion-fashion_mnist-*/scores.json"):
        result, recipe = Run(scores.parent).result, load_recipe(scores.with_name("recipe.yaml"))
        if [m.title for m in recipe.methods] == ["consensus"]:
            found.append(result.methods[0].value("acc_forget"))
    row = frame.loc["negmerge"].query("dataset == 'cars'").iloc[0]
    assert len(found) == 2
    assert row["acc_forget"] == pytest.approx(mean(found))
    assert row["acc_forget_std"] == pytest.approx(stdev(found))
    assert f"{mean(found):.2f} ± {stdev(found):.2f}" in said


@pytest.mark.tables
def test_merges_are_timed_three_times(desk, place: Path, tmp_path: Path):
    made = desk("T3", "methods=[consensus, greedy, uniform]", FEW)
    run, file = Run(made.pages[0].parents[1]), tmp_path / "seconds.json"
    recipe = load_recipe(run.recipe)
    found = merge_seconds(recipe, run, file, Quiet())
    assert {title: len(times) for title, times in found.items()} == {
        "consensus": 3,
        "uniform": 3,
        "greedy": 3,
    }
    assert min(found["greedy"]) > max(found["uniform"])  # it measures models, too
    assert merge_seconds(recipe, run, file, Quiet()) == found  # kept, not measured again
    assert not list(place.glob("out/.negmerge-*"))
    run.verify()


def test_trials_differ_whatever_seed_is_set(desk, place: Path):
    planned = experiment("T2").paper[0]
    assert [planned.load(trial, ["seed=7"]).seed for trial in range(3)] == [7, 8, 9]


def test_a_pool_that_two_runs_need_is_estimated_once():
    both, alone = (total(trials_of(table, "paper")) for table in ("C1", "B1"))
    assert both.hours < 1.2 * alone.hours


@pytest.mark.slow
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


@pytest.mark.tables
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
    cache = str(tmp_path.parent / "cache")
    out, _ = negmerge(tmp_path, "reproduce", "B13", "--scale", "paper", NEGMERGE_CACHE=cache)
    assert "GPU-hours" in out
    assert "measured on this machine (" in out
    assert "Nothing was started" in out
    assert not list(tmp_path.iterdir())


def test_weights_that_only_the_user_has_are_asked_for(tmp_path: Path):
    command = ["reproduce", "B8", "--scale", "paper", "--yes"]
    _, err = negmerge(tmp_path, *command, code=2)
    assert "B8: model.init is not set" in err
    assert "--set model.init=FILE" in err
    _, err = negmerge(tmp_path, *command, "--set", "model.init=none.safetensors", code=2)
    assert "none.safetensors: no such file" in err


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
