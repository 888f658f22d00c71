"""Pools as methods of one run, through the command line: to the end, and killed and resumed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from running import negmerge, start

TOY = str(Path(__file__).parents[1] / "toy.py")
RECIPE = """
title: Checkpoints of one training
scenario: numbers
records: 80
train: {epochs: 5, batch: 32, lr: 0.02}
pool:
  settings: {epochs: 30, batch: 32, lr: 0.02, schedule: cosine}
  checkpoints: [10, 20, 30]
  grid: {momentum: [0.0, 0.5]}
methods:
- {name: consensus, members: checkpoints}
- {name: consensus, members: last}
- {name: consensus, equalise: true}
- {name: consensus, subset: {count: 2, by: retain}}
search: {stop: 1.0, count: 3}
save_every: 0
workers: 1
threads: 1
"""
COMMAND = ["unlearn", "recipe.yaml", "--out", "run", "--plugin", TOY]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    (place / "recipe.yaml").write_text(RECIPE)
    out, _ = negmerge(place, *COMMAND, "--dry-run")
    assert "trainings of the pool: 2" in out
    out, _ = negmerge(place, *COMMAND)
    for title, data in {
        "consensus-checkpoints": "forget",
        "consensus-last": "forget",
        "consensus-equalised": "forget",
        "consensus-2-retain": "all",
    }.items():
        row = next(line for line in out.splitlines() if f"│ {title} " in line)
        assert f"│ {data} " in row
    return place


def test_the_tables_count_one_training_for_its_checkpoints(whole: Path):
    scores = json.loads((whole / "run" / "scores.json").read_text())
    ratios = {row["method"]: row["cost_ratio"] for row in scores["methods"]}
    assert ratios["consensus-checkpoints"] == pytest.approx(30 / 5)
    assert ratios["consensus-last"] == ratios["consensus-equalised"] == pytest.approx(2 * 30 / 5)
    text = f"the pool processed {2 * 30 / 5:.2f} × the samples of retraining from scratch"
    assert text in scores["warnings"]
    table = (whole / "run" / "report" / "tables" / "members.csv").read_text().splitlines()
    place = table[0].split(",").index("epoch")
    assert [line.split(",")[place] for line in table[1:]] == ["10", "20", "30"] * 2
    out, _ = negmerge(whole, *COMMAND, "--dry-run")
    assert "trainings of the pool: 2, 2 done" in out


def test_a_training_that_is_killed_after_a_checkpoint_goes_on(whole: Path, tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    process = start(tmp_path, *COMMAND)

    def models() -> list[Path]:
        return sorted(tmp_path.glob("run/pool/*/*.safetensors"))

    while process.poll() is None and not models():
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    made = {path: path.stat().st_mtime_ns for path in models()}
    assert 1 <= len(made) < 3, "it was to be killed between two checkpoints of a training"
    negmerge(tmp_path, *COMMAND)
    assert all(path.stat().st_mtime_ns == when for path, when in made.items())
    ours, theirs = (json.loads((p / "run/manifest.json").read_text()) for p in (tmp_path, whole))
    assert ours["result"] == theirs["result"]


def test_a_mistake_is_one_line(whole: Path):
    _, err = negmerge(whole, *COMMAND, "--set", "pool.checkpoints=[10, 20]", code=2)
    assert "checkpoints: the last one is 20, wanted settings.epochs = 30" in err
    assert err.count("\n") == 1
