"""The page of a run: complete, repeatable, honest about what is missing; in a real browser."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib import rc_context

import negmerge as nm
from browser import SCHEMES, WIDTHS, barriers, chromium, media, screen, too_wide
from negmerge.cli import main
from negmerge.errors import NegMergeError
from negmerge.evaluation.criteria import criteria
from negmerge.evaluation.metrics import OF_EVIDENCE, TABLES, metric_of
from negmerge.reports import ranking, summary
from negmerge.reports.charts import Chart
from negmerge.reports.page_data import PageData
from negmerge.reports.questions import questions
from negmerge.reports.styles import COLOURS, SYMBOLS, styles_of
from negmerge.runs.recipe import check_recipe, load_recipe
from negmerge.runs.result import RunResult
from negmerge.runs.store import Run
from running import negmerge

TINY = """
title: "A tiny run with <tags>, [/b] & [more]"
data: {name: fashion_small, limit: {train: 300, test: 100}}
split: {forget: {fraction: 0.2}, validation: 0.1}
train: {epochs: 8, batch: 32, lr: 0.1, schedule: cosine, augment: {crop: 0, flip: false}}
pool:
  settings: {batch: 16, lr: 0.05, augment: {crop: 0, flip: false}}
  grid: {epochs: [2, 3], label_smoothing: [0.0, 0.1]}
methods:
  - consensus
  - uniform
  - {name: consensus, options: {quorum: 0.7}, label: most}
  - {name: finetune, options: {epochs: 1}}
search: {stop: 1.0, count: 5, samples: 60}
workers: 1
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """One whole run, which the tests only read."""
    place = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEGMERGE_CACHE", str(place / "cache"))
        run = nm.run(check_recipe(yaml.safe_load(TINY), "tiny"), place / "run")
    nm.report(run)
    return run.folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def page_of(run: Path) -> str:
    return nm.report(run).read_text(encoding="utf-8")


