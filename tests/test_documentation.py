"""The documentation: examples run as pasted, and every path, file and anchor exists."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.text.documents import load_records
from pages import PAGES, ROOT, title
from running import negmerge, python

SOURCE = ROOT / "src" / "negmerge"
EXTEND = (ROOT / "docs" / "extend.md").read_text()


def example(section: str, number: int = 0) -> str:
    """A code block of a section."""
    text = EXTEND.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[number]


def plug_in(place: Path, section: str) -> str:
    path = place / f"{section.replace(' ', '_')}.py"
    path.write_text(example(section))
    return str(path)


def listed(place: Path, what: str, plugin: str) -> dict[str, object]:
    return json.loads(negmerge(place, "list", what, "--json", "--plugin", plugin)[0])


SMALL = [
    "data.limit={train: 200, test: 100}", "train.epochs=1", "pool.grid={epochs: [1, 2]}",
    "search.count=3", "search.limit=null", "search.samples=40", "workers=1",
]  # fmt: skip


EXAMPLES = {
    "A metric": ("metrics", "cross_entropy_forget"),
    "An attack": ("metrics", "mia_threshold"),
    "A test of forgetting": ("evidence", "sure"),
    "A criterion": ("criteria", "keep_nearly_all"),
    "A rival method": ("rivals", "noisy_retain"),
    "A backbone": ("models", "perceptron"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the examples as plug-ins, and a run that uses all of them."""
    place = tmp_path_factory.mktemp("examples")
    changes = [
        *SMALL, "methods=[consensus, {name: noisy_retain}]", "model.name=perceptron",
        "search.criterion=keep_nearly_all",
    ]  # fmt: skip
    given = [text for change in changes for text in ("--set", change)]
    plugins = [text for section in EXAMPLES for text in ("--plugin", plug_in(place, section))]
    negmerge(place, "unlearn", "demo", "--out", "run", *plugins, *given)
    return place


@pytest.mark.parametrize("section", EXAMPLES)
def test_an_example_is_listed(place, section):
    what, name = EXAMPLES[section]
    assert name in listed(place, what, plug_in(place, section))


def test_the_examples_are_used(place):
    scores = json.loads((place / "run" / "scores.json").read_text())
    merged, rival = scores["methods"]
    assert merged["criterion"] == "keep_nearly_all"
    assert rival["method"] == "noisy_retain"
    assert rival["settings"]["epochs"] == 5
    assert "perceptron" in (place / "run" / "recipe.yaml").read_text()
    assert {"retrained", "consensus"} <= scores["evidence"]["tests"]["sure"]["models"].keys()
    page = (place / "run" / "report" / "index.html").read_text()
    for name, label in (
        ("cross_entropy_forget", "forget loss"),
        ("mia_threshold", "MIA, loss"),
    ):
        assert merged[name] is not None
        assert scores["original"][name] is not None
        assert name in (place / "run" / "report" / "tables" / "scores.csv").read_text()
        assert label in page
    gaps = [abs(merged[metric] - scores["retrain"][metric]) for metric in GAP]
    assert merged["avg_gap"] == pytest.approx(sum(gaps) / 4)


GAP = ("acc_retain", "acc_forget", "acc_test", "mia")


def test_the_data_set_is_listed(tmp_path):
    found = listed(tmp_path, "datasets", plug_in(tmp_path, "A data set"))
    assert "blobs" in found


def test_the_scenario_runs_from_recipe_to_page(tmp_path):
    plugin = plug_in(tmp_path, "A scenario")
    (tmp_path / "waves.yaml").write_text(
        "{scenario: waves, title: Waves, pool: {settings: {batch: 16, lr: 0.05}, "
        "grid: {epochs: [2, 4]}}, methods: [consensus, uniform]}"
    )
    negmerge(tmp_path, "unlearn", "waves.yaml", "--out", "run", "--plugin", plugin)
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    for row in scores["methods"]:
        assert row["fit_retain"] >= 0.95 * scores["original"]["fit_retain"] - 1e-9
        assert row["fit_forget"] <= scores["original"]["fit_forget"]
    assert "fit on the forget set" in (tmp_path / "run" / "report" / "index.html").read_text()


def test_the_executor_gives_the_results_of_any_other(tmp_path):
    code = example("An executor") + (
        "\nfrom types import SimpleNamespace"
        "\nsteps = [SimpleNamespace(run=lambda base, advance, k=k: base + k) for k in (1, 2)]"
        "\nfrom negmerge.runs.watch import Unit"
        "\nwatch = Watch([Unit(name=name, size=1) for name in ('one', 'two')])"
        "\nassert list(Backwards(10).run(steps, watch)) == [(1, 12), (0, 11)]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_examples_of_studies(tmp_path):
    """The first one prints what its comments say; the second one is a study of two small runs."""
    numbers, study = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "study.md").read_text(), re.DOTALL
    )
    out, _ = python(tmp_path, "-c", numbers)
    assert out.split() == re.findall(r"  # ([\d.]+)[: ]", numbers) == ["0.71", "23"]
    changes = [*SMALL, "methods=[consensus, uniform]", "data.limit={train: 100, test: 50}"]
    small = f"seeds=range(2), changes={[*changes, 'threads=1']}"
    assert "seeds=range(12)" in study
    out, _ = python(tmp_path, "-c", study.replace("seeds=range(12)", small))
    assert out.startswith("uniform ")
    assert out.endswith("runs/study-demo/index.html\n")


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_link_leads_to_a_file_and_a_heading(page: Path):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def is_path(name: str) -> bool:
    """Whether a text in backticks names a file or folder of the repository.

    Other files are those of runs and models; `runs` is also the folder of the runs themselves.
    """
    first, _, rest = name.partition("/")
    folders = {path.name for path in (*ROOT.iterdir(), *SOURCE.iterdir()) if path.is_dir()}
    if name.endswith(".safetensors"):
        return False
    return name.endswith(".py") or (bool(rest) and first in folders - {"runs"})


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_file_that_a_page_names_exists(page: Path):
    for name in re.findall(r"`([\w./-]+)`", page.read_text()):
        found = [folder for folder in (ROOT, SOURCE) if (folder / name).exists()]
        assert found or not is_path(name), name


def test_a_path_that_does_not_exist_would_be_found():
    assert is_path("merging/kernels.py")
    assert is_path("src/negmerge/none")
    assert not is_path("scores.json")
    assert not is_path("runs/demo")


def test_records_and_recipe_of_the_page_about_texts_fit_together(tmp_path: Path):
    text = (ROOT / "docs" / "text.md").read_text()
    blocks = [
        re.sub(r"^    ", "", block, flags=re.MULTILINE)
        for block in re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    ]
    lines, recipe = blocks[0], Recipe.model_validate(yaml.safe_load(blocks[1]))
    (tmp_path / "facts.jsonl").write_text(lines)
    changes = re.findall(r"--set (?:'(.+?)'|(\S+))", text)
    short = load_recipe("text_records", [one or other for one, other in changes])
    for data in (recipe.settings.data.records, short.settings.data.records):
        records = load_records(data.model_copy(update={"name": str(tmp_path / data.name)}))
        assert [record.prompt is None for record in records] == [False, True]
        assert [record.values["author"] for record in records] == ["A", "B"]
    assert short.settings.split.forget == recipe.settings.split.forget
    assert short.settings.split.holdout is None


def test_the_page_of_recipe_fields_is_that_of_the_source():
    script = runpy.run_path(str(ROOT / "scripts" / "recipe_page.py"))
    assert script["page"]() == script["PAGE"].read_text(), "run python scripts/recipe_page.py"
