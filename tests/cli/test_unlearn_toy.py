"""A scenario that knows nothing of images goes the whole way through the command line."""

from __future__ import annotations

import csv
import json
import signal
import time
from pathlib import Path

import pytest

from running import negmerge, start

TOY = str(Path(__file__).parents[1] / "toy.py")
RECIPE = """
title: Numbers are forgotten
scenario: numbers
records: 80
train: {epochs: 40, batch: 32, lr: 0.02}
pool:
  settings: {batch: 32, lr: 0.02}
  grid: {epochs: [2, 4], momentum: [0.0, 0.5]}
methods: [consensus, uniform, ties, single_best, greedy]
search: {stop: 1.0, count: 5, limit: 4.0}
save_every: 0
workers: 1
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run, in a process that starts as a user's does."""
    place = tmp_path_factory.mktemp("toy")
    (place / "recipe.yaml").write_text(RECIPE)
    command = ["unlearn", "recipe.yaml", "--out", "run", "--plugin", TOY]
    out, err = negmerge(place, *command, plain=True)
    assert "forget error" in out, err
    return place / "run"


def test_it_trains_merges_searches_and_scores_with_its_own_metrics(run: Path):
    scores = json.loads((run / "scores.json").read_text())
    assert scores["splits"]["data"] == "numbers"
    for row in (scores["original"], scores["retrain"], *scores["methods"]):
        assert row["error_forget"] > 0
        assert row["error_retain"] > 0
        assert not {"acc_forget", "mia"} & row.keys()
        low, high = row["intervals"]["error_forget"]
        assert low <= row["error_forget"] <= high
    assert scores["retrain"]["error_forget"] > 3 * scores["original"]["error_forget"]
    for row in scores["methods"]:
        gaps = [abs(row[m] - scores["retrain"][m]) for m in ("error_forget", "error_retain")]
        assert row["avg_gap"] == pytest.approx(sum(gaps) / 2)
        assert row["error_forget"] > scores["original"]["error_forget"]
    with (run / "sweeps" / "consensus.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0].keys() == {"scale", "error_forget", "error_retain"}
    allowed = [r for r in rows if float(r["error_retain"]) <= 5 * float(rows[0]["error_retain"])]
    best = max(allowed, key=lambda r: float(r["error_forget"]))
    assert float(best["scale"]) == scores["methods"][0]["scale"]


def test_its_page_speaks_of_errors_and_not_of_accuracies(run: Path):
    page = (run / "report" / "index.html").read_text()
    assert "squared error on the forget set" in page
    assert "accuracy" not in page.lower()
    assert "Membership inference" not in page
    table = (run / "report" / "tables" / "scores.csv").read_text().splitlines()
    assert "error_forget" in table[0]


def test_its_page_is_built_again_and_the_run_verified(run: Path):
    before = (run / "report" / "index.html").read_bytes()
    negmerge(run.parent, "report", "run", "--plugin", TOY)
    assert (run / "report" / "index.html").read_bytes() == before
    out, _ = negmerge(run.parent, "verify", "run")
    assert "match the manifest" in out
    out, _ = negmerge(run.parent, "inspect", "run", "--plugin", TOY)
    assert "forget error" in out


def test_without_its_plug_in_the_scenario_is_one_line(run: Path):
    _, err = negmerge(run.parent, "unlearn", "recipe.yaml", "--out", "other", code=2)
    assert err.startswith("error: ")
    assert "unknown scenario 'numbers'" in err
    assert err.count("\n") == 1
    assert not (run.parent / "other").exists()


def test_a_rival_is_refused_before_any_work(run: Path):
    changed = "methods=[consensus, salun]"
    command = ["unlearn", "recipe.yaml", "--out", "other", "--set", changed, "--plugin", TOY]
    _, err = negmerge(run.parent, *command, code=2)
    assert "scenario numbers has no rivals" in err
    assert not (run.parent / "other").exists()


def test_it_goes_on_after_a_kill_and_ends_with_the_same_result(run: Path, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    command = ["unlearn", "recipe.yaml", "--out", "run", "--plugin", TOY]
    process = start(tmp_path, *command)
    while process.poll() is None and not list(tmp_path.glob("run/pool/*/*.safetensors")):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "run" / "manifest.json").exists()
    made = {p: p.stat().st_mtime_ns for p in tmp_path.glob("run/pool/*/*.safetensors")}
    negmerge(tmp_path, *command)
    assert all(p.stat().st_mtime_ns == when for p, when in made.items())
    results = [json.loads((p / "manifest.json").read_text()) for p in (run, tmp_path / "run")]
    assert results[0]["result"] == results[1]["result"]
    again, _ = negmerge(tmp_path, *command)  # finished: nothing is done again
    assert "Numbers are forgotten" in again


def test_the_lists_show_what_the_plug_in_brought(run: Path):
    found = {}
    for what in ("scenarios", "metrics", "criteria"):
        out, _ = negmerge(run.parent, "list", what, "--json", "--plugin", TOY)
        found[what] = json.loads(out)
    assert "numbers" in found["scenarios"]
    assert {"error_forget", "error_retain"} <= found["metrics"].keys()
    assert "keep_error" in found["criteria"]


@pytest.mark.slow
def test_a_plug_in_that_changed_is_not_served_from_what_the_old_one_did(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    plugin = tmp_path / "mine.py"
    text = Path(TOY).read_text()
    plugin.write_text(text)
    command = ["unlearn", "recipe.yaml", "--out", "run", "--plugin", str(plugin)]
    command += ["--set", "methods=[consensus, uniform]"]
    negmerge(tmp_path, *command)
    before = json.loads((tmp_path / "run" / "scores.json").read_text())
    changed = text.replace("mean = float(errors.mean())", "mean = 1000 + float(errors.mean())")
    assert changed != text
    plugin.write_text(changed)
    command[3] = "run2"  # another scenario file names other trainings: a folder of its own
    negmerge(tmp_path, *command)
    after = json.loads((tmp_path / "run2" / "scores.json").read_text())
    assert before["original"]["error_forget"] < 1000 < after["original"]["error_forget"]
    command[3] = "run"
    _, err = negmerge(tmp_path, *command, code=2)
    assert "was made by another recipe or from other data" in err
