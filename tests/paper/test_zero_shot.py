"""`negmerge check clip`: accuracies beside known ones, on the sets that are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file

from clips import NORM, make_clip, make_sets, random_clip
from negmerge.cli import main
from negmerge.paper import zero_shot
from negmerge.paper.experiments import published
from negmerge.paper.zero_shot import EIGHT, known_accuracies
from negmerge.scenarios.clip.prompts import PROMPTS
from negmerge.training.weights import load_tensors, save_tensors
from negmerge.vision.datasets import datasets, load, resolve
from running import negmerge


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A CLIP with heads for two sets: one among local copies, one in the cache of the Hub."""
    folder = tmp_path_factory.mktemp("check")
    make_sets(folder / "data")
    make_clip(folder / "clip", folder / "data", folder / "cache")
    hub = folder / "hub" / "datasets--uoft-cs--cifar10"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs/main").write_text("0" * 40)
    (hub / "snapshots").mkdir()
    (hub / "blobs").mkdir()
    shutil.copytree(folder / "data/cifar10", hub / "snapshots" / ("0" * 40))
    for path in (hub / "snapshots" / ("0" * 40)).iterdir():  # links to blobs, as the Hub makes them
        path.rename(hub / "blobs" / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    (folder / "local").mkdir()
    (folder / "data/mnist").rename(folder / "local/mnist")
    return folder


def accuracy(name: str, root: Path, place: Path) -> float:
    """The accuracy with open_clip's own module."""
    images = load(resolve(name, size=16, channels=3, **NORM), "test", root=root, cache=root / "c")
    inputs = torch.from_numpy(images.pixels.copy()).permute(0, 3, 1, 2) / 255
    head = load_file(place / "clip/class_embeddings.safetensors")[name]
    with torch.inference_mode():
        features = random_clip().encode_image((inputs - 0.5) / 0.25, normalize=True)
    return 100 * float(((features @ head.T).argmax(1).numpy() == images.labels).mean())


def test_sets_are_found_locally_and_in_the_cache_of_the_hub(place: Path):
    command = ["check", "clip", "clip", "--set", "data.root=local", "--json"]
    out, _ = negmerge(place, *command, HF_HUB_CACHE=str(place / "hub"), NEGMERGE_DATA="")
    found = json.loads(out)
    rows = {row["name"]: row for row in found["numbers"]}
    assert found["missing"] == {}
    assert found["passed"] is True
    assert rows["mnist"]["measured"] == pytest.approx(accuracy("mnist", place / "local", place))
    assert rows["cifar10"]["measured"] == pytest.approx(accuracy("cifar10", place / "data", place))
    for row in rows.values():
        assert row["images"] == 60
        assert row["known"] is None
        assert row["verdict"] == ""
    assert found["notes"] == ["no accuracies of these weights are known; nothing was compared"]


@pytest.fixture
def here(place: Path, monkeypatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    monkeypatch.delenv("NEGMERGE_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # which the command sets
    return place


def test_what_is_missing_is_named_with_where_it_was_sought(here: Path, capsys):
    sets = "sets=[mnist, svhn, cars]"
    main(["check", "clip", "clip", "--set", "data.root=local", "--set", sets,
          "--set", "data.limit.test=20"])  # fmt: skip
    out = " ".join(capsys.readouterr().out.split())
    assert "svhn, cars: not found in 'local' and '" in out
    assert "set data.root or NEGMERGE_DATA to a folder with local copies, or add --download" in out
    assert "at most 20 images of each set: not compared" in out


@pytest.mark.parametrize(("known", "code"), [(0.0, 0), (0.99, 0), (-1.01, 1)])
def test_an_accuracy_that_differs_ends_with_one(here: Path, capsys, monkeypatch, known, code):
    """The known accuracies are of weights that no test has; here the tiny model's take part."""
    measured = accuracy("mnist", here / "local", here)
    table = {"mnist": (measured + known, "this test")}
    monkeypatch.setattr(zero_shot, "known_accuracies", lambda name: table)
    monkeypatch.setattr(zero_shot, "_uses_known_weights", lambda source: True)
    command = ["check", "clip", "clip", "--set", "data.root=local", "--set", "sets=[mnist]"]
    if code:
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code == code
    else:
        main(command)
    out = capsys.readouterr().out
    assert ("differs" in out) == bool(code)
    assert ("pass" in out) != bool(code)
    assert "± 1" in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["nothing"], "model.name 'nothing': neither a folder"),
        (["hf-hub:nobody/nothing"], "model.name 'hf-hub:nobody/nothing': neither a folder"),
        (["x" * 5000], "cannot be a path: File name too long; name a model or a folder"),
        (["~no-such-user/clip"], "'~no-such-user/clip': cannot be a path"),
        (["clip", "--set", "sets=[svhn]"], "no data set can be measured: svhn: not found in"),
        (["clip", "--set", "sets=[mnst]"], "unknown data set 'mnst'; did you mean 'mnist'"),
        (["clip", "--set", "colour=red"], "the fields are sets, data.root and data.limit.test"),
        (["clip", "--set", "data.root=none"], "data.root: got 'none', wanted a folder"),
        (["clip", "--set", "sets"], "wanted key=value"),
        (["clip", "--pretrained", "openai"], "has its own weights"),
        (["ViT-B-32", "--pretrained", "nobody"], "wanted a tag of ViT-B-32 (openai, "),
    ],
)
def test_bad_input_is_one_line(here: Path, capsys, more, message):
    with pytest.raises(SystemExit) as ended:
        main(["check", "clip", *more])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "classes", "message"),
    [
        ({}, "5", "metadata `classes` is a int, wanted an object"),
        ({"mnist": torch.tensor(1.0)}, None, "'mnist': got shape (), wanted one row of 16 numbers"),
        ({"mnist": torch.ones(5, 7)}, None, "'mnist': got shape (5, 7), wanted one row of 16"),
        ({"logit_scale": torch.ones(3)}, None, "has no tensor logit_scale of one number"),
    ],
)
def test_heads_that_do_not_fit_are_one_line(here, tmp_path, capsys, change, classes, message):
    shutil.copytree(here / "clip", tmp_path / "odd")
    path = tmp_path / "odd/class_embeddings.safetensors"
    heads, about = load_tensors(path)
    about = about if classes is None else {"classes": classes}
    save_tensors(path, {**heads, **change}, about)
    with pytest.raises(SystemExit) as ended:
        main(["check", "clip", str(tmp_path / "odd"), "--set", "data.root=local"])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in err
    assert err.count("\n") == 1


