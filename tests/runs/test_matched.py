"""The matched comparison and the space of the weights in whole runs, against naive computations."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import negmerge as nm
from negmerge.evaluation.matching import Level, at_level
from negmerge.evaluation.scores import gap_metrics
from negmerge.evaluation.search import read_rows, write_rows
from negmerge.reports.frames import Missing
from negmerge.reports.matching import matched_frame
from negmerge.reports.page_data import PageData
from negmerge.runs.geometry import PATH
from negmerge.runs.geometry_record import barrier
from negmerge.runs.matching import MatchedSweep
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.runs.result import RunResult
from negmerge.runs.store import Run
from negmerge.training.weights import load_tensors
from running import negmerge_here
from toys import SMALL, run_toy, toy_scenario

ADDED = {"name": "uniform", "label": "plus", "add": 1.0}
LONGER = {
    "methods": ["consensus", "uniform", "single_best", ADDED],
    "train": {"epochs": 60, "batch": 16, "lr": 0.02},
    "search": {"count": 5, "stop": 1.0, "limit": 8.0},
}
"""A run whose models forget beyond the level of the retrained model."""


@pytest.fixture(scope="module")
def toy():
    with toy_scenario() as module:
        yield module


@pytest.fixture(scope="module")
def run(toy, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of the toy, whose forget metric rises by forgetting."""
    found = run_toy(tmp_path_factory.mktemp("matched") / "run", **LONGER)
    nm.report(found)
    return found


def scenario_of(run: Run):
    return load_recipe(run.recipe).make_scenario()


def test_the_level_is_the_retrained_models_on_the_samples_that_choose(run: Run):
    matching, scenario = run.result.matching, scenario_of(run)
    assert matching is not None
    own = scenario.measure(scenario.model(run.retrain), "choose").row()
    assert matching.metric == "error_forget"
    assert matching.level == own["error_forget"]
    assert matching.retrained == own
    assert matching.samples == {"retain": 40, "forget": 40}
    assert not matching.stated
    reported = run.result.retrain
    assert reported is not None
    assert reported.value("error_forget") != matching.level


def test_every_method_is_interpolated_in_its_rows(run: Run):
    result = run.result
    assert result.matching is not None
    level, retrained = result.matching.level, result.matching.retrained
    for title in ("consensus", "uniform", "single_best"):
        row = result.method(title)
        swept = title if row.member is None else f"member-{row.member}"
        rows, before = read_rows(run.matched(swept)), read_rows(run.sweep(swept))
        assert [own for own in rows if own in before] == before
        scales, errors = ([own[name] for own in rows] for name in ("scale", "error_forget"))
        first = next(k for k, error in enumerate(errors) if error >= level)
        assert first > 0
        assert scales[first - 1] < row.matched["scale"] <= scales[first]
        for name in ("error_forget", "error_retain"):
            values = [own[name] for own in rows]
            assert row.matched[name] == pytest.approx(
                np.interp(row.matched["scale"], scales, values)
            )
        assert row.matched["error_forget"] == level
        gap = abs(row.matched["error_retain"] - retrained["error_retain"])
        assert row.matched["matched_gap"] == pytest.approx(gap)
    assert {*gap_metrics(retrained)} == {"error_retain", "error_forget"}
    best = result.method("single_best")
    member = next(own for own in result.pool if own.id == best.member)
    assert member.matched == best.matched
    for own in result.pool:
        errors = [row["error_forget"] for row in read_rows(run.matched(f"member-{own.id}"))]
        assert bool(own.matched) == (max(errors) >= level)
    plus = result.method("plus")
    assert not plus.matched
    assert plus.unmatched is None


def test_choosing_is_not_influenced(run: Run, toy, tmp_path: Path):
    """With another level, λ and every score stay what they are."""
    search = LONGER["search"] | {"matched": 3.0}
    other = run_toy(tmp_path / "run", **LONGER | {"search": search})
    assert other.result.matching is not None
    assert other.result.matching.stated
    assert other.result.matching.level == 3.0
    for one, two in zip(run.result.methods, other.result.methods, strict=True):
        assert (one.scale, one.metrics, one.evaluations) == (
            two.scale,
            two.metrics,
            two.evaluations,
        )
        if one.matched:
            assert two.matched["error_forget"] == 3.0
            assert run.sweep("uniform").read_bytes() == other.sweep("uniform").read_bytes()