def words(page: str) -> str:
    """What a reader sees."""
    page = re.sub(r"<(style|script|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def scores_of(run: Path) -> dict:
    return json.loads((run / "scores.json").read_text())


def material(run: Path, scores: dict) -> PageData:
    """What the page would be made from if these were the scores."""
    result = RunResult.model_validate(scores)
    return PageData(Run(run), load_recipe(run / "recipe.yaml"), result)


def test_the_page_is_whole_and_needs_nothing(finished: Path):
    page = Run(finished).page.read_text(encoding="utf-8")
    assert "Missing from this page" not in page
    assert "A tiny run with &lt;tags&gt;, [/b] &amp; [more]" in page
    parts = re.findall(r'<section id="([\w-]+)".*?</section>', page, flags=re.DOTALL)
    drawn = re.findall(r'<section id="([\w-]+)"(?:(?!</section>).)*<svg', page, flags=re.DOTALL)
    assert {
        "trade-off", "pool", "sweeps", "prefixes", "by-depth", "by-component", "dissent", "attack",
    } <= set(drawn)  # fmt: skip
    assert {"scores", *drawn, "gradcam", "repeat"} <= set(parts)
    assert "<img " in page
    assert not re.search(r'(src|href)="(?!#|data:|figures/)', page)
    assert "http" not in re.sub(r"https?://www\.w3\.org\S+", "", page)


def test_every_number_of_the_table_is_in_the_scores(finished: Path):
    scores, frame = scores_of(finished), pd.read_csv(finished / "report/tables/scores.csv")
    rows = [scores["original"], scores["retrain"], *scores["methods"]]
    for metric in ("acc_retain", "acc_forget", "acc_test", "mia", "avg_gap"):
        assert sorted(frame[metric]) == sorted(row[metric] for row in rows)
        for row in rows:
            assert f"{row[metric]:.2f}" in words(Run(finished).page.read_text(encoding="utf-8"))
    members = pd.read_csv(finished / "report/tables/members.csv")
    assert list(members["acc_forget"]) == [row["acc_forget"] for row in scores["pool"]]
    assert set(members["scale"]) <= {0.0, 1.0}  # the coarse grid: every fourth of five


def test_the_terminal_shows_the_title_as_it_is(finished: Path, capsys):
    main(["inspect", str(finished)])
    assert "A tiny run with <tags>, [/b] & [more]" in capsys.readouterr().out


def test_exports_say_the_same_thing_three_times(finished: Path):
    for table in (finished / "report/tables").glob("*.csv"):
        assert table.stem in {*TABLES, "attack"} or table.stem.startswith(OF_EVIDENCE)
        rows = pd.read_csv(table)
        markdown = table.with_suffix(".md").read_text().splitlines()
        latex = table.with_suffix(".tex").read_text()
        assert len(markdown) == len(rows) + 2
        assert latex.count(r"\\") == len(rows) + 1
        assert all(rule in latex for rule in ("toprule", "midrule", "bottomrule"))
    page = Run(finished).page.read_text(encoding="utf-8")
    link = re.search(r'download="scores.csv" href="data:[^,]*base64,([^"]+)"', page)
    assert link
    assert base64.b64decode(link[1]) == (finished / "report/tables/scores.csv").read_bytes()


def test_every_figure_is_exported_with_a_legend(finished: Path):
    page, figures = Run(finished).page.read_text(encoding="utf-8"), finished / "report/figures"
    linked = re.findall(r'<a href="figures/([\w-]+\.(?:svg|pdf))" aria-label="[^"]+">', page)
    assert sorted(linked) == sorted(path.name for path in figures.iterdir())
    assert len(linked) == 2 * page.count('<svg class="chart"')
    for path in figures.glob("*.svg"):
        text, pdf = path.read_text(), path.with_suffix(".pdf").read_bytes()
        assert text.startswith("<?xml")
        assert not re.search(r"#0[12]0[0-3]..\b|var\(--", text)  # colours as on a light page
        assert pdf.startswith(b"%PDF-")
        assert pdf.rstrip().endswith(b"%%EOF")
        assert b"CreationDate" not in pdf
    drawn = (figures / "trade-off.svg").read_text()
    for name in ("NegMerge", "Uniform Merge", "most", "Finetune", "members", "retrained"):
        assert f">{name}</text>" in drawn, name
    assert ">random signs</text>" in (figures / "prefixes.svg").read_text()


def test_a_pdf_has_the_colours_of_a_light_page():
    chart = Chart("one", "One", "x", "y")
    chart.point(1, 2, "consensus", "a point")
    chart.target_line(1.5, "aim")
    before = chart.page_svg()
    with rc_context({"pdf.compression": 0}):
        text = chart.file_pdf().decode("latin-1")
    found = {tuple(map(float, one)) for one in re.findall(r"([\d.]+) ([\d.]+) ([\d.]+) rg\b", text)}
    red, green, blue = (int(COLOURS["blue"][0][k : k + 2], 16) / 255 for k in (1, 3, 5))
    assert any(np.allclose(one, (red, green, blue), atol=1e-6) for one in found)
    placeholders = [one for one in found if max(one) < 0.05 and max(one) > 0]
    assert not placeholders
    assert chart.page_svg() == before  # the placeholders are back
    assert chart.file_pdf() == chart.file_pdf()


def test_a_pdf_is_drawn_again_only_if_its_figure_changed(copy: Path):
    figures = copy / "report/figures"
    pdfs = {path: path.read_bytes() for path in figures.glob("*.pdf")}
    (figures / "pool.txt").write_text("mine")
    (figures / "dissent.svg").write_text("changed")
    (figures / "prefixes.pdf").write_bytes(b"changed")
    nm.report(copy)
    assert pdfs == {path: path.read_bytes() for path in figures.glob("*.pdf")}
    assert "changed" not in (figures / "dissent.svg").read_text()
    assert (figures / "pool.txt").exists()
    Run(copy).reopen()
    assert [path.name for path in figures.iterdir()] == ["pool.txt"]


def test_the_same_run_gives_the_same_bytes_and_stays_sealed(copy: Path):
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    out, _ = negmerge(copy.parent, "report", "copy")
    assert out == "page: copy/report/index.html\n"
    assert before == {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    for name in ("tables", "figures"):
        shutil.rmtree(copy / "report" / name)
    (copy / "report/index.html").unlink()
    nm.report(copy)
    assert before == {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    Run(copy).verify()


def test_a_page_of_the_unfinished_run_is_made_again(copy: Path):
    run, content = Run(copy), json.loads((copy / "manifest.json").read_text())
    assert run.has_page
    del content["files"]["report/index.html"]
    (copy / "manifest.json").write_text(json.dumps(content))
    assert not run.has_page
    nm.report(copy)
    assert run.has_page


def test_pages_made_at_once_wait_for_each_other(copy: Path):
    with ThreadPoolExecutor(2) as threads:
        assert set(threads.map(nm.report, [copy, copy])) == {Run(copy).page}
    Run(copy).verify()


def test_a_seal_is_of_the_recipe_it_was_made_with(copy: Path):
    run, problem = Run(copy), json.loads((copy / "manifest.json").read_text())["problem"]
    assert run.finished_with(problem)
    assert not run.finished_with("another problem")
    run.recipe.write_text(run.recipe.read_text() + "\n")
    assert not run.finished_with(problem)


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("report/data/attack.csv", "Membership inference: this run did not record"),
        ("report/data/gradcam.json", "Where the models look: this run did not draw it"),
        ("report/data/gradcam-1-original.png", "gradcam-1-original.png: no such file"),
        ("sweeps/uniform.csv", "How λ was chosen: sweeps/uniform.csv is missing"),
        ("patches/most.safetensors", "Sparsity by depth: patches/most.safetensors is missing"),
        ("manifest.json", "The scores: the run is not finished; it has base, retrain, 4 of 4"),
        ("scores.json", "scores.json: no such file"),
    ],
)
def test_what_is_lost_is_said(copy: Path, lost: str, told: str):
    (copy / lost).unlink()
    page = page_of(copy)
    assert told in words(page)
    assert "How to repeat the run" in page


@pytest.mark.parametrize(
    "broken",
    ["scores.json", "sweeps/uniform.csv", "patches/consensus.safetensors", "recipe.yaml",
     "manifest.json", "report/data/attack.csv", "report/data/gradcam.json"],
)  # fmt: skip
@pytest.mark.parametrize("content", [b"{}", b"\x00\xff\xfe nonsense"])
def test_what_is_broken_is_said_and_the_rest_is_there(copy: Path, broken: str, content: bytes):
    (copy / broken).write_bytes(content)
    page = page_of(copy)
    if not (broken == "recipe.yaml" and content == b"{}"):  # which is the demo's recipe
        assert "Missing from this page" in page
    assert "How to repeat the run" in page


def damaged(path: Path, change: object) -> None:
    """A file of a run with its bytes, or one of its values at a dotted place, replaced."""
    if isinstance(change, bytes):
        path.write_bytes(change)
        return
    place, value = change  # pyright: ignore
    tree = at = json.loads(path.read_text())
    *way, last = place.split("/")
    for key in way:
        at = at[int(key) if isinstance(at, list) else key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    path.write_text(json.dumps(tree))


@pytest.mark.parametrize("change", [b"", b"[]", b"{}", b"\xff", b"[" * 5000, b'{"a": 1, "a": 2}'])
@pytest.mark.parametrize("name", ["scores.json", "manifest.json"])
def test_commands_tell_of_a_broken_file(copy: Path, name: str, change: bytes, capsys):
    damaged(copy / name, change)
    told_in_one_line("inspect" if name == "scores.json" else "verify", copy, name, capsys)


@pytest.mark.parametrize(
    ("name", "verb", "change", "told"),
    [
        ("scores.json", "inspect", ("methods", []), "methods"),
        ("scores.json", "inspect", ("methods", "x"), "methods"),
        ("scores.json", "inspect", ("methods/0/seconds", None), "methods.0.seconds"),
        ("scores.json", "inspect", ("methods/0/seconds", "long"), "methods.0.seconds"),
        ("scores.json", "inspect", ("methods/1/scale", [1]), "methods.1.scale"),
        ("scores.json", "inspect", ("original/intervals", {"mia": [1]}), "original.intervals.mia"),
        ("scores.json", "inspect", ("original/seconds", 10**400), "40 digits"),
        ("scores.json", "inspect", ("splits/chosen_on", "x"), "chosen_on"),
        ("scores.json", "inspect", ("title", 5), "title"),
        ("scores.json", "inspect", ("title", "\ud800"), "surrogate"),
        ("scores.json", "inspect", ("warnings", [5]), "warnings.0"),
        ("manifest.json", "verify", ("files", []), "files"),
        ("manifest.json", "verify", ("files/recipe.yaml", []), "files.recipe.yaml"),
        ("manifest.json", "verify", ("files/recipe.yaml/sha256", 5), "files.recipe.yaml.sha256"),
        ("manifest.json", "verify", ("files/a\0b", {"bytes": 1, "sha256": "0" * 64}), "files"),
        ("manifest.json", "verify", ("versions", None), "versions"),
        ("manifest.json", "verify", ("result", None), "result"),
        ("manifest.json", "verify", ("format", "x"), "format"),
    ],
)
def test_commands_tell_what_is_damaged(copy: Path, name, verb, change, told, capsys):
    damaged(copy / name, change)
    assert told in told_in_one_line(verb, copy, name, capsys)


@pytest.mark.parametrize("name", ["x" * 300, "x/" * 3000])
def test_a_manifest_with_a_name_that_no_file_has(copy: Path, name: str, capsys):
    tree = json.loads((copy / "manifest.json").read_text())
    tree["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    (copy / "manifest.json").write_text(json.dumps(tree))
    told_in_one_line("verify", copy, "", capsys)


@pytest.mark.parametrize("name", ["scores.json", "manifest.json", "recipe.yaml"])
@pytest.mark.parametrize("verb", ["inspect", "verify", "report"])
def test_a_pipe_in_place_of_a_file_does_not_hang(copy: Path, name: str, verb: str, capsys):
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with contextlib.suppress(SystemExit):
        main([verb, str(copy)])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [b"[]", b"{", b'{"a": []}', b'{"a": {"id": "x", "sha256": "y", "seconds": "z"}}']
)
def test_a_damaged_journal_is_told(copy: Path, change):
    damaged(copy / "journal.json", change)
    with pytest.raises(NegMergeError, match=r"journal.json.*"):
        Run(copy).journal  # noqa: B018 (reads the file)


def told_in_one_line(verb: str, run: Path, name: str, capsys) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([verb, str(run)])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    assert name in told
    return told


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("scores.json", ("acc_forget", "acc_forget"), None),
        ("scores.json", ("[", "[ "), "scores.json: was changed after the run was finished"),
        ("scores.json", ('"seed": 0', '"seed": NaN'), "NaN is not JSON"),
        ("sweeps/uniform.csv", ("0.25", "0.26"), "sweeps/uniform.csv: was changed"),
    ],
)
def test_what_was_changed_is_said(copy: Path, name: str, change: tuple[str, str], told: str | None):
    text = (copy / name).read_text()
    assert change[0] in text
    (copy / name).write_text(text.replace(*change, 1))
    page = words(page_of(copy))
    assert told in page if told else "was changed" not in page


