"""Experiment trackers: what they are told, what they cannot change, what their failures cost."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import negmerge as nm
from negmerge.cli import main
from negmerge.errors import NegMergeError
from negmerge.runs import tracking
from negmerge.runs.store import Run, without_seconds
from running import negmerge
from toys import toy_scenario

TOY = str(Path(__file__).parents[1] / "toy.py")
RECIPE = """
scenario: numbers
records: 40
train: {epochs: 3, batch: 32, lr: 0.02}
pool: {settings: {batch: 32, lr: 0.02}, grid: {epochs: [2, 3]}}
methods: [consensus, uniform]
search: {stop: 1.0, count: 3}
workers: 1
threads: 1
"""


class Recorder:
    """A tracker that remembers what it is told, by run."""

    told: dict[str, list[tuple[str, float, int]]]
    pages: list[str]
    fails_after = 10**9

    def __init__(self, store: Run, name: str, id: str, config: dict[str, Any]) -> None:
        self.name, self.config = name, config
        self.told.setdefault(name, [])
        print("a tracker greets")  # standard output is for results

    def log(self, numbers: tracking.Numbers, step: int) -> None:
        if len(self.told[self.name]) >= self.fails_after:
            raise ConnectionError("the server\nis away")
        self.told[self.name] += [(key, value, step) for key, value in numbers.items()]

    def page(self, path: Path) -> None:
        assert path.is_file()
        self.pages.append(self.name)

    def close(self) -> None: ...


@pytest.fixture
def place(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder with a recipe, which is the current one, and a tracker that is a Recorder."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Recorder, "told", {}, raising=False)
    monkeypatch.setattr(Recorder, "pages", [], raising=False)
    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", Recorder)
    monkeypatch.setattr(tracking, "find_spec", lambda name: name != "wandb" or None)
    with toy_scenario():
        yield tmp_path


TRACK = ["track=tensorboard"]


def content(run: Run) -> tuple[Any, ...]:
    """All that a run made: files, recipe, scores without times, weights."""
    files = sorted(p.relative_to(run.folder) for p in run.folder.rglob("*") if p.is_file())
    weights = [path.read_bytes() for path in sorted(run.folder.rglob("*.safetensors"))]
    scores = without_seconds(json.loads(run.scores.read_text()))
    return files, run.recipe.read_text(), scores, weights


def test_losses_sweeps_and_scores_are_told_and_change_nothing(place, capsys):
    plain = nm.run("recipe.yaml", "runs/plain")
    assert Recorder.told == {}
    seen = nm.run("recipe.yaml", "runs/seen", TRACK)
    assert content(seen) == content(plain)
    told = Recorder.told["seen"]
    steps = {key: [step for name, _, step in told if name == key] for key, _, _ in told}
    assert steps["loss/member 2 of 2"] == [1, 2, 3]
    assert {"loss/member 1 of 2", "sweep/consensus/error_forget", "original/error_forget"} < {
        *steps
    }
    assert steps["sweep/uniform/scale"] == [0, 1, 2]
    values = {key: value for key, value, _ in told}
    row = seen.result.methods[0]
    assert values["consensus/avg_gap"] == row.avg_gap
    assert values["consensus/scale"] == row.scale
    assert capsys.readouterr().out == ""
    told.clear()
    nm.run("recipe.yaml", "runs/seen", TRACK)  # it is finished
    assert Recorder.told == {"seen": []}


def test_a_tracker_that_fails_is_a_warning(place, monkeypatch, capsys):
    monkeypatch.setattr(Recorder, "fails_after", 2)
    plain, seen = nm.run("recipe.yaml", "runs/plain"), nm.run("recipe.yaml", "runs/seen", TRACK)
    assert content(seen) == content(plain)
    assert len(Recorder.told["seen"]) == 2
    warnings = [line for line in capsys.readouterr().err.splitlines() if "track:" in line]
    assert warnings == [
        "warning: track: tensorboard failed, and the run goes on without it: ConnectionError: the "
        "server is away"
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("track=wandb", "track: wandb is not installed: pip install wandb"),
        ("track=wandbb", "did you mean 'wandb'?"),
        ("track=mlflow", "track: mlflow does not start: ValueError: no server"),
    ],
)
def test_a_tracker_that_is_missing_or_does_not_start_is_one_line(
    place, change, message, monkeypatch
):
    def fails(*_: object) -> None:
        raise ValueError("no\nserver")

    monkeypatch.setitem(tracking.TRACKERS, "mlflow", fails)
    with pytest.raises(NegMergeError) as caught:
        nm.run("recipe.yaml", "runs/a", [change])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (place / "runs" / "a" / "base.safetensors").exists()


def test_every_seed_of_a_study_is_a_run_of_the_tracker(place):
    plain = nm.study("recipe.yaml", range(2), "runs/study")
    shutil.rmtree("runs/study")
    seen = nm.study("recipe.yaml", range(2), "runs/study", TRACK)
    assert [*Recorder.told] == ["study-seed-0", "study-seed-1"]
    assert all(Recorder.told.values())
    assert seen.tree()["means"] == plain.tree()["means"]
    nm.study("recipe.yaml", range(2), "runs/study")  # without the tracker it is the same study


def test_the_page_comes_last(place, capsys):
    main(["unlearn", "recipe.yaml", "--out", "runs/seen", "--json", "--set", *TRACK])
    assert Recorder.pages == ["seen"]
    out = capsys.readouterr().out
    assert json.loads(out)["event"] == "result"


# The trackers themselves


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run with a page."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "recipe.yaml").write_text(RECIPE)
    negmerge(folder, "unlearn", "recipe.yaml", "--out", "runs/one", "--plugin", TOY)
    return folder


OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "HF_HUB_OFFLINE": "1"}
PROGRAM = """
import sys
from negmerge import plugins
from negmerge.runs.recipe import load_recipe
from negmerge.runs.store import Run
from negmerge.runs.tracking import track_page, tracked
from negmerge.support.progress import Quiet

