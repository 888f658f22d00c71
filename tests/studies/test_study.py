"""`negmerge study` on a toy: from the recipe to the page, repeated, extended, interrupted."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import time
from pathlib import Path
from statistics import mean
from subprocess import Popen, TimeoutExpired
from typing import Any

import pytest

import negmerge as nm
from browser import chromium
from negmerge.errors import NegMergeError
from negmerge.studies.directory import StudyDirectory
from negmerge.support.files import lock_folder
from prestarted import Process
from running import ended, negmerge, start
from toys import SMALL, toy_scenario

TOY = str(Path(__file__).parents[1] / "toy.py")
RECIPE = """
title: "Numbers <are> [/b] forgotten & compared"
scenario: numbers
records: 40
train: {epochs: 6, batch: 16, lr: 0.02}
pool: {settings: {batch: 16, lr: 0.02}, grid: {epochs: [1, 2]}}
methods: [consensus, uniform, ties]
search: {count: 3}
save_every: 0
workers: 1
"""
EXPORTS = ("csv", "md", "tex")
TABLES = {
    f"{name}.{end}" for name in ("means", "differences", "seeds", "evidence") for end in EXPORTS
}


def make(place: Path, seeds: str, *more: str, code: int = 0) -> tuple[str, str]:
    return ended(begin(place, seeds, *more), code)


def begin(place: Path, seeds: str, *more: str) -> Popen[str] | Process:
    """Begin a study; all tests share the compiled loops of merges."""
    (place / "recipe.yaml").write_text(RECIPE)
    command = ["study", "recipe.yaml", "--seeds", *seeds.split(), "--out", "study", *more]
    cache = str(place.parent / "cache of studies")
    return start(place, *command, "--plugin", TOY, NEGMERGE_CACHE=cache)


def contents(study: Path) -> dict[str, bytes]:
    """The page and the tables."""
    files = [study / "index.html", *sorted((study / "tables").iterdir())]
    return {path.name: path.read_bytes() for path in files}


def rows(study: Path, table: str) -> list[dict[str, str]]:
    with (study / "tables" / f"{table}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A study of three seeds, which the tests only read, and what the command printed."""
    place = tmp_path_factory.mktemp("study")
    out, err = make(place, "0-2")
    return place / "study", out, err


@pytest.fixture
def copy(made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[0], tmp_path / "study"))


def test_the_folder_and_what_the_command_says(made):
    study, out, err = made
    assert {path.name for path in study.glob("seed*/*.json")} >= {"0.json", "1.json", "2.json"}
    assert {*contents(study)} == {"index.html", *TABLES}
    lines = [line for line in err.splitlines() if "seed" in line]
    assert lines == [f"note: seed {k}: run {k + 1} of 3" for k in range(3)]
    assert "Numbers <are> [/b] forgotten & compared: 3 seeds (0–2)" in out
    assert out.endswith("page: study/index.html\n")
    assert "nan" not in out.lower()
    for seed in range(3):
        record = json.loads((study / "seeds" / f"{seed}.json").read_text())
        assert record["result"] == json.loads((study / f"seed-{seed}/scores.json").read_text())
        assert record["seed"] == record["result"]["seed"] == seed


