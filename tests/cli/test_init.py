"""`negmerge init`: recipes for own data that run, questions on a terminal, errors of one line."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clips import make_clip
from negmerge.runs.recipe import load_recipe
from running import negmerge, negmerge_here
from tiny_llama import FACTS, make_folder, write_jsonl

SMALL = ["search.evaluations=3", "methods=[consensus]", "workers=1"]


def make_images(
    folder: Path, count: int = 20, classes: tuple[str, ...] = ("cat", "dog", "0")
) -> Path:
    """A folder of images for each class, each of a colour of its own."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for k in range(count):
            pixels = rng.integers(0, 90, (16, 20, 3))
            pixels[..., number % 3] += 150
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{name}{k}.png")
    return folder


def run(place: Path, recipe: str, *changes: str) -> dict:
    """Plan and make a small run of a recipe; its scores."""
    given = [text for change in (*changes, *SMALL) for text in ("--set", change)]
    out, _ = negmerge(place, "unlearn", recipe, "--dry-run", "--out", "run", *given)
    assert " steps, 0 of them done" in out
    negmerge(place, "unlearn", recipe, "--out", "run", *given)
    return json.loads((place / "run" / "scores.json").read_text())


def test_a_recipe_for_a_folder_of_images_runs(tmp_path):
    make_images(tmp_path / "photos")
    out, _ = negmerge(tmp_path, "init", "photos", "--forget", "dog", "--model", "resnet_small")
    assert "60 images of 3 classes (0, cat, dog), no test images" in out
    assert "negmerge unlearn photos.yaml --dry-run" in out
    recipe = load_recipe(tmp_path / "photos.yaml")
    assert recipe.settings.data.size == 16
    assert recipe.settings.split.forget.class_ == "dog"
    scores = run(tmp_path, "photos.yaml", "pool.grid={epochs: [1, 2]}", "train.epochs=1")
    assert scores["splits"]["forgotten_class"] == "dog"
    sizes = scores["splits"]["sizes"]  # 12 of 60 are the test set, 5 of the others are held out
    assert (sizes["forget"] + sizes["retain"], sizes["forget"]) == (43, 14)


def test_a_recipe_for_texts_runs(tmp_path):
    rows = [
        {"who": one["person"], "question": one["prompt"], "response": one["answer"]}
        for one in FACTS
    ]
    write_jsonl(tmp_path / "facts.jsonl", rows)
    make_folder(tmp_path / "llama")
    given = ("--forget", "who=Ada,Bob", "--model", "llama")
    out, _ = negmerge_here(tmp_path, "init", "facts.jsonl", *given)
    assert "8 prompts with answers" in out
    assert "'who' (8 values)" in out
    recipe = load_recipe(tmp_path / "facts.yaml")
    assert recipe.settings.model.knows
    assert recipe.settings.data.records.columns.prompt == "question"
    small = ("pool.grid={epochs: [1, 2]}", "generate=2")
    assert run(tmp_path, "facts.yaml", *small)["splits"]["sizes"]["forget"] == 2


def test_a_recipe_for_a_clip_runs(tmp_path):
    make_images(tmp_path / "animals", 30)
    make_images(tmp_path / "others", 20, ("car", "ship"))
    make_clip(tmp_path / "clip")
    given = ("--kind", "clip", "--keep", "others", "--model", "clip")
    negmerge_here(tmp_path, "init", "animals", *given)
    recipe = load_recipe(tmp_path / "animals.yaml")
    assert recipe.settings.clip.control.name == "others"
    grid = "pool.grid={augment.randaugment.n: [1], augment.randaugment.m: [1, 5]}"
    scores = run(tmp_path, "animals.yaml", grid, "pool.settings.epochs=1")
    assert scores["splits"]["sizes"]["train"] == 65  # of 90, 18 are the test set, a tenth chooses λ


@pytest.mark.parametrize(
    ("forget", "field"),
    [
        ("10%", {"fraction": 0.1}),
        ("0.25", {"fraction": 0.25}),
        ("0", {"class_": "0"}),
        ("names.txt", {"ids": Path("names.txt")}),
    ],
)
def test_what_is_forgotten_of_images(forget, field, tmp_path):
    make_images(tmp_path / "photos", 3)
    (tmp_path / "names.txt").write_text("dog1.png\n")
    negmerge_here(
        tmp_path, "init", "photos", "--forget", forget, "--model", "resnet18", "-o", "a.yaml"
    )
    found = load_recipe(tmp_path / "a.yaml").settings.split.forget
    assert found.model_dump(exclude_none=True) == field


def test_texts_to_forget_may_be_a_file_of_their_own(tmp_path):
    write_jsonl(tmp_path / "keep.jsonl", FACTS[2:])
    write_jsonl(tmp_path / "forget.jsonl", FACTS[:2])
    given = ("--forget", "forget.jsonl", "--model", "stories15m")
    negmerge_here(tmp_path, "init", "keep.jsonl", *given)
    data = load_recipe(tmp_path / "keep.yaml").settings.data
    assert (data.forget.name, data.retain.name) == ("forget.jsonl", "keep.jsonl")


