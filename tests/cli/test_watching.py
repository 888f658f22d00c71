"""A run can be planned before, and watched from elsewhere while it works."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from negmerge.cli import main
from negmerge.runs.status import StatusWriter, refuse_second_driver
from negmerge.runs.store import Run
from running import negmerge, negmerge_here, start

TINY = [
    "data.limit={train: 200, test: 60}", "train={epochs: 2, batch: 32}", "search.samples=40",
    "pool.grid={epochs: [1, 2]}", "methods=[consensus, finetune]", "search.count=3",
]  # fmt: skip
LONG = [*TINY, "train={epochs: 500, batch: 32}"]


def words(changes: list[str]) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def test_a_run_is_planned_watched_and_finished(tmp_path: Path):
    command = ("unlearn", "demo", "--out", "run", *words(TINY))
    out, _ = negmerge_here(tmp_path, *command, "--dry-run")
    assert out.startswith("19 steps, 0 of them done; 2 at a time:\n")
    for stage in (
        "trainings of the original and the retrained model: 2",
        "trainings of the pool: 2",
        "merges: 1",
        "searches for λ: 1",
        "trainings of rivals: 1",
        "tests of forgetting: 8",
    ):
        assert f"  {stage}\n" in out
    assert "time: about" in out
    assert "of memory" in out
    assert not (tmp_path / "run").exists()

    _, err = negmerge(tmp_path, *command, "--json")
    events = [json.loads(line) for line in err.splitlines()]
    told = [event for event in events if event["event"] == "unit"]
    states = {name: [t["state"] for t in told if t["name"] == name] for name in ("member 1 of 2",)}
    assert states["member 1 of 2"][0] == "running"
    assert states["member 1 of 2"][-1] == "done"
    assert any(event.get("epochs") == 2 and event["loss"] > 0 for event in told)
    log = (tmp_path / "run" / "logs" / "member-1-of-2.log").read_text()
    assert "member 1 of 2 begins on" in log
    assert "epoch 1, epochs 1, loss" in log

    out, _ = negmerge_here(tmp_path, "status", "run")
    assert out.startswith("run: finished; page: ")
    out, _ = negmerge_here(tmp_path, *command, "--dry-run", "--json")
    plan = json.loads(out.splitlines()[-1])
    done = {stage["name"]: (stage["steps"], stage["done"]) for stage in plan["stages"]}
    assert done["trainings of the pool"] == (2, 2)
    assert done["merges"] == (1, 1)
    assert plan["seconds"] == 0
    negmerge_here(tmp_path, "verify", "run")


def test_the_status_of_a_run_that_works_and_of_one_that_was_killed(tmp_path: Path):
    process = start(tmp_path, "unlearn", "demo", "--out", "run", *words(LONG))
    try:
        end = time.monotonic() + 60
        while True:
            assert time.monotonic() < end
            time.sleep(0.2)
            if not (tmp_path / "run" / ".state" / "status.json").exists():
                continue
            out, _ = negmerge_here(tmp_path, "status", "run", "--json")
            status = json.loads(out)
            running = [unit for unit in status["units"] if unit["state"] == "running"]
            if running and all("epoch" in unit["facts"] for unit in running):
                break
        assert status["state"] == "working"
        assert status["pid"] == process.pid
        assert {unit["name"] for unit in running} == {"original model", "retrained model"}
        out, _ = negmerge_here(tmp_path, "status", "run")
        assert "training the original and the retrained model: " in out
        assert "original model: running on " in out
        assert " of 500, loss " in out
        os.kill(process.pid, signal.SIGKILL)
        process.wait(30)
        out, _ = negmerge_here(tmp_path, "status", "run")
        assert "run: stopped " in out
        assert "run the same command again, it continues" in out
    finally:
        process.kill()


def write_status(run: Path, **changes: Any) -> Path:
    """Write the status of a run that another machine works on; `facts` are those of its unit."""
    unit = {"name": "member 1 of 2", "size": 1, "state": "running", "done": 0, "node": "far"}
    unit |= {"attempt": 1, "begun": 0.0, "facts": changes.pop("facts", {}), "error": ""}
    status = {"format": "negmerge-status/1", "host": "far", "pid": 7, "begun": 0.0, "stage": "all"}
    status |= {"written": time.time(), "unit": "samples", "total": 1, "done": 0, "units": [unit]}
    path = run / ".state" / "status.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(status | changes))
    (run / "recipe.yaml").touch()
    return path


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"format": "negmerge-status/2"}, "format: Input should be 'negmerge-status/1'"),
        ({"written": float("nan")}, "NaN is not JSON"),
        ({"begun": -1e308, "written": 1e308, "done": 1}, "is damaged: written: "),
        ({"total": 10**50}, "a number of more than 40 digits"),
        ({"total": -1}, "is damaged: total: "),
        ({"pid": "7"}, "is damaged: pid: "),
        ({"units": [{}]}, "is damaged: units.0.name: Field required"),
        ({"units": {}}, "is damaged: units: "),
        ({"facts": {"loss": "\x1b[31m"}}, "is damaged: units.0.facts.loss: "),
    ],
)
def test_a_damaged_status_is_one_line(tmp_path: Path, changes, wanted):
    write_status(tmp_path / "run", **changes)
    for more in ((), ("--json",)):
        out, err = negmerge_here(tmp_path, "status", "run", *more, code=2)
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("error: run/.state/status.json: ")
        assert wanted in err


def test_a_status_that_is_cut_or_has_an_infinite_number_is_one_line(tmp_path: Path):
    path = write_status(tmp_path / "run")
    text = path.read_text()
    path.write_text(text[:-9])
    assert "is not valid JSON" in negmerge_here(tmp_path, "status", "run", code=2)[1]
    path.write_text(text.replace('"begun": 0.0', '"begun": 1e999'))  # read as infinity
    assert "too large" in negmerge_here(tmp_path, "status", "run", code=2)[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"facts": {"epoch": 1}},
        {"facts": {"epoch": 1e300, "epochs": -1.0, "attempt": 9.5, "node": 1.0, "error": 2.0}},
        {"stage": "\x1b[2J", "host": "a\nb", "unit": "\u202e"},
        {"total": 10**39, "done": 1, "pid": 10**39},
        {"units": []},
    ],
)
def test_an_odd_status_is_shown(tmp_path: Path, changes):
    write_status(tmp_path / "run", **changes)
    out, _ = negmerge_here(tmp_path, "status", "run")
    assert out.startswith("run: process ")
    assert all(line.isprintable() for line in out.splitlines())
    assert len(out.splitlines()) == 3 - ("units" in changes)
    assert json.loads(negmerge_here(tmp_path, "status", "run", "--json")[0])["state"] == "working"


def test_a_run_that_another_machine_works_on_is_refused(tmp_path: Path):
    """Locks may mean nothing between machines: the status tells."""
    path = write_status(tmp_path / "run")
    command = ("unlearn", "demo", "--out", "run", *words(TINY))
    _, err = negmerge_here(tmp_path, *command, code=2)
    assert "run: process 7 on far works on this run; wait for it" in err
    for wrong in (-60, 3600):  # silent for a minute; written by a clock that was wrong
        write_status(tmp_path / "run", written=time.time() + wrong)
        refuse_second_driver(Run(tmp_path / "run"))
        assert "run: stopped " in negmerge_here(tmp_path, "status", "run")[0]
    path.unlink()
    refuse_second_driver(Run(tmp_path / "run"))


def test_a_run_that_starts_has_a_status_at_once(tmp_path: Path):
    """Before it connects to a cluster, which takes seconds: a second driver must see it."""
    store = Run(tmp_path / "run")
    store.states.mkdir(parents=True)
    store.recipe.touch()
    with StatusWriter(store).running():
        out, _ = negmerge_here(tmp_path, "status", "run")
    assert "last sign" in out
    assert "\nstarting: " in out


def test_what_cannot_be_planned_is_one_line(tmp_path: Path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)
    full = SimpleNamespace(disk_usage=lambda path: usage._replace(free=1000))
    monkeypatch.setattr("negmerge.runs.plan.shutil", full)  # the cache of data has space
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["unlearn", "demo", "--dry-run", *words(TINY)])
    err = capsys.readouterr().err
    assert "runs/demo: 1.0 kB free, about " in err
    out, _ = negmerge_here(tmp_path, "status", "nothing", code=2)
    assert out == ""


def test_a_table_is_planned(tmp_path: Path):
    out, _ = negmerge_here(tmp_path, "reproduce", "T2", "--dry-run", "--out", "runs")
    assert "T2 at desk scale: " in out
    assert "measured on this machine" in out
    assert "runs: 0 of " in out
    assert "Nothing was started." in out
    assert not (tmp_path / "runs").exists()