def test_only_exports_of_its_own_are_removed(copy: Path, tmp_path: Path):
    tables = copy / "report/tables"
    (tables / "notes").mkdir()
    for name in ("old.csv", "own.csv", "mine.txt"):
        (tables / name).write_text("x")
    run = Run(copy)
    run.list_page_files([run.page, tables / "old.csv"])  # as an earlier page had it
    nm.report(copy)
    assert not (tables / "old.csv").exists()
    assert (tables / "own.csv").exists()
    assert (tables / "mine.txt").exists()
    assert (tables / "scores.csv").exists()
    shutil.rmtree(tables)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.csv").write_text("x")
    tables.symlink_to(elsewhere)
    with pytest.raises(NegMergeError, match="report/tables: is a link, and a run holds only"):
        nm.report(copy)
    assert [path.name for path in elsewhere.iterdir()] == ["own.csv"]


@pytest.mark.parametrize("name", ["../../recipe.yaml", "/etc/hostname", "text.png"])
def test_pictures_are_those_of_the_run(copy: Path, name: str):
    data = copy / "report/data"
    (data / "text.png").write_text("no picture")
    index = json.loads((data / "gradcam.json").read_text())
    index["rows"][0]["cells"][0]["file"] = name
    (data / "gradcam.json").write_text(json.dumps(index))
    page = page_of(copy)
    assert re.search(
        "Where the models look: .* is not (the name of a picture in this folder|a PNG)", words(page)
    )
    assert "<img " not in page


