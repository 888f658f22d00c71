"""The CLIP scenario through the command line: to the end, killed and resumed, and refused."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest
import torch

import negmerge as nm
from clips import CLASSES, make_clip, make_sets
from negmerge.cli import main
from negmerge.errors import NegMergeError
from negmerge.runs.context import Context
from negmerge.runs.executors import InProcess
from negmerge.runs.pipeline import unlearn
from negmerge.runs.recipe import load_recipe
from negmerge.runs.store import Run
from negmerge.scenarios.clip.library import open_clip
from negmerge.scenarios.clip.scenario import ClipScenario
from negmerge.support.progress import Quiet
from negmerge.training.weights import load_tensors, save_tensors
from running import start

TINY = """
title: A tiny CLIP
data: {name: mnist, root: data, limit: {test: 50}}
model: {name: clip}
clip: {control: {name: cifar10, root: data}, augmentation: torchvision}  # learns from few images
pool:
  settings:
    {epochs: 2, batch: 16, lr: 1.0e-3, optimizer: adamw, weight_decay: 0.1, schedule: cosine,
     warmup: 500, clip: 1.0}
  grid: {augment.randaugment.n: [1, 2], augment.randaugment.m: [2, 8]}
methods:
  - consensus
  - uniform
  - {name: consensus, subset: {count: 2, seed: 1}}
  - {name: uniform, add: 1.0}
  - greedy
  - {name: greedy, add: 1.0}
  - single_best