def test_numbers_stay_numbers_and_known_sets_need_no_files(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"Text {k}.", "year": 2000 + k} for k in range(4)])
    negmerge_here(tmp_path, "init", "a.jsonl", "--forget", "year=2001", "--model", "stories15m")
    assert load_recipe(tmp_path / "a.yaml").settings.split.forget.values == (2001,)
    negmerge_here(tmp_path, "init", "cifar10", "--forget", "cat", "--model", "resnet18")
    assert load_recipe(tmp_path / "cifar10.yaml").settings.data.name == "cifar10"


def test_a_given_model_is_not_trained(tmp_path):
    make_images(tmp_path / "photos", 3)
    (tmp_path / "model.safetensors").touch()
    given = ("--forget", "dog", "--model", "resnet18", "--weights", "model.safetensors")
    negmerge_here(tmp_path, "init", "photos", *given)
    settings = load_recipe(tmp_path / "photos.yaml").settings
    assert settings.model.weights == Path("model.safetensors")
    assert settings.retrain is None


def test_the_schema_is_named_if_it_is_there(tmp_path):
    make_images(tmp_path / "photos", 3)
    (tmp_path / "negmerge.schema.json").touch()
    negmerge_here(tmp_path, "init", "photos", "--forget", "dog", "--model", "resnet18")
    first = (tmp_path / "photos.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=negmerge.schema.json"


USUAL = ("--forget", "dog", "--model", "resnet18")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "init: DATA and --forget and --model are missing, and there is no terminal"),
        (("photos", "--model", "resnet18"), "init: --forget is missing"),
        (("photos", "--kind", "clip", "--model", "a"), "init: --keep is missing"),
        (("nowhere", *USUAL), "'nowhere': no such file or folder, and no known set"),
        (("./nowhere", *USUAL), "'./nowhere': no such file or folder"),
        (("photos/cat", *USUAL), "photos/cat: has images, but no folders of classes"),
        (("empty", *USUAL), "doesn't contain any data files"),
        (("notes.md", *USUAL), "notes.md: wanted a folder of images, or texts"),
        (("one.txt", *USUAL), "one.txt: has one record"),
        (("photos", "--forget", "dgo", "--model", "resnet18"), "did you mean 'dog'?"),
        (("photos", "--forget", "200%", "--model", "resnet18"), "wanted a share above 0"),
        (("photos", "--forget", "dog", "--model", "resnet81"), "did you mean 'resnet18'"),
        (("photos", *USUAL, "--weights", "no.safetensors"), "no.safetensors: no such file"),
        (("photos", *USUAL, "--keep", "cifar10"), "--keep: is for CLIP models"),
        (("photos", *USUAL, "-o", "there.yaml"), "there.yaml: exists; remove it"),
        (("photos", *USUAL, "-o", "recipe.txt"), "recipe.txt: wanted a name that ends with .yaml"),
        (
            ("facts.jsonl", "--forget", "persn=Ada", "--model", "stories15m"),
            "did you mean 'person'?",
        ),
        (
            ("facts.jsonl", "--forget", "person=Adda", "--model", "stories15m"),
            "did you mean 'Ada'?",
        ),
        (("facts.jsonl", "--forget", "10%", "--model", "nowhere"), "'nowhere': no such folder"),
        (("broken.jsonl", *USUAL), "broken.jsonl, line 1"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    make_images(tmp_path / "photos", 2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.md").write_text("hello")
    (tmp_path / "one.txt").write_text("hello")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "there.yaml").write_text("seed: 3")
    write_jsonl(tmp_path / "facts.jsonl", FACTS)
    before = sorted(tmp_path.rglob("*"))
    _, err = negmerge_here(tmp_path, "init", *arguments, code=2)
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts) == before


def on_terminal(place: Path, answers: list[str], *arguments: str) -> tuple[int, str]:
    """Run a command on a terminal, and type an answer after each question."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "negmerge.cli", *arguments],
        cwd=place,
        stdin=child,
        stdout=child,
        stderr=child,
        env=os.environ | {"TERM": "dumb"},
    )
    os.close(child)
    seen = ""
    while True:
        try:
            seen += os.read(parent, 4096).decode(errors="replace")
        except OSError:  # the terminal is closed
            break
        if seen.endswith("> ") and answers:
            os.write(parent, f"{answers.pop(0)}\n".encode())
            seen += "…"
    os.close(parent)
    return process.wait(), seen


def test_four_questions_make_a_recipe(tmp_path):
    make_images(tmp_path / "photos", 3)
    answers = ["nowhere", "photos", "", "dgo", "dog", "resnet18"]
    code, seen = on_terminal(tmp_path, answers, "init")
    assert code == 0, seen
    assert "no such file or folder" in seen
    assert "did you mean 'dog'?" in seen
    assert "[images] >" in seen
    assert load_recipe(tmp_path / "photos.yaml").settings.model.name == "resnet18"


def test_an_interrupted_question_writes_nothing(tmp_path):
    make_images(tmp_path / "photos", 3)
    code, seen = on_terminal(tmp_path, ["\x04"], "init", "photos")
    assert code == 130, seen
    assert not [*tmp_path.glob("*.yaml")]