def test_the_tables_are_those_of_the_scores(made):
    study, _, _ = made
    scores = [json.loads((study / f"seed-{k}/scores.json").read_text()) for k in range(3)]
    found = {(row["metric"], row["method"]): row for row in rows(study, "means")}
    for metric in ("error_forget", "error_retain", "avg_gap", "scale", "sparsity", "agreement"):
        for place, title in enumerate(("consensus", "uniform", "ties")):
            values = [one["methods"][place][metric] for one in scores]
            assert float(found[metric, title]["mean"]) == pytest.approx(mean(values))
            assert found[metric, title]["n"] == "3"
    assert float(found["error_forget", "retrained"]["mean"]) == pytest.approx(
        mean(one["retrain"]["error_forget"] for one in scores)
    )
    for row in rows(study, "differences"):
        assert row["against"] == "consensus"
        if row["metric"] == "error_forget" and row["method"] == "ties":
            # The aim is the error of the retrained model, though higher errors are forgetting.
            aims = [one["retrain"]["error_forget"] for one in scores]
            ours, theirs = (
                [
                    abs(one["methods"][k]["error_forget"] - a)
                    for one, a in zip(scores, aims, strict=True)
                ]
                for k in (2, 0)
            )
            pairs = [a - b for a, b in zip(ours, theirs, strict=True)]
            assert float(row["difference"]) == pytest.approx(mean(pairs))
            assert row["better_seeds"] == str(sum(pair < 0 for pair in pairs))
    assert len(rows(study, "seeds")) == 3 * 5
    for table in ("means", "differences", "seeds"):
        markdown = (study / "tables" / f"{table}.md").read_text().splitlines()
        assert "bottomrule" in (study / "tables" / f"{table}.tex").read_text()
        assert len(markdown) > 4


def test_the_page_is_whole_and_needs_nothing(made):
    page = contents(made[0])["index.html"].decode()
    assert "Numbers &lt;are&gt; [/b] forgotten &amp; compared" in page
    assert "Compared with consensus in 3 seeds (0–2): uniform and ties." in page
    drawn = re.findall(r'aria-label="(Paired differences from consensus: [^"]+)"', page)
    assert [title.rpartition(": ")[2] for title in drawn] == [
        "squared error on the forget set",
        "squared error on the retain set",
        "Avg. Gap to retraining",
        "mean gap to retraining at equal forgetting",
        "squared error on the retain set, matched",
    ]
    assert page.count("better →") == 5
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert "http" not in re.sub(r"https?://www\.w3\.org\S+", "", page)
    assert not re.search(r"\bnan\b", re.sub(r"base64,[^\"]+", "", page), re.IGNORECASE)
    assert "negmerge study recipe.yaml --seeds 0,1,2 --against consensus --out DIR" in page


def test_a_finished_study_is_only_read_again(copy: Path):
    before = contents(copy)
    shutil.rmtree(copy / "seed-1")
    shutil.rmtree(copy / "tables")
    out, err = make(copy.parent, "0,1,2")
    assert "seed" not in err
    assert "3 seeds (0–2)" in out
    assert contents(copy) == before
    assert not (copy / "seed-1").exists()


def test_seeds_are_added_and_another_method_compared_with(copy: Path):
    kept = {path: path.stat().st_mtime_ns for path in copy.glob("seed-*/*.safetensors")}
    out, err = make(copy.parent, "0 1 2 3", "--against", "ties", "--json")
    assert [json.loads(line)["text"] for line in err.splitlines() if "note" in line] == [
        "seed 3: run 4 of 4"
    ]
    told = json.loads(out)
    assert told["event"] == "result"
    assert (told["seeds"], told["against"]) == ([0, 1, 2, 3], "ties")
    assert {row["method"] for row in told["differences"]} == {"consensus", "uniform"}
    found = [row for row in told["differences"] if not row["metric"].startswith("matched")]
    assert {row["n"] for row in found} == {4}  # a level may not be reached in some seeds
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())
    assert "4 seeds (0–3)" in contents(copy)["index.html"].decode()


def test_it_goes_on_after_a_kill_and_ends_with_the_same_study(made, tmp_path: Path):
    process = begin(tmp_path, "0-2")
    while process.poll() is None and not list(tmp_path.glob("study/seed-1/pool/*/*.safetensors")):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / "study/seeds/0.json").exists()
    assert not (tmp_path / "study/seeds/1.json").exists()
    assert not (tmp_path / "study/index.html").exists()
    first = (tmp_path / "study/seed-0/manifest.json").stat().st_mtime_ns
    _, err = make(tmp_path, "0-2")
    assert "seed 0" not in err
    assert "seed 1: run 2 of 3" in err
    assert (tmp_path / "study/seed-0/manifest.json").stat().st_mtime_ns == first
    assert contents(tmp_path / "study") == contents(made[0])