def test_what_was_not_measured_does_not_appear(copy: Path):
    """A scenario without test set, attack and retrained model."""
    scores = scores_of(copy)
    scores["retrain"] = None
    for row in (scores["original"], *scores["methods"], *scores["pool"]):
        row |= {"acc_test": None, "mia": None, "avg_gap": None, "cost_ratio": None}
        row["intervals"] = {k: v for k, v in row["intervals"].items() if k.endswith(("in", "get"))}
    (copy / "scores.json").write_text(json.dumps(scores))
    text = words(page_of(copy))
    frame = pd.read_csv(copy / "report/tables/scores.csv")
    assert not {"acc_test", "mia", "avg_gap", "mia_low"} & set(frame)
    assert "MIA %" not in text
    assert "membership inference: not measured in this scenario" in text
    assert "there is no retrained reference" in text


def test_methods_are_sorted_by_the_criterion_and_the_chosen_one_is_marked(copy: Path):
    values = {"uniform": 71.0, "consensus": 65.0, "most": 80.5, "finetune": 70.5}
    scores = scores_of(copy)
    scores["original"]["acc_test"] = 70.0  # match_holdout: forget accuracy nearest to this
    for row in (scores["original"], scores["retrain"], *scores["methods"]):
        row["acc_forget"] = values.get(row.get("method"), 90.0)
        row |= {"acc_retain": 100.0, "mia": 0.0}
        row["intervals"] |= {"acc_retain": [98.6, 100.0], "mia": [0.0, 11.4]}
    (copy / "scores.json").write_text(json.dumps(scores))
    page = page_of(copy)
    text = words(page)
    assert "sorted by match_holdout" in text
    table = pd.read_csv(copy / "report/tables/scores.csv")
    assert list(table["method"])[2:] == ["finetune", "uniform", "consensus", "most"]
    chosen = re.findall(r'<tr class="chosen">\s*<th[^>]*>.*?</th>', page, flags=re.DOTALL)
    assert {words(row) for row in chosen} == {"● &nbsp;NegMerge consensus unlearned model"}
    # Intervals are never beyond 0 and 100, but for changes, of which tests of forgetting have some.
    tables = [path for path in (copy / "report/tables").iterdir() if "evidence" not in path.name]
    shares = [words(page.split('<section id="evidence"')[0]), *(p.read_text() for p in tables)]
    ends = re.findall(r"\[(-?[\d.]+)(?:–|--)(-?[\d.]+)\]", " ".join(shares))
    assert ends
    assert all(0 <= float(low) <= float(high) <= 100 for low, high in ends)
    assert "100.00 [98.6–100.0]" in text
    assert "±" not in text + "".join(shares)
    assert f"Computation: {scores['methods'][0]['cost_ratio']:.2f} × the samples of" in text
    assert "came nearest" not in text  # with 30 samples no two can be told apart
    assert "is not distinguishable from" in text


