"""The paper's tables on tiny settings: from the recipe to the table beside the published one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from clips import make_clip, make_sets
from negmerge.reproduction.reproduce import rendered, reproduce


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEGMERGE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def shown(made, capsys) -> str:
    from rich.console import Console

    for line in rendered(made):
        Console(width=200).print(line)
    return capsys.readouterr().out


def test_a_classifier_table(place: Path, capsys):
    changes = [
        "data={name: fashion_small, limit: {train: 300, test: 100}}", "search.samples=60",
        "train.epochs=2", "pool.settings.epochs=1", "search.count=3", "search.limit=null",
        "workers=1",
    ]  # fmt: skip
    made = reproduce("D4", "desk", place / "out", changes)
    assert list(made.frame["method"]) == ["retrain", "single_best", "negmerge"]
    for metric in ("acc_retain", "acc_forget", "acc_test", "mia", "avg_gap"):
        difference = made.frame[metric] - made.frame[f"{metric}_paper"]
        pd.testing.assert_series_equal(
            made.frame[f"{metric}_difference"], difference, check_names=False
        )
    notes = " ".join(made.notes)
    assert "The paper does not state" in notes
    assert "(95.76)" in shown(made, capsys)
    assert "| negmerge |" in (place / "out/D4.md").read_text()
    assert (place / "out/D4.tex").read_text().count(r"\\") == 4
    before = made.pages[0].stat().st_mtime_ns
    again = reproduce("D4", "desk", place / "out", changes)  # it goes on, here from the end
    assert again.pages[0].stat().st_mtime_ns == before
    pd.testing.assert_frame_equal(made.frame, again.frame)


def test_clip_tables_and_figures_share_a_run(place: Path, capsys):
    make_sets(place / "data")
    make_clip(place / "clip", place / "data", place / "cache")
    changes = [
        "data={name: mnist, root: data}", "clip.control={name: cifar10, root: data}",
        "model.name=clip", "pool.settings.epochs=1", "pool.settings.batch=32", "workers=1",
        "pool.grid={augment.randaugment.m: [1, 4]}", "search.count=3", "search.limit=null",
        "methods=[consensus, uniform]",
    ]  # fmt: skip
    made = {t: reproduce(t, "desk", place / "out", changes) for t in ("T6", "C3", "F3")}
    assert len(list((place / "out").glob("desk_clip_*"))) == 1
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
