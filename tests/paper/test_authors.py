"""`reproduce authors`: small checkpoints in the layout of the release, through the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from clips import NORM, make_clip, make_sets, random_clip
from negmerge.cli import main
from negmerge.evaluation.criteria import choose, criteria
from negmerge.evaluation.scales import Search
from negmerge.paper.authors import published_numbers
from negmerge.paper.released import find_release
from negmerge.runs.recipe import load_recipe
from negmerge.scenarios.clip.settings import ClipSettings
from negmerge.vision.datasets import load, resolve
from running import negmerge

MEMBERS = 4
SET = [
    "data.name=mnist", "data.root=data", "model.name=clip", "clip.pretrained=null",
    "clip.control={name: cifar10, root: data}",
]  # fmt: skip
State = dict[str, torch.Tensor]


def encoder_state() -> State:
    """The state of a CLIP without its text transformer, as the task-vector code keeps it."""
    state = random_clip().state_dict()
    return {name: t.clone() for name, t in state.items() if not name.startswith("transformer.")}


FINE_TUNED: dict[int, State] = {}
"""The members by number."""


def fine_tune(number: int, place: Path) -> State:
    """The state after two epochs on the set to forget; attention and text do not change."""
    clip, (inputs, labels) = random_clip(), tensors_of("mnist", "train", place)
    head = 20 * load_file(place / "clip/class_embeddings.safetensors")["mnist"]
    free = [p for n, p in clip.named_parameters() if n.startswith("visual.") and ".attn." not in n]
    optimiser = torch.optim.AdamW(free, 1e-3, weight_decay=0.1)
    torch.manual_seed(number)
    for picked in torch.stack([torch.randperm(len(labels)) for _ in range(2)]).reshape(-1, 20):
        noisy = inputs[picked] + 0.3 * torch.randn(inputs[picked].shape)
        logits = clip.encode_image(noisy, normalize=True) @ head.T
        optimiser.zero_grad()
        nn.functional.cross_entropy(logits, labels[picked]).backward()
        optimiser.step()
    start = encoder_state()
    return {name: t.clone() for name, t in clip.state_dict().items() if name in start}


def tensors_of(name: str, split: str, place: Path) -> tuple[torch.Tensor, torch.Tensor]:
    source = resolve(name, size=16, channels=3, **NORM)
    images = load(source, split, root=place / "data", cache=place / "cache")
    inputs = torch.from_numpy(images.pixels.copy()).permute(0, 3, 1, 2) / 255
    return (inputs - 0.5) / 0.25, torch.from_numpy(images.labels.copy())


def member_state(number: int) -> State:
    return {name: tensor.clone() for name, tensor in FINE_TUNED[number].items()}


def released_names(state: State, prefix: str) -> State:
    """The names of the release: attention as Q, K, V and O, and a prefix."""
    made: State = {}
    for name, tensor in state.items():
        if ".attn.in_proj_" in name:
            for letter, part in zip("QKV", tensor.chunk(3), strict=True):
                made[name.replace("in_proj_", f"{letter}.")] = part
        else:
            made[name.replace(".attn.out_proj.", ".attn.O.")] = tensor
    return {prefix + name: tensor for name, tensor in made.items()}


def module_of(state: State) -> nn.Module:
    """A module whose state dict this is."""
    whole = nn.Module()
    for name, tensor in state.items():
        *path, last = name.split(".")
        place = whole
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place._modules[part]
        place.register_parameter(last, nn.Parameter(tensor.clone()))
    return whole


def save_release(folder: Path) -> None:
    """One folder per member, in every form that a file of the release may have."""
    head = {"classification_head.weight": torch.ones(5, 16)}
    parallel = {f"module.{name}": tensor for name, tensor in head.items()}  # data-parallel training
    forms = [
        lambda s: released_names(s, "model."),
        lambda s: module_of(released_names(s, "")),
        lambda s: {"state_dict": released_names(s, "module.image_encoder.model.") | parallel},
        lambda s: module_of({f"image_encoder.model.{k}": t for k, t in s.items()} | head),
    ]
    for number, form in enumerate(forms):
        place = folder / f"rand-m{number + 1}-n1-mstd0.5" / "CarsVal"
        place.mkdir(parents=True)
        torch.save(form(member_state(number + 1)), place / "finetuned.pt")
        torch.save({"other": torch.ones(2)}, place / "checkpoint_1.pt")
    torch.save(module_of(released_names(encoder_state(), "model.")), folder / "zeroshot.pt")
    torch.save({"weight": torch.ones(3)}, folder / "head_CarsVal.pt")


def oracle() -> tuple[int, int]:
    """The unanimous elements and all elements, counted plainly."""
    base, members = encoder_state(), [member_state(k + 1) for k in range(MEMBERS)]
    signs = {name: sum(torch.sign(m[name] - base[name]) for m in members) for name in base}
    return (
        sum(int((one.abs() == MEMBERS).sum()) for one in signs.values()),
        sum(tensor.numel() for tensor in base.values()),
    )


def accuracy(name: str, scale: float, place: Path) -> float:
    """The test accuracy of θ − λτ, with open_clip's own module."""
    base, members = encoder_state(), [member_state(k + 1) for k in range(MEMBERS)]
    clip, changed = random_clip(), {}
    for key, start in base.items():
        moved = torch.stack([m[key].double() - start.double() for m in members])
        agree = torch.sign(moved).sum(0).abs() == MEMBERS
        changed[key] = (start - scale * torch.where(agree, moved.mean(0), 0.0)).float()
    clip.load_state_dict(changed, strict=False)
    inputs, labels = tensors_of(name, "test", place)
    head = load_file(place / "clip/class_embeddings.safetensors")[name]
    with torch.inference_mode():
        predicted = (clip.encode_image(inputs, normalize=True) @ head.T).argmax(1)
    return 100 * float((predicted == labels).double().mean())


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("authors")
    make_sets(folder / "data")
    make_clip(folder / "clip", folder / "data", folder / "cache")
    FINE_TUNED.update({k + 1: fine_tune(k + 1, folder) for k in range(MEMBERS + 1)})
    save_release(folder / "release")
    return folder