search: {count: 6, limit: 2.0}
save_every: 0
"""
MEMBERS, GRID = 4, 6


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    make_sets(folder / "data")
    make_clip(folder / "clip", folder / "data", folder / "cache")
    (folder / "tiny.yaml").write_text(TINY)
    return folder


@pytest.fixture(scope="module")
def finished(place: Path) -> Path:
    """One whole run, which the tests only look at."""
    process = start(place, "unlearn", "tiny.yaml", "--out", "whole")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "A tiny CLIP" in out
    assert "warn" not in err
    return place / "whole"


@pytest.fixture
def here(place: Path, monkeypatch) -> Iterator[Path]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker process has it
    yield place
    torch.set_num_threads(threads)


def scores_of(run: Path) -> dict:
    return json.loads((run / "scores.json").read_text())


def test_scores_have_every_key_and_null_for_what_is_not_measured(finished: Path):
    scores = scores_of(finished)
    assert scores["retrain"] is None
    assert scores["warnings"] == [w for w in scores["warnings"] if "retrain" not in w]
    for row in (scores["original"], *scores["methods"]):
        assert row["acc_test"] is row["mia"] is None
        assert row["samples"] == {"retain": 60, "forget": 50}
        for metric in ("acc_retain", "acc_forget"):
            low, high = row["intervals"][metric]
            assert 0 <= low <= row[metric] <= high <= 100
    assert scores["original"]["acc_forget"] > 100 / len(CLASSES["mnist"]) + 20, "it must know"
    rows = {row["method"]: row for row in scores["methods"]}
    assert list(rows) == [
        "consensus", "uniform", "consensus-2-1", "uniform-added", "greedy", "greedy-added",
        "single_best",
    ]  # fmt: skip
    for row in rows.values():
        assert row["avg_gap"] is row["cost_ratio"] is None
        assert row["scale"] >= 0
    assert rows["consensus"]["acc_forget"] < scores["original"]["acc_forget"]
    assert rows["uniform-added"]["acc_forget"] > scores["original"]["acc_forget"]
    assert rows["uniform-added"]["direction"] == "add"
    assert [rows[name]["members"] for name in rows][:4] == [4, 4, 2, 4]
    half = rows["consensus-2-1"]["samples_processed"]
    assert rows["consensus"]["samples_processed"] == 2 * half


def test_the_cost_is_counted_in_evaluations(finished: Path):
    rows = {row["method"]: row for row in scores_of(finished)["methods"]}

    def walked(title: str) -> int:
        with (finished / f"sweeps/{title}.csv").open() as file:
            return len(list(csv.DictReader(file)))

    assert rows["consensus"]["evaluations"] == walked("consensus") >= GRID
    ids = [p.name for p in (finished / "pool").iterdir()]
    alone = sum(walked(f"member-{name}") for name in ids)
    assert rows["single_best"]["evaluations"] == alone >= MEMBERS * GRID
    assert rows["greedy"]["evaluations"] == 2 * MEMBERS - 1 + walked("greedy")
    assert rows["uniform-added"]["evaluations"] == 0
    assert rows["greedy-added"]["evaluations"] == 2 * MEMBERS - 1


def test_the_seconds_are_those_of_pool_merge_and_search(finished: Path):
    scores = scores_of(finished)
    pool = sum(member["seconds"] for member in scores["pool"])
    for row in scores["methods"]:
        assert row["seconds_merge"] > 0
        assert (row["seconds_search"] > 0) == (row.get("direction") != "add")
        if row["members"] == MEMBERS:
            after = row["seconds_merge"] + row["seconds_search"]
            assert row["seconds"] == pytest.approx(pool + after)


def test_what_is_frozen_keeps_its_bits_and_is_counted(finished: Path):
    base, _ = load_tensors(finished / "base.safetensors")
    assert not any(name.startswith("transformer.") for name in base)
    frozen = [name for name in base if not name.startswith("visual.") or ".attn." in name]
    for path in finished.glob("pool/*/*.safetensors"):
        member, _ = load_tensors(path)
        assert member.keys() == base.keys()
        for name, tensor in member.items():
            assert torch.equal(tensor, base[name]) == (name in frozen), name
    about = scores_of(finished)["splits"]["model"]
    count = sum(base[name].numel() for name in frozen)
    assert (about["frozen"], about["elements"]) == (count, sum(t.numel() for t in base.values()))
    assert about["frozen_parts"] == ["heads", "text", "attention projections"]
    rows = {row["method"]: row for row in scores_of(finished)["methods"]}
    floor = 100 * count / about["elements"]
    assert rows["uniform"]["sparsity"] == pytest.approx(floor, abs=0.01)
    assert rows["consensus"]["sparsity"] > rows["consensus-2-1"]["sparsity"] > floor
    assert set(rows["consensus"]["anatomy"]) == {"early", "middle", "late", "stem", "mlp"}


def test_lambda_keeps_95_percent_of_the_control_on_validation(finished: Path):
    scores = scores_of(finished)
    assert scores["splits"]["chosen_on"] == {"retain": 12, "forget": 12}  # a tenth of training
    with (finished / "sweeps/uniform.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    kept = [r for r in rows if r["acc_retain"] >= 0.95 * rows[0]["acc_retain"]]
    best = min(kept, key=lambda r: (r["acc_forget"], r["scale"]))
    assert scores["methods"][1]["scale"] == best["scale"]


def test_the_unlearned_model_is_base_minus_lambda_tau(finished: Path, tmp_path: Path):
    tau = nm.TaskVector.load(finished / "patches/consensus.safetensors")
    scale = scores_of(finished)["methods"][0]["scale"]
    nm.apply(finished / "base.safetensors", -scale * tau, tmp_path / "again.safetensors")
    again = (tmp_path / "again.safetensors").read_bytes()
    assert again == (finished / "unlearned/model.safetensors").read_bytes()


def test_the_unlearned_clip_is_opened_by_open_clip_and_forgets_another_set(
    finished: Path, here: Path, tmp_path: Path
):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clip = open_clip().create_model(f"local-dir:{finished / 'unlearned'}")
    weights, _ = load_tensors(finished / "unlearned/model.safetensors")
    state = clip.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    original, _ = load_tensors(here / "clip/open_clip_model.safetensors")
    text = [name for name in original if not name.startswith("visual.")]
    assert all(torch.equal(state[name], original[name]) for name in text)
    assert not torch.equal(state["visual.proj"], original["visual.proj"])
    swapped = ["data.name=cifar10", "clip.control.name=mnist", "methods=[uniform]"]
    second = run_here(tmp_path / "second", f"model.name={finished / 'unlearned'}", *swapped)
    first = scores_of(finished)["methods"][0]
    assert second["original"]["samples"] == {"retain": 60, "forget": 50}
    assert second["original"]["acc_retain"] == pytest.approx(first["acc_forget"], abs=8)  # 50 of 60


def test_killed_and_resumed_gives_the_same_hashes(finished: Path, place: Path):
    run = place / "killed"
    process = start(place, "unlearn", "tiny.yaml", "--out", "killed")
    while process.poll() is None and not list(run.glob("pool/*/*.safetensors")):
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = {p: p.stat().st_mtime_ns for p in run.glob("pool/*/*.safetensors")}
    process = start(place, "unlearn", "tiny.yaml", "--out", "killed")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert kept == {p: p.stat().st_mtime_ns for p in kept}
    ours, whole = (json.loads((r / "manifest.json").read_text()) for r in (run, finished))
    assert ours["result"] == whole["result"]


def scenario_of(*changes: str) -> ClipScenario:
    scenario = load_recipe("tiny.yaml", changes).make_scenario()
    assert isinstance(scenario, ClipScenario)
    return scenario


def run_here(out: Path, *changes: str) -> dict:
    """A run in this process."""
    recipe = load_recipe("tiny.yaml", changes)
    scenario, folder = recipe.make_scenario(), Run(out)
    with folder.locked():
        unlearn(Context(recipe, scenario, folder, InProcess(scenario), Quiet()))
    return scores_of(out)


def test_linearised(here: Path, finished: Path, tmp_path: Path):
    methods = "methods=[consensus, single_best, greedy]"
    scores = run_here(tmp_path / "linear", "clip.linear=true", methods)
    rows = {row["method"]: row for row in scores["methods"]}
    assert any("not measured as an ordinary CLIP" in text for text in scores["warnings"])
    assert rows["consensus"]["evaluations"] == 1
    assert rows["single_best"]["evaluations"] == MEMBERS
    assert rows["consensus"]["acc_forget"] < scores["original"]["acc_forget"]
    theirs = scores_of(finished)["original"]
    for metric in ("acc_retain", "acc_forget"):  # at θ₀ the tangent space is the model
        assert scores["original"][metric] == theirs[metric]
    plain = nm.TaskVector.load(finished / "patches/consensus.safetensors")
    linear = nm.TaskVector.load(tmp_path / "linear/patches/consensus.safetensors")
    assert plain.keys() == linear.keys()
    assert plain.elements == linear.elements
    assert scores["splits"]["model"]["frozen_parts"] == ["heads", "text"]
    assert changes_attention(tmp_path / "linear")
    kept = ["clip.linear=true", "clip.freeze=attention", "pool.subset={count: 1}"]
    scores = run_here(tmp_path / "frozen", *kept, "methods=[consensus]")
    assert scores["splits"]["model"]["frozen_parts"] == ["heads", "text", "attention projections"]
    assert not changes_attention(tmp_path / "frozen")


def changes_attention(run: Path) -> bool:
    """Whether the members of a run changed attention; all projections, or none."""
    base, _ = load_tensors(run / "base.safetensors")
    changed = {
        torch.equal(tensor, base[name])
        for path in run.glob("pool/*/*.safetensors")
        for name, tensor in load_tensors(path)[0].items()
        if name.startswith("visual.") and ".attn." in name
    }
    (same,) = changed
    return not same


def test_halving_and_a_pool_drawn_from_the_grid(here: Path, tmp_path: Path):
    changes = ["search={strategy: bracket, stop: 2.0, count: 21}", "pool.subset={count: 2}"]
    scores = run_here(tmp_path / "few", *changes, "methods=[consensus]", "clip.freeze=nothing")
    (row,) = scores["methods"]
    assert row["members"] == 2
    assert row["evaluations"] in range(2, 13) or row["evaluations"] == 21
    assert scores["splits"]["model"]["frozen_parts"] == ["heads", "text"]
    base, _ = load_tensors(tmp_path / "few/base.safetensors")
    (member, *_) = (tmp_path / "few").glob("pool/*/*.safetensors")
    name = "visual.transformer.resblocks.0.attn.in_proj_weight"
    assert not torch.equal(load_tensors(member)[0][name], base[name])


def test_the_control_lies_beside_the_forget_set(here: Path):
    settings = load_recipe("tiny.yaml").settings
    assert settings.clip.control.root == settings.data.root
    found = scenario_of("clip.control.root=null").control
    named = scenario_of().control
    assert [one.fingerprint for one in found] == [one.fingerprint for one in named]


def test_else_the_control_lies_where_all_mirrors_do(here: Path, tmp_path: Path, monkeypatch):
    (tmp_path / "mnist").symlink_to(here / "data" / "mnist")
    monkeypatch.setenv("NEGMERGE_DATA", str(here / "data"))
    found = scenario_of(f"data.root={tmp_path}", "clip.control.root=null").control
    named = scenario_of().control
    assert [one.fingerprint for one in found] == [one.fingerprint for one in named]


def test_a_ready_head_needs_no_words(here: Path, tmp_path: Path):
    """Numbered classes, whose embeddings the folder has."""
    sets = {"gtsrb": [f"{k}" for k in range(50)]}  # more signs than there are words for
    make_sets(tmp_path / "data", 100, 50, sets)
    shutil.copytree(here / "clip", tmp_path / "clip")
    heads, about = load_tensors(here / "clip/class_embeddings.safetensors")
    classes = json.dumps(json.loads(about["classes"]) | sets)
    head = {"gtsrb": torch.randn(50, 16)}
    save_tensors(tmp_path / "clip/class_embeddings.safetensors", heads | head, {"classes": classes})
    changes = [
        "data.name=gtsrb",
        f"data.root={tmp_path / 'data'}",
        f"model.name={tmp_path / 'clip'}",
    ]
    scenario_of(*changes).check()


def test_heads_are_built_once(here: Path, finished: Path):
    before = {p: p.stat().st_mtime_ns for p in (here / "cache" / "heads").iterdir()}
    assert len(before) >= 2
    scenario_of().check()
    assert before == {p: p.stat().st_mtime_ns for p in (here / "cache" / "heads").iterdir()}


def test_a_new_control_set_keeps_the_pool(here: Path, tmp_path: Path):
    few = ["methods=[consensus]", "pool.subset={count: 1}"]
    run_here(tmp_path / "run", *few)
    members = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").glob("pool/*/*.safetensors")}
    scores = run_here(tmp_path / "run", *few, "clip.control.limit={test: 20}")
    assert scores["original"]["samples"]["retain"] == 20
    assert members == {p: p.stat().st_mtime_ns for p in members}
    assert len(list((tmp_path / "run").glob("pool/*/*.safetensors"))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.name=ViT-B-33", "did you mean 'ViT-B-32'"),
        ("model.name=ViT-B-32", "clip.pretrained: got nothing, wanted a tag of ViT-B-32 (openai"),
        ("clip.pretrained=openai", "has its own weights"),
        ("clip.control.name=cifar11", "unknown data set"),
        ("clip.control.name=mnist", "mnist is the set to forget"),
        ("clip.control.limit={train: 5}", "the control set is not trained on"),
        ("data.size=32", "data.size: CLIP models fix the image size; remove this field"),
        ("split.validation=0.1", "split: CLIP models are pretrained"),
        ("train.epochs=3", "train: CLIP models are pretrained"),
        ("retrain={}", "retrain: CLIP models are pretrained"),
        ("model.weights=x.safetensors", "CLIP models take their weights from clip.pretrained"),
        ("search.criterion=match_holdout", "wanted keep_retain"),
        ("methods=[finetune]", "scenario clip has no rivals"),
        ("methods=[{name: greedy, options: {order: best}}]", "wanted paper or soup"),
        ("methods=[{name: greedy, options: {scale: a}}]", "wanted a number"),
        ("methods=[{name: greedy, options: {speed: 1}}]", "it takes order, scale"),
        ("methods=[{name: greedy, subset: {count: 2}}]", "subset is for merge rules"),
        ("methods=[{name: ties, subset: {count: 9}}]", "subset.count 9: there are 4"),
        ("clip.freeze=everything", "clip.freeze"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(here: Path, change, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(["unlearn", "tiny.yaml", "--set", change, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def config_without(*path: str) -> Callable[[Path], None]:
    return config_with(None, *path)


def config_with(value: object, *path: str) -> Callable[[Path], None]:
    """Change a field of the configuration; None takes it out."""

    def harm(folder: Path) -> None:
        file = folder / "open_clip_config.json"
        tree = json.loads(file.read_text())
        at = tree
        for key in path[:-1]:
            at = at[key]
        at.pop(path[-1], None)
        if value is not None:
            at[path[-1]] = value
        file.write_text(json.dumps(tree))

    return harm


def tensors_with(file: str, name: str, change: Callable, **metadata: str) -> Callable[[Path], None]:
    """Change a tensor of a file; its metadata too."""

    def harm(folder: Path) -> None:
        tensors, about = load_tensors(folder / file)
        tensors[name] = change(tensors[name])
        save_tensors(folder / file, tensors, about | metadata)

    return harm


WEIGHTS, HEADS = "open_clip_model.safetensors", "class_embeddings.safetensors"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (config_without("model_cfg", "text_cfg"), "model_cfg.text_cfg: field required"),
        (
            config_without("model_cfg", "vision_cfg", "image_size"),
            "vision_cfg.image_size: field required",
        ),
        (
            config_with([16, 16, 3], "model_cfg", "vision_cfg", "image_size"),
            "image_size: input should be a valid integer or list",
        ),
        (
            config_with(0.5, "preprocess_cfg", "mean"),
            "preprocess_cfg.mean: input should be a valid list; got",
        ),
        (config_with(["a"] * 3, "preprocess_cfg", "mean"), "preprocess_cfg.mean.0: input should"),
        (
            config_with([0.2, 0.0, 0.2], "preprocess_cfg", "std"),
            "std.1: input should be greater than 0",
        ),
        (config_with([], "model_cfg"), "model_cfg: input should be a valid dictionary"),
        (tensors_with(WEIGHTS, "visual.proj", lambda t: t * torch.nan), "are not finite"),
        (tensors_with(HEADS, "mnist", lambda t: t * torch.nan), "are not finite"),
        (
            tensors_with(HEADS, "mnist", lambda t: t[:, 1:]),
            "got shape (5, 15), wanted one row of 16",
        ),
        (tensors_with(HEADS, "mnist", lambda t: t, classes="[1, 2]"), "metadata `classes` is"),
        (tensors_with(HEADS, "mnist", lambda t: t, classes="{"), "metadata `classes` is"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"no"), "open_clip_model.safetensors"),
    ],
)
def test_a_damaged_clip_is_one_line_before_anything_is_made(
    here: Path, harm, message, capsys, tmp_path
):
    harm(Path(shutil.copytree(here / "clip", tmp_path / "clip")))
    change = f"model.name={tmp_path / 'clip'}"
    with pytest.raises(SystemExit) as stop:
        main(["unlearn", "tiny.yaml", "--set", change, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_damaged_head_in_the_cache_is_made_again(here: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(tmp_path))
    whole = scenario_of().heads["forget"]
    for path in (tmp_path / "heads").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:40])
    assert torch.equal(scenario_of().heads["forget"], whole)


def test_an_unknown_set_is_noted_before_the_work_and_may_say_what_it_is(here: Path, tmp_path: Path):
    make_clip(tmp_path / "clip")
    make_sets(tmp_path / "data", sets={"eurosat": ["AnnualCrop", "Forest", "SeaLake"]})
    (tmp_path / "data/eurosat").rename(tmp_path / "EuroSAT_splits")
    changes = [f"data.name={tmp_path / 'EuroSAT_splits'}", f"model.name={tmp_path / 'clip'}"]
    unknown = scenario_of(*changes)
    assert any("such as “a photo of a AnnualCrop.”" in note for note in unknown.notes)
    known = scenario_of(*changes, "data.words=eurosat")
    assert not any("AnnualCrop" in note for note in known.notes)
    said = known._sentences(known.settings.data, known.class_names)
    assert said[0][0] == "a centered satellite photo of annual crop land."
    with pytest.raises(NegMergeError, match=r"data\.words: got 'moon', wanted one of cars"):
        load_recipe("tiny.yaml", ["data.words=moon"])


def test_the_page_has_what_the_scenario_has(finished: Path):
    """Grad-CAM of a ViT, members alone; nothing of what a CLIP is not asked."""
    page = (finished / "report/index.html").read_text(encoding="utf-8")
    assert "Missing from this page" not in page
    assert "What clip knows of mnist" in page
    assert "<img " in page
    assert "MIA %" not in page
    assert "membership inference: not measured in this scenario" in page
    table = (finished / "report/tables/members.csv").read_text().splitlines()
    assert len(table) == 1 + MEMBERS
    assert "acc_test" not in table[0]
    prefixes = pd.read_csv(finished / "report/tables/prefixes.csv")
    assert prefixes["sparsity"][0] == prefixes["coin_flips"][0] > 0  # frozen: no coin decides
    assert (prefixes["sparsity"] <= prefixes["coin_flips"] + 1e-9).all()
    nm.report(finished)
    assert page == (finished / "report/index.html").read_text(encoding="utf-8")
    Run(finished).verify()