def test_the_known_accuracies_agree_with_each_other():
    """Other sources are within the tolerance of the paper's; so is the mean of the eight."""
    others = json.loads((Path(zero_shot.__file__).with_name("zero_shot.json")).read_text())
    for name in ("ViT-B-32", "ViT-B-16", "ViT-L-14"):
        found = known_accuracies(name)
        assert found.keys() <= {*datasets}
        assert found["imagenet"][1] == "paper"
        assert known_accuracies(f"{name}-quickgelu") == found
        for source in ("open_clip", "cards"):
            for data, value in others[source].get(name, {}).items():
                assert abs(value - found[data][0]) <= zero_shot.POINTS, (name, data)
        if found.keys() >= {*EIGHT}:
            paper = zero_shot._paper_row(name)
            assert abs(mean(found[data][0] for data in EIGHT) - paper["acc_forget"]) < 0.5
    assert known_accuracies("ViT-B-32").keys() >= {*EIGHT, "imagenet"}
    assert {*EIGHT} == {name for name, one in PROMPTS.items() if one.epochs is not None}
    (cars,) = [row for row in published()["T5"]["rows"]
               if row["method"] == "pretrained" and row["dataset"] == "cars"]  # fmt: skip
    assert known_accuracies("ViT-B-32")["cars"] == (cars["acc_forget"], "paper") == (59.6, "paper")