def expected(place: Path, **numbers: Any) -> str:
    count, elements = oracle()
    known = {
        "what": "A tiny CLIP", "source": "this test", "members": MEMBERS, "elements": elements,
        "unanimous": count, "scale": 1.0, "acc_forget": 0.0, "acc_retain": 0.0,
    }  # fmt: skip
    (place / "expected.json").write_text(json.dumps(known | numbers))
    return "expected.json"


def arguments(*more: str, folder: str = "release", sets: list[str] = SET) -> list[str]:
    changes = [word for change in sets for word in ("--set", change)]
    return ["reproduce", "authors", "--checkpoints", folder, *changes, *more]


def numbers(out: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(out.splitlines()[-1])["numbers"]}


def test_the_whole_command_and_again(place: Path):
    """First with wrong numbers, which differ; then with the right ones, and nothing is repeated."""
    wrong = ["--trust", "--expected", expected(place, members=9), "--out", "out"]
    out, _ = negmerge(place, *arguments(*wrong, "--json"), code=1)
    found = numbers(out)
    count, elements = oracle()
    assert found["unanimous elements"]["measured"] == count
    assert found["elements"]["measured"] == elements
    assert found["elements"]["verdict"] == found["unanimous elements"]["verdict"] == "pass"
    assert found["members"]["verdict"] == found["retain accuracy"]["verdict"] == "differs"
    scale = found["λ"]["measured"]
    assert 0 < scale <= 1
    sides = {"forget accuracy": "mnist", "retain accuracy": "cifar10"}
    for row, name in sides.items():
        assert found[row]["measured"] == pytest.approx(accuracy(name, scale, place)), name
    assert found["forget accuracy"]["measured"] < accuracy("mnist", 0.0, place) - 5, "λ must matter"

    made = {p: p.stat().st_mtime_ns for p in (place / "out").rglob("*.safetensors")}
    assert len(made) == 2 + MEMBERS
    kept = {
        "scale": scale,
        "acc_forget": found["forget accuracy"]["measured"] + 0.1,
        "acc_retain": found["retain accuracy"]["measured"] - 0.09,
        "validation": [{"scale": 0.0, "acc_forget": 12.5, "acc_retain": 25.0}],
    }
    right = ["--trust", "--expected", expected(place, **kept), "--out", "out"]
    out, err = negmerge(place, *arguments(*right))
    assert out.count("pass") == 6
    assert "differs" not in out
    assert "note" not in err
    assert {p: p.stat().st_mtime_ns for p in (place / "out").rglob("*.safetensors")} == made
    page = (place / "out/authors.md").read_text()
    assert f"| unanimous elements | {count:,} | {count:,} | = | pass |" in page
    assert "| 0 | " in page
    assert "| 12.50 | " in page
    assert page.count("\n| 0") == 20, "21 values of λ, the last is 1"
    assert json.loads((place / "out/authors.json").read_text())["passed"] is True