@pytest.mark.parametrize(
    ("seeds", "more", "told"),
    [
        ("0-x", [], "--seeds '0-x': wanted whole numbers or ranges, such as 0-11 or 0,3,5"),
        ("3-1", [], "--seeds '3-1': wanted whole numbers"),
        ("0,,1", [], "--seeds '': wanted whole numbers"),
        ("\u0663", [], "wanted whole numbers"),  # a digit of another script
        ("0-999999999", [], "--seeds '0-999999999': wanted whole numbers"),
        ("0-2,1", [], "--seeds: got 0 1 2 1, wanted different whole numbers from 0"),
        ("0-2", ["--against", "unifrom"], "unknown method 'unifrom'; did you mean 'uniform'?"),
        ("0-2", ["--set", "methods=[ties]"], "methods: got ties, wanted at least two to compare"),
        ("0-2", ["--set", "seed=3"], "--set seed=3: the seeds of a study are those of --seeds"),
        ("0-2", ["--set", "search.count=4"], "the study of another recipe, which differs in "
         "search.count; name another folder with --out"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_and_change_nothing(made, seeds: str, more: list[str], told: str):
    before = contents(made[0])
    _, err = make(made[0].parent, seeds, *more, code=2)
    assert err.startswith("error: ")
    assert told in err
    assert err.count("\n") == 1
    assert contents(made[0]) == before


def test_a_recipe_that_cannot_run_leaves_nothing_behind(tmp_path: Path):
    _, err = make(tmp_path, "0-2", "--set", "methods=[consensus, salun]", code=2)
    assert "scenario numbers has no rivals" in err
    assert not (tmp_path / "study").exists()


def test_what_is_no_study_is_refused(copy: Path):
    record = copy / "seeds" / "1.json"
    record.write_text(record.read_text().replace('"seed": 1', '"seed": 2'))
    _, err = make(copy.parent, "0-2", code=2)
    assert "1.json: is damaged: it is of seed 2; remove it and repeat the command" in err
    record.write_text("{}")
    _, err = make(copy.parent, "0-2", code=2)
    assert "1.json: is damaged: format: Field required" in err
    record.write_text('{"seed": NaN}')
    _, err = make(copy.parent, "0-2", code=2)
    assert "1.json: NaN is not JSON; remove it and repeat the command" in err
    record.unlink()
    record.symlink_to(copy / "seeds" / "0.json")
    _, err = make(copy.parent, "0-2", code=2)
    assert "1.json: is neither a file nor a folder of its own" in err
    (copy / "seed-0").rename(copy.parent / "run")
    command = ["study", "recipe.yaml", "--seeds", "0,1", "--out", "run", "--plugin", TOY]
    _, err = negmerge(copy.parent, *command, code=2)
    assert err == "error: run: is a run; name another folder with --out\n"


def findings(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return result["evidence"]["tests"]["precision"]["models"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda result: result["methods"].pop(), "it has the methods 'consensus, uniform', wanted "
         "consensus, ties, uniform"),
        (lambda result: result["methods"][0].update(method="<b>"), "it has the methods '<b>, ties"),
        (lambda result: result["methods"][0].update(error_forget=1e308), "is 1e+308, wanted"),
        (lambda result: result["methods"][0].update({"=cmd()": 1.0}), "'=cmd()' is no name of a "
         "number"),
        (lambda result: result["original"].update({"a\nb": 1.0}), "is no name of a number"),
        (lambda result: result["matching"]["retrained"].update(error_retain=-1e308), "is -1e+308"),
        (lambda result: findings(result)["retrained"]["change_int4"].update(value=1e308),
         "'precision.change_int4' is 1e+308, wanted"),
    ],
)  # fmt: skip
def test_a_result_of_other_methods_or_numbers_is_refused(copy: Path, change, told: str):
    for path in (copy / "seeds/1.json", copy / "seed-1/scores.json"):
        tree = json.loads(path.read_text())
        change(tree.get("result", tree))
        path.write_text(json.dumps(tree))
    before = contents(copy)
    _, err = make(copy.parent, "0-2", code=2)
    assert "1.json: is damaged: " in err
    assert told in err
    assert err.count("\n") == 1
    (copy / "seeds/1.json").unlink()
    _, err = make(copy.parent, "0-2", code=2)
    assert "scores.json: is damaged: " in err
    assert told in err
    assert contents(copy) == before


def test_page_and_tables_are_of_one_study_if_two_end_at_once(copy: Path):
    for path in (copy / "tables").iterdir():
        path.unlink()
    (copy / "index.html").unlink()
    with lock_folder(copy):
        process = begin(copy.parent, "0-2")
        with pytest.raises(TimeoutExpired):
            process.wait(timeout=4)
        assert not list((copy / "tables").iterdir())
    ended(process, 0)
    assert {*contents(copy)} == {"index.html", *TABLES}


def test_of_two_recipes_that_begin_in_one_folder_at_once_one_is_refused(tmp_path: Path):
    first, second = StudyDirectory(tmp_path / "study"), StudyDirectory(tmp_path / "study")
    recipes = [nm.Recipe(methods=["consensus", name]) for name in ("uniform", "ties")]
    for folder, recipe in zip((first, second), recipes, strict=True):
        folder.check(recipe)  # both find nothing there
    first.claim(recipes[0])
    with pytest.raises(NegMergeError, match="holds the study of another recipe, which differs in"):
        second.claim(recipes[1])


def test_results_that_do_not_change_keep_the_study(copy: Path):
    """The title, the number of processes and how often to save are not part of a study."""
    changes = ["title=Another", "workers=2", "save_every=9", "feed_workers=0"]
    _, err = make(copy.parent, "0-2", *(word for one in changes for word in ("--set", one)))
    assert "seed" not in err
    assert "Another" in contents(copy)["index.html"].decode()


def test_from_python_with_models_of_other_seeds(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(tmp_path.parent / "cache of studies"))
    monkeypatch.chdir(tmp_path)
    recipe = SMALL | {"methods": ["consensus", "uniform"], "workers": 1}
    with toy_scenario():
        found = nm.study(nm.Recipe.model_validate(recipe), seeds=range(2))
        assert found.folder == Path("runs/study-recipe")
        assert found.page.is_file()
        assert found.seeds == [0, 1]
        assert [one.method for one in found.of("error_forget")] == ["uniform"]
        assert found.of("error_forget")[0].test.mean.n == 2
        with pytest.raises(NegMergeError, match="changes: need the name or path of a recipe"):
            nm.study(nm.Recipe.model_validate(recipe), [0], changes=["seed=1"])
    folder = StudyDirectory(found.folder)
    assert folder.run(1).reuse_from == [found.folder / "seed-0"]
    (found.folder / "seed-0" / "manifest.json").unlink()
    assert folder.run(1).reuse_from == []  # of a run that is not finished nothing is taken


def test_the_page_in_a_browser(made):
    with chromium() as browser:
        browser.set_window_size(1280, 1600)
        browser.get((made[0] / "index.html").as_uri())
        script = "return [...document.querySelectorAll('#glance svg.chart .named')].length"
        # For each chart and method the seeds and the mean; not all seeds reach equal forgetting.
        drawn = {"error_forget", "error_retain", "avg_gap"}
        drawn |= {"matched.matched_gap", "matched.error_retain"}
        marked = [row for row in rows(made[0], "differences") if row["metric"] in drawn]
        assert {row["metric"] for row in marked} == drawn
        assert browser.execute_script(script) == sum(int(row["n"]) + 1 for row in marked)
        heads = browser.find_elements("css selector", "#t-paired th button")
        heads[1].click()
        methods = browser.find_elements("css selector", "#t-paired tbody tr td:nth-child(2)")
        assert [cell.text for cell in methods] == ["ties"] * 5 + ["uniform"] * 5
        wide = "return document.documentElement.scrollWidth <= innerWidth"
        assert browser.execute_script(wide)
        browser.set_window_size(400, 900)
        assert browser.execute_script(wide)
        assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