def test_by_keep_retain_what_keeps_too_little_comes_last(finished: Path):
    both = {"consensus": (50, 93), "uniform": (40, 96), "most": (30, 94.9), "finetune": (45, 90)}
    scores, retain = scores_of(finished), metric_of("acc_retain")
    scores["original"]["acc_retain"] = 100.0
    for row in scores["methods"]:
        row["acc_forget"], row["acc_retain"] = map(float, both[row["method"]])

    def order() -> list[str]:
        result = RunResult.model_validate(scores)
        return [row.method for row in ranking.ranked(result, criteria.get("keep_retain"), retain)]

    assert order() == ["uniform", "most", "consensus", "finetune"]
    scores["methods"][1]["direction"] = "add"  # to learn: nothing to compare with the others
    assert order() == ["most", "consensus", "finetune", "uniform"]
    scores["original"]["acc_test"] = None
    del scores["original"]["intervals"]["acc_test"]
    result = RunResult.model_validate(scores)
    assert ranking.criterion_losses(result, criteria.get("match_holdout")) == {}


@pytest.mark.parametrize(("half", "apart"), [(0.2, True), (8.0, False)])
def test_came_nearest_is_said_only_where_the_intervals_tell_methods_apart(finished, half, apart):
    gaps = {"uniform": 1.0, "consensus": 3.0, "most": 4.0, "finetune": 20.0}
    scores = scores_of(finished)
    for row in (scores["retrain"], *scores["methods"]):
        row["avg_gap"] = gaps.get(row.get("method"), 0.0)
        row["intervals"] = {m: [row[m] - half, row[m] + half] for m in row["intervals"]}
    assert summary.nearest_method(material(finished, scores)) == (
        "Of 4 methods, Uniform Merge came nearest to retraining, with an Avg. Gap of 1.00 points; "
        "NegMerge has 3.00 points."
        if apart
        else "Of 4 methods, Uniform Merge has the smallest Avg. Gap to retraining, 1.00 points, "
        "but is not distinguishable from NegMerge and most: their 95 % intervals overlap."
    )


@pytest.mark.parametrize(("half", "doubt"), [(3.5, False), (3.6, True)])
def test_a_model_that_may_have_forgotten_nothing_is_said_to(finished: Path, half, doubt):
    """A difference of 5 points is beyond chance if both intervals are narrower than 5 / √2."""
    scores = scores_of(finished)
    for row, value in ((scores["original"], 90.0), (scores["methods"][0], 85.0)):
        row["acc_forget"] = value
        row["intervals"]["acc_forget"] = [value - half, value + half]
    scores["retrain"] = None
    _, forgotten, cost, trust = questions(material(finished, scores))
    assert forgotten.answer.word == ("Not shown" if doubt else "Not measured")
    assert forgotten.control == cost.control.partition(" Comp")[0]
    assert forgotten.control == "No retrained model: not measured."
    assert trust.answer.rule == "no_control"
    assert forgotten.numbers == (
        f"Accuracy on the forget set: 90.00 % before, 85.00 % after [{85 - half}–{85 + half}]."
    )