def test_the_converted_files_have_the_names_of_open_clip(place: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(place)
    with pytest.raises(SystemExit):
        main(arguments("--trust", "--expected", expected(place), "--out", str(tmp_path)))
    files = sorted((tmp_path / "checkpoints").glob("*.safetensors"))
    assert [p.name.rpartition("-")[0] for p in files] == [
        *(f"rand-m{k + 1}-n1-mstd0.5_CarsVal" for k in range(MEMBERS)), "zeroshot"
    ]  # fmt: skip
    for number, path in enumerate(files):
        state = encoder_state() if path.name.startswith("zeroshot") else member_state(number + 1)
        found = load_file(path)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


NO_DATA = ["data.name=cars", "model.name=clip", "clip.pretrained=null"]


def test_without_data_the_count_is_checked(place: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("NEGMERGE_DATA", str(tmp_path))
    wanted = ["--trust", "--expected", expected(place), "--out", str(tmp_path), "--json"]
    main(arguments(*wanted, sets=NO_DATA))
    out = capsys.readouterr().out
    found = numbers(out)
    assert found["unanimous elements"]["verdict"] == "pass"
    assert found["λ"]["verdict"] == found["forget accuracy"]["verdict"] == "not checked"
    (note,) = json.loads(out)["notes"]
    assert note.startswith(
        "λ and accuracies: not checked; the data set 'cars' was not found; looked"
    )
    assert str(tmp_path / "cars") in note


def test_a_folder_without_augmentation_that_joined_is_told(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("NEGMERGE_DATA", str(tmp_path))
    shutil.copytree(place / "release", tmp_path / "release")
    (tmp_path / "release/Cars").mkdir()
    torch.save(
        released_names(member_state(MEMBERS + 1), "model."),
        tmp_path / "release/Cars/finetuned.pt",
    )
    wanted = ["--trust", "--expected", expected(place), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(arguments(*wanted, folder=str(tmp_path / "release"), sets=NO_DATA))
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert "note: 5 members, the published numbers are of 4" in err
    assert "names are unlike the others: 'Cars'; remove them if" in err
    assert "differs" in out


MEMBER = "rand-m1-n1-mstd0.5/CarsVal"


def change_file(folder: Path, content: Any) -> None:
    torch.save(content, folder / MEMBER / "finetuned.pt")


def change_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nothing")


@pytest.mark.parametrize(
    ("harm", "more", "message"),
    [
        (lambda f: None, [], "opening a pickle can run code; if you trust the source of these 5"),
        (
            lambda f: (f / "zeroshot.pt").unlink(),
            ["--trust"],
            "has no file of the pretrained model",
        ),
        (
            lambda f: torch.save({"w": torch.ones(2)}, f / "rand-m1-n1-mstd0.5/zeroshot.pt"),
            ["--trust"],
            "the pretrained models rand-m1-n1-mstd0.5/zeroshot.pt, zeroshot.pt differ; keep one",
        ),
        (lambda f: change_file(f, {"w": torch.ones(2)}), ["--trust"], "not a CLIP image encoder"),
        (
            lambda f: change_file(f, {"model.params.0": torch.ones(2)}),
            ["--trust"],
            "is of a linearised model; wanted the standard models",
        ),
        (
            lambda f: change_file(f, released_names(encoder_state(), "model.")),
            ["--trust"],
            "has the weights of the base",
        ),
        (lambda f: None, ["--trust", "--set", "model.name=ViT-B-33"], "ViT-B-33"),
        (lambda f: shutil.rmtree(f), ["--trust"], "no such folder"),
        (
            lambda f: change_link(f / MEMBER / "finetuned.pt"),
            ["--trust"],
            "CarsVal/finetuned.pt: no such file",
        ),
        (
            lambda f: shutil.copy(f / MEMBER / "finetuned.pt", f / MEMBER / "finetuned.pth"),
            ["--trust"],
            "finetuned.pth: is of the same member as finetuned.pt beside it; keep one of them",
        ),
        (lambda f: None, ["--trust", "--out", "{folder}"], "is the folder of the checkpoints"),
        (
            lambda f: [shutil.rmtree(p) for p in f.glob("rand*")],
            ["--trust"],
            "no fine-tuned models",
        ),
    ],
)
def test_bad_input_is_one_line(place, tmp_path, harm, more, message, capsys, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("NEGMERGE_CACHE", str(place / "cache"))
    folder = tmp_path / "release"
    shutil.copytree(place / "release", folder)
    harm(folder)
    out = [] if "--out" in more else ["--out", str(tmp_path / "out")]
    words = [word.format(folder=folder) for word in more]
    with pytest.raises(SystemExit) as ended:
        main(arguments("--expected", expected(place), *out, *words, folder=str(folder)))
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


def test_options_of_authors_are_for_authors(capsys):
    for more in (["--trust"], ["--checkpoints", "x"], ["--json"]):
        with pytest.raises(SystemExit) as ended:
            main(["reproduce", "T2", *more])
        assert ended.value.code == 2
        assert "are for authors" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["reproduce", "authors"])
    assert "wanted --checkpoints FOLDER" in capsys.readouterr().err


def test_files_side_by_side_are_members_too(tmp_path: Path):
    for k in range(3):
        save_file({"w": torch.ones(k + 1)}, tmp_path / f"member-{k}.safetensors")
    torch.save({}, tmp_path / "zeroshot.pt")
    torch.save({}, tmp_path / "head_Cars.pt")
    (tmp_path / "notes.txt").write_text("")
    found = find_release(tmp_path)
    assert list(found.members) == ["member-0", "member-1", "member-2"]
    assert found.zero_shot == tmp_path / "zeroshot.pt"
    assert found.unlike == []


def test_linked_folders_have_members_and_the_output_has_none(place, tmp_path, capsys, monkeypatch):
    """A loop of links ends, and the files that a call converts are no members of the next."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("NEGMERGE_DATA", str(tmp_path))
    release, out = tmp_path / "release", tmp_path / "release/runs/out"
    release.mkdir()
    shutil.copy(place / "release/zeroshot.pt", release)
    for number in range(MEMBERS):
        own = place / f"release/rand-m{number + 1}-n1-mstd0.5"
        (release / f"m{number + 1}").symlink_to(own)
    (release / "loop").symlink_to(release)
    wanted = ["--trust", "--expected", expected(place), "--out", str(out), "--json"]
    for _ in range(2):
        main(arguments(*wanted, folder=str(release), sets=NO_DATA))
        found = numbers(capsys.readouterr().out)
        assert found["members"]["measured"] == MEMBERS
        assert found["unanimous elements"]["verdict"] == "pass"
    assert list(find_release(release, out).members) == [f"m{k + 1}/CarsVal" for k in range(MEMBERS)]


@pytest.mark.parametrize("row", [{"scale": 0.0}, {"acc_forget": 1.0, "acc_retain": 1.0}])
def test_a_published_sweep_must_have_all_numbers(row, place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(place)
    wrong = expected(place, validation=[row])
    with pytest.raises(SystemExit) as ended:
        main(arguments("--trust", "--expected", wrong, "--out", str(tmp_path / "out")))
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected.json: validation: wanted scale, acc_forget and acc_retain in each row" in line
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------- published numbers


def test_the_published_sweep_gives_the_published_scale():
    """The authors compare with a stored accuracy, 66.66; the sweep has 66.70 at λ = 0."""
    known, criterion = published_numbers(), criteria.get("keep_retain")
    rows = [dict(row) for row in known.validation]
    recipe = load_recipe(known.recipe)
    assert isinstance(recipe.settings, ClipSettings)
    assert recipe.criterion == "keep_retain"
    assert (
        tuple(row["scale"] for row in rows)
        == Search(strategy="grid").grid()
        == recipe.search.grid()
    )
    np.testing.assert_allclose([row["scale"] for row in rows], np.linspace(0, 1, 21))
    assert choose(rows, criterion).scale == known.scale == 0.9
    rows[0]["acc_retain"] = 66.66
    assert choose(rows, criterion).scale == 0.9


def test_the_published_numbers_are_those_of_the_recipe():
    known = published_numbers()
    recipe = load_recipe(known.recipe)
    assert len(recipe.pool.members()) == known.members == 30
    assert recipe.settings.data_names() == ["cars", "imagenet"]
    assert round(100 * known.unanimous / known.elements, 3) == 9.662
