"""Every table of the paper has recipes that are valid and reach each of its rows."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from negmerge.checking import check_methods
from negmerge.errors import NegMergeError
from negmerge.recipe import Recipe, load_recipe
from negmerge.reproduction.compare import (
    METRICS,
    Line,
    agreement,
    compare,
    frame,
    measured_rows,
)
from negmerge.reproduction.experiments import (
    Part,
    Scale,
    estimates,
    experiment,
    experiments,
    published,
    unstated,
)
from negmerge.reproduction.reproduce import name_of, needs, total
from negmerge.rivals import rivals

NOT_OURS = {"paper_number", "paper_config"}
"""Rows that others measured, or with another pool."""


def made_up(recipe: Recipe) -> dict:
    """Scores as a run of the recipe gives them, all numbers 50."""
    row = dict.fromkeys((*METRICS, "seconds_merge"), 50.0)
    clip = recipe.clip is not None
    methods = []
    for method in recipe.methods:
        own = row | {"method": method.title, "splits": "forget"}
        if method.name in rivals:
            rival = rivals.get(method.name)
            own["splits"] = rival.used(rival.resolve(method.options)[1])
        if clip:
            pool = len(recipe.pool.members())
            own["members"] = method.subset.count if method.subset else pool
            groups = ("early", "middle", "late", "stem", "mlp")
            own["anatomy"] = {k: {"tensors": 50.0, "elements": 40.0} for k in groups}
        if method.add is not None:
            own["direction"] = "add"
        methods.append(own)
    return {"original": row, "retrain": None if clip else row, "methods": methods}


def lines_of(table: str, scale: str) -> list[Line]:
    wanted = experiment(table)
    runs = []
    for number, part in enumerate(wanted.parts(scale)):
        recipe = part.load()
        rows = measured_rows(made_up(recipe), recipe, part, wanted.direction)
        runs.append((number, part.where, rows))
    return compare(published()[table], runs)


def test_every_table_of_the_paper_is_there():
    file = resources.files("negmerge.reproduction") / "published.json"
    printed = set(json.loads(file.read_text())["tables"])
    assert set(experiments()) == printed | {"F1", "F3"}
    for table in experiments():
        assert published()[table]["caption"]


@pytest.mark.parametrize("scale", ["paper", "desk"])
@pytest.mark.parametrize("table", experiments())
def test_what_the_paper_leaves_open_is_told_as_the_recipe_has_it(table: str, scale: Scale):
    told = unstated(table, scale)
    assert told
    assert not [line for line in told if set("{}") & set(line)]
    recipe = experiment(table).parts(scale)[0].load()
    stop, count = recipe.search.stop, recipe.search.count
    grids = [line for line in told if "values from 0" in line]
    assert all(f"{count} values from 0 to {stop:g}" in line for line in grids)
    assert all(("by bracketing" in g) == (recipe.search.strategy == "bracket") for g in grids)
    buffers = [line for line in told if "BatchNorm" in line]
    assert all(("are kept" in line) == (recipe.buffers == "keep") for line in buffers)
    held = [line for line in told if "is held out" in line]
    assert all(line.endswith("here: it is.") == (recipe.split.validation > 0) for line in held)


@pytest.mark.parametrize("table", experiments())
def test_a_run_is_titled_by_what_it_forgets(table: str):
    for part in experiment(table).parts("paper"):
        recipe = part.load()
        assert recipe.clip is None or recipe.title.endswith(f"forgets {recipe.data.name}")
    for part in experiment(table).parts("desk"):
        recipe, shipped = part.load(), load_recipe(part.recipe)
        assert recipe.title != shipped.title or not {"pool.grid", "split.forget"} & part.set.keys()


def test_the_kept_estimates_are_those_of_the_recipes():
    for table, kept in estimates().items():
        found = total(table, "paper")
        own = {"disk": found.disk / 1e9, "memory": found.memory / 1e9, "hours": found.hours}
        assert kept == pytest.approx(own, abs=0.06), table
    assert list(estimates()) == list(experiments())


@pytest.mark.parametrize("scale", ["paper", "desk"])
@pytest.mark.parametrize("table", experiments())
def test_its_recipes_are_valid(table: str, scale: str):
    for part in experiment(table).parts(scale):
        check_methods(part.load())


@pytest.mark.parametrize("table", experiments())
def test_the_papers_scale_reaches_every_row(table: str):
    lines = lines_of(table, "paper")
    absent = [line.printed for line in lines if not line.measured]
    assert {row["method"] for row in absent} <= NOT_OURS
    for line in lines:
        wanted = {m for m in METRICS if m in line.printed}
        assert line.printed["method"] in NOT_OURS or set(line.measured) == wanted, line.printed


@pytest.mark.parametrize("table", experiments())
def test_a_desk_reaches_every_method(table: str):
    rows = [(line.printed, line.measured) for line in lines_of(table, "desk")]
    reached = {(row["method"], row.get("splits")) for row, measured in rows if measured}
    printed = {(row["method"], row.get("splits")) for row, _ in rows}
    assert {kind for kind in printed if kind[0] not in NOT_OURS} == reached


def test_a_mean_over_data_sets_and_a_spread_over_trials():
    table = {"rows": [{"method": "negmerge", "acc_forget": 10.0}]}
    rows = [[{"method": "negmerge", "splits": "forget", "acc_forget": x}] for x in (1.0, 3.0, 8.0)]
    (line,) = compare(table, [(0, {}, rows[0]), (0, {}, rows[1]), (1, {}, rows[2])])
    assert line.value("acc_forget") == 5.0  # of 2 and 8
    assert line.spread("acc_forget") is None
    (line,) = compare(table, [(0, {}, rows[0]), (0, {}, rows[1])])
    assert line.spread("acc_forget") == pytest.approx(2**0.5)
    (both,) = compare(table, [(k, {}, one) for one in rows[:2] for k in (0, 1)])
    assert both.spread("acc_forget") == pytest.approx(2**0.5)  # of the means over the parts
    found = frame([line]).iloc[0]
    assert (found["acc_forget"], found["acc_forget_difference"]) == (2.0, -8.0)


def test_the_gap_of_several_trials_is_that_of_their_means():
    printed = published()["T2"]
    runs = []
    for forget in (90.0, 100.0):
        own = {"acc_retain": 99.0, "acc_forget": forget, "acc_test": 94.0, "mia": 12.0}
        retrain = own | {
            "acc_forget": 95.0,
            "method": "retrain",
            "splits": "retain",
            "avg_gap": 0.0,
        }
        rows = [retrain, own | {"method": "negmerge", "splits": "forget", "avg_gap": 1.25}]
        runs.append((0, {}, rows))
    lines = {line.printed["method"]: line for line in compare(printed, runs)}
    assert lines["negmerge"].value("avg_gap") == 0  # as the paper computes it; each trial has 1.25
    assert lines["retrain"].value("avg_gap") == 0
    found = frame(list(lines.values())).set_index("method").loc["negmerge"]
    assert found["acc_forget_std"] == pytest.approx(50**0.5)
    assert found["acc_forget_paper_std"] == 0.59


def test_rows_are_told_apart_by_the_data_they_use():
    rows = {(r["method"], r["splits"]): r for r in published()["T2"]["rows"]}
    assert ("salun", "all") in rows
    recipe = experiment("T2").paper[0].load()
    scores = made_up(recipe)
    for row in scores["methods"]:
        row["mia"] = 99.0 if row["splits"] == "all" else 1.0
    lines = compare(published()["T2"], [(0, {}, measured_rows(scores, recipe, Part(recipe="x")))])
    found = {(x.printed["method"], x.printed["splits"]): x.value("mia") for x in lines}
    assert found["salun", "all"] == found["random_label", "all"] == 99
    assert found["salun", "forget"] == found["random_label", "forget"] == 1


def test_the_published_numbers_agree_with_themselves():
    for table, printed in published().items():
        lines = [
            Line(row, {m: {0: [row[m]]} for m in METRICS if m in row}) for row in printed["rows"]
        ]
        found = agreement(lines)
        assert found is None or found[1] == pytest.approx(1), table


def test_tables_that_need_the_same_run_share_it():
    names = [
        name_of(part.recipe, part.load())
        for table in ("B1", "C2", "F1")
        for part in experiment(table).parts("paper")
    ]
    assert len(set(names)) == 8


def test_what_only_the_user_can_give_is_said():
    assert needs("B11", "paper").endswith("; and --set model.init=FILE")
    assert "--set" not in needs("B11", "paper", ["model.init=swin.safetensors"])
    assert "--set" not in needs("B11", "desk")


def test_changes_are_followed():
    changes = ["clip.control.name=/data/imagenet"]
    text = needs("T6", "paper", changes)
    assert "2 runs on /data/imagenet, cars; not estimated, data set '/data/imagenet'" in text
    part = experiment("T3").parts("paper")[0]
    assert part.load(changes=["data.name=svhn"]).title.endswith("forgets svhn")
    assert any(
        "and none, as in" in one for one in unstated("T3", "desk", ["pool.settings.clip=null"])
    )


def test_a_title_does_not_move_a_run():
    part = experiment("T3").parts("paper")[0]
    named = part.load(changes=["title=other words"])
    assert name_of(part.recipe, part.load()) == name_of(part.recipe, named)
    assert name_of(part.recipe, part.load(1)) != name_of(part.recipe, part.load())


@pytest.mark.parametrize("table", ["T2", "B11", "T6"])
def test_needs_are_said(table: str):
    text = needs(table, "paper")
    assert "GPU-hours" in text
    assert "GB of disk" in text


def test_an_unknown_table_is_told():
    with pytest.raises(NegMergeError, match="unknown table 'T9'; there are: T1, T2"):
        experiment("T9")