def test_warnings_about_other_methods_do_not_count(finished: Path):
    scores = scores_of(finished)

    def doubts(*warnings: str) -> str:
        page = material(finished, scores | {"warnings": [*warnings]})
        return questions(page)[3].answer.text

    assert "1 warning below" in doubts("consensus: λ = 0 did best", "uniform: λ = 0 did best")
    assert "warning" not in doubts("uniform: λ = 0 did best")


def test_a_changed_file_is_not_trusted(copy: Path):
    assert "Can it be trusted? No" not in words(page_of(copy))
    (copy / "sweeps/uniform.csv").write_text("scale\n")
    assert "Can it be trusted? No : files of the run were changed" in words(page_of(copy))


def test_the_interval_of_the_gap_is_that_of_its_metrics(finished: Path):
    """It was computed by hand; a metric that is not part of the gap changes nothing."""
    scores = scores_of(finished)
    for row in (scores["retrain"], *scores["methods"]):
        row["intervals"] = {m: [row[m] - 2.0, row[m] + 2.0] for m in row["intervals"]}
    scores["methods"][0] |= {"avg_gap": 0.5, "own_number": 3.0}
    scores["methods"][0]["intervals"]["own_number"] = [0.0, 1000.0]
    result = RunResult.model_validate(scores)
    low, high = ranking.gap_interval(result.methods[0], result)
    assert (low, high) == (0.0, pytest.approx(0.5 + (8 * 2.0**2) ** 0.5 / 4))
    del scores["methods"][0]["intervals"]["mia"]
    result = RunResult.model_validate(scores)
    assert ranking.gap_interval(result.methods[0], result) is None
    assert ranking.nearest_to_retrained(result) is None


def test_without_retraining_its_cost_is_reckoned_from_the_recipe(finished: Path):
    scores = scores_of(finished)
    ratio = scores["methods"][0]["cost_ratio"]
    assert summary.cost_ratio(material(finished, scores)).startswith(
        f"{ratio:.2f} × the samples of retraining, "
    )
    scores["retrain"] = scores["methods"][0]["cost_ratio"] = None
    told = (
        f"{ratio:.2f} × the samples that retraining with the settings of the recipe would process."
    )
    assert summary.cost_ratio(material(finished, scores)) == told


def lab(colour: str) -> np.ndarray:
    """A colour in OKLab."""
    parts = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    axes = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(axes) @ np.cbrt(np.array(cones) @ linear)


@pytest.mark.parametrize("recipe", ["demo", "desk_clip_mnist", "clip_ablations", "desk_cifar10"])
def test_methods_of_one_page_are_told_apart(recipe: str):
    titles = [method.title for method in load_recipe(recipe).methods]
    styles = styles_of(["original", "retrained", *titles])
    for one, two in combinations(styles.values(), 2):
        assert one.marker in SYMBOLS
        for scheme in (0, 1):
            distance = np.linalg.norm(
                lab(COLOURS[one.colour][scheme]) - lab(COLOURS[two.colour][scheme])
            )
            repeated = len(titles) > len(COLOURS) - 2 and one.marker != two.marker
            assert distance > 0.065 or repeated, (one, two)
    many = styles_of([f"own-{k}" for k in range(60)])
    assert len({(style.colour, style.marker, style.dashes) for style in many.values()}) == 60


# ------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser(finished: Path):
    with chromium() as found:
        found.set_window_size(1280, 900)
        found.get(Run(finished).page.resolve().as_uri())
        yield found


def test_it_loads_without_errors_or_requests(browser):
    assert not browser.get_log("browser")
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        event["params"]["request"]["url"]
        for event in asked
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [u for u in urls if not u.startswith("data:")] == [browser.current_url]


def test_tables_sort_both_ways(browser):
    def column(k: int) -> list[str]:
        script = """return [...document.querySelectorAll("#t-scores tbody tr")]
            .map(row => row.cells[arguments[0]].dataset.value)"""
        return browser.execute_script(script, k)

    heads = browser.find_elements("css selector", "#t-scores thead button")
    labels = [head.text for head in heads]
    k = labels.index("forget %")
    for direction in ("ascending", "descending"):
        heads[k].click()
        values = [float(v) for v in column(k)]
        assert values == sorted(values, reverse=direction == "descending")
        assert heads[k].find_element("xpath", "..").get_attribute("aria-sort") == direction
    k = labels.index("λ")
    heads[k].click()
    values = column(k)
    known = [float(v) for v in values if v]
    assert known == sorted(known)
    assert values[len(known) :] == [""] * (len(values) - len(known))  # what is empty comes last
    heads[0].click()
    assert column(0) == sorted(column(0))