plugins.load(sys.argv[2])
recipe, store = load_recipe("recipe.yaml", [f"track={sys.argv[1]}"]), Run("runs/one")
for part in (0, 2):  # the second time as after an interruption
    with tracked(recipe, store, Quiet()) as progress:
        for epoch in (1, 2):
            facts = {"epoch": part + epoch, "epochs": 4, "loss": 1 / (part + epoch)}
            progress.unit_changed("member 1 of 1", "running", **facts)
track_page(recipe, store, store.page)
"""


@pytest.mark.parametrize("name", tracking.TRACKERS)
def test_a_real_tracker_keeps_one_run(name, finished, tmp_path):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {tracking.PACKAGES.get(name, name)}")
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    (tmp_path / "kept").mkdir()
    kept = tmp_path / "kept"
    settings = OFFLINE | {"TRACKIO_DIR": str(kept / "trackio"), "WANDB_DIR": str(kept)}
    settings |= {"MLFLOW_TRACKING_URI": f"file:{kept / 'mlflow'}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, TOY],
        cwd=tmp_path,
        env=os.environ | settings | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "failed" not in done.stderr
    CHECKS[name](tmp_path)


def check_trackio(place: Path) -> None:
    (path,) = (place / "kept" / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute("select run_name, step, metrics from metrics").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    found = [(step, json.loads(text)) for _, step, text in rows]
    losses = {s: one["loss/member 1 of 1"] for s, one in found if "loss/member 1 of 1" in one}
    assert losses == {1: 1.0, 2: 0.5, 3: pytest.approx(1 / 3), 4: 0.25}
    assert any("consensus/avg_gap" in one for _, one in found)
    sizes = [
        p.stat().st_size
        for p in (place / "kept" / "trackio" / "artifacts").rglob("*")
        if p.is_file()
    ]
    assert (place / "runs" / "one" / "report" / "index.html").stat().st_size in sizes


def check_wandb(place: Path) -> None:
    runs = [*(place / "kept" / "wandb").glob("offline-run-*")]
    assert len({run.name.split("-")[3] for run in runs}) == 1
    assert all([*run.glob("*.wandb")] for run in runs)


def check_mlflow(place: Path) -> None:
    (losses,) = (place / "kept" / "mlflow").rglob("loss/member 1 of 1")
    found = [line.split()[1:] for line in losses.read_text().splitlines()]
    assert [(float(value), int(step)) for value, step in found][-1] == (0.25, 4)
    assert [*(place / "kept" / "mlflow").rglob("artifacts/index.html")]


def check_tensorboard(place: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "runs" / "tensorboard" / "one"))
    events.Reload()
    losses = events.Scalars("loss/member 1 of 1")
    assert [one.step for one in losses] == [1, 2, 3, 4]
    assert events.Scalars("consensus/avg_gap")


CHECKS = {
    "trackio": check_trackio,
    "wandb": check_wandb,
    "mlflow": check_mlflow,
    "tensorboard": check_tensorboard,
}
