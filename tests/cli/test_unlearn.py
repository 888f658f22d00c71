"""The main job through the command line: to the end, killed and resumed, and refused."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import negmerge as nm
from negmerge.runs.recipe import load_recipe
from negmerge.scenarios.classify.scenario import Classify
from running import negmerge, negmerge_here, start

TINY = """
title: A tiny run
data: {name: fashion_small, limit: {train: 300, test: 100}}
split: {forget: {fraction: 0.2}, validation: 0.1}
train: {epochs: 6, batch: 32, lr: 0.05, augment: {crop: 2, flip: true}}
pool:
  settings: {batch: 16, lr: 0.05, momentum: 0.9}
  grid: {epochs: [2, 3], label_smoothing: [0.0, 0.1]}
methods:
  - consensus
  - uniform
  - ties
  - magmax
  - {name: consensus, options: {quorum: 0.7}, label: most}
  - single_best
search: {stop: 1.0, count: 5, limit: 2.0, samples: 60}
save_every: 0
"""
QUICK = ["--set", "workers=1", "--set", "save_every=15"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unlearn")
    (folder / "tiny.yaml").write_text(TINY)
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    """One whole run, which the tests only look at."""
    out, err = negmerge(place, "unlearn", "tiny.yaml", "--out", "whole")
    assert "A tiny run" in out
    assert "page: whole/report/index.html" in out
    assert "note: retraining without the forget set" in err
    assert "`retrain: null` skips it" in err
    assert "Traceback" not in err
    return place / "whole"


def quick(place: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run a recipe in this process, without saving the trainings in progress."""
    return negmerge_here(place, "unlearn", *arguments, *QUICK, code=code)


def manifest(run: Path) -> dict:
    return json.loads((run / "manifest.json").read_text())


def temporary_files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob(".*") if p.is_file() or p.name == ".state"]


def test_the_run_directory_is_the_contracts(finished: Path):
    names = {p.relative_to(finished).as_posix() for p in finished.rglob("*") if p.is_file()}
    assert {"recipe.yaml", "base.safetensors", "scores.json", "manifest.json"} <= names
    assert "unlearned/model.safetensors" in names
    for method in ("consensus", "uniform", "ties", "magmax", "most", "single_best"):
        assert f"patches/{method}.safetensors" in names
    assert len([n for n in names if n.startswith("pool/") and n.endswith(".safetensors")]) == 4
    assert not temporary_files(finished)
    logs = {name for name in names if name.startswith("logs/")}
    assert names - {"manifest.json"} - logs == set(manifest(finished)["files"])
    assert "logs/member-1-of-4.log" in logs


def test_scores_have_every_number_and_its_control(finished: Path):
    scores = json.loads((finished / "scores.json").read_text())
    rows = [scores["original"], scores["retrain"], *scores["methods"]]
    for row in rows:
        for metric in ("acc_retain", "acc_forget", "acc_test", "mia"):
            low, high = row["intervals"][metric]
            assert 0 <= low <= row[metric] <= high <= 100
        gaps = [abs(row[m] - scores["retrain"][m]) for m in ("acc_retain", "acc_forget")]
        gaps += [abs(row[m] - scores["retrain"][m]) for m in ("acc_test", "mia")]
        assert row["avg_gap"] == pytest.approx(sum(gaps) / 4)
    assert [m["method"] for m in scores["methods"]] == [
        "consensus", "uniform", "ties", "magmax", "most", "single_best",
    ]  # fmt: skip
    for method in scores["methods"]:
        assert method["scale"] >= 0
        assert method["splits"] == "forget"
        assert not method["looked"]
        # 4 members × 2.5 epochs × 54 records over 6 epochs × 216 records
        assert method["cost_ratio"] == pytest.approx(4 * 2.5 * 54 / (6 * 216))
    sizes = scores["splits"]["sizes"]
    assert sizes == {"retain": 216, "forget": 54, "validation": 30, "test": 100}
    assert scores["original"]["samples"] == {"retain": 156, "forget": 27, "test": 100}


def test_the_unlearned_model_is_base_minus_lambda_tau(finished: Path, tmp_path: Path):
    scores = json.loads((finished / "scores.json").read_text())
    tau = nm.TaskVector.load(finished / "patches/consensus.safetensors")
    out = tmp_path / "again.safetensors"
    nm.apply(finished / "base.safetensors", -scores["methods"][0]["scale"] * tau, out)
    assert out.read_bytes() == (finished / "unlearned/model.safetensors").read_bytes()


