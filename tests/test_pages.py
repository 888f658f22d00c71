"""Every block of code in the documentation runs, or is at least a command that exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from fnmatch import translate
from pathlib import Path

import numpy as np
import pytest
import yaml
from cyclopts import CycloptsError
from safetensors.numpy import save_file

from negmerge.cli.verbs import app
from negmerge.runs.recipe import Recipe
from pages import DOCS, PAGES, ROOT, blocks, commands, title, with_smaller_runs
from running import negmerge_here, python

OWN_TESTS = {"docs/extend.md", "docs/study.md", "docs/text.md"}
"""Pages whose Python has tests of its own, in test_documentation.py."""
SMALL = [
    "data.limit={train: 200, test: 100}", "train.epochs=1", "pool.grid={epochs: [1, 2]}",
    "methods=[consensus]", "search.evaluations=4", "search.samples=40", "workers=1", "threads=1",
]  # fmt: skip
CHANGES = {
    "docs/tutorials/remove-data.md": SMALL,
    "docs/howto/own-data.md": ["search.evaluations=4", "workers=1", "threads=1"],
}
"""What makes the runs of a page small enough for a test."""


def run_blocks(page: Path, place: Path) -> list[str]:
    """Run the Python of a page in one process, its shell in another, in order; what they say."""
    variables = os.environ | with_smaller_runs(place, CHANGES.get(title(page), []))
    work, said, code = place / "work", [], ""
    work.mkdir()
    for language, text in blocks(page, "python", "yaml", "sh"):
        if language == "yaml":
            (work / "mine.yaml").write_text(text)
        elif language == "sh":
            command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(command, cwd=work, env=variables, text=True, capture_output=True)
            assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
            said.append(done.stdout)
        else:  # a block may use the names of the blocks before it, which made their files already
            kept = code if re.search(r"^import|^from", text) is None else ""
            if "fine_tune(" in text and "def fine_tune" not in text:
                kept = code
            said.append(python(work, "-c", kept + text, OMP_NUM_THREADS="1")[0])
            code = kept + text
    return said


LONG = {
    "docs/tutorials/remove-data.md",
    "docs/tutorials/paper-tables.md",
    "docs/howto/own-data.md",
    "docs/howto/trainer.md",
}
"""Pages whose blocks take longer; `make slow` runs them."""
RUN = [
    pytest.param(page, id=title(page), marks=[pytest.mark.slow] if title(page) in LONG else [])
    for page in PAGES
    if blocks(page, "python", "sh") and title(page) not in OWN_TESTS
]


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path):
    said = run_blocks(page, tmp_path)
    assert said
    if page.name == "README.md":  # prints what the page says that it prints
        shown = re.findall(r"^    (\w+ +to forget.*)$", page.read_text(), re.MULTILINE)
        numbers = [[*map(float, re.findall(r"[\d.]+", line))] for line in said[0].splitlines()]
        for line, found in zip(shown, numbers, strict=True):
            assert found == pytest.approx([*map(float, re.findall(r"[\d.]+", line))], abs=5)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_recipes_on_a_page_are_valid(page: Path):
    for _, text in blocks(page, "yaml"):
        Recipe.model_validate(yaml.safe_load(text))


TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
)


def mistake(words: list[str]) -> str:
    """What is wrong with a command; "" if its verb and options exist."""
    program, *arguments = words
    while "--plugin" in arguments:  # of every verb; read before the verb is
        at = arguments.index("--plugin")
        del arguments[at : at + 2]
    if program == "make":
        return "" if arguments[0] in TARGETS else f"no target {arguments[0]}"
    if program == "pip":
        named = {name for word in arguments for name in re.findall(r"\[([\w,]+)\]", word)}
        unknown = {one for names in named for one in names.split(",")} - EXTRAS
        return f"no extras {unknown}" if unknown else ""
    try:
        app.parse_args(arguments, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_command_exists(page: Path):
    if title(page) == "docs/reference/command-line.md":
        return  # is made from the verbs
    for words in commands(page):
        assert not mistake(words), words


@pytest.mark.parametrize(
    "line", ["negmerge mergge a b", "negmerge merge a b --oout c", "make teest", "pip install .[q]"]
)
def test_a_command_that_does_not_exist_would_be_found(line: str):
    assert mistake(line.split())


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Path:
    """The folder in which the commands of the page of errors run."""
    place = tmp_path_factory.mktemp("errors")
    rng = np.random.default_rng(0)

    def weights(rows: int = 4) -> dict[str, np.ndarray]:
        shape = (rows, 4)
        return {name: rng.standard_normal(shape, np.float32) for name in ("a.weight", "b.weight")}

    base = weights()
    save_file(base, place / "base.safetensors")
    (place / "pool").mkdir()
    for k in range(3):
        change = weights()
        model = {name: base[name] + np.float32(0.1) * change[name] for name in base}
        save_file(model, place / "pool" / f"{k}.safetensors")
    save_file(weights(3), place / "other.safetensors")
    save_file({f"module.{name}": v for name, v in base.items()}, place / "wrapped.safetensors")
    save_file({"a.weight": base["a.weight"]}, place / "part.safetensors")
    wrong = {name: value.copy() for name, value in base.items()}
    wrong["a.weight"][0, 0] = np.nan
    save_file(wrong, place / "nan.safetensors")
    (place / "cut.safetensors").write_bytes((place / "base.safetensors").read_bytes()[:100])
    (place / "copy.safetensors").write_bytes((place / "pool" / "0.safetensors").read_bytes())
    (place / "model.pt").write_bytes(b"PK\x03\x04")
    (place / "typo.yaml").write_text("{sed: 1}\n")
    negmerge_here(
        place, "merge", "base.safetensors", *(f"pool/{k}.safetensors" for k in range(3)),
        "-o", "patch.safetensors",
    )  # fmt: skip
    return place


ERRORS = [text for _, text in blocks(DOCS / "reference" / "errors.md", "console")]


@pytest.mark.parametrize("block", ERRORS, ids=lambda block: block.partition("\n")[0])
def test_an_error_is_the_one_on_its_page(damaged: Path, block: str):
    command, wanted = block.rstrip("\n").split("\n")
    _, said = negmerge_here(damaged, *command.split()[2:], code=2)
    pattern = translate(wanted.replace("[", "[[]").replace("?", "[?]").replace("…", "*"))
    assert re.fullmatch(pattern, said.rstrip("\n")), said


def test_pages_made_from_the_source_are_those_of_the_source():
    # In a process of its own: cyclopts writes into a usage how Python was started.
    command = [sys.executable, str(ROOT / "scripts" / "reference_pages.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_on_the_page_of_python():
    import negmerge

    listed = re.findall(r"^::: negmerge\.(\w+)$", (DOCS / "reference/python.md").read_text(), re.M)
    assert sorted(listed) == sorted(negmerge.__all__)


def test_every_extra_is_on_the_page_of_installing():
    text = (DOCS / "tutorials" / "install.md").read_text()
    for name in EXTRAS - {"test", "dev", "docs"}:
        assert f"| `{name}` |" in text, name


def test_badges_say_what_is_true():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "3.11 or newer" in (DOCS / "figures" / "badge-python.svg").read_text()
    assert project["license"] in (DOCS / "figures" / "badge-licence.svg").read_text()


def test_pictures_are_small():
    for picture in (DOCS / "figures").glob("*.png"):
        assert picture.stat().st_size < 150_000, picture


def test_every_page_is_in_the_navigation():
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml without the Python object of one extension."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    configuration = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)  # noqa: S506

    def files(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        parts = entry.values() if isinstance(entry, dict) else entry
        return {name for part in parts for name in files(part)}

    assert files(configuration["nav"]) == {str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md")}
