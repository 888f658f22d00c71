"""Several runs on one page: side by side, repeatable, and refused where metrics differ."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

import negmerge as nm
from browser import barriers, chromium, screen, too_wide
from negmerge.cli import main
from negmerge.runs.store import Run
from regression import FORGET, RETAIN, make_run, registered

OTHER = {"seed": 3, "methods": "[consensus, uniform, finetune]"}


def change(run: Run, **fields: object) -> None:
    """A run with other fields in its recipe or its scores."""
    text = run.recipe.read_text()
    for name in fields.keys() & OTHER.keys():
        text = text.replace(f"{name}: {OTHER[name]}", f"{name}: {fields[name]}")
    run.recipe.write_text(text)
    scores = json.loads(run.scores.read_text())
    splits = {name: fields[name] for name in fields if name in ("data", "fingerprint")}
    scores["splits"] |= splits
    run.scores.write_text(json.dumps(scores))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch) -> list[Run]:
    monkeypatch.chdir(tmp_path)
    found = [make_run(tmp_path / name) for name in ("one", "two")]
    for run in found:
        manifest = json.loads(run.manifest.read_text())
        run.manifest.write_text(json.dumps(manifest | {"result": "a" * 64}))
    change(found[1], seed=4, methods="[consensus, {name: uniform, label: mean}, finetune]")
    scores = json.loads(found[1].scores.read_text())
    scores["methods"][1]["method"] = "mean"
    scores["methods"][0][FORGET] = 0.055
    found[1].scores.write_text(json.dumps(scores))
    return found


def words(page: Path) -> str:
    text = re.sub(r"<(style|script)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def refused(capsys, *arguments: str) -> str:
    capsys.readouterr()
    with registered(), pytest.raises(SystemExit) as ended:
        main(["report", *arguments])
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    return told


def test_methods_stand_side_by_side(runs: list[Run], capsys):
    with registered():
        main(["report", "one", "two"])
    assert capsys.readouterr().out == "page: runs/comparison/index.html\n"
    folder = Path("runs/comparison")
    frame = pd.read_csv(folder / "tables/scores.csv")
    assert list(zip(frame["method"], frame["run"], strict=True)) == [
        ("original", "one"), ("original", "two"), ("retrained", "one"), ("retrained", "two"),
        ("uniform", "one"), ("consensus", "one"), ("consensus", "two"), ("finetune", "one"),
        ("finetune", "two"), ("mean", "two"),
    ]  # fmt: skip
    assert list(frame.loc[frame["method"] == "consensus", FORGET]) == [0.05, 0.055]
    recipes = pd.read_csv(folder / "tables/recipes.csv", index_col="field", dtype=str)
    assert recipes.fillna("").to_dict("index") == {
        "seed": {"one": "3", "two": "4"},
        "methods.uniform": {"one": "yes", "two": ""},
        "methods.mean": {"one": "", "two": "yes"},
    }
    text = words(folder / "index.html")
    assert "2 runs: one and two" in text
    assert "Warnings" not in text
    assert "NegMerge consensus one" in text
    verdicts = pd.read_csv(folder / "tables/verdicts.csv")
    assert list(verdicts["Is it forgotten?"]) == ["Partly shown", "Partly shown"]
    record = json.loads((folder / "comparison.json").read_text())
    assert record["runs"] == {"one": "a" * 64, "two": "a" * 64}
    page = (folder / "index.html").read_text()
    linked = re.findall(r'href="figures/([\w.-]+)"', page)
    assert sorted(linked) == sorted(path.name for path in (folder / "figures").iterdir())
    assert len(linked) == 4
    assert not re.search(r'(src|href)="(?!#|data:|figures/)', page)


def test_the_charts_have_the_same_axes(runs: list[Run]):
    with registered():
        main(["report", "one", "two", "-o", "out"])
    ticks = [
        [re.findall(rf'id="{axis}tick_\d+".*?<text[^>]*>([^<]+)</text>', text, flags=re.DOTALL)
         for axis in "xy"]
        for text in (Path(f"out/figures/trade-off-{k}.svg").read_text() for k in (0, 1))
    ]  # fmt: skip
    assert ticks[0] == ticks[1]


def test_the_same_runs_give_the_same_bytes(runs: list[Run], tmp_path: Path):
    def contents() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    with registered():
        main(["report", "one", "two", "-o", "out"])
        before = contents()
        main(["report", "one", "two", "-o", "out"])
    assert contents() == before
    assert not (tmp_path / "one/report/index.html").exists()  # the runs are only read


def test_what_else_differs_is_said(runs: list[Run]):
    change(runs[1], fingerprint="f" * 64)
    with registered():
        main(["report", "one", "two", "-o", "out"])
        assert "forget or measure different samples" in words(Path("out/index.html"))
        change(runs[1], data="flats")
        scores = json.loads(runs[1].scores.read_text())
        runs[1].scores.write_text(json.dumps(scores | {"retrain": None}))
        main(["report", "one", "two", "-o", "out"])
    text = words(Path("out/index.html"))
    assert "different data sets" in text
    assert "No retrained model in two" in text


def test_runs_with_other_metrics_are_refused(runs: list[Run], monkeypatch, capsys):
    from regression import RegressionSettings

    class Reversed(RegressionSettings):
        kind = "reversed"
        forget_metric = RETAIN

    from negmerge.scenarios.settings import scenarios

    scenarios.register("reversed", Reversed)
    try:
        recipe = runs[1].recipe
        recipe.write_text(recipe.read_text().replace("scenario: regression", "scenario: reversed"))
        told = refused(capsys, "one", "two")
    finally:
        scenarios.remove("reversed")
    assert "two: its forget metric is deviation_retain (squared error on the retain set)" in told
    assert "that of one is deviation_forget" in told
    assert "report them one by one" in told
    assert not Path("runs").exists()


def test_bad_input_is_told_in_one_line(runs: list[Run], tmp_path: Path, capsys):
    assert "one: is given twice" in refused(capsys, "one", "two", "one")
    assert "nowhere: is not a run" in refused(capsys, "one", "nowhere")
    assert "--out: is for a comparison" in refused(capsys, "one", "-o", "out")
    assert "one: is a run; name another folder" in refused(capsys, "one", "two", "-o", "one")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/letter.txt").write_text("mine")
    assert "full: is not empty, and holds no" in refused(capsys, "one", "two", "-o", "full")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/tables").symlink_to(tmp_path / "full")
    assert "linked/tables: is neither" in refused(capsys, "one", "two", "-o", "linked")
    runs[1].manifest.unlink()
    assert "two: the run is not finished" in refused(capsys, "one", "two")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]


def test_one_run_alone_is_as_before(runs: list[Run], capsys):
    with registered():
        main(["report", "one"])
        assert capsys.readouterr().out == "page: one/report/index.html\n"
        assert nm.report("one") == Path("one/report/index.html")


def test_it_can_be_read_on_a_phone_and_heard(runs: list[Run]):
    with registered():
        main(["report", "one", "two", "-o", "out"])
    with chromium() as browser:
        for width, scheme in ((390, "dark"), (820, "light"), (1440, "light")):
            with screen(browser, width, scheme):
                browser.get(Path("out/index.html").resolve().as_uri())
                assert not browser.get_log("browser")
                assert too_wide(browser) == []
                assert barriers(browser) == []