def test_patches_are_those_of_the_merge_command(finished: Path, tmp_path: Path):
    members = sorted(str(p) for p in finished.glob("pool/*/*.safetensors"))
    for rule in ("ties", "magmax"):
        out = tmp_path / f"{rule}.safetensors"
        negmerge(
            tmp_path, "merge", str(finished / "base.safetensors"), *members, "--rule", rule,
            "-o", str(out),
        )  # fmt: skip
        assert out.read_bytes() == (finished / f"patches/{rule}.safetensors").read_bytes()


def test_lambda_is_the_criterions(finished: Path):
    scores = json.loads((finished / "scores.json").read_text())
    with (finished / "sweeps/uniform.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    target = rows[0]["acc_holdout"]
    best = min(rows, key=lambda r: (abs(r["acc_forget"] - target), r["scale"]))
    assert scores["methods"][1]["scale"] == best["scale"]


def test_run_again_changes_nothing_and_is_quick(finished: Path, place: Path):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}
    out, err = negmerge(place, "unlearn", "tiny.yaml", "--out", "whole")
    assert "A tiny run" in out
    assert err == ""
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file()}


def trainings(run: Path) -> list[Path]:
    """The saved states of trainings in progress."""
    return [p for p in run.glob(".state/*") if "." not in p.name]


def test_killed_and_resumed_gives_the_same_hashes(finished: Path, place: Path):
    """Killed in the middle of a training, while members are trained, and at random."""
    rng, run = random.Random(4), place / "killed"

    def after(wait: float):
        return lambda: time.monotonic() - begun > wait

    moments = [
        lambda: trainings(run),
        lambda: list(run.glob("pool/*/*.safetensors")),
        lambda: list(run.glob("sweeps/*.csv")),
        *(after(rng.uniform(3, 7)) for _ in range(2)),
    ]
    kills, seen = 0, set()
    for moment in moments:
        process = start(place, "unlearn", "tiny.yaml", "--out", "killed")
        begun = time.monotonic()
        while process.poll() is None and not moment():
            time.sleep(0.01)
        process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        if moment is moments[0]:
            assert trainings(run), "the first kill must leave a training to be taken up"
        done = {p: p.stat().st_mtime_ns for p in run.glob("**/*.safetensors")}
        for path, changed in seen:  # nothing that was finished is made again
            assert done.get(path) == changed
        made_last = (".state", "unlearned")  # which are written until the run is sealed
        seen = {(p, t) for p, t in done.items() if not {*made_last} & {*p.parts}}
    assert kills >= 3
    negmerge(place, "unlearn", "tiny.yaml", "--out", "killed")
    assert not temporary_files(run)
    ours, whole = manifest(run), manifest(finished)
    assert ours["result"] == whole["result"]
    timed = "report/tables/"  # which have seconds in them
    weights = [n for n in whole["files"] if n.endswith((".safetensors", ".csv"))]
    weights = [n for n in weights if not n.startswith(timed)]
    assert {n: ours["files"][n]["sha256"] for n in weights} == {
        n: whole["files"][n]["sha256"] for n in weights
    }


def test_workers_die_with_a_killed_parent(place: Path):
    command = ["unlearn", "tiny.yaml", "--out", "orphans", "--set", "train.epochs=500"]
    process = start(place, *command, plain=True)
    while process.poll() is None and not trainings(place / "orphans"):
        time.sleep(0.1)
    assert process.poll() is None, "it ended before a training was seen"
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    assert len([c for c in children if c]) >= 2
    given_up = time.monotonic() + 60
    while any(_is_training(int(c)) for c in children) and time.monotonic() < given_up:
        time.sleep(0.1)
    assert not [c for c in children if _is_training(int(c))]


def _is_training(pid: int) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"spawn_main" in line and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_interrupted_exits_130_and_two_runs_on_one_folder_are_refused(place: Path):
    command = ["unlearn", "tiny.yaml", "--out", "twice", "--set", "train.epochs=500"]
    process = start(place, *command, plain=True)
    while not (place / "twice" / "recipe.yaml").exists():
        time.sleep(0.1)
        assert process.poll() is None
    _, err = negmerge(place, "unlearn", "tiny.yaml", "--out", "twice", code=2)
    assert "another run" in err
    assert err.count("\n") == 1
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not (place / "twice" / "manifest.json").exists()