def test_hovering_and_arrow_keys_name_a_point(browser):
    from selenium.webdriver import ActionChains, Keys

    points = browser.find_elements("css selector", "#trade-off svg.chart:first-child .named")
    tip = browser.find_element("id", "tip")
    assert not tip.is_displayed()
    named = [point.get_attribute("aria-label") for point in points]
    assert len(named) == 4 + 2 + 4  # members, original and retrained, methods
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", points[-1])
    ActionChains(browser).move_to_element(points[-1]).perform()
    assert tip.is_displayed()
    assert named[-1].startswith("NegMerge")  # the run's own method lies above all others
    assert tip.text.splitlines()[0] == named[-1]
    script = """const [under, above] = [...arguments].map(one => one.querySelector("use"));
        for (const name of ["x", "y"]) under.setAttribute(name, above.getAttribute(name));"""
    browser.execute_script(script, points[-2], points[-1])
    ActionChains(browser).move_by_offset(1, 0).perform()
    assert tip.text.splitlines()[:2] == [named[-1], named[-2]]
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    assert not tip.is_displayed()
    ActionChains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()
    assert not tip.is_displayed()
    browser.execute_script("arguments[0].focus()", points[0])
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert tip.text == named[1]


def test_the_legend_picks_out_a_method(browser):
    from selenium.webdriver import ActionChains, Keys

    entries = browser.find_elements("css selector", "#trade-off .legend button")
    titles = [entry.get_attribute("data-of") for entry in entries]

    def bright() -> set[str]:
        parts = browser.find_elements("css selector", "#trade-off svg [data-of]")
        seen = [part for part in parts if float(part.value_of_css_property("opacity")) > 0.5]
        return {part.get_attribute("data-of") for part in seen}

    assert bright() == set(titles)
    one, other = entries[titles.index("uniform")], entries[titles.index("consensus")]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", one)
    ActionChains(browser).move_to_element(one).perform()
    assert bright() == {"uniform"}
    one.click()
    ActionChains(browser).move_to_element(other).perform()
    assert bright() == {"consensus"}
    heading = browser.find_element("css selector", "#trade-off h2")
    ActionChains(browser).move_to_element(heading).perform()
    assert bright() == {"uniform"}  # a press keeps it
    assert one.get_attribute("aria-pressed") == "true"
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    assert bright() == set(titles)
    browser.execute_script("arguments[0].focus()", entries[0])
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert bright() == {titles[1]}