def test_a_run_that_continues_measures_no_level_twice(
    run: Run, toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun = Path(shutil.copytree(run.folder, tmp_path / "run"))
    (begun / "manifest.json").unlink()
    monkeypatch.setattr(MatchedSweep, "run", lambda *_: pytest.fail("measured again"))
    again = run_toy(begun, **LONGER)
    assert again.result.matching == run.result.matching
    assert [row.matched for row in again.result.methods] == [
        row.matched for row in run.result.methods
    ]


def test_lengths_and_distances_are_those_of_the_weights(run: Run):
    geometry = run.result.geometry
    assert geometry is not None
    base, retrained = (load_tensors(path)[0] for path in (run.base, run.retrain))

    def vector(weights):
        return torch.cat([weights[name].double().flatten() for name in sorted(weights)]).numpy()

    theta, end = vector(base), vector(retrained)
    titles = [model.model for model in geometry.models]
    assert titles[:3] == ["consensus", "uniform", "conflict"]
    assert titles[3:] == [f"member-{member.id}" for member in run.result.pool]
    for model in geometry.models:
        if model.model == "conflict":
            continue
        if model.model.startswith("member-"):
            tau = vector(load_tensors(run.member(model.model[7:]))[0]) - theta
        else:
            patch = nm.TaskVector.load(run.patch(model.model))
            tau = vector({name: patch[name] for name in base})
            assert model.scale == run.result.method(model.model).scale
        moved = theta - model.scale * tau
        assert model.length == pytest.approx(np.linalg.norm(model.scale * tau), rel=1e-6)
        assert model.separation == pytest.approx(np.linalg.norm(end - theta), rel=1e-9)
        assert model.distance == pytest.approx(np.linalg.norm(moved - end), rel=1e-6)
        cosine = -tau @ (end - theta) / np.linalg.norm(tau) / np.linalg.norm(end - theta)
        assert model.cosine == pytest.approx(cosine, rel=1e-5)


def test_losses_along_a_path_are_those_of_the_models(run: Run):
    geometry, scenario = run.result.geometry, scenario_of(run)
    assert geometry is not None
    assert geometry.path == list(PATH)
    assert geometry.samples == {"retain": 40, "forget": 40}
    base = load_tensors(run.base)[0]
    for title in ("consensus", "uniform"):
        model = next(one for one in geometry.models if one.model == title)
        tau = nm.TaskVector.load(run.patch(title))
        for name, losses in model.losses.items():
            pairs = scenario.eval_sets("choose")[name]
            assert len(losses) == len(PATH)
            for t, loss in zip(PATH, losses, strict=True):
                network = scenario.model()
                network.load_state_dict({n: w - t * model.scale * tau[n] for n, w in base.items()})
                with torch.no_grad():
                    wanted = torch.nn.functional.mse_loss(network(pairs.x), pairs.y)
                assert loss == pytest.approx(float(wanted), rel=1e-4)
            assert model.barriers[name] == pytest.approx(barrier(PATH, losses))
    retrained = scenario.mean_loss(
        scenario.model(run.retrain), "retain", scenario.eval_sets("choose")["retain"]
    )
    assert geometry.retrained["retain"] == pytest.approx(retrained)


def test_the_page_and_the_terminal_show_both(run: Run):
    page = run.page.read_text()
    assert "Missing from this page" not in page
    for id, title in (("matched", "At equal forgetting"), ("geometry", "Where the models lie")):
        section = page.split(f'<section id="{id}"')[1].split("</section>")[0]
        assert title in section
        assert section.count("<svg") >= 2 - (id == "matched")
    with (run.tables / "matched.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["method"] == "retrained"
    assert {row["method"] for row in rows} == {
        "retrained", "consensus", "uniform", "single_best",
    }  # fmt: skip
    assert len({row["error_forget"] for row in rows}) == 1
    with (run.tables / "geometry.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows[:4]] == ["original", "consensus", "uniform", "conflict"]
    assert rows[-1]["model"] == "member 3"
    apart, near = (float(row["distance"]) for row in rows[:2])
    assert float(rows[1]["nearer"]) == pytest.approx(apart - near)
    out, _ = negmerge_here(run.folder.parent, "inspect", "run")
    assert "At equal forgetting (forget error" in out
    run.verify()


def test_a_level_out_of_reach_has_a_reason(toy, tmp_path: Path):
    found = run_toy(tmp_path / "run", methods=["consensus"], search={"count": 3, "matched": 1e9})
    row = found.result.first
    assert not row.matched
    assert "was not reached up to λ = " in (row.unmatched or "")
    assert "matched" not in json.loads(found.scores.read_text())["methods"][0]
    page = PageData(found, load_recipe(found.recipe), found.result)
    with pytest.raises(Missing, match="no method reached the level: consensus: the level 1,000,0"):
        matched_frame(page)


def test_without_a_level_nothing_is_added(tmp_path: Path):
    """A model in memory has no retrained model, and functions have no sets with a loss."""
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)

    def fine_tune(model, settings):
        with torch.no_grad():
            model.weight[0, :2] += 0.1 * settings.epochs

    def evaluate(model):
        known = model.weight.detach().square()[0]
        return {"forget": float(known[:2].sum()), "retain": float(known[2:].sum())}

    pool, search = nm.Pool(grid={"epochs": [1, 2]}), nm.Search(count=3, stop=4.0)
    with pytest.warns(UserWarning, match="a λ larger than all"):
        nm.unlearn(
            model,
            fine_tune=fine_tune,
            evaluate=evaluate,
            pool=pool,
            search=search,
            out=tmp_path / "run",
        )
    found = Run(tmp_path / "run").result
    assert found.matching is None
    assert not found.first.matched
    assert found.geometry is not None
    (placed, *_), missing = found.geometry.models, found.geometry.missing
    assert placed.distance is None
    assert placed.length == pytest.approx(placed.scale * 0.15 * 2**0.5)
    assert missing == "the scenario has no sets of samples with a loss"
    page = (tmp_path / "run/report/index.html").read_text()
    assert f"Losses along paths were not measured: {missing}" in page
    assert "At equal forgetting" not in page


def test_older_results_and_recipes_are_as_they_were(run: Run):
    tree = run.result.tree()
    del tree["matching"], tree["geometry"]
    for row in (*tree["methods"], *tree["pool"]):
        row.pop("matched", None)
    old = RunResult.model_validate(tree)
    assert old.matching is old.geometry is None
    assert old.tree() == tree
    assert "matched" not in Recipe.model_validate(SMALL).dump()
    recipe = Recipe.model_validate(SMALL | {"search": {"matched": 2.0}})
    assert "matched: 2.0" in recipe.dump()


def test_a_barrier_by_hand():
    # The line from 1 to 3 is 1.5, 2, 2.5 at the quarters; t = 2 is beyond the end.
    path = [0.0, 0.25, 0.5, 0.75, 1.0, 2.0]
    assert barrier(path, [1.0, 1.5, 2.75, 2.0, 3.0, 99.0]) == 0.75
    assert barrier(path, [1.0, 1.0, 1.0, 1.0, 3.0, None]) == 0.0
    assert barrier(path, [1.0, None, 1.0, 1.0, 3.0, 4.0]) is None
    assert barrier([0.0, 0.5], [1.0, 2.0]) is None


def test_rows_of_the_search_without_numbers_and_ends_of_intervals_are_left_out(
    run: Run, tmp_path: Path
):
    """`search.confidence` adds a column to a sweep, and a broken λ has a row of NaN."""
    scenario, folder = scenario_of(run), Run(tmp_path / "run")
    rows = read_rows(run.sweep("consensus"))
    ends = [{**row, "error_retain.high": row["error_retain"] + 1} for row in rows]
    broken = dict.fromkeys(ends[0], float("nan")) | {"scale": 99.0}
    sweep, out = tmp_path / "sweep.csv", tmp_path / "matched" / "consensus.csv"
    patch = run.folder / "patches" / "consensus.safetensors"
    value = (rows[0]["error_forget"] + rows[1]["error_forget"]) / 2
    level = Level("error_forget", value, lower=False)
    for given in ([*rows], [*ends, broken]):
        write_rows(sweep, given)
        step = MatchedSweep("key", run.base, patch, None, level, 4, sweep, out, folder.states / "p")
        folder.states.mkdir(parents=True, exist_ok=True)
        step.run(scenario, lambda count: None)
        found = read_rows(out)
        assert {*found[0]} == {*rows[0]}
        assert max(row["scale"] for row in found) == rows[-1]["scale"]
        assert at_level(found, level) is not None
