"""Every table of the paper has recipes that are valid and reach each of its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources

import pytest

from negmerge.errors import NegMergeError
from negmerge.paper.comparison import (
    PRINTED,
    ComparedRow,
    MeasuredRow,
    compare,
    comparison_frame,
    measured_rows,
    rank_correlation,
)
from negmerge.paper.experiments import (
    PlannedRun,
    TableScale,
    estimates,
    experiment,
    experiments,
    published,
    unstated,
)
from negmerge.paper.needs import needs, total
from negmerge.paper.trials import name_of, trials_of
from negmerge.rivals import rivals
from negmerge.runs.checks import check_methods
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.runs.result import RunResult

NOT_OURS = {"paper_number"}
"""Rows that others measured."""


def made_up(recipe: Recipe) -> RunResult:
    """The result as a run of the recipe gives it, all numbers 50."""
    metrics = dict.fromkeys(("acc_retain", "acc_forget", "acc_test", "mia"), 50.0)
    row = metrics | {"intervals": {}, "samples": {}, "seconds": 50.0, "avg_gap": 50.0}
    row["validation"] = {"acc_retain": 60.0}
    grouped = recipe.scenario == "clip"  # its runs count zeros by group of layers
    methods = []
    for method in recipe.methods:
        own = row | {"method": method.title, "splits": "forget", "scale": 0.5, "sparsity": 50.0}
        own |= {"cost_ratio": None, "evaluations": 1, "criterion": None, "looked": False}
        own |= {"edge": False, "seconds_merge": 50.0}
        if method.name in rivals:
            rival = rivals.get(method.name)
            own["splits"] = rival.used(rival.resolve(method.options)[1])
        if grouped:
            pool = len(recipe.pool.members())
            own["members"] = method.subset.count if method.subset else pool
            groups = ("early", "middle", "late", "stem", "mlp")
            zeros = {"tensors": 50.0, "elements": 40.0, "tensors_std": 20.0}
            own["anatomy"] = dict.fromkeys(groups, zeros)
        if method.add is not None:
            own["direction"] = "add"
        methods.append(own)
    tree = {"title": "", "seed": 0, "original": row, "retrain": None if grouped else row}
    splits = {"data": "x", "sizes": {}, "chosen_on": {}}
    tree |= {"methods": methods, "splits": splits, "pool": [], "warnings": []}
    return RunResult.model_validate(tree)


def lines_of(table: str, scale: TableScale) -> list[ComparedRow]:
    wanted = experiment(table)
    runs = []
    for number, planned in enumerate(wanted.runs(scale)):
        recipe = planned.load()
        times = {method.title: [1.0, 2.0, 6.0] for method in recipe.methods}
        seconds = times if wanted.times(planned) else {}
        rows = measured_rows(made_up(recipe), recipe, planned, wanted, seconds)
        runs.append((number, planned.where, rows))
    return compare(published()[table]["rows"], runs, wanted.readings)


def test_every_table_of_the_paper_is_there():
    file = resources.files("negmerge.paper") / "published.json"
    printed = set(json.loads(file.read_text())["tables"])
    assert set(experiments()) == printed | {"F1", "F3", "FB1"}
    for table in experiments():
        assert published()[table]["caption"]


@pytest.mark.parametrize("scale", ["paper", "desk"])
@pytest.mark.parametrize("table", experiments())
def test_what_the_paper_leaves_open_is_told_as_the_recipe_has_it(table: str, scale: TableScale):
    told = unstated(table, scale)
    assert told
    assert not [line for line in told if set("{}") & set(line)]
    recipe = experiment(table).runs(scale)[0].load()
    stop, count = recipe.search.stop, recipe.search.count
    grids = [line for line in told if "values from 0" in line]
    assert all(f"{count} values from 0 to {stop:g}" in line for line in grids)
    assert not grids or recipe.search.strategy == "grid"
    refined = [line for line in told if "up to the limit or around the optimum" in line]
    assert not refined or recipe.search.strategy == "refine"
    buffers = [line for line in told if "BatchNorm" in line]
    assert all(("are kept" in line) == (recipe.buffers == "keep") for line in buffers)
    for line in (line for line in told if "is held out" in line):
        assert line.endswith("here: it is.") == (recipe.settings.split.validation > 0)


@pytest.mark.parametrize("table", experiments())
def test_a_run_is_titled_by_what_it_forgets(table: str):
    for planned in experiment(table).runs("paper"):
        data = planned.where.get("dataset")
        assert data is None or planned.load().title.endswith(f"forgets {data}")
    for planned in experiment(table).runs("desk"):
        recipe, shipped = planned.load(), load_recipe(planned.recipe)
        changed = {"pool.grid", "split.forget"} & planned.set.keys()
        assert recipe.title != shipped.title or not changed


def test_the_kept_estimates_are_those_of_the_recipes():
    for table, kept in estimates().items():
        found = total(trials_of(table, "paper"))
        own = {"disk": found.disk / 1e9, "memory": found.memory / 1e9, "hours": found.hours}
        assert kept == pytest.approx(own, abs=0.06), table
    assert list(estimates()) == list(experiments())


@pytest.mark.parametrize("scale", ["paper", "desk"])
@pytest.mark.parametrize("table", experiments())
def test_its_recipes_are_valid(table: str, scale: TableScale):
    for planned in experiment(table).runs(scale):
        check_methods(planned.load())


@pytest.mark.parametrize("table", experiments())
def test_the_papers_scale_reaches_every_row(table: str):
    lines = lines_of(table, "paper")
    absent = [line.printed for line in lines if not line.measured]
    assert {row["method"] for row in absent} <= NOT_OURS
    for line in lines:
        wanted = {column for column in PRINTED if column in line.printed}
        assert line.printed["method"] in NOT_OURS or set(line.measured) == wanted, line.printed


@pytest.mark.parametrize("table", experiments())
def test_a_desk_reaches_every_method(table: str):
    rows = [(line.printed, line.measured) for line in lines_of(table, "desk")]
    reached = {(row["method"], row.get("splits")) for row, measured in rows if measured}
    printed = {(row["method"], row.get("splits")) for row, _ in rows}
    assert {kind for kind in printed if kind[0] not in NOT_OURS} == reached


def found_of(table: str) -> dict[tuple[str, str], ComparedRow]:
    """The rows of a table at paper scale, by method and component or group of layers."""
    lines = lines_of(table, "paper")
    return {
        (x.printed["method"], x.printed.get("component") or x.printed.get("layer_group", "")): x
        for x in lines
        if x.printed.get("backbone", "vit_b32") == "vit_b32"
    }


def test_added_vectors_keep_what_the_validation_images_say():
    for table, wanted in (("T5", 60.0), ("T3", 50.0)):
        lines = lines_of(table, "paper")
        assert {line.value("acc_retain") for line in lines} == {wanted}, table
        assert {line.value("acc_forget") for line in lines} == {50.0}, table


def test_the_settings_of_the_task_vector_code_run():
    runs = [one for one in experiment("T5").runs("paper") if one.recipe == "clip_paper_config"]
    epochs = {one.where["dataset"]: one.load().pool.members() for one in runs}
    assert {name: [m.epochs for m in found] for name, found in epochs.items()} == {
        "cars": [35],
        "dtd": [76],
        "sun397": [14],
    }
    assert all(member.augment.randaugment is None for (member,) in epochs.values())


def test_the_deviation_of_a_component_is_not_that_of_trials():
    assert found_of("C3")["negmerge", "mlp"].spread("sparsity") == 0.2  # a share of one
    assert found_of("T6")["negmerge", "deep"].spread("sparsity") is None  # the paper prints none


def test_the_seconds_are_three_merges_of_one_data_set():
    line = found_of("T1")["uniform", ""]
    assert line.measured["seconds"].keys() == {24}  # the linear run of cars, the last in the table
    assert line.value("seconds") == 3.0
    assert line.spread("seconds") == pytest.approx(7**0.5)  # of 1, 2 and 6


def test_both_readings_are_compared_and_one_is_ranked():
    printed = [
        {"method": m, "dataset": "cars", "acc_forget": x}
        for m, x in (("negmerge", 1.0), ("negmerge_min", 2.0), ("negmerge_max", 3.0))
    ]
    values = {"negmerge": 1, "negmerge_min_signed": 2, "negmerge_max_signed": 3}
    values |= {"negmerge_min_magnitude": 9, "negmerge_max_magnitude": 8}
    rows = [MeasuredRow(m, "forget", {"acc_forget": float(x)}) for m, x in values.items()]
    lines = compare(printed, [(0, {}, rows)], experiment("C1").readings)
    assert [line.printed["method"] for line in lines] == [
        "negmerge",
        "negmerge_min_signed",
        "negmerge_min_magnitude",
        "negmerge_max_signed",
        "negmerge_max_magnitude",
    ]
    assert rank_correlation(lines) == ("acc_forget", pytest.approx(1), 3)
    assert rank_correlation(lines, 1) == ("acc_forget", pytest.approx(1 / 3), 3)
    frame = comparison_frame(lines).set_index("method")
    assert frame.loc["negmerge_min_magnitude", "acc_forget_difference"] == 7.0


def test_a_mean_over_data_sets_and_a_spread_over_trials():
    table = [{"method": "negmerge", "acc_forget": 10.0}]
    rows = [[MeasuredRow("negmerge", "forget", {"acc_forget": x})] for x in (1.0, 3.0, 8.0)]
    (line,) = compare(table, [(0, {}, rows[0]), (0, {}, rows[1]), (1, {}, rows[2])])
    assert line.value("acc_forget") == 5.0  # of 2 and 8
    assert line.spread("acc_forget") is None
    (line,) = compare(table, [(0, {}, rows[0]), (0, {}, rows[1])])
    assert line.spread("acc_forget") == pytest.approx(2**0.5)
    (both,) = compare(table, [(k, {}, one) for one in rows[:2] for k in (0, 1)])
    assert both.spread("acc_forget") == pytest.approx(2**0.5)  # of the means over the parts
    found = comparison_frame([line]).iloc[0]
    assert (found["acc_forget"], found["acc_forget_difference"]) == (2.0, -8.0)


def test_the_gap_of_several_trials_is_that_of_their_means():
    printed = published()["T2"]["rows"]
    runs = []
    for forget in (90.0, 100.0):
        own = {"acc_retain": 99.0, "acc_forget": forget, "acc_test": 94.0, "mia": 12.0}
        retrained = own | {"acc_forget": 95.0, "avg_gap": 0.0}
        rows = [
            MeasuredRow("retrain", "retain", retrained),
            MeasuredRow("negmerge", "forget", own | {"avg_gap": 1.25}),
        ]
        runs.append((0, {}, rows))
    lines = {line.printed["method"]: line for line in compare(printed, runs)}
    assert lines["negmerge"].value("avg_gap") == 0  # as the paper computes it; each trial has 1.25
    assert lines["retrain"].value("avg_gap") == 0
    found = comparison_frame(list(lines.values())).set_index("method").loc["negmerge"]
    assert found["acc_forget_std"] == pytest.approx(50**0.5)
    assert found["acc_forget_paper_std"] == 0.59


def test_rows_are_told_apart_by_the_data_they_use():
    rows = {(r["method"], r["splits"]): r for r in published()["T2"]["rows"]}
    assert ("salun", "all") in rows
    table = experiment("T2")
    recipe = table.paper[0].load()
    tree = made_up(recipe).tree()
    for row in tree["methods"]:
        row["mia"] = 99.0 if row["splits"] == "all" else 1.0
    result = RunResult.model_validate(tree)
    rows = measured_rows(result, recipe, PlannedRun(recipe="x"), table, {})
    lines = compare(published()["T2"]["rows"], [(0, {}, rows)])
    found = {(x.printed["method"], x.printed["splits"]): x.value("mia") for x in lines}
    assert found["salun", "all"] == found["random_label", "all"] == 99
    assert found["salun", "forget"] == found["random_label", "forget"] == 1


def test_the_published_numbers_agree_with_themselves():
    for table, printed in published().items():
        lines = [
            ComparedRow(row, {m: {0: [row[m]]} for m in PRINTED if m in row})
            for row in printed["rows"]
        ]
        found = rank_correlation(lines)
        assert found is None or found[1] == pytest.approx(1), table


def test_tables_that_need_the_same_run_share_it():
    names = [
        name_of(planned.recipe, planned.load())
        for table in ("B1", "C2", "F1")
        for planned in experiment(table).runs("paper")
    ]
    assert len(set(names)) == 8


def needs_of(table: str, scale: TableScale, changes: Sequence[str] = ()) -> str:
    return needs(table, scale, trials_of(table, scale, changes))


def test_what_only_the_user_can_give_is_said():
    assert needs_of("B11", "paper").endswith("; and --set model.init=FILE")
    assert "--set" not in needs_of("B11", "paper", ["model.init=swin.safetensors"])
    assert "--set" not in needs_of("B11", "desk")


def test_changes_are_followed():
    changes = ["clip.control.name=/data/imagenet"]
    text = needs_of("T6", "paper", changes)
    assert "2 runs on /data/imagenet, cars; not estimated, data set '/data/imagenet'" in text
    planned = experiment("T3").runs("paper")[0]
    assert planned.load(changes=["data.name=svhn"]).title.endswith("forgets svhn")
    assert any(
        "and none, as in" in one for one in unstated("T3", "desk", ["pool.settings.clip=null"])
    )


def test_a_title_does_not_move_a_run():
    planned = experiment("T3").runs("paper")[0]
    named = planned.load(changes=["title=other words"])
    assert name_of(planned.recipe, planned.load()) == name_of(planned.recipe, named)
    assert name_of(planned.recipe, planned.load(1)) != name_of(planned.recipe, planned.load())


@pytest.mark.parametrize("table", ["T2", "B11", "T6"])
def test_needs_are_said(table: str):
    text = needs_of(table, "paper")
    assert "GPU-hours" in text
    assert "GB of disk" in text


def test_an_unknown_table_is_told():
    with pytest.raises(NegMergeError, match="unknown table 'T9'; wanted one of: T1, T2"):
        experiment("T9")


def test_deviations_over_tensors_and_over_trials_are_not_mixed():
    """The stem is one tensor: in a column of deviations over tensors it has none, in any trial."""
    printed = published()["C3"]["rows"]
    trials = []
    for value in (10.0, 30.0):
        rows = [
            MeasuredRow(
                "negmerge", "forget", {"sparsity": value}, {"component": name}, deviations=d
            )
            for name, d in (("stem", {}), ("mlp", {"sparsity": 0.2}))
        ]
        trials.append((0, {"backbone": "vit_b32"}, rows))
    lines = [line for line in compare(printed, trials) if line.printed["backbone"] == "vit_b32"]
    found = {line.printed["component"]: line for line in lines}
    assert found["mlp"].value("sparsity") == found["stem"].value("sparsity") == 20.0
    assert found["mlp"].spread("sparsity") == 0.2
    assert found["stem"].spread("sparsity") is None