def contrast(one: str, two: str) -> float:
    """WCAG's ratio of two colours as `rgb(…)`."""

    def luminance(colour: str) -> float:
        parts = [float(x) / 255 for x in re.findall(r"[\d.]+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_have_contrast(browser, scheme: str):
    media(browser, prefers_color_scheme=scheme)
    script = """
        const probe = document.body.appendChild(document.createElement("span"));
        const found = {};
        for (const name of arguments[0]) {
            probe.style.color = `var(--${name})`;
            found[name] = getComputedStyle(probe).color;
        }
        probe.remove();
        return found;
    """
    names = ["back", "card", "text", "soft", "link", "alarm", *COLOURS]
    found = browser.execute_script(script, names)
    assert (contrast(found["back"], "rgb(0,0,0)") < 2) == (scheme == "dark")
    for behind in ("back", "card"):
        for name in ("text", "soft", "link"):
            assert contrast(found[name], found[behind]) >= 4.5, name
        for name in ("alarm", *COLOURS):
            assert contrast(found[name], found[behind]) >= 3, name
    script = """return [...document.querySelectorAll("svg.chart text")]
        .map(text => getComputedStyle(text).fill)"""
    assert set(browser.execute_script(script)) == {found["text"]}


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_scrolls_sideways_and_verdicts_come_first(browser, width: int):
    with screen(browser, width):
        assert browser.execute_script("return document.scrollingElement.scrollWidth") <= width
        assert too_wide(browser) == []
        right = "return document.getElementById(arguments[0]).getBoundingClientRect().right"
        for id in ("t-summary", "slider", "slider-scale"):
            assert browser.execute_script(right, id) <= width
        first = "return document.getElementById('q-trust').getBoundingClientRect().top + scrollY"
        assert browser.execute_script(first) <= 800  # on the first screen
        small = """return [...document.querySelectorAll("svg.chart text")]
            .map(t => t.getBoundingClientRect().height).filter(h => h < 8).length"""
        assert browser.execute_script(small) == 0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_no_barrier(browser, width: int, scheme: str):
    with screen(browser, width, scheme):
        assert barriers(browser, charts=(width, scheme) == (390, "dark")) == []


def test_axe_would_find_a_barrier(browser):
    browser.execute_script(
        """document.body.insertAdjacentHTML("beforeend", "<img id='bad' src='data:,'>")"""
    )
    try:
        assert [one.split(":")[0] for one in barriers(browser)] == ["image-alt"]
    finally:
        browser.execute_script("document.getElementById('bad').remove()")


def test_the_slider_stops_at_measured_scales_only(browser, finished: Path):
    from selenium.webdriver import ActionChains, Keys

    sweeps = pd.read_csv(finished / "report/tables/sweeps.csv")
    slider = browser.find_element("id", "slider")
    scale = slider.find_element("css selector", "input")
    shown = slider.find_element("css selector", "output")

    def press(*keys: str) -> tuple[str, list[str]]:
        ActionChains(browser).send_keys(*keys).perform()
        cells = slider.find_elements("css selector", "td[data-now]")
        assert scale.get_attribute("aria-valuetext") == shown.text
        return shown.text, [cell.text for cell in cells]

    def measured(title: str) -> list[tuple[str, list[str]]]:
        rows = sweeps[sweeps["method"] == title].sort_values("scale")
        return [
            (f"λ = {row['scale']:g}", [f"{row[name]:.2f}" for name in ("acc_forget", "acc_retain")])
            for _, row in rows.iterrows()
        ]

    browser.execute_script("arguments[0].focus()", scale)
    for title in ("consensus", "uniform"):
        stops = measured(title)
        found = [press(Keys.HOME), *(press(Keys.ARROW_RIGHT) for _ in stops[1:])]
        assert [(text.split(" (")[0], cells[:2]) for text, cells in found] == stops
        assert press(Keys.ARROW_RIGHT) == found[-1] == press(Keys.END)  # there is nothing beyond
        chosen = sweeps[(sweeps["method"] == title) & sweeps["chosen"]]["scale"].item()
        assert f"λ = {chosen:g} (" in next(text for text, _ in found if "chosen" in text)
        assert "the original" in found[0][0]
        lit = browser.find_elements("css selector", "#sweeps .named.now")
        assert {point.get_attribute("data-of") for point in lit} == {title}
        pick = slider.find_element("css selector", "select")
        browser.execute_script("arguments[0].focus()", pick)
        press(Keys.ARROW_DOWN)
        assert "chosen" in shown.text  # another method begins at its own chosen λ
        browser.execute_script("arguments[0].focus()", scale)


def test_a_third_press_restores_the_groups(browser):
    browser.refresh()
    count = "return document.querySelectorAll('#t-scores tr.group').length"
    order = """return [...document.querySelectorAll("#t-scores tbody tr")].map(r => r.innerText)"""
    before, rows = browser.execute_script(count), browser.execute_script(order)
    assert before == 3
    head = browser.find_element("css selector", "#t-scores thead button")
    for groups in (0, 0, before):
        head.click()
        assert browser.execute_script(count) == groups
    assert browser.execute_script(order) == rows


def test_it_prints_light_and_whole(browser):
    media(browser, media="print", prefers_color_scheme="dark")
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    assert browser.execute_script(style, "nav", "display") == "none"
    assert browser.execute_script(style, "body", "color") == "rgb(31, 35, 40)"
    media(browser)
    paper = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert base64.b64decode(paper["data"]).startswith(b"%PDF")
    assert (
        browser.execute_script(
            "return document.querySelectorAll('details:not([open]):not(.long)').length"
        )
        == 0
    )


def test_it_can_be_heard(browser):
    """Text alternatives, a language, one main heading, headers with a scope, ids used once."""
    count = browser.execute_script
    assert count("return document.documentElement.lang") == "en"
    assert count("return document.querySelectorAll('h1').length") == 1
    assert count("return document.querySelectorAll('img:not([alt]), img[alt=\"\"]').length") == 0
    assert count("return document.querySelectorAll('svg.chart:not([aria-label])').length") == 0
    assert count("return document.querySelectorAll('th:not([scope])').length") == 0
    ids = count("return [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    broken = """return [...document.querySelectorAll("use")].map(u => u.getAttribute("href"))
        .filter(h => !document.getElementById(h.slice(1))).length"""
    assert count(broken) == 0