def test_an_edited_list_is_another_problem(place: Path, monkeypatch):
    """The recipe names a file; when the file changes, a finished run is not finished."""
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    scenario = load_recipe(place / "tiny.yaml", ["split.validation=0.0"]).make_scenario()
    assert isinstance(scenario, Classify)
    trained = scenario.splits.train
    (place / "ids.txt").write_text("\n".join(map(str, trained[:40])))
    arguments = [
        "tiny.yaml", "--out", "edited",
        "--set", "split={forget: {indices: ids.txt}}", "--set", "methods=[consensus]",
        "--set", "train.epochs=1", "--set", "retrain=null", "--set", "pool.grid={epochs: [1, 2]}",
    ]  # fmt: skip
    quick(place, *arguments)
    assert json.loads((place / "edited/scores.json").read_text())["retrain"] is None
    (place / "ids.txt").write_text("\n".join(map(str, trained[:41])))
    _, err = quick(place, *arguments, code=2)
    assert "made by another recipe" in err


def test_one_record_with_merged_statistics(place: Path):
    """A plain erasure request, and BatchNorm statistics in the task vector."""
    quick(
        place, "tiny.yaml", "--out", "one",
        "--set", "split={forget: {class: 2, count: 1}}", "--set", "buffers=merge",
        "--set", "methods=[uniform, single_best]", "--set", "train={epochs: 1, batch: 64}",
        "--set", "retrain=null", "--set", "pool.grid={epochs: [1, 2]}",
        "--set", "pool.settings.lr=0.01", "--set", "model.name=resnet_small",
    )  # fmt: skip
    scores = json.loads((place / "one/scores.json").read_text())
    assert scores["methods"][0]["looked"]
    assert "λ was chosen on the reported data" in " ".join(scores["warnings"])
    for method in ("uniform", "single_best"):
        assert "bn1.running_var" in nm.TaskVector.load(place / f"one/patches/{method}.safetensors")


@pytest.mark.slow
def test_pool_that_is_not_kept(place: Path):
    """To the end, and killed with three of four members trained: the last is trained as before."""
    rules = ("consensus", "uniform", "ties", "magmax")
    changes = ["--set", f"methods=[{', '.join(rules)}]", "--set", "search.limit=null"]
    changes += ["--set", "train.epochs=1", "--set", "retrain=null"]
    quick(place, "tiny.yaml", "--out", "unfolded", *changes)
    changes += ["--set", "pool.keep=false"]
    quick(place, "tiny.yaml", "--out", "folded", *changes)
    run, killed = place / "folded", place / "killed-fold"
    assert not list(run.glob("pool/*/*.safetensors"))
    command = ["unlearn", "tiny.yaml", "--out", killed.name, *changes, *QUICK]
    process = start(place, *command)
    while len(list(killed.glob("pool/*/*.json"))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    process.communicate()
    negmerge_here(place, *command)
    assert manifest(killed)["result"] == manifest(run)["result"]
    for rule in rules:
        patch = f"patches/{rule}.safetensors"
        assert manifest(killed)["files"][patch]["sha256"] == manifest(run)["files"][patch]["sha256"]
        folded = nm.TaskVector.load(run / patch)
        kept = nm.TaskVector.load(place / "unfolded" / patch)
        assert folded.origin.n == 4
        for name in kept:
            np.testing.assert_allclose(folded[name], kept[name], rtol=1e-6, atol=1e-12)


def test_a_whole_class_with_the_oracle(place: Path):
    quick(
        place, "tiny.yaml", "--out", "class", "--set", "split.forget={class: 2}",
        "--set", "methods=[consensus]", "--set", "search={criterion: oracle, count: 3}",
    )  # fmt: skip
    scores = json.loads((place / "class" / "scores.json").read_text())
    assert scores["splits"]["forgotten_class"] == "pullover"
    assert scores["retrain"]["acc_forget"] == 0
    assert scores["splits"]["sizes"]["test"] == 90
    assert scores["methods"][0]["looked"]
    assert scores["original"]["samples"]["forget"] == scores["splits"]["sizes"]["forget"]
    out, _ = negmerge_here(place, "inspect", "class")
    assert "λ was chosen by oracle on the reported data" in " ".join(out.split())


def test_weights_from_files(finished: Path, place: Path):
    quick(
        place, "tiny.yaml", "--out", "given", "--set", "methods=[consensus]",
        "--set", f"model.weights={finished / 'base.safetensors'}",
        "--set", f"retrain.weights={finished / 'retrain.safetensors'}",
    )  # fmt: skip
    ours = json.loads((place / "given" / "scores.json").read_text())
    theirs = json.loads((finished / "scores.json").read_text())
    for row in ("original", "retrain"):
        for metric in ("acc_retain", "acc_forget", "acc_test", "mia"):
            assert ours[row][metric] == theirs[row][metric]


def test_another_criterion_reuses_everything_and_leaves_no_stale_files(place: Path):
    run = place / "changed"
    few = ["--set", "methods=[consensus, uniform]", "--set", "pool.grid={epochs: [2, 3]}"]
    few += ["--set", "train.epochs=1", "--set", "retrain=null"]
    quick(place, "tiny.yaml", "--out", "changed", *few)
    models = {p: p.stat().st_mtime_ns for p in run.glob("pool/*/*.safetensors")}
    models[run / "base.safetensors"] = (run / "base.safetensors").stat().st_mtime_ns
    few[1] = "methods=[consensus]"
    quick(
        place, "tiny.yaml", "--out", "changed", *few,
        "--set", "search.criterion=keep_retain",
    )  # fmt: skip
    assert models == {p: p.stat().st_mtime_ns for p in models}
    assert not (run / "patches/uniform.safetensors").exists()
    assert not (run / "sweeps/uniform.csv").exists()
    scores = json.loads((run / "scores.json").read_text())
    assert [m["criterion"] for m in scores["methods"]] == ["keep_retain"]
    negmerge_here(place, "verify", "changed")


def test_another_recipe_does_not_overwrite_the_original_model(finished: Path, place: Path):
    _, err = quick(place, "tiny.yaml", "--out", "whole", "--set", "train.epochs=7", code=2)
    assert "was made by another recipe" in err
    assert "--out" in err


def test_inspect_and_verify(finished: Path, place: Path, tmp_path: Path):
    out, _ = negmerge_here(place, "inspect", "whole")
    assert "consensus" in out
    assert "λ was chosen by match_holdout on " in " ".join(out.split())
    out, _ = negmerge_here(place, "inspect", "whole", "--json")
    found = json.loads(out)
    assert found["kind"] == "run"
    assert found["finished"]
    assert found["members"] == 4
    out, _ = negmerge_here(place, "verify", "whole")
    assert "match the manifest" in out
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(finished), str(copy)], check=True)  # noqa: S607
    with (copy / "patches/ties.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    _, err = negmerge_here(place, "verify", str(copy), code=2)
    assert "patches/ties.safetensors" in err
    assert "has changed" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["unlearn", "nothing.yaml"], "no such file"),
        (["unlearn", "tiny.yaml", "--set", "data.name=cifarten"], "unknown data set"),
        (["unlearn", "tiny.yaml", "--set", "data.name=cifar10"], "cifar10"),
        (["unlearn", "tiny.yaml", "--set", "model.name=resnet19"], "did you mean"),
        (["unlearn", "tiny.yaml", "--set", "split.forget={class: boot}"], "no such class"),
        (["unlearn", "tiny.yaml", "--set", "split.forget={indices: no.txt}"], "no.txt"),
        (["unlearn", "tiny.yaml", "--set", "split.forget={indices: pipe}"], "not a regular file"),
        (["unlearn", "tiny.yaml", "--set", "split.forget={ids: /dev/zero}"], "not a regular file"),
        (["unlearn", "tiny.yaml", "--set", "model.weights=no.safetensors"], "model.weights"),
        (["unlearn", "tiny.yaml", "--set", "methods=[tees]"], "unknown method"),
        (["unlearn", "tiny.yaml", "--set", "train.lr=1e30", "--set", "workers=1"], "diverged"),
        (["unlearn", "tiny.yaml", "--set", "model.name=vgg16_bn"], "does not take images of 28"),
        (["unlearn", "tiny.yaml", "--set", "title=2024-99-99"], "title"),
        (["unlearn", "tiny.yaml", "--set", "pool.grid={epochs: [2020-01-01]}"], "epochs"),
        (["unlearn", "tiny.yaml", "--set", "pool.grid={label_smoothing: [0, 0.0]}"], "twice"),
        (["unlearn", "tiny.yaml", "--set", "search.criterion=guess"], "unknown criterion"),
        (
            ["unlearn", "tiny.yaml", "--set", "search.criterion=oracle", "--set", "retrain=null"],
            "oracle needs the retrained model, but retrain is null",
        ),
        (
            ["unlearn", "tiny.yaml", "--set", "pool.keep=false", "--set", "methods=[tall]"],
            "pool.keep false",
        ),
        (["inspect", "nowhere"], "nowhere"),
        (["report", "cache"], "is not a run"),
        (["verify", "cache"], "manifest.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(place: Path, arguments, message, tmp_path: Path):
    out = tmp_path / "out"
    if arguments[0] == "unlearn":
        arguments = [*arguments, "--out", str(out)]
    _, err = negmerge_here(place, *arguments, code=2)
    if "diverged" in message:  # after work was announced and begun
        err = err.splitlines(keepends=True)[-1]
    else:
        assert not out.exists()
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
